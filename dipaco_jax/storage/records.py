"""Files of records in ArrayRecord, several of them read as one, and their `meta.json`. Nothing here imports JAX."""

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from dipaco_jax.storage import seals

READ_RECORDS = 2048  # read at one time
RANDOM_ACCESS = 'readahead_buffer_size:0,max_parallelism:0'  # options of a reader

T = TypeVar('T')


@contextlib.contextmanager
def record_writer(file: str) -> Iterator[ArrayRecordWriter]:
  """Opens a writer of records, each in a group of its own and uncompressed, the fastest to read at random.

  It writes in place, so the file belongs in a directory that is still being written aside. Raises OSError.
  """
  writer = ArrayRecordWriter(file, 'group_size:1,uncompressed')
  try:
    try:
      yield writer
    except BaseException:
      with contextlib.suppress(RuntimeError):  # the error of the block is the one to raise
        writer.close()
      raise
    writer.close()
  except RuntimeError as e:
    raise OSError(f'{file}: {e}') from e


def record_reader(file: str) -> ArrayRecordReader:
  """Opens a reader for random access. Raises seals.Damaged."""
  try:
    reader = ArrayRecordReader(file, RANDOM_ACCESS)
    if reader.ok():
      return reader
  except (RuntimeError, ValueError):
    pass
  raise seals.Damaged(file)


def read_records(file: str, reader: ArrayRecordReader, *which) -> list[bytes]:
  """Returns `reader.read(*which)`, which verifies the checksum of every record. Raises seals.Damaged."""
  try:
    return reader.read(*which)
  except (RuntimeError, IndexError, ValueError) as e:
    raise seals.Damaged(file) from e


def read_across(counts: Sequence[int], indices: Iterable[int], read: Callable[[int, list[int]], list[T]]) -> list[T]:
  """Reads items of several files, of these counts, as if they were one; `read(file, numbers)` reads items of one file.

  `indices` are numbers of items in all files together, in any order, which the result keeps.
  """
  at, ends = np.array([*indices], np.int64), np.cumsum(counts)
  files = np.searchsorted(ends, at, 'right')
  records: dict[int, T] = {}
  for file in np.unique(files):
    mine = np.flatnonzero(files == file)
    numbers = at[mine] - (ends[file] - counts[file])
    records.update(zip(mine.tolist(), read(int(file), numbers.tolist()), strict=True))
  return [records[i] for i in range(len(at))]


def write_meta(folder: str, meta: dict[str, Any]) -> dict[str, Any]:
  """Writes `meta.json` into a directory that is still being written aside; returns `meta`."""
  with open(os.path.join(folder, 'meta.json'), 'w') as f:
    json.dump(meta, f, indent=1)
  return meta


def read_meta(folder: str) -> dict[str, Any]:
  """Reads the `meta.json` of a folder. Raises seals.Damaged."""
  return seals.read_json(pathlib.Path(folder) / 'meta.json')
