"""A shard read as an endless shuffled stream of batches [2.4].

A step's batch depends on nothing but (seed, path, step), so a run that is resumed needs only the step, which is the
path's own (see `training.job.Job.own_step`). Nothing here imports JAX.
"""

import functools
import os
from collections.abc import Sequence

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from dipaco_jax.core import seeded_hash
from dipaco_jax.core.errors import InputError
from dipaco_jax.storage.records import read_across, read_records, record_reader

BLOCK = 4096  # positions of a stream shuffled at one time


@functools.lru_cache(256)  # bounds the open files, however many the paths
def _cached_reader(file: str, modified_ns: int) -> ArrayRecordReader:
  return record_reader(file)


def cached_reader(file: str) -> ArrayRecordReader:
  """Returns a reader of records that stays open for a while. Raises seals.Damaged."""
  modified_ns = os.stat(file).st_mtime_ns if os.path.exists(file) else 0
  return _cached_reader(os.path.abspath(file), modified_ns)


class Shard:
  """An endless stream of batches of one path's rows, shuffled again in every epoch."""

  def __init__(self, files: Sequence[str], batch_size: int, seq_len: int, seed: int, path: int):
    """Opens the files, whose rows come one file after the other. Raises seals.Damaged; InputError without rows."""
    self._files = files
    self._batch_size = batch_size
    self._seq_len = seq_len
    self._seed = seed
    self._path = path
    self._order = functools.lru_cache(2)(self._shuffle)
    self._counts = [cached_reader(file).num_records() for file in files]
    self.num_rows: int = sum(self._counts)
    if not self.num_rows:
      raise InputError(f'path {path} has no text ({files[0]}): use more text, or fewer paths in config.grid')

  def _shuffle(self, block: int) -> np.ndarray:  # costs little more than the rows of one batch
    return shuffled(np.arange(block * BLOCK, (block + 1) * BLOCK), self.num_rows, self._seed, self._path)

  def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and segment ids of a step's rows, int32 [B, L] each. Takes the same time for every step."""
    block, begin = divmod(step * self._batch_size, BLOCK)
    rows, end = self._order(block), begin + self._batch_size
    while len(rows) < end:
      block += 1
      rows = np.concatenate([rows, self._order(block)])
    return _unpack(read_across(self._counts, rows[begin:end], self._read), self._seq_len)

  def _read(self, file: int, rows: list[int]) -> list[bytes]:
    return read_records(self._files[file], cached_reader(self._files[file]), rows)


def read_rows(file: str, start: int, stop: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
  """Reads tokens and segment ids of rows `start` to `stop`, or to the last one, int32 [rows, L] each."""
  reader = cached_reader(file)
  stop = min(stop, reader.num_records())
  return _unpack(read_records(file, reader, start, stop) if start < stop else [], seq_len)


def _unpack(records: list[bytes], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
  itemsize = len(records[0]) // (2 * seq_len) if records else 2
  rows = np.frombuffer(b''.join(records), f'<u{itemsize}').reshape(-1, 2, seq_len)
  return rows[:, 0].astype(np.int32), rows[:, 1].astype(np.int32)


def shuffled(positions: np.ndarray, num_rows: int, seed: int, path: int) -> np.ndarray:
  """Returns the row at each position of an endless stream whose every epoch of `num_rows` positions is a permutation.

  A Feistel cipher keyed by (seed, path, epoch) over the next power of two, walked until it falls inside: nothing is
  stored, for any number of rows. (Grain's own takes 10 to 300 ms per batch if there are few rows.)
  """
  epoch, row = divmod(positions.astype(np.uint64), np.uint64(num_rows))
  keys = [seeded_hash.of_integers(seed, path, epoch, turn) for turn in range(8)]
  high, low = (num_rows - 1).bit_length() // 2, ((num_rows - 1).bit_length() + 1) // 2
  high_mask = np.uint64((1 << high) - 1)
  low_mask = np.uint64((1 << low) - 1)
  shift = np.uint64(low)
  outside = np.arange(len(row))
  while len(outside):
    left, right = row[outside] >> shift, row[outside] & low_mask
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
      left = left ^ (seeded_hash.mix(even[outside] ^ right) & high_mask)
      right = right ^ (seeded_hash.mix(odd[outside] ^ left) & low_mask)
    row[outside] = left << shift | right
    outside = outside[row[outside] >= num_rows]
  return row.astype(np.int64)
