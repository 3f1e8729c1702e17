"""Object stores: the same tests on a folder, on S3 and on Google's interface, and failures."""

import concurrent.futures
import errno
import hashlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import line
import object_server
import pytest
import slow
from backends import small_disk

from dipaco_jax.storage import backends, object_store

KINDS = ['file', 's3', 'gs']
SIZES = [0, 1, 1000, backends.PART_BYTES, 2 * backends.PART_BYTES + 5]
WRITER = """
import sys, os, signal
from dipaco_jax.storage import object_store as storage
place = storage.open_storage(sys.argv[1])
if sys.argv[2] == 'before it is seen':
  os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
print('ready', flush=True)
for i in range(60):
  place.write(f'all/{i % 3}', bytes([i % 3]) * 20_000_000)
"""


@pytest.fixture(scope='module')
def endpoint():
  with object_server.s3_server() as endpoint:
    yield endpoint


def url_of(kind: str, folder: pathlib.Path, request, monkeypatch) -> str:
  """A fresh place of a kind."""
  if kind == 'file':
    return (folder / 'some place').as_uri()
  for name, value in object_server.environment(request.getfixturevalue('endpoint')).items():
    monkeypatch.setenv(name, value)
  return f'{kind}://{object_server.BUCKET}/{folder.name}-{os.getpid()}/x'


@pytest.fixture(params=KINDS)
def place(request, tmp_path, monkeypatch) -> object_store.Storage:
  return object_store.open_storage(url_of(request.param, tmp_path, request, monkeypatch), patience_s=20)


@pytest.mark.parametrize('size', slow.but(SIZES, 1, 1000, backends.PART_BYTES))
def test_what_is_written_is_read_and_counted(place, size):
  data = random.Random(size).randbytes(size)
  sha256 = place.write('modules/level-a/0-1.safetensors', data)
  assert sha256 == hashlib.sha256(data).hexdigest()
  assert place.read('modules/level-a/0-1.safetensors', sha256) == data
  assert (place.bytes_in, place.bytes_out) == (size, size)
  place.write('modules/level-a/0-1.safetensors', b'another')
  assert place.read('modules/level-a/0-1.safetensors', hashlib.sha256(b'another').hexdigest()) == b'another'


@pytest.mark.parametrize('size', [0, 1000, 2 * backends.PART_BYTES + 5])
def test_files_are_written_and_read_without_being_in_memory(place, tmp_path, size):
  data = random.Random(size).randbytes(size)
  (tmp_path / 'file').write_bytes(data)
  sha256 = place.write_file('deep/name', tmp_path / 'file')
  assert place.read('deep/name', sha256) == data
  place.read_file('deep/name', sha256, tmp_path / 'copy')
  assert (tmp_path / 'copy').read_bytes() == data and (place.bytes_in, place.bytes_out) == (2 * size, size)
  with pytest.raises(object_store.Corrupt, match='deep/name is corrupt'):
    place.read_file('deep/name', hashlib.sha256(b'another').hexdigest(), tmp_path / 'copy')
  with pytest.raises(object_store.Missing, match='deep/none is missing'):
    place.read_file('deep/none', sha256, tmp_path / 'copy')


@pytest.mark.parametrize('kind', ['file', 's3'])  # of Google's precondition on a generation moto knows nothing
def test_of_those_that_write_a_name_at_once_one_counts(kind, tmp_path, request, monkeypatch):
  place = object_store.open_storage(url_of(kind, tmp_path, request, monkeypatch), patience_s=20)
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    found = set(pool.map(lambda i: place.agree('deep/name', b'%d' % i), range(40)))
  assert found == {bytes(place.fetch('deep/name'))}
  assert place.names('') == ['deep/name']


def test_names_are_those_below_a_folder(place):
  assert place.names('') == place.names('a') == []
  for name in ('b', 'a/2', 'a/1', 'a/c/.zarray', 'ab'):
    place.write(name, b'')
  assert place.names('') == ['a/1', 'a/2', 'a/c/.zarray', 'ab', 'b']
  assert place.names('a') == place.names('a/') == ['a/1', 'a/2', 'a/c/.zarray']
  assert place.names('a/c') == ['a/c/.zarray'] and place.names('a/1/2') == []
  assert place.exists('a/1') and not place.exists('a') and not place.exists('c')
  for _ in range(2):  # absent is fine
    place.delete('a/1')
    place.delete('no/such')
  assert place.names('a') == ['a/2', 'a/c/.zarray'] and not place.exists('a/1')


