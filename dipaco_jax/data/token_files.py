"""Documents in files of token ids: nanoGPT's .bin, llm.c's with a header, Megatron's with an .idx.

Such files do not tell their tokenizer: it is the one of config.tokenizer.model_file. A document ends behind its
end-of-text token, or before a begin-of-text token, or where Megatron's index says. The ids stay as they are; around
them stand the tokens that stand around a text.
"""

import functools
import logging
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import compressed_files, equality, megatron_index, source, tokenizer_files
from dipaco_jax.data.tokenizer import Tokenizer
from dipaco_jax.storage import remote_files

HEADERS = {20240520: '<u2', 20240801: '<u4'}  # llm.c's magic numbers, for GPT-2 and Llama 3: how wide ids are
HEADER_BYTES = 1024  # 256 int32: magic, version, number of ids
CHUNK_IDS = 1 << 20  # read at one time; a longer text without an end in it is one text
PIECE_IDS = 4096  # of a text that has no documents: whole rows of most lengths


class Layout(NamedTuple):
  """The position of the ids in a file."""

  dtype: np.dtype
  start: int  # bytes
  ids: int  # how many


def documents(path: str, data: settings.Data, name: str) -> source.Documents:
  """Yields the documents of a file, numbered from 1; `name` is their domain."""
  tokenizer = _tokenizer(path, data)
  token_arrays = _of_index(path, tokenizer) if megatron_index.is_there(path) else _cut(path, tokenizer)
  for number, ids in enumerate(token_arrays, 1):
    yield number, functools.partial(source.already_read, ids, name)


def pieces(path: str, data: settings.Data, fraction: float = 0.0) -> Iterator[source.Placed]:
  """Yields the pieces of one long text, each with the share of the text behind its middle.

  The piece in which the last `fraction` of the text begins is cut there.
  """
  tokenizer = _tokenizer(path, data)
  count = _layout(path, tokenizer).ids
  border, begin = round(count * (1 - fraction)), 0
  for chunk in _chunks(path, tokenizer):
    for ids in np.split(chunk, range(PIECE_IDS, len(chunk), PIECE_IDS)):
      parts, at = np.split(ids, [border - begin] if 0 < border - begin < len(ids) else []), 0
      for part in parts:
        cut = equality.Cut(ids, at) if len(parts) > 1 else None
        yield source.Placed(part, 1 - (begin + len(part) / 2) / count, cut)
        begin += len(part)
        at += len(part)


def decode(ids: np.ndarray, data: settings.Data) -> str:
  """Returns the text of a document, by the tokenizer of all files of tokens."""
  return _tokenizer('data', data).decode(ids)


def is_one_text(path: str, data: settings.Data) -> bool:
  """Returns whether no document ends in the first CHUNK_IDS of a file, but for the last one."""
  modified_ns = 0 if remote_files.is_remote(path) else os.stat(path).st_mtime_ns
  return _has_no_end(path, modified_ns, _tokenizer_file(path, data))


def say_how_it_is_taken(path: str, data: settings.Data) -> None:
  """Warns of a file that is taken for one text, as its ends of documents may be unknown, and of gaps in an index."""
  if megatron_index.is_there(path):
    for sentence in megatron_index.describe_gaps(path):
      logging.warning('%s', sentence)
  if is_one_text(path, data):
    tokenizer = _tokenizer(path, data)
    message = '%s: no document ends (by token %d) in its first %d tokens: it is read as one text in pieces of %d tokens'
    logging.warning(message, path, tokenizer.eos_id, min(CHUNK_IDS, _layout(path, tokenizer).ids), PIECE_IDS)


@functools.lru_cache(100_000)
def _has_no_end(path: str, _: int, tokenizer_file: str) -> bool:
  if megatron_index.is_there(path):
    return False
  tokenizer = _open_tokenizer(tokenizer_file)
  chunk = next(_chunks(path, tokenizer), np.zeros(0, np.int32))
  return len(chunk) > 1 and not len(_ends(chunk[1:-1], tokenizer))


def _tokenizer_file(path: str, data: settings.Data) -> str:
  if not (isinstance(data, source.TextSettings) and data.tokenizer_file):
    raise InputError(f'{path}: a file of tokens: name the tokenizer that made it in config.tokenizer.model_file')
  return data.tokenizer_file


def _tokenizer(path: str, data: settings.Data) -> Tokenizer:
  return _open_tokenizer(_tokenizer_file(path, data))


_open_tokenizer = functools.lru_cache(8)(tokenizer_files.open_file)


