"""Two disks and a bucket: the files on each disk and in the bucket after each exchange."""

import json
import pathlib
import shutil
import threading
import time
from concurrent import futures

import pytest

from dipaco_jax.buckets import disks, disks_apart, mirror, other_disk, run_objects
from dipaco_jax.command_line import bucket_run
from dipaco_jax.core.errors import Unavailable
from dipaco_jax.storage import files, object_store


class Board:
  """What processes tell each other, as the coordinator of a job keeps it."""

  def __init__(self):
    self.texts, self.changed = dict[str, str](), threading.Condition()

  def say(self, key: str, text: str):
    with self.changed:
      assert key not in self.texts
      self.texts[key] = text
      self.changed.notify_all()

  def hear(self, key: str) -> str:
    with self.changed:
      assert self.changed.wait_for(lambda: key in self.texts, 20), f'nobody says {key}'
      return self.texts[key]

  def forget(self, key: str):
    with self.changed:
      del self.texts[key]


class Two:
  """Two processes of a job, as they are once it has begun."""

  def __init__(self, place: str, folder: pathlib.Path, first: str = 'first', other: str = 'other'):
    board, storages = Board(), [object_store.open_storage(place, 1) for _ in range(2)]
    peers = [disks_apart.Peers(k, 2, board.say, board.hear, board.forget) for k in range(2)]
    self.board, scratches = board, [folder / name for name in (first, other)]
    for scratch in scratches:
      scratch.mkdir(exist_ok=True)
    self.others = disks_apart.Others(peers[0])
    self.mirror = mirror.Mirror(storages[0], scratches[0], self.others)
    self.mirror.fetch_files(names := self.mirror.names())
    self.mirror.fetch_trees(names, is_finished=False, all_checkpoints=False)
    self.first = disks_apart.First(self.mirror, peers[0])
    self.other = other_disk.Other(storages[1], scratches[1], peers[1])
    self.first.tell('begin')
    self.other.begin('begin')

  @property
  def workdirs(self) -> tuple[pathlib.Path, pathlib.Path]:
    return self.mirror.workdir, self.other.workdir

  def both(self, function: str, *args):
    """Both processes call it."""
    with futures.ThreadPoolExecutor(2) as pool:
      for done in [pool.submit(getattr(side, function), *args) for side in (self.first, self.other)]:
        done.result(30)

  def end(self):
    self.mirror.publish_all()
    self.mirror.wait()
    self.others.close()
    self.other.wait(20)


@pytest.fixture
def place(tmp_path) -> str:
  return (tmp_path / 'place').as_uri()


@pytest.fixture
def two(place, tmp_path):
  return Two(place, tmp_path)


def write(folder: pathlib.Path, *names: str, words: str = ''):
  for name in names:
    files.write_file(folder / name, words or name)


def begin(two: Two):
  write(two.mirror.workdir, 'config.json', 'stages/tokenize.json', 'sequences/0/train', 'features/x.npy')
  two.both('follow', 'begun', False)


def checkpoint(two: Two, updates: int, *sides: int):
  """Each process writes its part, as `run_checkpoints` does; those of `sides` publish it."""
  parts = [['meta/a', 'arrays/x/0'], ['arrays/x/1']]
  for k, workdir in enumerate(two.workdirs):
    folder = workdir / 'checkpoints' / 'train'
    write(folder / str(updates), *parts[k], words=f'{updates} {k}')
    write(folder / str(updates), 'meta/a', words=f'{updates} {k}')  # which both have
    for process, names in enumerate(parts):
      write(folder.with_name('train.sha256'), f'{updates}/{process}.json', words=json.dumps(dict.fromkeys(names, '')))
  publishers = two.mirror, two.other
  for k in sides or (0, 1):
    publishers[k].publish_checkpoint(two.workdirs[k] / 'checkpoints' / 'train' / str(updates))


def version(two: Two, number: int):
  for k, (publisher, workdir) in enumerate(zip((two.mirror, two.other), two.workdirs, strict=True)):
    for process in range(2):
      write(workdir, f'modules/{number}/index-{process}.json', words=json.dumps({f'low/{process}': ''}))
    write(workdir, f'modules/{number}/low/{k}', words=f'{number} {k}')
    write(workdir, 'paths/best.json', words=json.dumps({'version': [number]}))
    publisher.publish_version(workdir / 'modules' / str(number), workdir / 'paths' / 'best.json')


