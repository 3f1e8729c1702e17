"""Scratch folders and their buckets: the order of publication, and which files are fetched."""

import errno
import json
import os
import pathlib
import shutil
import threading
import time

import line
import object_server
import pytest

from dipaco_jax.buckets import mirror, run_objects
from dipaco_jax.core.errors import InputError, Unavailable
from dipaco_jax.storage import files, object_store, remedies


def open_mirror(place: str, scratch: pathlib.Path, patience_s: float = 20) -> mirror.Mirror:
  """What a start does, without its locks."""
  scratch.mkdir(exist_ok=True)
  made = mirror.Mirror(object_store.open_storage(place, patience_s), scratch)
  names = made.names()
  made.fetch_files(names)
  made.fetch_trees(names, is_finished=False, all_checkpoints=False)
  return made


def write(folder: pathlib.Path, *names: str, words: str = ''):
  for name in names:
    files.write_file(folder / name, words or name)


def checkpoint(made: mirror.Mirror, updates: int, *gone: int):
  write(made.workdir / 'checkpoints' / 'train' / str(updates), 'meta/a', 'arrays/d/b', words=str(updates))
  write(made.workdir / 'checkpoints' / 'train.sha256' / str(updates), '0.json')
  for number in gone:
    shutil.rmtree(made.workdir / 'checkpoints' / 'train' / str(number))
    shutil.rmtree(made.workdir / 'checkpoints' / 'train.sha256' / str(number))
  with open(made.workdir / 'metrics.jsonl', 'a') as f:
    f.write(f'{updates}\n')
  made.publish_checkpoint(made.workdir / 'checkpoints' / 'train' / str(updates))


def version(made: mirror.Mirror, number: int, words: str = ''):
  write(made.workdir, f'modules/{number}/low/0', f'modules/{number}/high/0', words=words)
  write(made.workdir, 'paths/best.json', words=json.dumps({'version': [number]}))
  made.publish_version(made.workdir / 'modules' / str(number), made.workdir / 'paths' / 'best.json')


def begin(made: mirror.Mirror):
  write(made.workdir, 'config.json', 'tokenizer.model', 'sequences/0/train', 'stages/tokenize.json', 'features/x.npy')
  write(made.workdir, 'shards/0-parts/1/train', 'tokenize-1/sequences/0/train')
  made.publish_all()


def what_lasts(workdir: pathlib.Path) -> dict[str, str]:
  return {str(f.relative_to(workdir)): f.read_text() for f in files.complete_files(workdir)}


@pytest.fixture
def place(tmp_path) -> str:
  return (tmp_path / 'place').as_uri()


def test_an_empty_scratch_gets_what_lasts_and_the_newest_checkpoint(place, tmp_path):
  first = open_mirror(place, tmp_path / 'first')
  begin(first)
  checkpoint(first, 8)
  first.wait()
  version(first, 1)
  checkpoint(first, 16)
  first.wait()
  second = open_mirror(place, tmp_path / 'second')
  expected = what_lasts(first.workdir)
  for name in [n for n in expected if n.startswith(('features', 'shards/0-parts', 'tokenize-'))]:
    del expected[name]
  for name in ('meta/a', 'arrays/d/b'):
    del expected[f'checkpoints/train/8/{name}']
  assert what_lasts(second.workdir) == expected
  checkpoint(second, 24)
  second.wait()
  there = [name for name in run_objects.whole_trees(second.names()) if run_objects.is_checkpoint(name)]
  assert there == ['checkpoints/train/16', 'checkpoints/train/24']


def test_parts_are_there_until_what_is_made_of_them(place, tmp_path):
  made = open_mirror(place, tmp_path / 'first')
  begin(made)
  made.publish_parts(older_than_s=100)
  made.wait()
  assert not any('tokenize-1' in name or '-parts' in name for name in made.names())
  write(made.workdir, 'routing/0-parts/train-0.npy', 'routing/0-parts/train-0.npy.sha256')
  made.publish_parts(older_than_s=-1)
  made.wait()
  second = open_mirror(place, tmp_path / 'second')
  for name in ('tokenize-1/sequences/0/train', 'shards/0-parts/1/train', 'routing/0-parts/train-0.npy'):
    assert (second.workdir / name).read_text() == name
  shutil.rmtree(second.workdir / 'tokenize-1')
  os.replace(second.workdir / 'shards' / '0-parts', second.workdir / 'shards' / '0')
  second.publish_all()
  second.wait()
  assert not any('tokenize-1' in name or 'shards/0-parts' in name for name in second.names())
  assert {'shards/0.index.json', 'shards/0/1/train'} <= {*second.names()}


