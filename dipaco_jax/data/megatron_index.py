"""Megatron's index (.idx) of a file of tokens (.bin): the places of sequences, and which of them form a document.

The borders of documents begin with 0 and end with the number of sequences. Some writers leave out the last border, or
write none: `all_borders` completes them, so that every sequence belongs to a document.
"""

import itertools
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import compressed_files
from dipaco_jax.storage import remote_files

MAGIC, VERSION = b'MMIDIDX\0\0', 1
BEFORE = b'TNTIDX\0\0'  # the magic of the format that Megatron had first
HEADER = np.dtype([('magic', 'V9'), ('version', '<u8'), ('kind', 'u1'), ('sequences', '<u8'), ('borders', '<u8')])
KINDS = {1: 'u1', 2: 'i1', 3: '<i2', 4: '<i4', 5: '<i8', 8: '<u2'}  # of a token; 6 and 7 are no integers
ANEW = "make it again with Megatron's preprocess_data"

Places = list[tuple[int, int]]  # (first byte, number of tokens) of each sequence of a document


def of(path: str) -> str:
  """Returns the path of a .bin file's index, which may not exist."""
  return os.path.splitext(path)[0] + '.idx'


def is_there(path: str) -> bool:
  """Returns whether a .bin file has an index next to it."""
  return bool(remote_files.find(of(path))) if remote_files.is_remote(path) else os.path.isfile(of(path))


class Index(NamedTuple):
  """The content of an index."""

  dtype: np.dtype  # of a token
  lengths: np.ndarray  # int32 [sequences], tokens
  starts: np.ndarray  # int64 [sequences], bytes
  borders: np.ndarray  # int64, as written; see `all_borders`


def read(path: str) -> tuple[np.dtype, Iterator[Places]]:
  """Reads the index of a .bin file: the type of a token, and the documents. Raises InputError if it is damaged."""
  index = read_index(path)
  return index.dtype, _documents(index)


def read_index(path: str) -> Index:
  """Reads and checks the index of a .bin file. Raises InputError if it is damaged."""
  index, content = of(path), _content(of(path))
  if content[: len(BEFORE)].tobytes() == BEFORE:
    raise InputError(f"{index}: it is in Megatron's first format, which is no longer supported: {ANEW}")
  if len(content) < HEADER.itemsize or content[: len(MAGIC)].tobytes() != MAGIC:
    raise InputError(f'{index}: not a Megatron index, which begins with MMIDIDX: {ANEW}, or leave out {path}')
  header = content[: HEADER.itemsize].view(HEADER)[0]
  if (version := int(header['version'])) != VERSION or (kind := int(header['kind'])) not in KINDS:
    problem = f'version {version}' if version != VERSION else f'tokens of type {kind}, not an integer type'
    raise InputError(f'{index}: it has {problem}, which cannot be read: {ANEW}')
  dtype = np.dtype(KINDS[kind])
  count = int(header['sequences'])
  borders = int(header['borders'])
  size = HEADER.itemsize + (4 + 8) * count + 8 * borders
  if size != len(content):  # longer with modes, where there are images too
    problem = f'{len(content)} bytes, not the {size} of {count} sequences of text and {borders} borders of documents'
    raise InputError(f'{index}: damaged, cut short or not of text alone ({problem}): {ANEW}')
  lengths = np.frombuffer(content, '<i4', count, HEADER.itemsize)
  starts = np.frombuffer(content, '<i8', count, HEADER.itemsize + 4 * count)
  limits = np.frombuffer(content, '<i8', borders, HEADER.itemsize + (4 + 8) * count)
  parsed_index = Index(dtype, lengths, starts, limits)
  _check(path, parsed_index)
  return parsed_index


def all_borders(index: Index) -> np.ndarray:
  """Returns the borders of documents from 0 to the number of sequences.

  Sequences before the first border, or behind the last, are one more document. Without any document each sequence is
  one, as Megatron itself reads them.
  """
  borders, count = index.borders, len(index.lengths)
  if len(borders) < 2:
    return np.arange(count + 1)
  return np.concatenate([[0] * bool(borders[0] > 0), borders, [count] * bool(borders[-1] < count)]).astype(np.int64)


def describe_gaps(path: str) -> list[str]:
  """Returns sentences that describe what the index of a .bin file leaves out; [] if it is complete."""
  index, sentences = read_index(path), []
  if num_added := len(all_borders(index)) - len(index.borders):
    documents = 'document' if num_added == 1 else 'documents'
    sentences.append(
      f'{of(path)}: {len(index.lengths):,} sequences, but its borders of documents do not reach from 0 to the last '
      f'sequence; the sequences outside them are read as {num_added:,} more {documents}'
    )
  size, used = _size(path), int(index.lengths.sum(dtype=np.int64)) * index.dtype.itemsize
  if size > used:
    sentences.append(
      f'{path}: {used:,} of its {size:,} bytes are in the sequences of its .idx; the others are not read'
    )
  return sentences


def _content(index: str) -> np.ndarray:
  """Returns a file's bytes: those of a disk stay there until they are needed."""
  with compressed_files.reading(index):
    if remote_files.is_remote(index) or not os.path.getsize(index):
      return np.frombuffer(remote_files.read(index), np.uint8)
    return np.memmap(index, np.uint8, 'r')


def _size(path: str) -> int:
  with compressed_files.reading(path), remote_files.open_file(path) as f:
    return f.seek(0, os.SEEK_END)


def _check(path: str, index: Index) -> None:
  """Raises InputError if an index points out of itself or of its .bin file."""
  _, lengths, starts, borders = index
  is_inside = not len(lengths) or (lengths.min() >= 0 and starts.min() >= 0)
  if not is_inside or np.any(np.diff(borders) < 0) or np.any((borders < 0) | (borders > len(lengths))):
    raise InputError(f'{of(path)}: damaged (its places are not in order): {ANEW}')
  if not len(lengths):
    return
  size = _size(path)
  ends = np.minimum(starts, size + 1) + lengths.astype(np.int64) * index.dtype.itemsize  # without overflow
  if (needed := int(ends.max())) > size:
    problem = f'{size} bytes, but its .idx describes {needed} or more'
    raise InputError(f'{path}: damaged, cut short or of another .idx ({problem}); fix it, or leave it out')


def _documents(index: Index) -> Iterator[Places]:
  for begin, end in itertools.pairwise(all_borders(index)):
    yield list(zip(index.starts[begin:end].tolist(), index.lengths[begin:end].tolist(), strict=True))
