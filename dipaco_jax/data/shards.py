"""Shards: the sequences of each path, packed into rows and read as a stream of batches [2.4].

Sequences are packed into rows of `seq_len` with segment ids; attention does not cross a segment. A shard is read as an
endless shuffled stream in which a step's batch depends on nothing but (seed, path, step), so that going on needs only
the step, which is the path's own (see `spmd.Job.own_step`). Nothing here imports JAX.
"""

import collections
import concurrent.futures
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from dipaco_jax.core.errors import InputError
from dipaco_jax.data.sequences import Sequences
from dipaco_jax.storage.records import (
  READ_RECORDS,
  read_across,
  read_meta,
  read_records,
  record_reader,
  record_writer,
  write_meta,
)

BLOCK = 4096  # positions of a stream shuffled at one time
BLOCK_SEQUENCES = 1 << 18  # that are dealt out at one time
OPEN_ROWS = 64  # rows being packed
MIN_DOCUMENTS = 8  # a path with so many has one for its hold-out, whatever the draw
LEAST_PIECES = 16  # of longer texts, that are held back at least, up to MOST_PIECES
MOST_PIECES = 0.1  # of them

S = TypeVar('S')
T = TypeVar('T')


class Dealt(NamedTuple):
  """Which sequences are whose, [N]; 2 bytes of each beside `assignment`, which is no copy."""

  seed: int

  assignment: np.ndarray  # [N, top_n] paths, the best first; -1: it is not used
  held: np.ndarray  # bool: whether its document is held back
  domains: np.ndarray  # uint8


def deal(
  sequences: Sequences, assignment: np.ndarray, num_paths: int, seed: int, holdout_fraction: float, after: float = 0.0
) -> Dealt:
  """Draws the documents that are held back.

  A document is held back whole, from all paths [2.7]: its sequences are the hold-out of the path they are routed to
  first, and every other sequence trains all its paths. Pieces of longer texts are held back by their own draws.

  Args:
    assignment: int [N, top_n] paths of each sequence, the best first; -1: it is not used.
    seed: of the draw of held-back documents.
    holdout_fraction: of the documents.
    after: that is held back of longer texts already, see `Drawn`.
  """
  (documents, domains), draws = sequences.columns(), sequences.draws()
  pieces = None if draws is None else drawn_pieces(documents, draws, holdout_fraction, after)
  held = held_out(documents, assignment[:, 0], num_paths, seed, holdout_fraction, pieces)
  return Dealt(seed, assignment, held, domains)


class Drawn(NamedTuple):
  """Pieces of longer texts whose draws lie in a span: texts' ends, or whole texts, next to what is held back already.

  Neighbours are on one side, where a hash of each would leave every held-back piece between two that are trained on.
  """

  draws: np.ndarray  # [N]; -1 for documents that are drawn by a hash
  begin: float
  end: float

  def of(self, block: slice) -> np.ndarray:
    """Those of a block, bool."""
    return (self.draws[block] >= self.begin) & (self.draws[block] < self.end)


def drawn_pieces(documents: np.ndarray, draws: np.ndarray, fraction: float, after: float = 0.0) -> Drawn:
  """So many of the pieces, but at least LEAST_PIECES, if they are not more than MOST_PIECES of all."""
  if not fraction:
    return Drawn(draws, after, after)
  near = [
    block.start + np.flatnonzero((draws[block] >= after) & (draws[block] < after + MOST_PIECES))
    for block in blocks(len(draws))
  ]
  indices = np.concatenate(near) if near else np.zeros(0, np.int64)
  indices = indices[np.argsort(draws[indices], kind='stable')]
  _, first = np.unique(documents[indices], return_index=True)  # each document where it comes first
  needed = np.sort(draws[indices[first]])[:LEAST_PIECES]
  least = np.nextafter(needed[-1], np.float32(2)) if len(needed) else after
  return Drawn(draws, after, float(max(after + fraction, least)))


def write_shard(sequences: Sequences, dealt: Dealt, path: int, out_dir: str, seq_len: int) -> dict[str, Any]:
  """Writes a path's `train.array_record`, `holdout.array_record` and `meta.json`; returns what is in the last."""
  train = write_rows(f'{out_dir}/train.array_record', sequences, _mine(dealt, path, False), seq_len)
  held = spread_out(sequences, _mine(dealt, path, True), dealt.seed)
  holdout = write_rows(f'{out_dir}/holdout.array_record', sequences, held, seq_len, in_order=True)
  domains = np.zeros(len(sequences.domains), np.int64)
  for block in blocks(len(dealt.held)):
    domains += np.bincount(dealt.domains[block][dealt.assignment[block, 0] == path], minlength=len(domains))
  return write_meta(out_dir, {'train': train, 'holdout': holdout, 'domains': domains.tolist()})