def test_what_is_half_uploaded_is_not_there(place, tmp_path):
  begin(first := open_mirror(place, tmp_path / 'first'))
  for updates in (8, 16):
    checkpoint(first, updates)
    first.wait()  # or only the newest is uploaded
  (tmp_path / 'place' / 'checkpoints' / 'train' / '16.index.json').unlink()
  (tmp_path / 'place' / 'sequences.index.json').unlink()
  second = open_mirror(place, tmp_path / 'second')
  assert (second.workdir / 'checkpoints' / 'train' / '8' / 'meta' / 'a').exists()
  assert not (second.workdir / 'checkpoints' / 'train' / '16').exists()
  assert not (second.workdir / 'sequences').exists()


def test_a_damaged_checkpoint_gives_way_to_the_one_before(place, tmp_path):
  begin(first := open_mirror(place, tmp_path / 'first'))
  for updates in (8, 16):
    checkpoint(first, updates)
    first.wait()  # or only the newest is uploaded
  (tmp_path / 'place' / 'checkpoints' / 'train' / '16' / 'meta' / 'a').write_text('another')
  second = open_mirror(place, tmp_path / 'second')
  assert [p.name for p in (second.workdir / 'checkpoints' / 'train').iterdir()] == ['8']


def test_the_same_scratch_keeps_what_was_not_uploaded_and_another_one_does_not(place, tmp_path):
  begin(first := open_mirror(place, tmp_path / 'first'))
  first.wait()
  write(first.workdir, 'base/params', 'metrics.jsonl')  # and is killed
  again = open_mirror(place, tmp_path / 'first')
  assert (again.workdir / 'base' / 'params').exists()
  again.publish_all()
  again.wait()
  assert 'base.index.json' in again.names()
  write(again.workdir, 'modules/1/0', 'stages/pretrain.json')
  second = open_mirror(place, tmp_path / 'second')
  write(second.workdir, 'stages/pretrain.json', words='of another machine')
  second.publish_all()
  second.wait()
  third = open_mirror(place, tmp_path / 'first')
  assert not (third.workdir / 'modules').exists()
  assert (third.workdir / 'stages' / 'pretrain.json').read_text() == 'of another machine'


def test_nothing_goes_from_the_bucket_before_the_next_checkpoint_is_there(place, tmp_path):
  begin(made := open_mirror(place, tmp_path / 'scratch'))
  version(made, 1)
  checkpoint(made, 8)
  made.wait()
  shutil.rmtree(made.workdir / 'modules' / '1')
  version(made, 2)
  made.wait()
  assert 'modules/1.index.json' in made.names()
  checkpoint(made, 16, 8)
  made.wait()
  there = run_objects.whole_trees(made.names())
  assert sorted(there) == ['checkpoints/train/16', 'modules/2', 'sequences']
  assert not [name for name in made.names() if name.startswith(('modules/1', 'checkpoints/train/8'))]


def held_back(made: mirror.Mirror, monkeypatch) -> threading.Event:
  """Nothing is uploaded before this is set."""
  writes, write_now = threading.Event(), made.storage.write
  monkeypatch.setattr(made.storage, 'write', lambda *object_: writes.wait() and write_now(*object_))
  return writes


@pytest.mark.parametrize('uploads', ['soon', 'late'])
def test_what_others_have_removed_from_a_scratch_stays_in_the_bucket(uploads, place, tmp_path, monkeypatch):
  writes = held_back(made := open_mirror(place, tmp_path / 'scratch'), monkeypatch)
  if uploads == 'soon':
    writes.set()
  begin(made)
  write(made.workdir, 'modules/1/0')
  checkpoint(made, 8)
  shutil.rmtree(made.workdir / 'sequences')
  checkpoint(made, 16)
  if uploads == 'soon':
    made.wait()
  shutil.rmtree(made.workdir)
  made.publish_all()
  writes.set()
  made.wait()
  assert {'sequences.index.json', 'checkpoints/train/16.index.json', 'config.json'} <= {*made.names()}


def test_nor_does_it_go_where_the_config_changes_before_the_first_checkpoint_is_uploaded(place, tmp_path, monkeypatch):
  writes = held_back(made := open_mirror(place, tmp_path / 'scratch'), monkeypatch)
  begin(made)
  checkpoint(made, 8)
  shutil.rmtree(made.workdir / 'sequences')
  write(made.workdir, 'config.json', words='changed')
  made.publish_all()
  writes.set()
  made.wait()
  assert {'sequences.index.json', 'checkpoints/train/8.index.json', 'config.json'} <= {*made.names()}


def test_after_a_refusal_nothing_of_another_config_stays(place, tmp_path):
  begin(made := open_mirror(place, tmp_path / 'scratch'))
  write(made.workdir, 'shards/0/meta.json', 'refused.txt')
  made.publish_all()
  made.wait()
  again = open_mirror(place, tmp_path / 'another')
  for name in ('shards', 'sequences', 'stages'):
    shutil.rmtree(again.workdir / name)
  write(again.workdir, 'config.json', words='another')
  for name in ('refused.txt', 'tokenizer.model'):
    (again.workdir / name).unlink()
  again.publish_all()
  again.wait()
  assert sorted(again.names()) == ['config.json', 'scratch']


