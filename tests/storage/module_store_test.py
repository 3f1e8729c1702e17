"""What survives: files whole or not at all, modules by path, versions that are pointed at, run state gone bad."""

import gc
import json
import os
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import small
import tiny_run

from dipaco_jax.core import modules
from dipaco_jax.storage import files, module_store, publishing, seals, tensors, trees
from dipaco_jax.training import module_publishing
from dipaco_jax.training import run_checkpoints as run_state_lib

SPECS = (('shared', 'x', ()), ('low', 'y', ('a',)), ('own', 'z', ('a', 'b')))
SHAPES = {'x': (3,), 'y': (2, 2), 'z': (1,)}
LAYOUT = modules.make_layout({'a': 2, 'b': 2}.items(), SPECS, SHAPES)


def numbered(version):
  """Every module filled with numbers of its own."""
  stacked = {}
  for i, level in enumerate(LAYOUT.levels):
    (name,), lead = LAYOUT.names(level), LAYOUT.grid.level_shape(level)
    numbers = 1000 * version + 100 * i + np.arange(LAYOUT.grid.num_modules(level), dtype='f')
    spread = numbers.reshape(*lead, *[1] * len(SHAPES[name]))
    stacked[level.name] = {name: jax.numpy.broadcast_to(spread, (*lead, *SHAPES[name]))}
  return stacked


@pytest.fixture
def workdir(tmp_path):
  for version in (1, 2, 3):
    module_publishing.publish_modules(tmp_path, version, LAYOUT, numbered(version))
  publishing.write_json(tmp_path / 'paths' / 'best.json', {'version': [3, 1, 3, 3]})
  return tmp_path


def test_load_path_is_what_the_path_takes(workdir):
  for path, version in enumerate([3, 1, 3, 3]):
    expected = modules.take(LAYOUT, numbered(version), LAYOUT.grid.coordinates(path))
    found = module_store.load_path(workdir, LAYOUT, path)
    assert list(found) == sorted(SHAPES)
    small.assert_close(found, small.fetched(expected), 0)
  assert module_store.load_path(workdir, LAYOUT, 0, version=2)['x'][0] == 2000


def test_load_path_reads_its_own_files_only(workdir):
  mine = {'shared/shared.safetensors', 'low/1.safetensors', 'own/1-0.safetensors'}
  for file in (workdir / 'modules').rglob('*.safetensors'):
    if '/'.join(file.parts[-3:]) not in {f'3/{name}' for name in mine}:
      file.unlink()
  assert set(module_store.load_path(workdir, LAYOUT, 2)) == set(SHAPES)
  with pytest.raises(seals.Damaged, match=r'3/low/0\.safetensors is missing'):
    module_store.load_path(workdir, LAYOUT, 1, version=3)


@pytest.mark.parametrize('at', [0, 9, -1])
def test_a_flipped_bit_in_a_module_is_named(workdir, at):
  file = workdir / 'modules' / '3' / 'low' / '0.safetensors'
  data = bytearray(file.read_bytes())
  data[at] ^= 1
  file.write_bytes(data)
  with pytest.raises(OSError, match=r'low/0\.safetensors is not as it was written'):
    module_store.load_path(workdir, LAYOUT, 0)
  module_store.load_path(workdir, LAYOUT, 2)


def test_a_module_is_one_plain_file(workdir):
  found = safetensors.numpy.load_file(workdir / 'modules' / '2' / 'own' / '0-1.safetensors')
  np.testing.assert_array_equal(found['z'], [2201])
  index = json.loads((workdir / 'modules' / '2' / 'index-0.json').read_text())
  assert len(index) == 1 + 2 + 4


def test_collect_keeps_what_is_pointed_at_and_the_newest(workdir):
  module_store.collect(workdir, {1})
  assert module_store.versions(workdir) == [1, 3]
  for path in range(4):
    module_store.load_path(workdir, LAYOUT, path)


def test_collect_goes_on_where_it_was_killed(workdir):
  (workdir / '.collected-2' / 'low').mkdir(parents=True)
  module_store.collect(workdir, {1})
  assert module_store.versions(workdir) == [1, 3] and not list(workdir.glob('.collected-*'))


def test_a_version_is_published_whole_and_replaced_whole(workdir):
  for number in (9, 3):
    (workdir / 'modules' / '.3.old' / 'low').mkdir(parents=True, exist_ok=True)  # of a killed run
    module_publishing.publish_modules(workdir, 3, LAYOUT, numbered(number))
    assert module_store.load_path(workdir, LAYOUT, 0)['x'][0] == 1000 * number
  (workdir / '.version-4' / 'modules' / '4' / 'low').mkdir(parents=True)  # of a killed run
  assert module_store.versions(workdir) == [1, 2, 3]
  module_publishing.publish_modules(workdir, 4, LAYOUT, numbered(4))
  assert module_store.versions(workdir) == [1, 2, 3, 4] and not list(workdir.glob('.version-*'))


