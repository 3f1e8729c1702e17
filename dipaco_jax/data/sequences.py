"""Tokenized sequences before routing, in ArrayRecord, in parts that are made and kept one by one.

A document is cut into sequences of at most `seq_len` tokens; a sequence is what is routed, by its own first tokens
[2.4]. A record is one sequence with the number of its document, so that hold-outs are drawn by document, and the index
of its domain. Pieces of longer texts have draws beside that, by which neighbours are held back together. Nothing here
imports JAX.
"""

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import os
import pathlib
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import source
from dipaco_jax.storage import seals
from dipaco_jax.storage.records import read_across, read_meta, read_records, record_reader, record_writer, write_meta

BATCH_CHARS = 250_000  # of text tokenized by a thread at one time
MAX_DOMAINS = 256  # further ones count as 'other'
HEADER = struct.Struct('<IHH')  # document, domain, bytes of a token

Progress = Callable[[int, int | None], None]  # done, of how many where that is known


class Sequence(NamedTuple):
  """Tokens [at most seq_len], the number of their document, the index of its domain."""

  tokens: np.ndarray
  document: int
  domain: int


def write_part(
  make_documents: Callable[[str], Iterable],
  tokenizer,
  out_dir: str,
  *,
  seq_len: int,
  eval_len: int,
  prefix_tokens: int,
  pieces: int = 1,
  part: tuple[int, int] = (0, 1),
  progress: Progress = lambda done, total: None,
  threads: int = 0,
) -> dict[str, Any]:
  """Writes the sequences of a part of the text into a folder: both splits, and `meta.json`.

  `<split>.array_record` has them, documents in their order; `<split>.documents` and `<split>.domains` are arrays of
  what is in their headers, `<split>.draws` of documents' draws where any has one. A training document gives sequences
  of at most `seq_len` tokens, a validation document its first `eval_len`, or, where it is a piece of a longer text,
  some from all over it; those of `prefix_tokens` or fewer are dropped, as no loss would count them. Memory does not
  grow with the text.

  Args:
    make_documents: 'train' or 'validation' to the part's documents (id, text, domain, draw).
    tokenizer: has `encode_batch` and `vocab_size`.
    pieces: sequences that a piece of a longer text gives in validation.
    part: (k, n): its documents have the numbers k, k + n, k + 2n..., which no other part's have.
    progress: called after each document with the number done, of both splits, and None.
    threads: that tokenize; 0: one per core. The result is the same.

  Returns:
    What meta.json holds: counts by split, domain names, lengths.
  """
  dtype = np.dtype('<u2' if tokenizer.vocab_size <= 1 << 16 else '<u4')
  domains: dict[str, int] = {}
  counts: dict[str, collections.Counter[str]] = {}
  done = itertools.count(1)
  for split, length in (('train', seq_len), ('validation', eval_len)):
    count = counts.setdefault(split, no_counts())
    with _writer(os.path.join(out_dir, split)) as write:
      for number, (document, tokens) in enumerate(_tokenized(make_documents(split), tokenizer, threads)):
        found = list(_cut(tokens, length)) if split == 'train' or document.draw >= 0 else [tokens[:length]]
        kept = [sequence.astype(dtype) for sequence in found if len(sequence) > prefix_tokens]
        dropped = len(found) - len(kept)
        if split == 'validation' and document.draw >= 0:
          kept = _spread(kept, pieces, document.id)
        write(part[0] + part[1] * number, _index(domains, document.domain), document.draw, kept)
        count.update(documents=1, sequences=len(kept), tokens=sum(map(len, kept)), dropped=dropped)
        progress(next(done), None)
  sizes = {'seq_len': seq_len, 'eval_len': eval_len, 'prefix_tokens': prefix_tokens}
  return write_meta(out_dir, counts | {'domains': list(domains), 'vocab_size': tokenizer.vocab_size} | sizes)


def merge(folder: str, parts: int) -> dict[str, Any]:
  """What `meta.json` is to hold of parts that are in `folder`/<k>: counts, domain names, lengths.

  Raises:
    InputError: a part is missing, or no document of a split is long enough.
  """
  domains: dict[str, int] = {}
  train, validation = no_counts(), no_counts()
  for k in range(parts):
    meta = read_meta(os.path.join(folder, str(k)))
    train.update(meta['train'])
    validation.update(meta['validation'])
    for domain in meta['domains']:
      _index(domains, domain)
  for split, count in (('train', train), ('validation', validation)):
    if not count['sequences']:
      prefix = meta['prefix_tokens']
      fix = 'name longer ones in config.data.validation, or use more text' if split == 'validation' else 'use more text'
      raise InputError(f'no document of {split} is longer than config.routing.prefix_tokens={prefix} tokens: {fix}')
  return {
    'documents': train['documents'], 'sequences': train['sequences'], 'tokens': train['tokens'],
    'dropped_sequences': train['dropped'], 'validation_documents': validation['sequences'],
    'validation_tokens': validation['tokens'], 'vocab_size': meta['vocab_size'], 'domains': list(domains),
    'seq_len': meta['seq_len'], 'eval_len': meta['eval_len'], 'parts': parts,
  }  # fmt: skip


def no_counts() -> collections.Counter[str]:
  return collections.Counter(documents=0, sequences=0, tokens=0, dropped=0)


