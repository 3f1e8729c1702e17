"""Files of every kind that people have: which is which, the same documents of each, and the line for each wrong one."""

import gzip
import itertools
import os
import sys
import time

import corpora
import pytest
from backports import zstd

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import compressed_files, corpus, file_kinds, json_files

RECORDS = [
  {'text': f'line {i} ä\u2028', 'domain': 'ab'[i % 2], 'meta': {'set': f's{i % 3}', 'title': f'title {i}'}}
  for i in range(200)
]


def of(pattern: str, **changes) -> settings.Data:
  return settings.Data(source='files', train=(pattern,), validation_fraction=0.1, **changes)


@pytest.mark.parametrize('kind', corpora.RECORDS)
def test_the_same_documents_of_every_kind_of_records(kind, tmp_path):
  data = of(corpora.write_records(tmp_path, kind, RECORDS))
  corpus.check_readable(data)
  train, validation = corpora.both(data)
  assert 15 <= len(validation) <= 25
  found = {(d.text, d.domain) for d in train + validation}
  assert found == {(record['text'], record['domain']) for record in RECORDS} and len(train + validation) == 200
  assert {d.id.split(':')[1] for d in train + validation} == {f'{n}' for n in range(1, 201)}
  parts = [d for k in range(3) for d in corpus.documents(data, 'train', (k, 3))]
  assert sorted(parts) == sorted(train)


@pytest.mark.parametrize('kind', corpora.RECORDS)
def test_text_and_domain_may_be_inside_other_objects(kind, tmp_path):
  records = [{'meta': record['meta'], 'n': 3} for record in RECORDS]
  if kind.startswith('tar'):
    records = [{'text': r['meta']['title'], **r} for r in records]
  data = of(corpora.write_records(tmp_path, kind, records), text_key='meta.title', domain_key='meta.set')
  corpus.check_readable(data)
  found = {(d.text, d.domain) for side in corpora.both(data) for d in side}
  assert found == {(r['meta']['title'], r['meta']['set']) for r in records}


@pytest.mark.parametrize('kind', [kind for kind in corpora.RECORDS if 'tar' not in kind])
def test_a_key_that_is_not_there_is_named_with_those_that_are(kind, tmp_path):
  data = of(corpora.write_records(tmp_path, kind, RECORDS), text_key='content')
  with pytest.raises(
    ValueError, match=r"no text under 'content'; texts are under \['domain', 'meta.set', 'meta.title', "
  ):
    corpus.check_readable(data)


BAD = {
  'nothing.txt': (b'', 'it has no text'),
  'blank.jsonl': (b'\n\n', 'it has no text'),
  'binary.txt': (b'abc\0def', r'byte 3 is NUL'),
  'latin.txt': (('x' * 100 + 'é').encode('latin1'), 'not UTF-8 at byte 100'),
  'split.txt': (b'x' * ((1 << 20) - 1) + b'\xc3(', f'not UTF-8 at byte {(1 << 20) - 1}'),
  'plain.jsonl': (corpora.lines(2) + b'plain text\n', r'plain\.jsonl:3: not JSON'),
  'key.jsonl': (b'{"content": "x", "n": 1}\n', r"key\.jsonl:1: no text under 'text'; texts are under \['content'\]"),
  'list.jsonl': (
    b'\xef\xbb\xbf\n [1]\n',
    r'list\.jsonl: an array instead of one object per line; jq',
  ),
  'later.jsonl': (corpora.lines(2) + b'[1]\n', r'later\.jsonl:3: not a JSON object, as each line should be'),
  'deep.jsonl': (b'{"text": ' + b'[' * 100_000, r'deep\.jsonl:1: not JSON'),
  'latin.jsonl': (b'{"text": "\xe9"}\n', r'latin\.jsonl:1: not UTF-8 at byte 10'),
  'cut.jsonl.gz': (gzip.compress(os.urandom(5000))[:2000], 'damaged or cut short'),
  'no.jsonl.gz': (b'plain', 'Not a gzipped file'),
  'no.jsonl.zst': (b'plain', 'damaged or cut short'),
  'cut.txt.zst': (zstd.compress(os.urandom(5000).hex().encode())[:2000], 'damaged or cut short'),
  'cut.txt.xz': (corpora.COMPRESS['xz'](os.urandom(5000).hex().encode())[:2000], 'damaged or cut short'),
  'cut.txt.bz2': (corpora.COMPRESS['bz2'](os.urandom(5000).hex().encode())[:2000], 'damaged or cut short'),
  'cut.parquet': (b'PAR1' + bytes(500), r'damaged or cut short \(Parquet magic bytes'),
  'empty.parquet': (b'', 'damaged or cut short'),
  'no.arrow': (b'plain text that is long enough', 'damaged or cut short'),
  'no.tar': (b'plain text', 'damaged or cut short'),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_files_are_named(tmp_path, name):
  content, message = BAD[name]
  (tmp_path / 'good.txt').write_text('good text\n\n' * 20_000)
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=message) as error:
    corpus.check_readable(corpora.in_files(tmp_path))
  assert name in str(error.value) and '\n' not in str(error.value)


