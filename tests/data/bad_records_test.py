"""Records without text, or that cannot be parsed: an error that names the field, or left out and counted."""

import collections
import gzip
import io
import itertools
import json
import tarfile
import tracemalloc

import corpora
import own_modules
import pyarrow as pa
import pyarrow.parquet
import pytest

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import compressed_files, corpus, file_kinds, json_files, left_out, source, source_tfds

GOOD = [f'text {i} of some words' for i in range(60)]
BAD_LINES = [
  b'{"words": "x"}', b'{"text": null}', b'{"text": 3}', b'{"text": ["x"]}', b'[1, 2]', b'null', b'{"text": "x', b'\xff',
  b'{"text": "\xe9"}',
]  # fmt: skip


def of(pattern, **changes) -> settings.Data:
  return settings.Data(source='files', train=(str(pattern),), validation_fraction=0.1, **changes)


def write_lines(folder, ending: str) -> int:
  lines = [json.dumps({'text': text}).encode() for text in GOOD]
  for i, line in enumerate(BAD_LINES):
    lines.insert(3 * i, line)
  content = b'\n'.join(lines)
  compression = ending.rpartition('.')[2]
  (folder / f'a.{ending}').write_bytes(corpora.COMPRESS.get(compression, lambda x: x)(content))
  return len(BAD_LINES)


def write_table(folder, ending: str) -> int:
  texts = pa.array([None, *GOOD[:30], b'\xff', *GOOD[30:]], pa.binary())
  table = pa.table({'text': pa.Array.from_buffers(pa.string(), len(texts), texts.buffers())})
  if ending == 'parquet':
    pa.parquet.write_table(table, folder / 'a.parquet')
  else:
    with pa.ipc.new_stream(folder / 'a.arrow', table.schema) as writer:
      writer.write_table(table)
  return 2


def write_tar(folder, ending: str) -> int:
  bad = [('txt', b'\xff'), ('json', b'{'), ('json', b'[]'), ('json', b'{"text": null}'), ('jpg', b'x')]
  files = [*(('txt', text.encode()) for text in GOOD[:30]), *bad, *(('txt', text.encode()) for text in GOOD[30:])]
  with tarfile.open(folder / f'a.{ending}', 'w:gz' if ending.endswith('gz') else 'w') as tar:
    for i, (suffix, content) in enumerate(files):
      about = tarfile.TarInfo(f'{i:03}.{suffix}')
      about.size = len(content)
      tar.addfile(about, io.BytesIO(content))
  return len(bad)


def counting(bad_records: collections.Counter[str]) -> left_out.Omitted:
  return left_out.Omitted(bad_records, collections.Counter())


WRITE = dict.fromkeys(('jsonl', 'ndjson', 'json', 'jsonl.gz', 'jsonl.zst', 'jsonl.xz'), write_lines)
WRITE |= {'parquet': write_table, 'arrow': write_table, 'tar': write_tar, 'tar.gz': write_tar}


@pytest.mark.parametrize('ending', WRITE)
def test_bad_records_are_left_out_and_counted(ending, tmp_path, caplog):
  num_bad = WRITE[ending](tmp_path, ending)
  with pytest.raises(InputError, match=r'config\.data\.skip_bad_records=True leaves out such records') as error:
    corpus.check_readable(of(tmp_path / '*'))
  assert f'a.{ending}' in str(error.value) and '\n' not in str(error.value)
  data = of(tmp_path / '*', skip_bad_records=True)
  corpus.check_readable(data)
  skipped = collections.Counter[str]()
  assert not caplog.text
  found = [d for split in ('train', 'validation') for d in corpus.documents(data, split, omitted=counting(skipped))]
  assert sorted(d.text for d in found) == sorted(GOOD)
  assert skipped == {f'.{ending.partition(".")[0]}': num_bad}
  assert caplog.text.count('skipped this and every other bad record') == 1
  in_parts = [d for k in range(3) for split in ('train', 'validation') for d in corpus.documents(data, split, (k, 3))]
  assert sorted(d.id for d in in_parts) == sorted(d.id for d in found)


@pytest.mark.parametrize('ending', ['jsonl', 'jsonl.gz', 'tar'])
def test_a_record_that_is_too_long_is_a_bad_record(ending, tmp_path, monkeypatch):
  monkeypatch.setattr(json_files, 'MAX_LINE_BYTES', 1000)
  monkeypatch.setattr(compressed_files, 'CHUNK_BYTES', 300)
  long = json.dumps({'text': 'x' * 5000}).encode()
  short = [json.dumps({'text': text}).encode() for text in ('first', 'last')]
  file = tmp_path / f'a.{ending}'
  if ending == 'tar':
    with tarfile.open(file, 'w') as tar:
      for i, content in enumerate((short[0], long, short[1])):
        info = tarfile.TarInfo(f'{i}.json')
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
  else:
    content = b'\n'.join([short[0], long, short[1]])
    file.write_bytes(gzip.compress(content) if ending.endswith('gz') else content)
  documents = dict(file_kinds.documents(str(file), of(file), 'a'))
  assert [documents[number]()[0] for number in (1, 3)] == ['first', 'last'] and documents.keys() == {1, 2, 3}
  with pytest.raises(source.BadRecord, match=r'longer than|larger than'):
    documents[2]()