@contextlib.contextmanager
def _writer(stem: str) -> Iterator[Callable[[int, int, float, list[np.ndarray]], None]]:
  """Yields what writes (document, domain, draw, sequences)."""
  have_draws = False
  with (
    record_writer(f'{stem}.array_record') as records,
    open(f'{stem}.documents', 'wb') as documents,
    open(f'{stem}.domains', 'wb') as domains,
    open(f'{stem}.draws', 'wb') as draws,
  ):

    def write(document: int, domain: int, draw: float, sequences: list[np.ndarray]):
      nonlocal have_draws
      have_draws = have_draws or draw >= 0
      for tokens in sequences:
        records.write(HEADER.pack(document, domain, tokens.itemsize) + tokens.tobytes())
      documents.write(np.full(len(sequences), document, '<u4').tobytes())
      domains.write(bytes([domain]) * len(sequences))
      draws.write(np.full(len(sequences), draw, '<f4').tobytes())

    yield write
  if not have_draws:
    os.remove(f'{stem}.draws')


def _cut(tokens: np.ndarray, length: int) -> Iterator[np.ndarray]:
  return (tokens[begin : begin + length] for begin in range(0, len(tokens), length))


def _spread(sequences: list[np.ndarray], count: int, name: str) -> list[np.ndarray]:
  """So many of them, as far from each other as may be, from a place that follows from the name."""
  if count >= len(sequences):
    return sequences
  first = source.uniform(f'first of {name}')
  return [sequences[int((first + i) * len(sequences) / count)] for i in range(count)]


def _index(domains: dict[str, int], domain: str) -> int:
  """The domain's number; adds a new one while there is room."""
  if domain not in domains and len(domains) >= MAX_DOMAINS - 1:
    domain = 'other'
  return domains.setdefault(domain, len(domains))


def _tokenized(documents: Iterable, tokenizer, threads: int) -> Iterator[tuple[Any, np.ndarray]]:
  """(document without its text, tokens) of each. Threads suffice: SentencePiece releases Python's lock."""
  threads = threads or os.cpu_count() or 1
  waiting: collections.deque = collections.deque()
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    for batch in _batches(documents):
      future = pool.submit(tokenizer.encode_batch, [d.text for d in batch])
      waiting.append(([d._replace(text='') for d in batch], future))
      if len(waiting) > 2 * threads:
        of, future = waiting.popleft()
        yield from zip(of, future.result(), strict=True)
    for of, future in waiting:
      yield from zip(of, future.result(), strict=True)


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
  """Random access to all sequences of a split, those of one part after those of another; a grain data source."""

  def __init__(self, folder: str | os.PathLike, split: str, open_parts: int | None = None):
    """Files are opened when they are first read. Raises seals.Damaged.

    Args:
      folder: has `meta.json`, and a folder for each part.
      open_parts: how many parts stay open: a reader takes 20 bytes a sequence. None: all.
    """
    meta = read_meta(os.fspath(folder))
    self.domains: list[str] = meta['domains']
    self._stems = [os.path.join(folder, str(k), split) for k in range(meta['parts'])]
    parts = [read_meta(os.path.dirname(stem)) for stem in self._stems]
    self.counts: list[int] = [part[split]['sequences'] for part in parts]  # of sequences, by part
    numbers = {name: i for i, name in enumerate(self.domains)}  # each part has numbers of its own
    self._domains = [
      np.array([numbers[name if name in numbers else 'other'] for name in part['domains']], np.uint8) for part in parts
    ]
    self._reader = functools.lru_cache(open_parts)(lambda k: record_reader(f'{self._stems[k]}.array_record'))

  def __len__(self) -> int:
    return sum(self.counts)

  def __getitem__(self, index: int) -> Sequence:
    return self.read([range(len(self))[index]])[0]

  def read(self, indices: Iterable[int]) -> list[Sequence]:
    """Those at `indices`, in their order."""
    return read_across(self.counts, indices, self._read_part)

  def _read_part(self, k: int, numbers: list[int]) -> list[Sequence]:
    records = read_records(f'{self._stems[k]}.array_record', self._reader(k), numbers)
    return [_decode(record, self._domains[k]) for record in records]

  def columns(self) -> tuple[np.ndarray, np.ndarray]:
    """All sequences' documents, uint32 [N], and domains, uint8 [N]."""
    documents, domains = np.empty(len(self), np.uint32), np.empty(len(self), np.uint8)
    end = 0
    for stem, count, renumbered in zip(self._stems, self.counts, self._domains, strict=True):
      begin, end = end, end + count
      documents[begin:end] = _column(f'{stem}.documents', '<u4', count)
      domains[begin:end] = renumbered[_column(f'{stem}.domains', 'u1', count)]
    return documents, domains

  def draws(self) -> np.ndarray | None:
    """All sequences' documents' draws, float32 [N], -1 for those that have none; None where none has."""
    stems = [stem for stem, count in zip(self._stems, self.counts, strict=True) if count]
    if not any(seals.is_expected(pathlib.Path(f'{stem}.draws')) for stem in stems):
      return None
    parts = [
      _column(file, '<f4', count) if seals.is_expected(pathlib.Path(file)) else np.full(count, -1, '<f4')
      for file, count in zip([f'{stem}.draws' for stem in self._stems], self.counts, strict=True)
    ]
    return np.concatenate(parts)


def _column(file: str, dtype: str, count: int) -> np.ndarray:
  with seals.reading(pathlib.Path(file)):
    found = np.fromfile(file, dtype)
  if len(found) != count:
    raise seals.Damaged(file)
  return found


def _decode(record: bytes, domains: np.ndarray) -> Sequence:
  document, domain, itemsize = HEADER.unpack_from(record)
  return Sequence(np.frombuffer(record, f'<u{itemsize}', offset=HEADER.size), document, int(domains[domain]))