def test_good_files_pass_the_check(tmp_path):
  (tmp_path / 'a.txt').write_text('\ufeffgood text, ' * 100_000)
  (tmp_path / 'b.jsonl').write_bytes(b'\xef\xbb\xbf' + corpora.lines(5) + b'\n' + corpora.lines(200).rstrip())
  corpus.check_readable(corpora.in_files(tmp_path))
  corpus.check_readable(settings.Data(source='stdlib'))


def test_faults_beyond_the_beginning_are_found_by_the_stream(tmp_path):
  (tmp_path / 'a.jsonl').write_bytes(corpora.lines(60_000) + b'{"txt": 1}\n')
  corpus.check_readable(corpora.in_files(tmp_path))
  with pytest.raises(ValueError, match=r'a\.jsonl:60001: no text'):
    list(corpus.documents(corpora.in_files(tmp_path, validation_fraction=1e-9), 'train'))
  (tmp_path / 'a.jsonl').unlink()
  (tmp_path / 'b.txt').write_bytes(b'good text\n' * 300_000 + b'\xff')
  with pytest.raises(ValueError, match=r'b\.txt: not UTF-8 at byte 3000000'):
    list(corpus.documents(corpora.in_files(tmp_path), 'train'))


def test_an_array_is_rejected_by_its_first_byte(monkeypatch):
  monkeypatch.setattr(
    compressed_files, 'chunks', lambda path: itertools.chain([b' \n['], itertools.repeat(b'1, ', 1000))
  )
  with pytest.raises(ValueError, match=r'a\.json: an array'):
    next(json_files.lines('a.json'))


def test_the_time_of_a_long_line_is_that_of_its_bytes(monkeypatch):
  """Each chunk is copied once: some milliseconds here, where a copy of the whole line for each took 10 s."""
  chunk, count = b'x' * (1 << 10), 1 << 13
  monkeypatch.setattr(compressed_files, 'chunks', lambda path: itertools.repeat(chunk, count))
  began = time.process_time()
  [(number, line)] = json_files.lines('a.json')
  assert (number, len(line)) == (1, len(chunk) * count) and time.process_time() - began < 3


def test_the_library_that_zst_needs_is_named(tmp_path, monkeypatch):
  (tmp_path / 'a.jsonl.zst').write_bytes(zstd.compress(corpora.lines(3)))
  monkeypatch.setitem(sys.modules, 'backports.zstd', None)
  monkeypatch.setitem(sys.modules, 'compression.zstd', None)
  with pytest.raises(ValueError, match='pip install'):
    corpus.check_readable(corpora.in_files(tmp_path))