def _layout(path: str, tokenizer: Tokenizer) -> Layout:
  """Finds the ids of a file without an index: behind llm.c's header, or from its first byte. Raises InputError.

  Ids without a header have 2 bytes each, or 4 where the vocabulary takes them or every second 2 bytes are 0.
  """
  with compressed_files.reading(path), remote_files.open_file(path) as f:
    beginning = f.read(CHUNK_IDS)
    size = f.seek(0, os.SEEK_END)
  magic, _, count = (int.from_bytes(beginning[at : at + 4], 'little') for at in (0, 4, 8))
  if magic in HEADERS and size >= HEADER_BYTES:
    dtype = np.dtype(HEADERS[magic])
    if size != HEADER_BYTES + count * dtype.itemsize:
      raise InputError(
        f'{path}: damaged or cut short ({count} tokens by its header, {size - HEADER_BYTES} bytes of them); '
        'fix it, or leave it out'
      )
    return Layout(dtype, HEADER_BYTES, count)
  halves = np.frombuffer(beginning[: len(beginning) // 4 * 4], '<u2')
  is_wide = tokenizer.vocab_size > 1 << 16 or (len(halves) > 2 and not halves[1::2].any())
  dtype = np.dtype('<u4' if is_wide else '<u2')
  if size % dtype.itemsize:
    problem = f'{size} bytes are no whole number of tokens of {dtype.itemsize} bytes'
    raise InputError(f'{path}: damaged or cut short ({problem}); fix it, or leave it out')
  return Layout(dtype, 0, size // dtype.itemsize)


def _chunks(path: str, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
  """Yields the ids of a file without an index, int32, CHUNK_IDS at a time."""
  dtype, start, count = _layout(path, tokenizer)
  with compressed_files.reading(path), remote_files.open_file(path) as f:
    f.seek(start)
    for begin in range(0, count, CHUNK_IDS):
      content = f.read(min(CHUNK_IDS, count - begin) * dtype.itemsize)
      yield _checked(np.frombuffer(content, dtype), begin, path, tokenizer)


def _checked(ids: np.ndarray, begin: int, path: str, tokenizer: Tokenizer) -> np.ndarray:
  """Returns ids as int32, the first of which is number `begin`. Raises InputError for one that is no token."""
  outside = (ids < 0) | (ids >= tokenizer.vocab_size)
  if outside.any():
    at = int(outside.argmax())
    problem = f'token {begin + at} is {ids[at]}, and the vocabulary of config.tokenizer.model_file has'
    raise InputError(
      f'{path}: {problem} {tokenizer.vocab_size}: name the tokenizer that made this file, or leave it out'
    )
  return ids.astype(np.int32)


def _ends(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
  """Returns the places at which documents end: behind an end-of-text, before a begin-of-text token."""
  begin, end = tokenizer.special_ids.get('bos', tokenizer.eos_id), tokenizer.eos_id
  ends = np.flatnonzero(ids == end) + 1
  return ends if begin == end else np.union1d(ends, np.flatnonzero(ids == begin))


def _cut(path: str, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
  """Yields the documents of a file without an index; what follows the last end stays without one."""
  rest = np.zeros(0, np.int32)
  for chunk in _chunks(path, tokenizer):
    *complete, rest = np.split(ids := np.concatenate([rest, chunk]), _ends(ids, tokenizer))
    yield from (_as_text(document, tokenizer) for document in complete if _has_text(document, tokenizer))
  if _has_text(rest, tokenizer):
    yield _as_text(rest, tokenizer)[:-1]


def _of_index(path: str, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
  """Yields the documents of a file that Megatron's index tells."""
  dtype, spans = megatron_index.read(path)
  with compressed_files.reading(path), remote_files.open_file(path) as f:
    for places in spans:
      parts = []
      for start, count in places:
        f.seek(start)
        ids = np.frombuffer(f.read(count * dtype.itemsize), dtype)
        parts.append(_checked(ids, start // dtype.itemsize, path, tokenizer))
      document = np.concatenate([np.zeros(0, np.int32), *parts])
      if _has_text(document, tokenizer):
        yield _as_text(document, tokenizer)


def _has_text(document: np.ndarray, tokenizer: Tokenizer) -> bool:
  special = (tokenizer.eos_id, tokenizer.special_ids.get('bos'))
  return len(document) > 2 or any(token not in special for token in document)


def _as_text(document: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
  """Returns a document with the tokens around it that the tokenizer puts around a text."""
  is_begun = document[0] in (tokenizer.bos_id, tokenizer.special_ids.get('bos'))
  before = [tokenizer.bos_id] * (tokenizer.bos_id >= 0 and not is_begun)
  after = [tokenizer.eos_id] * bool(document[-1] != tokenizer.eos_id)
  return np.concatenate([before, document, after]).astype(np.int32)
