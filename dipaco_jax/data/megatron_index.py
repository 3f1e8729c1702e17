"""Megatron's index of a file of tokens, the .idx beside its .bin: where sequences are, and which are a document."""

import itertools
import os
from collections.abc import Iterator

import numpy as np

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import compressed_files
from dipaco_jax.storage import remote_files

MAGIC, VERSION = b'MMIDIDX\0\0', 1
BEFORE = b'TNTIDX\0\0'  # the magic of the format that Megatron had first
HEADER = np.dtype([('magic', 'V9'), ('version', '<u8'), ('kind', 'u1'), ('sequences', '<u8'), ('borders', '<u8')])
KINDS = {1: 'u1', 2: 'i1', 3: '<i2', 4: '<i4', 5: '<i8', 8: '<u2'}  # of a token; 6 and 7 are no integers
ANEW = "make it anew with Megatron's preprocess_data"

Places = list[tuple[int, int]]  # (first byte, number of tokens) of each sequence of a document


def of(path: str) -> str:
  """Returns the path of a .bin file's index, whether it is there or not."""
  return os.path.splitext(path)[0] + '.idx'


def is_there(path: str) -> bool:
  """Tells whether a .bin file has an index beside it."""
  return bool(remote_files.find(of(path))) if remote_files.is_remote(path) else os.path.isfile(of(path))


def read(path: str) -> tuple[np.dtype, Iterator[Places]]:
  """Reads the index of a .bin file: the type of a token, and the documents. Raises InputError where it is damaged."""
  index, content = of(path), _content(of(path))
  if content[: len(BEFORE)].tobytes() == BEFORE:
    raise InputError(f"{index}: it is in Megatron's first format, which is read no more: {ANEW}")
  if len(content) < HEADER.itemsize or content[: len(MAGIC)].tobytes() != MAGIC:
    raise InputError(f"{index}: no index of Megatron's, which begins with MMIDIDX: {ANEW}, or leave out {path}")
  header = content[: HEADER.itemsize].view(HEADER)[0]
  if (version := int(header['version'])) != VERSION or (kind := int(header['kind'])) not in KINDS:
    words = f'version {version}' if version != VERSION else f'tokens of type {kind}, no integer'
    raise InputError(f'{index}: it has {words}, which cannot be read: {ANEW}')
  dtype, count, borders = np.dtype(KINDS[kind]), int(header['sequences']), int(header['borders'])
  size = HEADER.itemsize + (4 + 8) * count + 8 * borders
  if size != len(content):  # longer with modes, where there are images too
    words = f'{len(content)} bytes, not the {size} of {count} sequences of text and {borders - 1} documents'
    raise InputError(f'{index}: damaged, cut short or not of text alone ({words}): {ANEW}')
  lengths = np.frombuffer(content, '<i4', count, HEADER.itemsize)
  starts = np.frombuffer(content, '<i8', count, HEADER.itemsize + 4 * count)
  limits = np.frombuffer(content, '<i8', borders, HEADER.itemsize + (4 + 8) * count)
  _check(path, lengths, starts, limits, dtype.itemsize)
  return dtype, _documents(lengths, starts, limits)


def _content(index: str) -> np.ndarray:
  """Returns a file's bytes: those of a disk stay there until they are needed."""
  with compressed_files.reading(index):
    if remote_files.is_remote(index) or not os.path.getsize(index):
      return np.frombuffer(remote_files.read(index), np.uint8)
    return np.memmap(index, np.uint8, 'r')


def _check(path: str, lengths: np.ndarray, starts: np.ndarray, borders: np.ndarray, itemsize: int) -> None:
  """Raises InputError where an index points out of itself or of its .bin file."""
  with compressed_files.reading(path), remote_files.open_file(path) as f:
    size = f.seek(0, os.SEEK_END)
  is_inside = not len(lengths) or (lengths.min() >= 0 and starts.min() >= 0)
  if not is_inside or np.any(np.diff(borders) < 0) or np.any((borders < 0) | (borders > len(lengths))):
    raise InputError(f'{of(path)}: damaged (its places are not in order): {ANEW}')
  if len(lengths) and (needed := int((starts + lengths.astype(np.int64) * itemsize).max())) > size:
    words = f'{size} bytes, and its .idx tells of {needed}'
    raise InputError(f'{path}: damaged, cut short or of another .idx ({words}); fix it, or leave it out')


def _documents(lengths: np.ndarray, starts: np.ndarray, borders: np.ndarray) -> Iterator[Places]:
  for begin, end in itertools.pairwise(borders):
    yield list(zip(starts[begin:end].tolist(), lengths[begin:end].tolist(), strict=True))