@pytest.mark.parametrize('spoil', [lambda d: d[:-1], lambda d: d + b'0', lambda d: bytes([d[0] ^ 64]) + d[1:]])
def test_bytes_that_changed_are_found_and_named(place, spoil):
  data = bytes(range(256))
  sha256 = place.write('a/b', data)
  place.backend.put('a/b', spoil(data))
  with pytest.raises(object_store.Corrupt, match=f'{place.url}/a/b is corrupt'):
    place.read('a/b', sha256)


def test_an_object_that_is_missing_is_named(place):
  place.write('a/b', b'')
  for name in ('a/c', 'd/e'):
    with pytest.raises(object_store.Missing, match=f'{place.url}/{name} is missing'):
      place.read(name, '')
  assert place.names('') == ['a/b']


@pytest.mark.parametrize('name', ['', '/a', 'a/', 'a//b', '../a', 'a/../b', './a', 'a/.b.17'])
def test_names_that_mean_something_else_are_rejected(tmp_path, name):
  place = object_store.open_storage(str(tmp_path / 'place'))
  actions = [
    lambda: place.write(name, b''),
    lambda: place.fetch(name),
    lambda: place.agree(name, b''),
    lambda: place.exists(name),
    lambda: place.delete(name),
  ]
  for action in actions:
    with pytest.raises(ValueError, match='cannot name an object'):
      action()
  assert list(tmp_path.rglob('*')) == []


@pytest.mark.parametrize('url', ['ftp://host/x', 's3://', 'gs:///', 'postgresql://host'])
def test_a_url_of_another_kind_is_rejected(url):
  with pytest.raises(ValueError, match=r'cannot store objects: give a folder, file:///FOLDER, s3://BUCKET'):
    object_store.open_storage(url)


@pytest.mark.parametrize('scheme, extra', [('s3', 's3'), ('gs', 'gcs')])
def test_the_extra_that_is_not_installed_is_named(scheme, extra):
  program = f"""
import sys
sys.modules['obstore'] = None  # as if it were not installed
from dipaco_jax.storage import object_store as storage
storage.open_storage('.')
storage.open_storage('{scheme}://bucket/x')
"""
  done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
  assert f'InputError: {scheme}:// needs obstore: pip install "dipaco_jax[{extra}]"' in done.stderr


def test_where_objects_are_on_this_machine(place, tmp_path):
  file = place.local_path('a/b')
  place.write('a/b', b'here')
  assert file.read_bytes() == b'here' if place.url.startswith('file:') else file is None


# -- trees


def make_tree(folder: pathlib.Path) -> dict[str, bytes]:
  contents = {'text/a.txt': b'a' * 70_000, 'text/.zarray': b'{}', 'empty': b'', 'deep/er/b': bytes(range(256))}
  for name, data in contents.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
  return contents


def contents_of(folder: pathlib.Path) -> dict[str, bytes]:
  return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob('*') if f.is_file()}