def content(folder: pathlib.Path) -> dict[str, str]:
  return {str(f.relative_to(folder)): f.read_text() for f in files.complete_files(folder)}


def links(two: Two) -> list[pathlib.Path]:
  return [*(two.other.workdir.parent / 'uploads').glob('*')]


def wait_until(moment):
  deadline = time.monotonic() + 20
  while not moment():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_a_checkpoint_is_whole_when_every_part_is_there(two, place, tmp_path):
  begin(two)
  checkpoint(two, 8, 0)
  wait_until(lambda: 'checkpoints/train/8/arrays/x/0' in two.mirror.names())
  time.sleep(0.1)
  assert 'checkpoints/train/8.index.json' not in two.mirror.names()
  two.other.publish_checkpoint(two.other.workdir / 'checkpoints' / 'train' / '8')
  two.end()
  assert {'checkpoints/train/8.index.json', 'checkpoints/train.sha256/8/1.json'} <= {*two.mirror.names()}
  assert not links(two)
  one = mirror.Mirror(object_store.open_storage(place), tmp_path / 'other')  # of one process, in the scratch of a part
  one.fetch_files(names := one.names())
  one.fetch_trees(names, is_finished=False, all_checkpoints=False)
  found = content(one.workdir / 'checkpoints' / 'train' / '8')
  assert found == {'meta/a': '8 0', 'arrays/x/0': '8 0', 'arrays/x/1': '8 1'}


def test_an_older_checkpoint_goes_after_a_newer_one_is_whole(two):
  begin(two)
  checkpoint(two, 8)
  two.mirror.wait()
  for workdir in two.workdirs:
    shutil.rmtree(workdir / 'checkpoints')
  checkpoint(two, 16, 0)
  wait_until(lambda: 'checkpoints/train/16/arrays/x/0' in two.mirror.names())
  assert 'checkpoints/train/8.index.json' in two.mirror.names()
  two.other.publish_checkpoint(two.other.workdir / 'checkpoints' / 'train' / '16')
  two.end()
  assert not [name for name in two.mirror.names() if '/8' in name]


def test_what_the_first_passes_over_is_let_go(two):
  begin(two)
  checkpoint(two, 8, 0)  # whose upload waits for the other's part
  wait_until(lambda: not two.mirror.queue.waiting)
  checkpoint(two, 16)
  checkpoint(two, 24)
  two.other.publish_checkpoint(two.other.workdir / 'checkpoints' / 'train' / '8')
  two.mirror.wait()
  there = [name for name in run_objects.whole_trees(two.mirror.names()) if run_objects.is_checkpoint(name)]
  assert there == ['checkpoints/train/24', 'checkpoints/train/8'] and not links(two)
  two.both('follow', 'round', True)
  for workdir in two.workdirs:  # or the processes would go on from different ones
    assert sorted(p.name for p in (workdir / 'checkpoints' / 'train').iterdir()) == ['24', '8']


def test_what_is_passed_over_is_let_go_while_something_is_uploaded(two, monkeypatch):
  begin(two)
  put_file, goes_on = two.mirror.storage.backend.put_file, threading.Event()

  def slowly(name, file):
    assert 'checkpoints/' not in name or goes_on.wait(20)
    return put_file(name, file)

  monkeypatch.setattr(two.mirror.storage.backend, 'put_file', slowly)
  for updates in (8, 16, 24, 32):
    checkpoint(two, updates)
    wait_until(lambda: not two.mirror.queue.waiting or two.mirror.queue.waiting[0].names[-1] != 'checkpoints/train/8')
  wait_until(lambda: len(links(two)) == 1)  # of the last, as 8 is there
  goes_on.set()
  two.end()
  assert 'checkpoints/train/32.index.json' in two.mirror.names() and not links(two)


class Fair:
  """A lock that whoever waits gets before its last holder can have it again."""

  def __init__(self):
    self.lock = threading.Lock()

  def __enter__(self):
    self.lock.acquire()

  def __exit__(self, *_):
    self.lock.release()
    time.sleep(0.1)