def merge(folder: str, num_paths: int, seq_len: int) -> dict[str, Any]:
  """What `meta.json` is to hold of shards that are in `folder`/<path>.

  Per path `shard_tokens`, `shard_sequences`, `shard_rows`, `holdout_rows`, `sequences_by_path_and_domain`; and
  `padding_fraction` of the training rows.
  """
  metas = [read_meta(os.path.join(folder, str(path))) for path in range(num_paths)]
  tokens, rows = ([meta['train'][name] for meta in metas] for name in ('tokens', 'rows'))
  return {
    'shard_tokens': tokens,
    'shard_sequences': [meta['train']['sequences'] for meta in metas],
    'shard_rows': rows,
    'holdout_rows': [meta['holdout']['rows'] for meta in metas],
    'sequences_by_path_and_domain': [meta['domains'] for meta in metas],
    'padding_fraction': 1 - sum(tokens) / max(1, sum(rows) * seq_len),
    'seq_len': seq_len,
  }


def blocks(count: int) -> Iterator[slice]:
  """Of all sequences: what is computed of them is in memory a block at a time."""
  return (slice(start, start + BLOCK_SEQUENCES) for start in range(0, count, BLOCK_SEQUENCES))


def drawn(documents: np.ndarray, seed: int, fraction: float, purpose: str, pieces: Drawn | None = None) -> np.ndarray:
  """bool [N]: whether a hash of (seed, purpose, document) falls below `fraction`; of longer texts, those `pieces`."""
  key = int.from_bytes(purpose.encode()[:7], 'big')
  found = np.empty(len(documents), bool)
  for block in blocks(len(documents)):
    found[block] = _hash(seed, key, documents[block]) < np.uint64(fraction * 2**64)
    if pieces is not None:
      found[block] = np.where(pieces.draws[block] < 0, found[block], pieces.of(block))
  return found


def held_out(
  documents: np.ndarray, first: np.ndarray, num_paths: int, seed: int, fraction: float, pieces: Drawn | None = None
) -> np.ndarray:
  """bool [N]: whether a sequence's document is held back.

  A document is drawn by a hash of (seed, its number), a piece of a longer text by its own draw. A path of MIN_DOCUMENTS
  or more that no draw hit gets its lowest.

  Args:
    documents, first: [N] document and first path of each sequence; -1: it is not used, nor held back.
    pieces: of longer texts, that are held back.
  """
  held, hit = np.empty(len(documents), bool), np.zeros(num_paths, bool)
  for block in blocks(len(documents)):
    held[block] = _below(seed, documents[block], fraction, pieces, block) & (first[block] >= 0)
    hit[first[block][held[block]]] = True
  chosen: list[int] = []  # documents
  together: list[float] = []  # draws of those that are pieces

  def lowest(path, mine: np.ndarray) -> int:
    draws = np.full(len(mine), -1.0)
    if pieces is not None:
      draws = np.concatenate([pieces.draws[block][first[block] == path] for block in blocks(len(documents))])
    at = int(np.where(draws < 0, _hash(seed, mine) / 2.0**64, draws).argmin())
    together.extend(draws[at : at + 1][draws[at : at + 1] >= 0])
    return int(mine[at])

  for path in np.flatnonzero(~hit) if fraction else ():
    mine = np.concatenate([documents[block][first[block] == path] for block in blocks(len(documents))])
    if not np.isin(mine, chosen).any() and len(np.unique(mine)) >= MIN_DOCUMENTS:
      chosen.append(lowest(path, mine))
  for block in blocks(len(documents)) if chosen else ():
    held[block] |= np.isin(documents[block], chosen) & (first[block] >= 0)
    if pieces is not None:  # of a text that is held back whole, all pieces
      held[block] |= np.isin(pieces.draws[block], together) & (first[block] >= 0)
  return held


def _below(seed: int, documents: np.ndarray, fraction: float, pieces: Drawn | None, block: slice) -> np.ndarray:
  by_hash = _hash(seed, documents) < np.uint64(fraction * 2**64)
  return by_hash if pieces is None else np.where(pieces.draws[block] < 0, by_hash, pieces.of(block))


def _mine(dealt: Dealt, path: int, held: bool) -> Iterator[np.ndarray]:
  """The sequences of a path's hold-out, or of its training rows, in their order, some at a time."""
  columns = slice(0, 1 if held else None)  # a hold-out is the first path's
  for block in blocks(len(dealt.held)):
    mine = (dealt.assignment[block, columns] == path).any(1) & (dealt.held[block] == held)
    indices = block.start + np.flatnonzero(mine)
    yield from (indices[i : i + READ_RECORDS] for i in range(0, len(indices), READ_RECORDS))