def test_of_a_run_that_was_rejected_before_any_work_nothing_stays(place, tmp_path):
  made = open_mirror(place, tmp_path / 'scratch')
  write(made.workdir, 'config.json', 'environment.json', 'stages/tokenize.seconds')
  made.publish_all()
  shutil.rmtree(made.workdir)
  made.publish_all()
  made.wait()
  assert made.names() == ['scratch']


def test_a_version_that_is_made_again_with_other_bytes_is_never_a_mixture(place, tmp_path, monkeypatch):
  begin(made := open_mirror(place, tmp_path / 'scratch'))
  for words in ('one', 'two'):
    version(made, 1, words)
    made.wait()
  second = open_mirror(place, tmp_path / 'second')
  assert {*what_lasts(second.workdir / 'modules').values()} == {'two'}
  put_file = made.storage.backend.put_file

  def fail(name, file):
    if name == 'modules/1/low/0':
      raise PermissionError(errno.EACCES, 'no')
    put_file(name, file)

  monkeypatch.setattr(made.storage.backend, 'put_file', fail)
  version(made, 1, 'three')
  with pytest.raises(Unavailable, match=r'modules/1/low/0: .*no; run the same command again'):
    made.wait()
  assert not (open_mirror(place, tmp_path / 'third').workdir / 'modules').exists()


def test_an_unchanged_file_is_not_uploaded_again(place, tmp_path):
  begin(made := open_mirror(place, tmp_path / 'scratch'))
  made.publish_all()
  made.wait()
  there = tmp_path / 'place' / 'tokenizer.model'
  before = there.stat().st_mtime_ns, there.stat().st_ino
  made.publish_all()
  made.wait()
  assert before == (there.stat().st_mtime_ns, there.stat().st_ino)


@pytest.mark.parametrize(
  ('there', 'words'),
  [
    ('notes.txt', r'holds other things \(notes.txt\)'),
    ('config.json', 'a run that was copied to it'),
    (remedies.ISLANDS_MARK, 'is a run of islands'),
  ],
)
def test_other_things_are_rejected(place, tmp_path, there, words):
  write(tmp_path / 'place', there)
  with pytest.raises(InputError, match=words):
    open_mirror(place, tmp_path / 'scratch')


@pytest.fixture
def wire(monkeypatch):
  """A line to S3 that can be cut."""
  with object_server.s3_server() as endpoint:
    wire = line.Line(int(endpoint.rpartition(':')[2]))
    for name, value in object_server.environment(f'http://127.0.0.1:{wire.port}').items():
      monkeypatch.setenv(name, value)
    yield wire


@pytest.mark.slow
def test_while_one_is_uploaded_only_the_newest_waits_and_an_outage_that_lasts_is_an_error(wire, tmp_path, monkeypatch):
  begin(made := open_mirror('s3://bucket/run', tmp_path / 'scratch', patience_s=0.5))
  uploaded, upload = [], made.storage.upload_tree
  monkeypatch.setattr(
    made.storage, 'upload_tree', lambda folder, name, others: (uploaded.append(name), upload(folder, name, others))[1]
  )
  checkpoint(made, 8)
  made.wait()
  wire.cut.set()
  started = time.monotonic()
  checkpoint(made, 16)
  while made.queue.waiting:
    assert time.monotonic() < started + 20
  write(made.workdir, 'report.html')
  checkpoint(made, 24)
  checkpoint(made, 32, 8, 16, 24)
  assert time.monotonic() - started < 5, 'nothing waits for the bucket'
  wire.heal()
  made.wait()
  there = [n for n in run_objects.whole_trees(made.names()) if run_objects.is_checkpoint(n)]
  assert there == ['checkpoints/train/32']
  assert uploaded == ['sequences', *(f'checkpoints/train/{updates}' for updates in (8, 16, 32))]
  assert bytes(made.storage.fetch('metrics.jsonl')) == b'8\n16\n24\n32\n'
  assert not [n for n in made.names() if '/24' in n or '/16' in n or '/8' in n]
  made.publish_all()
  made.wait()
  assert 'report.html' in made.names(), 'though the checkpoint with which it waited is passed over'

  wire.faults = ['reset'] * 100
  wire.hang_up()
  checkpoint(made, 40)
  with pytest.raises(Unavailable, match=f'again when the bucket can be written: .* {tmp_path}/scratch'):
    made.wait()
  with pytest.raises(Unavailable):
    made.publish_all()
  assert json.loads((made.workdir / 'checkpoints' / 'train' / '40' / 'meta' / 'a').read_text()) == 40
  assert not os.listdir(tmp_path / 'scratch' / 'uploads')