def test_no_order_is_forgotten_before_it_was_heard():
  """Though another thread passes something over as soon as an upload is asked for."""
  board, passing = Board(), futures.ThreadPoolExecutor(1)

  def say(key: str, text: str):
    board.say(key, text)
    if 'upload' in json.loads(text):
      passing.submit(others.pass_over, ['modules/1'])

  others = disks_apart.Others(disks_apart.Peers(0, 2, say, board.hear, board.forget))
  others._lock = Fair()
  wait = others.ask('checkpoints/train/8')
  passing.shutdown()
  board.say('order 0/1', '{"files": {}}')
  assert wait() == {} and board.texts.keys() == {'order 1'}


@pytest.mark.parametrize('side', ['first', 'other'])
def test_a_part_that_cannot_be_linked_holds_nobody_up(two, monkeypatch, side):
  begin(two)
  checkpoint(two, 8)
  two.mirror.wait()
  link, publisher = files.link, two.mirror if side == 'first' else two.other

  def full(source, target):
    if publisher.workdir in source.parents and {'train', '16'} <= {*source.parts}:
      raise OSError(28, 'No space left on device')
    return link(source, target)

  monkeypatch.setattr(files, 'link', full)
  if side == 'first':
    with pytest.raises(OSError, match='No space'):
      checkpoint(two, 16)
    two.other.publish_checkpoint(two.other.workdir / 'checkpoints' / 'train' / '16')
  else:
    checkpoint(two, 16)
    two.mirror.wait()
  with pytest.raises(Unavailable, match='checkpoints/train/16 is not in the bucket; run'):
    two.first.follow('round', True)
  checkpoint(two, 24)
  two.end()
  names = two.mirror.names()
  assert 'checkpoints/train/24.index.json' in names and not links(two)
  assert not [name for name in names if name.startswith('checkpoints/train/16')]


def test_an_interrupt_of_one_that_is_not_the_first_ends_it(place, tmp_path, monkeypatch):
  board, storage = Board(), object_store.open_storage(place, 1)
  board.say(f'{bucket_run.START}: published', '{}')
  peers = disks_apart.Peers(1, 2, board.say, board.hear, board.forget)
  monkeypatch.setattr(disks, 'peers', lambda: peers)

  def leave():
    with pytest.raises(KeyboardInterrupt), bucket_run._other_disk(storage, tmp_path):
      raise KeyboardInterrupt

  with futures.ThreadPoolExecutor(1) as pool:
    done = pool.submit(leave)
    try:
      done.result(5)
    finally:
      board.say('order 0', '{}')  # else the thread would wait for it


def test_what_a_killed_process_has_left_half_goes(two, place, tmp_path):
  begin(two)
  two.mirror.storage.write('checkpoints/train/8/arrays/x/0', b'half')
  two.end()
  again = Two(place, tmp_path)
  assert not run_objects.half_trees(again.mirror.names())
  again.end()


def test_a_part_that_is_gone_leaves_nothing_of_the_whole(two):
  begin(two)
  checkpoint(two, 8)
  two.mirror.wait()
  checkpoint(two, 16, 0)
  shutil.rmtree(two.other.workdir / 'checkpoints' / 'train' / '16')
  two.other.publish_checkpoint(two.other.workdir / 'checkpoints' / 'train' / '16')
  two.mirror.wait()
  names = two.mirror.names()
  assert 'checkpoints/train/8.index.json' in names
  assert not [name for name in names if name.startswith('checkpoints/train/16')]


def test_parts_reach_the_first_and_leave_the_bucket_when_they_are_of_no_use(two):
  begin(two)
  write(two.mirror.workdir, 'shards/0-parts/0/train', 'routing/0-parts/a-0.npy', 'evaluation/validation/nll-0.npy')
  write(two.other.workdir, 'shards/0-parts/1/train', 'routing/0-parts/a-1.npy', 'evaluation/validation/nll-1.npy')
  two.other.publish_parts(older_than_s=-1)
  two.both('gather', 'parts', ['shards/0-parts/*', 'routing/0-parts/*', 'evaluation/validation/nll-*'])
  for name in ('shards/0-parts/1/train', 'routing/0-parts/a-1.npy', 'evaluation/validation/nll-1.npy'):
    assert (two.mirror.workdir / name).read_text() == name
  names = two.mirror.names()
  assert 'shards/0-parts/1.index.json' in names and not any(name.startswith('evaluation') for name in names)
  (two.mirror.workdir / 'shards' / '0-parts').rename(two.mirror.workdir / 'shards' / '0')
  shutil.rmtree(two.mirror.workdir / 'routing')
  two.both('follow', 'merged', False)
  assert content(two.other.workdir / 'shards') == content(two.mirror.workdir / 'shards')
  assert not (two.other.workdir / 'routing' / '0-parts' / 'a-1.npy').exists()
  assert not any('-parts' in name for name in two.mirror.names())
  two.end()