def test_digest_is_of_parameters_and_where_they_are(workdir, tmp_path_factory):
  other = tmp_path_factory.mktemp('other')
  module_publishing.publish_modules(other, 7, LAYOUT, numbered(3))
  assert module_store.modules_sha256(other, 7) == module_store.modules_sha256(workdir, 3)
  assert module_store.modules_sha256(workdir, 2) != module_store.modules_sha256(workdir, 3)
  found = module_publishing.addressable_modules(LAYOUT, numbered(3))
  swapped = [(level, (1 - m[0],) if level.name == 'low' else m, x) for level, m, x in found]
  module_publishing.publish_module_files(other, 8, swapped)
  assert module_store.modules_sha256(other, 8) != module_store.modules_sha256(workdir, 3)


# -- files


def test_bytes_are_those_of_safetensors_and_are_not_copied():
  arrays = {
    f'[{i}].é"{name}': np.arange(-6, 6).reshape(3, 2, 2)[..., :i].astype(dtype)
    for name, dtype in tensors.DTYPES.items()
    for i in range(3)
  } | {'scalar': np.float32(3), 'in another order': np.arange(6).reshape(2, 3).T}
  data = tensors.to_bytes(arrays)
  assert data == safetensors.numpy.save({name: np.ascontiguousarray(x).reshape(x.shape) for name, x in arrays.items()})
  assert data == tensors.to_bytes(dict(reversed(arrays.items())))
  found = tensors.from_bytes(data)
  assert found.keys() == arrays.keys()
  for name, x in found.items():
    assert x.dtype == arrays[name].dtype and not x.flags.owndata
    np.testing.assert_array_equal(x, arrays[name])
  assert tensors.to_bytes({}) == safetensors.numpy.save({}) and tensors.from_bytes(tensors.to_bytes({})) == {}


def test_write_file_is_whole_or_not_at_all(tmp_path):
  file = tmp_path / 'new' / 'file'
  files.write_file(file, 'one')
  assert file.read_text() == 'one'
  with pytest.raises(TypeError):
    files.write_file(file, 12)
  assert file.read_text() == 'one' and os.listdir(file.parent) == ['file']
  before = open(file)  # noqa: SIM115
  files.write_file(file, b'two')
  with before:
    assert before.read() == 'one'  # who was reading goes on with the old one
  assert file.read_text() == 'two'


def test_publish_directory_is_whole_or_not_at_all(tmp_path):
  final = tmp_path / 'published'
  with publishing.publish_directory(final) as aside:
    (aside / 'part').mkdir()
    (aside / 'part' / 'file').write_text('one')
    assert not final.exists()
  with pytest.raises(KeyboardInterrupt), publishing.publish_directory(final) as aside:
    (aside / 'file').write_text('two')
    raise KeyboardInterrupt
  assert [str(p.relative_to(final)) for p in final.rglob('*')] == ['part', 'part/file']
  (tmp_path / '.published.1').mkdir()  # of a killed run
  with publishing.publish_directory(final) as aside:
    (aside / 'file').write_text('three')
  assert sorted(os.listdir(final)) == [seals.SUMS, 'file'] and os.listdir(tmp_path) == ['published']


# -- run state


def arrays(k):
  rng = np.random.default_rng(k)
  return {'modules': {'w': jax.numpy.asarray(rng.normal(size=(40, 50)).astype('f'))}, 'count': jax.numpy.int32(k)}