def test_a_tree_goes_up_and_comes_down_once(place, tmp_path):
  tree = make_tree(tmp_path / 'tree')
  place.upload_tree(tmp_path / 'tree', 'pre/pared')
  threads = [threading.Thread(target=place.download_tree, args=('pre/pared', tmp_path / 'there')) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert contents_of(tmp_path / 'there') == tree
  index = len(place.fetch('pre/pared.index.json'))
  assert place.bytes_in == sum(map(len, tree.values())) + 2 * index  # one of the four, and this test
  assert not [f for f in tmp_path.iterdir() if f.name.startswith('.')]


@pytest.mark.parametrize('harm', ['delete', 'change', 'spoil the index', 'lose the index'])
def test_a_tree_that_is_not_whole_does_not_come_down(place, tmp_path, harm):
  make_tree(tmp_path / 'tree')
  place.upload_tree(tmp_path / 'tree', 'pre/pared')
  name = 'pre/pared.index.json' if 'index' in harm else 'pre/pared/deep/er/b'
  place.delete(name)
  if harm in ('change', 'spoil the index'):
    place.backend.put(name, b'{"deep')
  error = object_store.Missing if harm in ('delete', 'lose the index') else object_store.Corrupt
  with pytest.raises(error, match=f'{place.url}/{name} is'):
    place.download_tree('pre/pared', tmp_path / 'there')
  assert [f.name for f in tmp_path.iterdir() if 'there' in f.name] == []


def test_a_full_disk_of_this_machine_is_named_with_what_moves_it(place, tmp_path):
  (tmp_path / 'tree').mkdir()
  (tmp_path / 'tree' / 'large').write_bytes(bytes(4 << 20))
  place.upload_tree(tmp_path / 'tree', 'prepared')
  with small_disk(tmp_path / 'disk', 1 << 20) as disk:
    with pytest.raises(OSError, match=f'TMPDIR.*{disk / "there"}') as raised:
      place.download_tree('prepared', disk / 'there')
    assert raised.value.errno == errno.ENOSPC and [*disk.iterdir()] in ([], [disk / '.lock'])


def test_what_killed_writers_left_does_not_go_up(place, tmp_path):
  tree = make_tree(tmp_path / 'tree')
  (tmp_path / 'tree' / '.a.json.17').write_bytes(b'half')
  place.upload_tree(tmp_path / 'tree', 'pre/pared')
  place.download_tree('pre/pared', tmp_path / 'there')
  assert contents_of(tmp_path / 'there') == tree


def test_a_tree_that_did_not_go_up_whole_is_missing(place, tmp_path, monkeypatch):
  make_tree(tmp_path / 'tree')
  real = place.backend.put_file

  def put_file(name, file):
    if name == 'pre/pared/deep/er/b':
      raise PermissionError(errno.EACCES, 'no')
    real(name, file)

  monkeypatch.setattr(place.backend, 'put_file', put_file)
  with pytest.raises(OSError, match=r'deep/er/b: .*no'):
    place.upload_tree(tmp_path / 'tree', 'pre/pared')
  with pytest.raises(object_store.Missing, match=r'pre/pared\.index\.json is missing'):
    place.download_tree('pre/pared', tmp_path / 'there')


def test_a_tree_that_is_the_place_itself_is_not_written_again(tmp_path):
  place = object_store.open_storage(str(tmp_path))
  tree = make_tree(tmp_path / 'tree')
  before = {f: f.stat().st_ino for f in (tmp_path / 'tree').rglob('*')}
  place.upload_tree(tmp_path / 'tree', 'tree')
  place.download_tree('tree', tmp_path / 'tree')
  assert {f: f.stat().st_ino for f in (tmp_path / 'tree').rglob('*')} == before and place.bytes_in == 0
  object_store.open_storage(str(tmp_path)).download_tree('tree', tmp_path / 'elsewhere')
  assert contents_of(tmp_path / 'elsewhere') == tree


# -- what breaks


def kill_a_writer(url: str, moment: str, after_s: float):
  writer = subprocess.Popen([sys.executable, '-c', WRITER, url, moment], stdout=subprocess.PIPE, text=True)
  with writer:
    assert writer.stdout.readline() == 'ready\n'
    if moment == 'at random':
      time.sleep(after_s)
      writer.kill()
  assert writer.returncode == -signal.SIGKILL


@pytest.mark.parametrize('kind', ['file', 's3'])
def test_a_writer_killed_at_random_leaves_no_half(kind, tmp_path, request, monkeypatch):
  url = url_of(kind, tmp_path, request, monkeypatch)
  place = object_store.open_storage(url, patience_s=20)
  for _ in range(3):
    kill_a_writer(url, 'at random', random.uniform(0, 0.4))
    for name in place.names(''):
      assert place.fetch(name) == bytes([int(name[-1])]) * 20_000_000


def test_what_a_killed_writer_leaves_is_not_seen_and_is_removed(tmp_path):
  place = object_store.open_storage(str(tmp_path))
  sha256 = place.write('all/0', b'')
  kill_a_writer(str(tmp_path), 'before it is seen', 0)
  assert place.names('') == ['all/0'] and place.read('all/0', sha256) == b''
  assert len([*(tmp_path / 'all').iterdir()]) == 2
  place.tidy('other')
  assert len([*(tmp_path / 'all').iterdir()]) == 2
  place.tidy('all')
  assert [*tmp_path.rglob('*')] == [tmp_path / 'all', tmp_path / 'all' / '0']


def test_a_full_disk_is_an_error_at_once(tmp_path):
  with small_disk(tmp_path / 'disk', 1 << 20) as disk:
    place = object_store.open_storage(str(disk))
    sha256 = place.write('a/b', b'kept')
    with pytest.raises(OSError, match='a/c') as raised:
      place.write('a/c', bytes(4 << 20))
    assert raised.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match='a/d'):
      place.agree('a/d', bytes(4 << 20))
    assert [*disk.rglob('*')] == [disk / 'a', disk / 'a' / 'b'] and place.read('a/b', sha256) == b'kept'


