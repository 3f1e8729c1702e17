"""Text and tokenizers in a bucket, of a real server, are those on disk; globs match as on disk."""

import errno
import glob
import gzip
import importlib
import json
import os
import random
import sys

import corpora
import line
import object_server
import pytest
import slow
from backports import zstd
from fsspec.implementations.memory import MemoryFileSystem

from dipaco_jax.config import settings
from dipaco_jax.core.errors import Unavailable
from dipaco_jax.data import corpus, tokenizer_files
from dipaco_jax.data.sentencepiece_tokenizer import train
from dipaco_jax.storage import object_store, remote_files
from dipaco_jax.storage.backends import PART_BYTES

NAMES = 'a.txt sub/a.txt sub/b1.txt sub/b2.txt sub/b10.txt sub/deep/b1.txt sub/deep/er/b1.txt other/(1).txt'.split()


@pytest.fixture(scope='module', autouse=True)
def bucket():
  with object_server.s3_server() as endpoint, pytest.MonkeyPatch.context() as patch:
    for name, value in object_server.environment(endpoint).items():
      patch.setenv(name, value)
    remote_files._storage.cache_clear()
    yield object_store.open_storage(f's3://{object_server.BUCKET}')
  remote_files._storage.cache_clear()


PATTERNS = [
  '*.txt', 'sub/*', '**/*.txt', '**/b1.txt', 'sub/**', 'sub/**/b1.txt', 'sub/b?.txt', 'sub/b[1].txt', 'sub/b[!1].txt',
]  # fmt: skip


@pytest.mark.parametrize('pattern', [*PATTERNS, 'a.txt', 'other/(1).txt', 'none.txt', 's*/a.txt'])
def test_globs_match_as_on_disk(tmp_path, bucket, pattern):
  for name in NAMES:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    bucket.write(f'globs/{name}', b'')
  here = [path for path in glob.glob(f'{tmp_path}/{pattern}', recursive=True) if os.path.isfile(path)]
  for root in (f's3://{object_server.BUCKET}/globs', f'gs://{object_server.BUCKET}/globs'):
    found = [path.removeprefix(root) for path in remote_files.find(f'{root}/{pattern}')]
    assert sorted(found) == sorted(path.removeprefix(str(tmp_path)) for path in here)


@pytest.mark.slow
def test_documents_and_tokenizers_are_those_on_disk(tmp_path, bucket):
  lines = ''.join(json.dumps({'text': f'line {i} ' * 50, 'domain': 'ab'[i % 2]}) + '\n' for i in range(20_000)).encode()
  contents = {
    'a.jsonl': lines,
    'b.jsonl.gz': gzip.compress(lines, 1),
    'c.json.zst': zstd.compress(lines),
    'd.txt': b'some words\n\n' * 1000,
  }
  for name, content in contents.items():
    (tmp_path / name).write_bytes(content)
    bucket.write(f'text/{name}', content)
  found = []
  for root in (str(tmp_path), f's3://{object_server.BUCKET}/text'):
    data = settings.Data(source='files', train=(f'{root}/*',), validation_fraction=0.5)
    corpus.check_readable(data)
    found.append(list(corpus.documents(data, 'validation')) + list(corpus.documents(data, 'train')))
  assert found[0] == found[1] and len(found[0]) > 30_000 and len(lines) > PART_BYTES
  model = train([d.text for d in found[0][:200]], 278)
  bucket.write('t5.model', model)
  (tmp_path / 't5.model').write_bytes(model)
  given = (f's3://{object_server.BUCKET}/t5.model', tmp_path / 't5.model')
  ids = [tokenizer_files.open_file(file).encode('line 1').tolist() for file in given]
  assert ids[0] == ids[1]


def test_the_content_of_objects_is_reported_by_the_bucket(bucket):
  root = f's3://{object_server.BUCKET}'
  for name, content in (('same/a.txt', b'words'), ('same/sub/b.txt', b'words'), ('same/c.txt', b'other')):
    bucket.write(name, content)
  paths = [f'{root}/same/{name}' for name in ('a.txt', 'sub/b.txt', 'c.txt', 'none.txt')]
  a, b, c = paths[:3]
  found = remote_files.identities(paths)
  assert [*found] == [a, b, c] and found[a] != found[c]
  bucket.write('same/a.txt', b'drows')
  again = remote_files.identities(paths)
  assert again[a] != found[a] and (again[b], again[c]) == (found[b], found[c])


