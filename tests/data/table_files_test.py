"""Tables: kinds of text, rows without any, a row group at a time, and datasets as they are saved."""

import io
import json
import sys

import corpora
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from dipaco_jax.config import settings
from dipaco_jax.data import corpus, source_files, table_files
from dipaco_jax.storage import remote_files

TEXTS = [f'text {i}' for i in range(3000)]


def of(*patterns, **changes) -> settings.Data:
  return settings.Data(source='files', train=tuple(map(str, patterns)), validation_fraction=0.1, **changes)


def texts(data: settings.Data) -> list[str]:
  return sorted(d.text for side in corpora.both(data) for d in side)


@pytest.mark.parametrize(
  'kind', [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_all_kinds_of_strings(kind, tmp_path):
  pa.parquet.write_table(pa.table({'text': pa.array(TEXTS).cast(kind)}), tmp_path / 'a.parquet')
  assert texts(of(tmp_path / '*')) == sorted(TEXTS)


@pytest.mark.parametrize(
  ('columns', 'words'),
  [
    ({'text': [b'bytes'], 'words': ['a']}, r"no text under 'text'; texts are under \['words'\]"),
    ({'text': [3], 'inside': [{'words': 'a'}]}, r"texts are under \['inside.words'\]: set config.data.text_key"),
    ({'text': [3]}, 'no other key has one: leave out this file'),
    ({'text': ['a', None]}, "row 2 has no text under 'text'"),
    (
      {'text': pa.Array.from_buffers(pa.string(), 1, [None, *pa.array([b'\xff']).buffers()[1:]])},
      'row 1 is not UTF-8 at byte 0 of a text',
    ),
    ({'text': ['', ' ']}, 'it has no text'),
  ],
)
@pytest.mark.parametrize('ending', ['parquet', 'arrow'])
def test_what_is_no_text_is_named(columns, words, ending, tmp_path):
  table = pa.table(columns)
  if ending == 'parquet':
    pa.parquet.write_table(table, tmp_path / 'a.parquet')
  else:
    with pa.ipc.new_stream(tmp_path / 'a.arrow', table.schema) as writer:
      writer.write_table(table)
  with pytest.raises(ValueError, match=words) as error:
    corpus.check_readable(of(tmp_path / '*'))
  assert f'a.{ending}' in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize(
  ('right', 'wrong', 'words'),
  [
    (np.int32([0, 300, 1000, 1000]), np.int32([0, 300, 1016, 1016]), 'out of bounds: 1016 > 1000'),
    (np.bytes_(b'words'), np.bytes_(b'w\xffrds'), "can't decode byte 0xff"),
    (np.int64([1040]), np.int64([2**50]), 'does not fit into memory'),  # bytes of the record batch
  ],
)
def test_a_damaged_arrow_file_is_named_and_nothing_outside_its_buffers_is_read(right, wrong, words, tmp_path):
  table = pa.table({'text': ['a' * 300, 'b' * 700, ''], 'words': ['a', 'b', 'c']})
  stream = pa.BufferOutputStream()
  with pa.ipc.new_stream(stream, table.schema) as writer:
    writer.write_table(table)
  content = stream.getvalue().to_pybytes()
  assert right.tobytes() in content
  (tmp_path / 'a.arrow').write_bytes(content.replace(right.tobytes(), wrong.tobytes()))
  with pytest.raises(ValueError, match=f'a.arrow: damaged.*{words}'):
    corpus.check_readable(of(tmp_path / '*'))


class Counted(io.FileIO):
  """A file that counts the bytes that are read of it."""

  count = 0

  def read(self, size=-1):
    found = super().read(size)
    self.count += len(found)
    return found


def test_no_more_than_a_row_group_of_the_columns_is_read_ahead(tmp_path, monkeypatch):
  columns = {
    'text': [f'{i} {"words " * 100}' for i in range(1000)],
    'more': [bytes([i % 256]) * 9000 for i in range(1000)],
  }
  pa.parquet.write_table(pa.table(columns), tmp_path / 'a.parquet', row_group_size=100, compression='none')
  opened = []
  monkeypatch.setattr(remote_files, 'open_file', lambda path: opened.append(Counted(path)) or opened[-1])
  rows = table_files.parquet(str(tmp_path / 'a.parquet'), of('*'), '')
  numbers = [next(rows)[0] for _ in range(100)]
  assert numbers == [*range(1, 101)] and 60_000 < opened[0].count < 150_000
  next(rows)
  assert 120_000 < opened[0].count < 250_000


def test_a_saved_dataset_is_its_own_files_and_no_caches(tmp_path):
  import datasets  # a second, for few tests

  made = datasets.Dataset.from_dict({'text': TEXTS})
  made.save_to_disk(tmp_path / 'mine', num_shards=3)
  saved = datasets.load_from_disk(tmp_path / 'mine')
  saved.map(lambda row: {'text': row['text'] + ' again'}, cache_file_name=str(tmp_path / 'mine' / 'cache-1.arrow'))
  assert (tmp_path / 'mine' / 'cache-1.arrow').exists()
  for pattern in (tmp_path / 'mine', f'{tmp_path}/mine/'):
    assert texts(of(pattern)) == sorted(TEXTS)
  for state in (json.dumps({'files': 3}), '[' * 100_000):
    (tmp_path / 'mine' / 'state.json').write_text(state)
    with pytest.raises(ValueError, match=r'state\.json: not as datasets\.save_to_disk writes it'):
      texts(of(tmp_path / 'mine'))


def test_of_several_splits_one_has_to_be_named(tmp_path):
  import datasets

  made = datasets.Dataset.from_dict({'text': TEXTS})
  datasets.DatasetDict({'train': made, 'test': made}).save_to_disk(tmp_path / 'mine')
  with pytest.raises(
    ValueError, match=r"dataset of several splits, \['test', 'train'\]: name one, as '.*/mine/test', in"
  ):
    corpus.check_readable(of(tmp_path / 'mine'))
  assert texts(of(tmp_path / 'mine' / 'train')) == sorted(TEXTS)


def test_the_library_is_named(tmp_path, monkeypatch):
  pattern = corpora.write_records(tmp_path, 'parquet', [{'text': 'a'}])
  monkeypatch.setitem(sys.modules, 'pyarrow', None)
  with pytest.raises(ValueError, match=r"a\.parquet: reading it needs pyarrow: pip install 'dipaco_jax\[parquet\]'"):
    source_files.check_beginnings(of(pattern))
