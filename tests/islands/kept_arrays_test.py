"""Arrays that a process keeps of modules: in memory, and on its machine's disk for whoever is started again."""

import os
import shutil
import threading

import backends
import numpy as np
import pytest
import tiny_run

from dipaco_jax.islands import kept_arrays
from dipaco_jax.islands.kept_arrays import KeptArrays
from dipaco_jax.storage import object_store


def name(version: int, module: str = 'low/1', kind: str = 'modules') -> str:
  return f'objects/{kind}/{version}/{module}-{version:016x}.safetensors'


def arrays(x: float) -> dict[str, np.ndarray]:
  return {'block_0/w': np.full(1000, x, np.float32)}


SIZE = arrays(0)['block_0/w'].nbytes


def is_kept(kept: KeptArrays, of: str, x: float) -> bool:
  return (found := kept.get(of)) is not None and bool((found['block_0/w'] == x).all())


@pytest.fixture
def kept(tmp_path):
  return KeptArrays(tmp_path / 'weights' / 'run')


def written(kept: KeptArrays):
  """Waits until all is on disk that was put so far."""
  kept.writer.submit(lambda: None).result()


def again(kept: KeptArrays) -> KeptArrays:
  """As the next process of the machine finds it."""
  written(kept)
  return KeptArrays(kept.folder)


def test_arrays_are_found_in_memory_and_by_the_next_process(kept):
  kept.put(name(4), arrays(1))
  for one in (kept, again(kept)):
    assert is_kept(one, name(4), 1) and one.get(name(4)) is one.get(name(4))
    assert one.get(name(4, 'low/2')) is one.get('') is None


def test_without_a_folder_nothing_is_written_and_nothing_found(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  one = KeptArrays()
  one.put(name(4), arrays(1))
  assert is_kept(one, name(4), 1) and KeptArrays().get(name(4)) is None and not [*tmp_path.iterdir()]


def test_of_each_module_the_two_newest_versions_are_kept(kept):
  """Whatever kind of object the weights follow from; outer states are apart."""
  for version, kind in ((3, 'differences'), (4, 'modules'), (5, 'differences')):
    kept.put(name(version, kind=kind), arrays(version))
    kept.put(name(version, 'low/2', kind), arrays(version))
    kept.put(name(version, kind='outer'), arrays(-version))
  for one in (kept, again(kept)):
    for kind, sign in (('differences', 1), ('outer', -1)):
      assert is_kept(one, name(5, kind=kind), sign * 5) and one.get(name(3, kind=kind)) is None
    assert is_kept(one, name(4), 4) and is_kept(one, name(4, kind='outer'), -4)
  kept.put(name(9), arrays(9))
  assert is_kept(again(kept), name(5, 'low/2', 'differences'), 5), 'of another module'


def test_an_older_version_that_is_read_for_a_replay_displaces_no_newer_one(kept):
  kept.put(name(9), arrays(9))
  kept.put(name(4), arrays(4))
  for one in (kept, again(kept)):
    assert is_kept(one, name(9), 9) and is_kept(one, name(4), 4)


def test_memory_is_bounded_and_the_rest_is_on_disk(kept):
  kept.memory_bytes = 2 * SIZE
  for module in range(4):
    kept.put(name(1, f'low/{module}'), arrays(module))
  written(kept)
  assert [*kept.memory] == [name(1, 'low/2'), name(1, 'low/3')]
  assert is_kept(kept, name(1, 'low/0'), 0) and [*kept.memory] == [name(1, 'low/3'), name(1, 'low/0')]


def test_nothing_leaves_memory_before_it_is_on_disk(kept):
  """However slow the disk; not even what is too much."""
  kept.memory_bytes = SIZE
  go = threading.Event()
  kept.writer.submit(go.wait)
  for module in range(3):
    kept.put(name(1, f'low/{module}'), arrays(module))
  assert len(kept.memory) == 3
  go.set()
  written(kept)
  assert len(kept.memory) == 1 and all(is_kept(again(kept), name(1, f'low/{module}'), module) for module in range(3))


@pytest.mark.parametrize('damage', [tiny_run.flip_a_bit, lambda f: os.truncate(f, 200), lambda f: os.truncate(f, 0)])
def test_a_damaged_file_counts_as_absent_and_is_written_again(damage, kept):
  kept.put(name(4), arrays(1))
  written(kept)
  [file] = kept.folder.iterdir()
  damage(file)
  one = again(kept)
  assert one.get(name(4)) is None
  one.put(name(4), arrays(2))
  assert is_kept(again(one), name(4), 2)


def test_a_full_disk_stops_nobody(tmp_path, caplog):
  with backends.small_disk(tmp_path / 'disk', 65_536) as folder:
    kept = KeptArrays(folder / 'weights')
    (folder / 'other').write_bytes(b'x' * 61_440)
    kept.put(name(1), arrays(1))
    written(kept)
    assert 'is not on disk' in caplog.text and is_kept(kept, name(1), 1) and again(kept).get(name(1)) is None
    (folder / 'other').unlink()
    kept.put(name(2), arrays(2))
    assert is_kept(again(kept), name(2), 2)
    assert len([*kept.folder.iterdir()]) == 1, 'nothing is left half written'


def test_a_share_of_the_disk_is_used_and_what_was_used_last_stays(kept, monkeypatch):
  free = 7 * SIZE
  monkeypatch.setattr(kept_arrays.shutil, 'disk_usage', lambda folder: shutil._ntuple_diskusage(0, 0, free))
  for module in range(2):
    kept.put(name(1, f'low/{module}'), arrays(module))
    written(kept)
  for module, seconds in ((0, 50), (1, 100)):
    os.utime(kept._file(name(1, f'low/{module}')), (seconds, seconds))
  assert is_kept(again(kept), name(1, 'low/0'), 0)
  kept.put(name(1, 'low/2'), arrays(2))
  one = again(kept)
  assert one.get(name(1, 'low/1')) is None and is_kept(one, name(1, 'low/0'), 0) and is_kept(one, name(1, 'low/2'), 2)


def test_what_killed_processes_left_half_written_goes_with_its_version(kept):
  kept.put(name(4), arrays(4))
  written(kept)
  half = kept._file(name(4)).with_name(f'.{kept._file(name(4)).name}.17')
  half.write_bytes(b'half')
  kept.put(name(5), arrays(5))
  written(kept)
  assert half.exists(), 'somebody may be writing it'
  kept.put(name(6), arrays(6))
  written(kept)
  assert not half.exists()


def test_a_machine_keeps_one_run_until_its_end(tmp_path):
  storage = object_store.open_storage(str(tmp_path / 'there'))
  for number in ('1-0', '1-1'):
    kept = kept_arrays.begin(storage, tmp_path / 'here', number)
    kept.put(name(1), arrays(1))
    kept.close()
  assert [folder.name for folder in (tmp_path / 'here' / 'weights').iterdir()] == ['1-1']
  kept_arrays.end(tmp_path / 'here')
  assert not [*(tmp_path / 'here').iterdir()]


def test_where_objects_are_on_this_disk_already_no_more_is_written(tmp_path):
  storage = object_store.open_storage(str(tmp_path))
  kept = kept_arrays.begin(storage, storage.local_path('here').parent, '1-0')
  kept.put(name(1), arrays(1))
  kept.close()
  assert not [*tmp_path.iterdir()]