@pytest.mark.parametrize('kind', ['s3', 'gs'])
@pytest.mark.parametrize('fault', ['reset', 'unavailable'])
def test_a_line_that_breaks_is_waited_out(kind, fault, tmp_path, request, monkeypatch, caplog):
  url = url_of(kind, tmp_path, request, monkeypatch)
  port = int(request.getfixturevalue('endpoint').rpartition(':')[2])
  with line.Line(port) as wire:
    for name, value in object_server.environment(f'http://127.0.0.1:{wire.port}').items():
      monkeypatch.setenv(name, value)
    wire.faults = [fault] * 6  # obstore by itself tries four times
    place = object_store.open_storage(url, patience_s=30)
    sha256 = place.write('a/b', b'through')
    assert not wire.faults and 'the next attempt is in' in caplog.text
    assert place.read('a/b', sha256) == b'through'


@pytest.mark.parametrize('kind', ['s3', 'gs'])
def test_patience_ends(kind, tmp_path, request, monkeypatch):
  url = url_of(kind, tmp_path, request, monkeypatch)
  for name, value in object_server.environment('http://127.0.0.1:9').items():
    monkeypatch.setenv(name, value)
  began = time.monotonic()
  with pytest.raises(OSError, match=f'{url}/a/b: .*error sending request'):
    object_store.open_storage(url, patience_s=0.5).write('a/b', b'')
  assert time.monotonic() - began < 10


def test_a_bucket_that_is_not_there_is_an_error_at_once(tmp_path, request, monkeypatch):
  url_of('s3', tmp_path, request, monkeypatch)
  with pytest.raises(FileNotFoundError, match='NoSuchBucket'):
    object_store.open_storage('s3://no-such-bucket/x').write('a/b', b'')


@pytest.mark.parametrize('number, calls', [(errno.ETIMEDOUT, 3), (errno.EIO, 3), (errno.ENOSPC, 1), (errno.EACCES, 1)])
def test_which_errors_of_a_folder_pass(tmp_path, number, calls):
  place = object_store.open_storage(str(tmp_path), patience_s=5)
  made = []

  def action():
    made.append(0)
    if len(made) < 3:
      raise OSError(number, os.strerror(number))
    return 'done'

  if calls == 3:
    assert place.retry('a', action) == 'done'
  else:
    with pytest.raises(OSError, match=f'{place.url}/a: ') as raised:
      place.retry('a', action)
    assert raised.value.errno == number
  assert len(made) == calls


@pytest.mark.parametrize('index', ['{"../outside": "0"}', '{"/outside": "0"}', '["a"]', 'null', '{"a": 3}'])
def test_an_index_that_names_files_elsewhere_writes_nothing(tmp_path, index):
  place = object_store.open_storage(str(tmp_path / 'place'))
  place.write('tree.index.json', index.encode())
  with pytest.raises((ValueError, OSError), match=r'cannot name an object|is not an index'):
    place.download_tree('tree', tmp_path / 'here' / 'tree', '')
  assert not (tmp_path / 'here' / 'outside').exists() and not (tmp_path / 'here' / 'tree').exists()