@pytest.mark.parametrize('kind', slow.all_but(['parquet', 'feather', 'tar', 'jsonl.xz'], 'jsonl.xz'))
def test_records_in_a_bucket_or_on_the_hub_are_those_on_disk(tmp_path, bucket, monkeypatch, kind):
  """The Hub's file system is another one of fsspec's here, as it cannot be reached."""
  monkeypatch.setitem(importlib.import_module('fsspec.registry')._registry, 'hf', MemoryFileSystem)
  (tmp_path / 'here').mkdir()
  draw, size = random.Random(0), 3000 if kind == 'parquet' else 30
  records = [{'text': draw.randbytes(size).hex(), 'domain': 'a'} for _ in range(2000)]
  corpora.write_records(tmp_path / 'here', kind, records)
  [file] = (tmp_path / 'here').iterdir()
  assert (file.stat().st_size > PART_BYTES) == (kind == 'parquet')
  bucket.write(f'{kind}/{file.name}', file.read_bytes())
  MemoryFileSystem().pipe(f'/datasets/{kind}/{file.name}', file.read_bytes())
  found = []
  for root in (tmp_path / 'here', f's3://{object_server.BUCKET}/{kind}', f'hf://datasets/{kind}'):
    data = settings.Data(source='files', train=(f'{root}/*',), validation_fraction=0.5)
    corpus.check_readable(data)
    found.append(corpora.both(data))
  assert found[0] == found[1] == found[2] and len(found[0][0]) > 500


@pytest.mark.parametrize('fault', slow.but(['reset', 'unavailable', 'forbidden'], 'unavailable'))
def test_a_line_that_breaks_while_text_is_read_is_waited_out_unless_we_are_rejected(fault, bucket, monkeypatch, caplog):
  data = random.Random(0).randbytes(3 * PART_BYTES)
  bucket.write('long.txt', data)
  with line.Line(int(os.environ['AWS_ENDPOINT_URL'].rpartition(':')[2])) as wire:
    monkeypatch.setenv('AWS_ENDPOINT_URL', f'http://127.0.0.1:{wire.port}')
    place = object_store.open_storage(bucket.url, patience_s=60)
    monkeypatch.setattr(remote_files, '_storage', lambda of: place)
    with remote_files.open_file(f'{bucket.url}/long.txt') as f:
      found = f.read(5)
      wire.faults = [fault] * 10  # obstore by itself tries four times
      wire.hang_up()
      if fault == 'forbidden':
        with pytest.raises(OSError, match=r'long\.txt: .*403'):
          f.read(len(data))
      else:
        assert found + f.read(len(data)) == data and not wire.faults
    assert ('the next attempt is in' in caplog.text) == (fault != 'forbidden')


def test_what_the_hub_needs_is_named(monkeypatch):
  data = settings.Data(source='files', train=('hf://datasets/x/*.parquet',))
  monkeypatch.setitem(sys.modules, 'fsspec', None)
  with pytest.raises(ValueError, match=r"reading from the Hub needs huggingface_hub: pip install 'dipaco_jax\[hub\]'"):
    corpus.check_readable(data)


def test_what_is_missing_is_named(bucket):
  root = f's3://{object_server.BUCKET}'
  with pytest.raises(ValueError, match=r'none/\*\.txt.* matches no object: correct config\.data\.train'):
    corpus.check_readable(settings.Data(source='files', train=(f'{root}/none/*.txt',)))
  with pytest.raises(ValueError, match=r"tokenizer 's3://bucket/no\.model': there is no such object"):
    tokenizer_files.open_file(f'{root}/no.model')
  with pytest.raises(ValueError, match=r's3://none-such/\*\.txt'):
    corpus.check_readable(settings.Data(source='files', train=('s3://none-such/*.txt',)))


def test_what_is_away_is_not_taken_for_missing(tmp_path, monkeypatch):
  (tmp_path / 'tokenizer.json').touch()
  assert remote_files.can_open(f'{tmp_path}/tokenizer.json') and not remote_files.can_open(f'{tmp_path}/none')

  def stale(path):
    raise OSError(errno.ESTALE, 'Stale file handle', path)

  monkeypatch.setattr(remote_files, 'open_file', stale)
  with pytest.raises(Unavailable, match=r'tokenizer\.json: Stale file handle; run the same command again'):
    remote_files.can_open(f'{tmp_path}/tokenizer.json')