@pytest.mark.parametrize(
  ('name', 'words'),
  [
    (
      'a.csv',
      r"a\.csv: \.csv files cannot be read: with pandas, read_csv\('.*a\.csv'\)\.to_parquet\('.*/a\.parquet'\)",
    ),
    ('a.tsv', r"read_csv\('.*a\.tsv', sep='\\t'\)"),
    ('a.tgz', r'name it .*a\.tar\.gz'),
    ('a.zip', 'unpack it'),
    ('a.tfrecord', "config.data.source='tfds'"),
    ('a.pdf', r'\.pdf is not one of \.txt .*set config\.data\.plain_suffixes=\.pdf, else leave it out'),
    ('a.py', r'\.py is not one of'),
    ('a.parquet.gz', r'\.parquet files are read uncompressed'),
    ('a.bin.zst', r'\.bin files are read uncompressed'),
    ('a.idx', r'name .*/a\.bin, to which it belongs'),
  ],
)
def test_what_cannot_be_read_is_rejected_by_name_and_never_trained_on(name, words, tmp_path):
  (tmp_path / name).write_text('text,label\nsome text,1\n' * 1000)
  data = of(f'{tmp_path}/*')
  for read in (corpus.check_readable, lambda data: list(corpus.documents(data, 'train'))):
    with pytest.raises(ValueError, match=words) as error:
      read(data)
    assert '\n' not in str(error.value)


def test_further_suffixes_of_plain_text(tmp_path):
  for name in ('a.py', 'b.RS.gz', 'README'):
    content = 'some = text\n\n' * 5000
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if name.endswith('.gz') else content.encode())
  data = of(f'{tmp_path}/*', plain_suffixes=('.py', '.rs'))
  corpus.check_readable(data)
  assert {d.id.split('#')[0] for d in corpus.documents(data, 'train')} == {'a.py', 'b.RS.gz', 'README'}


@pytest.mark.parametrize(
  ('name', 'kind'), [('a.JSONL.gz', '.jsonl'), ('a.b.txt.zst', '.txt'), ('A', ''), ('x/a.parquet', '.parquet')]
)
def test_a_name_says_what_a_file_holds(name, kind):
  assert file_kinds.suffix(name) == kind


def test_half_a_surrogate_pair_is_replaced(tmp_path, caplog):
  (tmp_path / 'a.jsonl').write_bytes(b'{"text": "a\\ud800b? \\ud83d\\ude00"}\n' * 300)
  assert {d.text for d in corpus.documents(corpora.in_files(tmp_path), 'train')} == {'a\ufffdb? \U0001f600'}
  assert caplog.text.count('lone surrogates') == 1


@pytest.mark.parametrize(
  ('content', 'advice'),
  [
    (gzip.compress(b'{"text": "words"}\n'), 'compressed by gzip: add .gz to its name'),
    (zstd.compress(b'{"text": "words"}\n'), 'compressed by zstd: add .zst to its name'),
    ('{"text": "words"}\n'.encode('utf-16'), 'UTF-16: convert it'),
    (b'PK\x03\x04', 'ZIP archive: unpack it'),
    (b'PAR1', 'Parquet file: name it .parquet'),
    (b'%PDF-1.7', 'PDF: extract its text'),
  ],
  ids='gzip zstd utf-16 zip parquet pdf'.split(),
)
@pytest.mark.parametrize('name', ['a.jsonl', 'a.txt'])
def test_a_file_that_is_no_text_is_named_for_what_it_is(tmp_path, name, content, advice):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(InputError, match=advice):
    file_kinds.check_beginning(f'{tmp_path}/{name}', of('x', skip_bad_records=True))


@pytest.mark.parametrize('name', ['a.txt', 'a.parquet', 'a.jsonl.zst', 'a.bin'])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
  (tmp_path / name).write_text('version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n')
  with pytest.raises(InputError, match=f'{name} is a pointer of Git LFS, not the file itself: run `git lfs pull`'):
    file_kinds.check_beginning(str(tmp_path / name), settings.Data(source='files'))