def abstract(meta):
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), arrays(0))


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Checkpoints of 4 and 6 updates; that of 2 was to go."""
  directory = tmp_path_factory.mktemp('run') / 'state'
  state = run_state_lib.RunState(directory, 2)
  for updates in (2, 4, 6):
    state.save(updates, arrays(updates), {'record': {'phase': updates, 'best': [None, 1.5]}})
  state.wait()
  state.close()
  return directory


def restored(directory):
  state = run_state_lib.RunState(directory, 2)
  try:
    return state.restore(abstract)
  finally:
    state.close()


def test_run_state_comes_back_as_it_was(saved):
  found, meta = restored(saved)
  assert meta == {'record': {'phase': 6, 'best': [None, 1.5]}}
  small.assert_close(found, arrays(6), 0)
  assert sorted(p.name for p in saved.iterdir() if p.name.isdigit()) == ['4', '6']
  assert sorted(os.listdir(saved.with_name('state.sha256'))) == ['4', '6']


def test_of_older_ones_no_more_is_read_than_is_needed(saved, tmp_path, caplog):
  directory = copied(saved, tmp_path)
  for item, found in (('arrays', {4, 6}), ('meta', {6})):
    tiny_run.flip_a_bit(tiny_run.largest(directory / '4' / item))
    assert restored(directory)[1]['record']['phase'] == 6
    assert {int(p.name) for p in directory.iterdir() if p.name.isdigit()} == found
  assert f'checkpoint {directory / "4"} is corrupt (meta/' in caplog.text


def test_no_run_state_is_none(tmp_path):
  assert restored(tmp_path / 'none') is None


def copied(saved, tmp_path):
  """The checkpoints with their seals, which Orbax itself doesn't have: it doesn't notice a flipped bit."""
  shutil.copytree(saved.with_name('state.sha256'), tmp_path / 'state.sha256')
  return shutil.copytree(saved, tmp_path / 'state')


def truncate(file):
  os.truncate(file, file.stat().st_size // 2)


def test_a_flipped_bit_in_an_array_is_noticed(saved, tmp_path):
  directory = copied(saved, tmp_path)
  tiny_run.flip_a_bit(tiny_run.largest(directory / '6'))
  found, meta = restored(directory)
  small.assert_close(found, arrays(meta['record']['phase']), 0)


@pytest.mark.parametrize('damage', [truncate, os.unlink, lambda file: file.write_bytes(bytes(file.stat().st_size))])
def test_a_corrupt_checkpoint_is_named_and_the_one_before_it_used(saved, tmp_path, damage, caplog):
  directory = shutil.copytree(saved, tmp_path / 'state')
  damage(tiny_run.largest(directory / '6'))
  found, meta = restored(directory)
  assert meta['record']['phase'] == 4
  small.assert_close(found, arrays(4), 0)
  assert f'checkpoint {directory / "6"} is corrupt' in caplog.text
  assert not (directory / '6').exists()
  gc.collect()


def test_half_of_an_old_checkpoint_is_passed_over(saved, tmp_path, caplog):
  directory = copied(saved, tmp_path)
  shutil.copytree(directory / '4', directory / '2')  # a run was killed while it removed this one
  shutil.copytree(tmp_path / 'state.sha256' / '4', tmp_path / 'state.sha256' / '2')
  shutil.rmtree(directory / '2' / 'arrays')
  assert restored(directory)[1]['record']['phase'] == 6
  assert 'corrupt' not in caplog.text


def test_what_these_devices_cannot_use_is_moved_aside_and_can_be_taken_back(saved, tmp_path, caplog):
  directory = copied(saved, tmp_path)
  state = run_state_lib.RunState(directory, 2)
  _, meta = state.restore(lambda meta: None if meta['record']['phase'] == 6 else abstract(meta))
  assert meta['record']['phase'] == 4 and set(state.metas) == {4}
  state.save(6, arrays(5), {'record': {'phase': 5, 'best': [None, 1.5]}})
  state.wait()
  state.close()
  (aside,) = tmp_path.glob('state-6-elsewhere-*')
  assert f'checkpoint {directory / "6"} is in {aside} now' in caplog.text
  small.assert_close(restored(directory)[0], arrays(5), 0)
  shutil.rmtree(directory / '6')
  shutil.rmtree(tmp_path / 'state.sha256' / '6')
  os.replace(aside, directory / '6')
  small.assert_close(restored(directory)[0], arrays(6), 0)


def test_where_these_devices_can_use_none_nothing_is_moved(saved, tmp_path):
  directory = copied(saved, tmp_path)
  state = run_state_lib.RunState(directory, 2)
  with pytest.raises(ValueError, match='start on as many devices as before'):
    state.restore(lambda meta: None)
  state.close()
  assert os.listdir(tmp_path / 'state.sha256') and sorted(os.listdir(tmp_path)) == ['state', 'state.sha256']
  small.assert_close(restored(directory)[0], arrays(6), 0)


def test_a_checkpoint_is_not_compared_with_an_old_seal_of_its_name(saved, tmp_path, monkeypatch, caplog):
  directory = copied(saved, tmp_path)
  shutil.copytree(tmp_path / 'state.sha256' / '4', tmp_path / 'state.sha256' / '8')  # of one that is gone
  state = run_state_lib.RunState(directory, 2)
  with monkeypatch.context() as killed:  # before there is a new seal
    killed.setattr(trees, 'digests', lambda *args: os.stat('there is no such file'))
    state.save(8, arrays(8), {'record': {'phase': 8, 'best': [None, 1.5]}})
    state.wait()
    state.close()
  small.assert_close(restored(directory)[0], arrays(8), 0)
  assert 'corrupt' not in caplog.text


def test_a_checkpoint_that_comes_with_the_next_one_is_sealed(tmp_path, monkeypatch):
  """Small ones do, between two looks of the thread that seals."""
  state = run_state_lib.RunState(tmp_path / 'state', 2)

  def meanwhile(seconds):
    for updates in '46':
      (tmp_path / 'state' / updates).mkdir()
      (tmp_path / 'state' / updates / 'file').write_text(updates)

  monkeypatch.setattr(state._closing, 'wait', meanwhile)
  state._seal(4)
  state._seal(3)  # this one has gone
  assert list(json.loads((tmp_path / 'state.sha256' / '4' / '0.json').read_text())) == ['file']
  assert os.listdir(tmp_path / 'state.sha256') == ['4']
  state.close()


def test_two_writers_of_one_name_do_not_meet(tmp_path, monkeypatch):
  """They may have one number, in two containers."""
  real, file = os.fsync, tmp_path / 'file'

  def meanwhile(handle):
    monkeypatch.setattr(os, 'fsync', real)
    files.write_file(file, b'other')
    real(handle)

  monkeypatch.setattr(os, 'fsync', meanwhile)
  files.write_file(file, b'the first one')
  assert file.read_bytes() == b'the first one' and os.listdir(tmp_path) == ['file']