def test_between_stages_both_have_all_modules_and_records(two):
  begin(two)
  version(two, 1)
  checkpoint(two, 8)
  write(two.mirror.workdir, 'stages/train.json', 'stages/x.seconds')
  (two.mirror.workdir / 'stages' / 'tokenize.json').unlink()
  two.both('follow', 'trained', False)
  assert [*map(content, (w / 'modules' for w in two.workdirs))] == 2 * [
    {'1/low/0': '1 0', '1/low/1': '1 1'} | {f'1/index-{k}.json': json.dumps({f'low/{k}': ''}) for k in range(2)}
  ]
  assert [p.name for p in (two.other.workdir / 'stages').iterdir()] == ['train.json']
  parts = [content(workdir / 'checkpoints' / 'train') for workdir in two.workdirs]
  assert '8/arrays/x/1' in parts[1] and '8/arrays/x/1' not in parts[0], 'checkpoints stay in parts'
  two.both('follow', 'round', True)
  assert content(two.other.workdir / 'checkpoints') == content(two.mirror.workdir / 'checkpoints')
  two.end()


def test_a_version_that_is_made_again_is_whole_again(two, place, tmp_path):
  begin(two)
  version(two, 1)
  two.end()
  again = Two(place, tmp_path)
  expected = content(again.mirror.workdir / 'modules')
  for workdir in again.workdirs:
    shutil.rmtree(workdir / 'modules')
  version(again, 1)
  again.both('follow', 'trained', False)
  assert [content(workdir / 'modules') for workdir in again.workdirs] == [expected] * 2
  again.end()


@pytest.mark.parametrize('lost', ['first', 'other'])
def test_scratches_of_several_moments_become_that_of_the_bucket(two, place, tmp_path, lost):
  begin(two)
  checkpoint(two, 8)
  version(two, 1)
  two.end()
  for workdir in two.workdirs:  # then both go on, unpublished
    write(workdir, 'stages/train.json', 'base/params', 'evaluation/x')
    shutil.rmtree(workdir / 'modules' / '1')
    write(workdir, 'modules/2/low/0', 'checkpoints/train/16/meta/a')
  asked = list[str]()
  again = Two(place, tmp_path, **{lost: 'empty'})
  expected = {'8/meta/a', '8/arrays/x/0', '8/arrays/x/1'}
  for workdir in again.workdirs:
    assert content(workdir / 'checkpoints' / 'train').keys() == expected
    assert sorted(p.name for p in (workdir / 'modules').iterdir()) == ['1']
    assert not any((workdir / name).exists() for name in ('stages/train.json', 'base', 'evaluation', 'features'))
    assert (workdir / 'sequences' / '0' / 'train').exists()
  assert not asked
  again.end()


def test_what_is_here_as_in_the_bucket_is_not_fetched_again(two, place, tmp_path, monkeypatch):
  begin(two)
  two.end()
  fetched, read_file = list[str](), object_store.Storage.read_file
  monkeypatch.setattr(
    object_store.Storage, 'read_file', lambda self, name, *args: (fetched.append(name), read_file(self, name, *args))
  )
  again = Two(place, tmp_path)
  assert not fetched and (again.other.workdir / 'sequences' / '0' / 'train').exists()
  again.end()


def test_an_upload_that_fails_on_one_is_an_error_on_both(two, monkeypatch):
  begin(two)

  def fail(name, file):
    raise PermissionError(13, 'no')

  monkeypatch.setattr(two.other.storage.backend, 'put_file', fail)
  checkpoint(two, 8)
  words = r'checkpoints/train/8/arrays/x/1: .*no; run the same command again'
  with pytest.raises(Unavailable, match=words):
    two.mirror.wait()
  with pytest.raises(Unavailable, match=words):
    two.other.check()
  assert 'checkpoints/train/8.index.json' not in two.mirror.names()