def spread_out(sequences: Sequences, chunks: Iterable[np.ndarray], seed: int) -> Iterator[np.ndarray]:
  """The sequences at the indices, one of every document before any has its second, documents in a drawn order.

  Early stopping looks at the first rows of a hold-out, and in the order of the text these would be of few documents.
  """
  both = [(indices, np.array([x.document for x in sequences.read(indices)], np.int64)) for indices in chunks]
  if not both:
    return
  indices, documents = (np.concatenate(arrays) for arrays in zip(*both, strict=True))
  order = np.lexsort((_hash(seed, 1, indices), documents))  # those of a document in a drawn order
  starts = np.flatnonzero(np.diff(documents[order], prepend=-1))
  rank = np.empty(len(order), np.int64)
  rank[order] = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
  order = np.lexsort((_hash(seed, 2, documents), rank))
  yield from (indices[order[i : i + READ_RECORDS]] for i in range(0, len(order), READ_RECORDS))


def write_rows(
  file: str, sequences: Sequences, chunks: Iterable[np.ndarray], seq_len: int, in_order: bool = False
) -> dict[str, int]:
  """Packs the sequences at the indices; returns the numbers of sequences, of tokens and of rows."""
  counts = collections.Counter(sequences=0, tokens=0, rows=0)

  def tokens():
    for indices in chunks:
      counts.update(sequences=len(indices))
      yield from (sequence.tokens for sequence in sequences.read(indices))

  with record_writer(file) as writer:
    for row in pack_in_order(tokens(), seq_len) if in_order else pack(tokens(), seq_len):
      writer.write(row.tobytes())
      counts.update(tokens=int(np.count_nonzero(row[1])), rows=1)
  return counts


def pack(sequences: Iterable[np.ndarray], seq_len: int) -> Iterator[np.ndarray]:
  """Rows [2, seq_len] of tokens and of segment ids (1, 2...; 0 is padding).

  A sequence goes into the first of at most OPEN_ROWS open rows that has room; none crosses rows.
  """
  open_rows: list[tuple[list[np.ndarray], int]] = []
  for tokens in sequences:
    fitting = (i for i, (_, used) in enumerate(open_rows) if used + len(tokens) <= seq_len)
    row, used = open_rows.pop(i) if (i := next(fitting, None)) is not None else ([], 0)
    row.append(tokens)
    if used + len(tokens) == seq_len:
      yield _row(row, seq_len)
      continue
    open_rows.append((row, used + len(tokens)))
    if len(open_rows) > OPEN_ROWS:
      yield _row(open_rows.pop(max(range(len(open_rows)), key=lambda i: open_rows[i][1]))[0], seq_len)
  for row, _ in open_rows:
    yield _row(row, seq_len)


def pack_in_order(sequences: Iterable[np.ndarray], seq_len: int) -> Iterator[np.ndarray]:
  """As `pack`, but rows come in the order of their first sequences, and may have more padding."""
  waiting: collections.deque[tuple[list[np.ndarray], int]] = collections.deque()
  for tokens in sequences:
    fitting = (i for i, (_, used) in enumerate(waiting) if used + len(tokens) <= seq_len)
    if (i := next(fitting, None)) is None:
      waiting.append(([tokens], len(tokens)))
    else:
      waiting[i] = [*waiting[i][0], tokens], waiting[i][1] + len(tokens)
    if len(waiting) > OPEN_ROWS:
      yield _row(waiting.popleft()[0], seq_len)
  for row, _ in waiting:
    yield _row(row, seq_len)


def _row(sequences: list[np.ndarray], seq_len: int) -> np.ndarray:
  row = np.zeros((2, seq_len), sequences[0].dtype)
  end = 0
  for segment, tokens in enumerate(sequences, 1):
    begin, end = end, end + len(tokens)
    row[0, begin:end], row[1, begin:end] = tokens, segment
  return row


