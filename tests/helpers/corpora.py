"""Settings of text in files, files of records made by the tools that make them, and both splits of a corpus."""

import bz2
import gzip
import json
import lzma
import pathlib
from collections.abc import Sequence
from typing import Any

import pyarrow.feather
import pyarrow.parquet
import webdataset
from backports import zstd

from dipaco_jax.config import settings
from dipaco_jax.data import corpus


def in_files(tmp_path, **kwargs) -> settings.Data:
  return settings.Data(source='files', train=(f'{tmp_path}/*.*',), **kwargs)


def lines(count: int, name: str = '') -> bytes:
  """Lines of JSON; those of another name are other documents."""
  texts = (f'line {i} {name}'.strip() for i in range(count))
  return ''.join(json.dumps({'text': text, 'domain': 'ab'[i % 2]}) + '\n' for i, text in enumerate(texts)).encode()


def paragraphs(count: int, words: str = 'some words') -> str:
  """Plain text in which no two pieces are equal."""
  return ''.join(f'{words} {i}\n\n' for i in range(count))


COMPRESS = {'gz': gzip.compress, 'bz2': bz2.compress, 'xz': lzma.compress, 'zst': zstd.compress, 'zstd': zstd.compress}
RECORDS = 'jsonl ndjson json jsonl.gz jsonl.bz2 jsonl.xz jsonl.zst jsonl.zstd parquet arrow feather tar tar.gz'.split()


def write_records(folder: pathlib.Path, kind: str, records: Sequence[dict[str, Any]], stem: str = 'a') -> str:
  """Writes records to a file, or the folder of a saved dataset; returns the pattern by which a config names it."""
  name, _, compression = kind.partition('.')
  file = folder / f'{stem}.{kind}'
  if name == 'parquet':
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), file, row_group_size=50)
  elif name == 'arrow':
    import datasets  # a second, for one kind

    file = folder / stem
    datasets.Dataset.from_list(list(records)).save_to_disk(file, num_shards=1)
  elif name == 'feather':  # Arrow's file format, as that of Feather
    file = folder / f'{stem}.arrow'
    pyarrow.feather.write_feather(pyarrow.Table.from_pylist(list(records)), file, compression='lz4')
  elif name == 'tar':
    with webdataset.TarWriter(str(file)) as tar:
      for i, record in enumerate(records):
        about = {key: value for key, value in record.items() if key != 'text'}
        tar.write({'__key__': f'{i:06}', 'txt': record['text'], 'json': about})
  else:
    content = ''.join(json.dumps(record) + '\n' for record in records).encode()
    file.write_bytes(COMPRESS[compression](content) if compression else content)
  return str(file)


def both(data: settings.Data) -> list[list[corpus.Document]]:
  """Training and validation documents."""
  return [list(corpus.documents(data, split)) for split in ('train', 'validation')]
