"""Tokenized sequences before routing, in ArrayRecord.

A document is cut into sequences of at most `seq_len` tokens; a sequence is what is routed, by its own first tokens
[2.4]. A record is one sequence with the number of its document, so that hold-outs are drawn by document, and the index
of its domain. Nothing here imports JAX.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

BATCH_CHARS = 250_000  # of text tokenized by a thread at one time
READ_RECORDS = 2048  # read at one time
MAX_DOMAINS = 256  # further ones count as 'other'
HEADER = struct.Struct('<IHH')  # document, domain, bytes of a token

Progress = Callable[[int, int | None], None]  # done, of how many where that is known


class Sequence(NamedTuple):
  """Tokens [at most seq_len], the number of their document, the index of its domain."""

  tokens: np.ndarray
  document: int
  domain: int


@contextlib.contextmanager
def record_writer(file: str) -> Iterator[ArrayRecordWriter]:
  """Writes records in groups of one, uncompressed, which is the fastest to read at random; OSError if it cannot."""
  writer = ArrayRecordWriter(file, 'group_size:1,uncompressed')
  try:
    yield writer
    writer.close()
  except RuntimeError as e:
    raise OSError(f'{file}: {e}') from e


def record_reader(file: str) -> ArrayRecordReader:
  """Reads records at random; ValueError for a missing or damaged file."""
  try:
    reader = ArrayRecordReader(file, 'readahead_buffer_size:0,max_parallelism:0')
    if reader.ok():
      return reader
  except (RuntimeError, ValueError):
    pass
  fault = 'damaged' if os.path.exists(file) else 'missing'
  raise ValueError(f'{file} is {fault}: remove its folder, and its stage in stages/, to have it made again')


def write_meta(out_dir: str, meta: dict[str, Any]) -> dict[str, Any]:
  """Writes `meta.json` and returns what is in it."""
  with open(os.path.join(out_dir, 'meta.json'), 'w') as f:
    json.dump(meta, f, indent=1)
  return meta


def write_sequences(
  make_documents: Callable[[str], Iterable],
  tokenizer,
  out_dir: str,
  *,
  seq_len: int,
  eval_len: int,
  prefix_tokens: int,
  progress: Progress = lambda done, total: None,
  threads: int = 0,
) -> dict[str, Any]:
  """Writes `train.array_record`, `validation.array_record` and `meta.json` into a folder, documents in their order.

  A training document gives sequences of at most `seq_len` tokens, a validation document its first `eval_len`; those of
  `prefix_tokens` or fewer are dropped, as no loss would count them. Memory does not grow with the text.

  Args:
    make_documents: 'train' or 'validation' to documents (id, text, domain).
    tokenizer: has `encode_batch` and `vocab_size`.
    progress: called after each document with the number done, of both splits, and None.
    threads: that tokenize; 0: one per core. The result is the same.

  Returns:
    What meta.json holds: counts, domain names, lengths.

  Raises:
    ValueError: no document of a split is long enough.
  """
  dtype = np.dtype('<u2' if tokenizer.vocab_size <= 1 << 16 else '<u4')
  domains: dict[str, int] = {}
  counts: dict[str, collections.Counter[str]] = {}
  done = itertools.count(1)
  for split, length in (('train', seq_len), ('validation', eval_len)):
    count = counts.setdefault(split, collections.Counter())
    with record_writer(os.path.join(out_dir, f'{split}.array_record')) as writer:
      for number, (domain, tokens) in enumerate(_tokenized(make_documents(split), tokenizer, threads)):
        pieces = list(_cut(tokens, length)) if split == 'train' else [tokens[:length]]
        kept = [piece.astype(dtype) for piece in pieces if len(piece) > prefix_tokens]
        _write_document(writer, number, _index(domains, domain), kept)
        tokens_kept = sum(map(len, kept))
        count.update(documents=1, sequences=len(kept), tokens=tokens_kept, dropped=len(pieces) - len(kept))
        progress(next(done), None)
    if not count['sequences']:
      raise ValueError(f'no {split} text is longer than config.routing.prefix_tokens={prefix_tokens}: use more text')
  train, validation = counts['train'], counts['validation']
  meta = {
    'documents': train['documents'], 'sequences': train['sequences'], 'tokens': train['tokens'],
    'dropped_sequences': train['dropped'], 'validation_documents': validation['sequences'],
    'validation_tokens': validation['tokens'], 'vocab_size': tokenizer.vocab_size, 'domains': list(domains),
    'seq_len': seq_len, 'eval_len': eval_len,
  }  # fmt: skip
  return write_meta(out_dir, meta)


def _write_document(writer: ArrayRecordWriter, number: int, domain: int, sequences: list[np.ndarray]):
  for tokens in sequences:
    writer.write(HEADER.pack(number, domain, tokens.itemsize) + tokens.tobytes())


def _cut(tokens: np.ndarray, length: int) -> Iterator[np.ndarray]:
  return (tokens[begin : begin + length] for begin in range(0, len(tokens), length))


def _index(domains: dict[str, int], domain: str) -> int:
  """The domain's number; adds a new one while there is room."""
  if domain not in domains and len(domains) >= MAX_DOMAINS - 1:
    domain = 'other'
  return domains.setdefault(domain, len(domains))


def _tokenized(documents: Iterable, tokenizer, threads: int) -> Iterator[tuple[str, np.ndarray]]:
  """(domain, tokens) of each document. Threads suffice: SentencePiece releases Python's lock; nothing is orphaned."""
  threads = threads or os.cpu_count() or 1
  waiting: collections.deque = collections.deque()
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    for batch in _batches(documents):
      waiting.append(([d.domain for d in batch], pool.submit(tokenizer.encode_batch, [d.text for d in batch])))
      if len(waiting) > 2 * threads:
        names, future = waiting.popleft()
        yield from zip(names, future.result(), strict=True)
    for names, future in waiting:
      yield from zip(names, future.result(), strict=True)


def _batches(documents: Iterable) -> Iterator[list]:
  batch: list = []
  size = 0
  for document in documents:
    batch.append(document)
    size += len(document.text)
    if size >= BATCH_CHARS:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


class Sequences:
  """Random access to a file of sequences; a grain data source as it stands."""

  def __init__(self, file: str):
    """Raises ValueError for a missing or damaged file."""
    self._reader = record_reader(os.fspath(file))

  def __len__(self) -> int:
    return self._reader.num_records()

  def __getitem__(self, index: int) -> Sequence:
    return self.read([range(len(self))[index]])[0]

  def read(self, indices: Iterable[int]) -> list[Sequence]:
    """Those at `indices`, in their order."""
    return [_decode(record) for record in self._reader.read([int(i) for i in indices])]

  def columns(self) -> tuple[np.ndarray, np.ndarray]:
    """All sequences' documents and domains, int64 [N] each."""
    starts = range(0, len(self), READ_RECORDS)
    chunks = (self._reader.read(start, min(start + READ_RECORDS, len(self))) for start in starts)
    headers = (value for chunk in chunks for record in chunk for value in HEADER.unpack_from(record)[:2])
    both = np.fromiter(headers, np.int64, 2 * len(self)).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _decode(record: bytes) -> Sequence:
  document, domain, itemsize = HEADER.unpack_from(record)
  return Sequence(np.frombuffer(record, f'<u{itemsize}', offset=HEADER.size), document, domain)