def pad(sequences: Iterable[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
  """Tokens and segment ids, int32 [B, length] each, with one sequence in a row."""
  rows = np.stack([_row([np.asarray(tokens[:length], np.int32)], length) for tokens in sequences])
  return rows[:, 0], rows[:, 1]


# Reading.


@functools.lru_cache(256)  # bounds the open files, however many the paths
def _cached_reader(file: str, modified_ns: int) -> ArrayRecordReader:
  return record_reader(file)


def cached_reader(file: str) -> ArrayRecordReader:
  """A reader that stays open for a while. Raises seals.Damaged."""
  modified_ns = os.stat(file).st_mtime_ns if os.path.exists(file) else 0
  return _cached_reader(os.path.abspath(file), modified_ns)


class Shard:
  """An endless stream of batches of one path's rows, shuffled anew in every epoch."""

  def __init__(self, files: Sequence[str], batch_size: int, seq_len: int, seed: int, path: int):
    """Of one file, or of several, one after the other.

    Raises seals.Damaged; InputError where there are no rows.
    """
    self._files, self._batch_size, self._seq_len, self._seed, self._path = files, batch_size, seq_len, seed, path
    self._order = functools.lru_cache(2)(self._shuffle)
    self._counts = [cached_reader(file).num_records() for file in files]
    self.num_rows: int = sum(self._counts)
    if not self.num_rows:
      raise InputError(f'path {path} has no text ({files[0]}): use more text, or fewer paths in config.grid')

  def _shuffle(self, block: int) -> np.ndarray:
    """The order is worked out a block at a time, which costs little more than one batch's."""
    return shuffled(np.arange(block * BLOCK, (block + 1) * BLOCK), self.num_rows, self._seed, self._path)

  def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segment ids of the step's rows, int32 [B, L] each, in the same time whatever the step."""
    block, begin = divmod(step * self._batch_size, BLOCK)
    rows, end = self._order(block), begin + self._batch_size
    while len(rows) < end:
      block += 1
      rows = np.concatenate([rows, self._order(block)])
    return _unpack(read_across(self._counts, rows[begin:end], self._read), self._seq_len)

  def _read(self, file: int, rows: list[int]) -> list[bytes]:
    return read_records(self._files[file], cached_reader(self._files[file]), rows)


def read_rows(file: str, start: int, stop: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
  """Tokens and segment ids of the rows from `start` to before `stop`, or to the last, int32 [rows, L] each."""
  reader = cached_reader(file)
  stop = min(stop, reader.num_records())
  return _unpack(read_records(file, reader, start, stop) if start < stop else [], seq_len)


def _unpack(records: list[bytes], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
  itemsize = len(records[0]) // (2 * seq_len) if records else 2
  rows = np.frombuffer(b''.join(records), f'<u{itemsize}').reshape(-1, 2, seq_len)
  return rows[:, 0].astype(np.int32), rows[:, 1].astype(np.int32)


def shuffled(positions: np.ndarray, num_rows: int, seed: int, path: int) -> np.ndarray:
  """The row at each position of an endless stream whose every epoch of `num_rows` positions is a permutation.

  A Feistel cipher keyed by (seed, path, epoch) over the next power of two, walked until it falls inside: nothing is
  stored, whatever the number of rows. (Grain's own takes 10 to 300 ms for a batch where rows are few.)
  """
  epoch, row = divmod(positions.astype(np.uint64), np.uint64(num_rows))
  keys = [_hash(seed, path, epoch, turn) for turn in range(8)]
  high, low = (num_rows - 1).bit_length() // 2, ((num_rows - 1).bit_length() + 1) // 2
  high_mask, low_mask, shift = np.uint64((1 << high) - 1), np.uint64((1 << low) - 1), np.uint64(low)
  outside = np.arange(len(row))
  while len(outside):
    left, right = row[outside] >> shift, row[outside] & low_mask
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
      left = left ^ (_mix(even[outside] ^ right) & high_mask)
      right = right ^ (_mix(odd[outside] ^ left) & low_mask)
    row[outside] = left << shift | right
    outside = outside[row[outside] >= num_rows]
  return row.astype(np.int64)


def _hash(*numbers: int | np.ndarray) -> np.ndarray:
  """uint64 of any integers, elementwise."""
  x: np.ndarray = np.zeros(1, np.uint64)
  for number in numbers:
    x = _mix((x ^ np.asarray(number).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15))
  return x


def _mix(x: np.ndarray) -> np.ndarray:
  """The finalizer of SplitMix64."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def prefetch(load: Callable[[S], T], items: Iterable[S], depth: int = 2, threads: int = 1) -> Iterator[T]:
  """`load(item)` for each item, in order, up to `depth` of them ahead in threads that end with the iterator."""
  todo = iter(items)
  pool = concurrent.futures.ThreadPoolExecutor(threads, 'prefetch')
  try:
    waiting = collections.deque(pool.submit(load, item) for item in itertools.islice(todo, depth))
    while waiting:
      value = waiting.popleft().result()
      waiting.extend(pool.submit(load, item) for item in itertools.islice(todo, 1))
      yield value
  finally:
    pool.shutdown(cancel_futures=True)