def test_a_line_that_is_too_long_is_not_kept(monkeypatch):
  monkeypatch.setattr(json_files, 'MAX_LINE_BYTES', 1 << 20)
  monkeypatch.setattr(compressed_files, 'chunks', lambda path: itertools.repeat(b'x' * (1 << 18), 400))
  tracemalloc.start()
  try:
    [(number, line)] = json_files.lines('a.json')
    assert number == 1 and (1 << 20) < len(line) < (3 << 19) and tracemalloc.get_traced_memory()[1] < (1 << 23)
  finally:
    tracemalloc.stop()


def test_good_records_keep_their_side_when_bad_ones_are_left_out(tmp_path):
  lines = [json.dumps({'text': text}) for text in GOOD]
  (tmp_path / 'a.jsonl').write_text('\n'.join(lines))
  before = [{d.text for d in side} for side in corpora.both(of(tmp_path / '*'))]
  (tmp_path / 'a.jsonl').write_text('\n'.join([*lines, '{}', '{}']))
  assert [{d.text for d in side} for side in corpora.both(of(tmp_path / '*', skip_bad_records=True))] == before


def test_a_file_of_bad_records_alone_is_named(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"words": "x"}\n' * 20)
  (tmp_path / 'b.jsonl').write_bytes(corpora.lines(20))
  with pytest.raises(
    InputError, match=r'a\.jsonl: none of its first records .*:1: no text .*set config\.data\.text_key'
  ):
    corpus.check_readable(of(tmp_path / '*', skip_bad_records=True))


@pytest.mark.parametrize('content', ['{\n"text": "x"\n}\n', '[\n{"text": "x"}\n]\n'])
def test_a_document_over_several_lines_is_an_error_all_the_same(content, tmp_path):
  (tmp_path / 'a.json').write_text(content)
  with pytest.raises(InputError, match='jq -c') as error:
    corpus.check_readable(of(tmp_path / '*', skip_bad_records=True))
  assert 'skip_bad_records' not in str(error.value)


def test_bad_records_of_a_mixture_count_once(tmp_path):
  write_lines(tmp_path, 'jsonl')
  (tmp_path / 'b.jsonl').write_bytes(corpora.lines(300))
  sources = tuple(settings.Source(name, (f'{tmp_path}/{name}.jsonl',), 1.0) for name in 'ab')
  data = settings.Data(source='files', train=sources, validation_fraction=0.1, skip_bad_records=True)
  skipped = collections.Counter[str]()
  train = list(corpus.documents(data, 'train', omitted=counting(skipped)))
  assert any(d.times for d in train) and skipped['.jsonl'] <= len(BAD_LINES)
  list(corpus.documents(data, 'validation', omitted=counting(skipped)))
  assert skipped == {'.jsonl': len(BAD_LINES)}


def test_documents_of_an_own_source_and_of_tfds(tmp_path, monkeypatch):
  words = [('a', 'text'), ('b', None), ('c', 'x\ud800'), ('d', lambda: 3), ('e', 'more')]
  name = own_modules.write(
    tmp_path, monkeypatch, 'listed = []\ndef make(config, split):\n  return listed if split == "train" else None\n'
  )
  __import__(name).listed[:] = words
  data = settings.from_dict({'data': {'source': f'{name}:make', 'validation_fraction': 1e-9}}).data
  with pytest.raises(InputError, match='skip_bad_records'):
    list(corpus.documents(data, 'train'))
  data = settings.from_dict({'data': settings.Data(data.source, skip_bad_records=True).__dict__}).data
  skipped = collections.Counter[str]()
  assert [
    d.id for split in ('train',) for d in corpus.documents(data, split, fraction=0.0, omitted=counting(skipped))
  ] == [
    'a',
    'e',
  ]
  assert skipped == {f'{name}:make': 3}


class NoText:
  """A TensorFlow Example without any feature."""

  class _Feature:
    class bytes_list:
      value = ()

  @classmethod
  def FromString(cls, record):
    del record
    found = cls()
    found.features = found
    found.feature = collections.defaultdict(cls._Feature)
    return found


def test_an_example_of_tfds_without_text_is_a_bad_record():
  with pytest.raises(source.BadRecord, match="c4: document 7 has no text under 'text'"):
    source_tfds._parse_example(NoText, settings.Data(name='c4'), None, 7, b'')
