"""Tokenized sequences before routing, and shards of packed rows after it, in ArrayRecord.

A document is cut into sequences of at most `seq_len` tokens; a sequence is what is routed [2.4]. The sequences of one
path are its shard, packed into rows of `seq_len` with segment ids, and read as an endless shuffled stream in which a
step's batch depends on nothing but (seed, path, step). Nothing here imports JAX.
"""

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

BATCH_CHARS = 250_000  # of text tokenized by a thread at one time
READ_RECORDS = 2048  # read at one time
BLOCK = 4096  # positions of a stream shuffled at one time
OPEN_ROWS = 64  # rows being packed
MIN_DOCUMENTS = 8  # a path with so many has one for its hold-out, whatever the draw
MAX_DOMAINS = 256  # further ones count as 'other'
HEADER = struct.Struct('<IHH')  # document, domain, bytes of a token

T = TypeVar('T')
Progress = Callable[[int, int | None], None]  # done, of how many where that is known


class Sequence(NamedTuple):
  """Tokens [at most seq_len], the number of their document, the index of its domain."""

  tokens: np.ndarray
  document: int
  domain: int


# Files.


@contextlib.contextmanager
def _writer(file: str):
  """A writer of records of one each, uncompressed: the fastest to read at random."""
  writer = ArrayRecordWriter(file, 'group_size:1,uncompressed')
  try:
    yield writer
    writer.close()
  except RuntimeError as e:
    raise OSError(f'{file}: {e}') from e


def _open(file: str) -> ArrayRecordReader:
  try:
    reader = ArrayRecordReader(file, 'readahead_buffer_size:0,max_parallelism:0')
    if reader.ok():
      return reader
  except (RuntimeError, ValueError):
    pass
  raise ValueError(f'{file}: {"damaged" if os.path.exists(file) else "missing"}: have it made again')


@functools.lru_cache(256)  # bounds the open files, however many the paths
def _open_cached(file: str, modified_ns: int) -> ArrayRecordReader:
  return _open(file)


def _write_meta(out_dir: str, meta: dict[str, Any]) -> dict[str, Any]:
  with open(os.path.join(out_dir, 'meta.json'), 'w') as f:
    json.dump(meta, f, indent=1)
  return meta


# Tokenization.


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
    progress: called now and then with the number of documents done, and None.
    threads: that tokenize; 0: one per core. The result is the same.

  Returns:
    What meta.json holds: counts, domain names, lengths.
  """
  dtype = np.dtype('<u2' if tokenizer.vocab_size <= 1 << 16 else '<u4')
  counts: collections.Counter[tuple[str, str]] = collections.Counter()
  domains: dict[str, int] = {}
  done = itertools.count(1)
  for split, length in (('train', seq_len), ('validation', eval_len)):
    with _writer(os.path.join(out_dir, f'{split}.array_record')) as writer:
      for number, (domain, tokens) in enumerate(_tokenized(make_documents(split), tokenizer, threads)):
        if domain not in domains and len(domains) == MAX_DOMAINS:
          domain = 'other'
        index = domains.setdefault(domain, len(domains))
        for begin in range(0, len(tokens) if split == 'train' else 1, length):
          piece = tokens[begin : begin + length]
          kept = len(piece) > prefix_tokens
          if kept:
            writer.write(HEADER.pack(number, index, dtype.itemsize) + piece.astype(dtype).tobytes())
          counts[split, 'sequences' if kept else 'dropped'] += 1
          counts[split, 'tokens'] += kept * len(piece)
        counts[split, 'documents'] += 1
        progress(next(done), None)
  return _write_meta(
    out_dir,
    {
      'documents': counts['train', 'documents'],
      'sequences': counts['train', 'sequences'],
      'tokens': counts['train', 'tokens'],
      'dropped_sequences': counts['train', 'dropped'],
      'validation_documents': counts['validation', 'sequences'],
      'validation_tokens': counts['validation', 'tokens'],
      'vocab_size': tokenizer.vocab_size,
      'domains': list(domains),
      'seq_len': seq_len,
      'eval_len': eval_len,
    },
  )


def _tokenized(documents: Iterable, tokenizer, threads: int) -> Iterator[tuple[str, np.ndarray]]:
  """(domain, tokens) of each document. Threads suffice: SentencePiece releases Python's lock; nothing is orphaned."""
  threads = threads or len(os.sched_getaffinity(0))
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
    self._reader = _open(os.fspath(file))

  def __len__(self) -> int:
    return self._reader.num_records()

  def __getitem__(self, index: int) -> Sequence:
    return self.read([range(len(self))[index]])[0]

  def read(self, indices: Iterable[int]) -> list[Sequence]:
    """Those at `indices`, in their order."""
    return [_decode(record) for record in self._reader.read([int(i) for i in indices])]

  def columns(self) -> tuple[np.ndarray, np.ndarray]:
    """All sequences' documents and domains, int64 [N] each."""
    rows = (HEADER.unpack_from(record)[:2] for i in self._starts() for record in self._reader.read(i, self._stop(i)))
    both = np.fromiter(itertools.chain.from_iterable(rows), np.int64, 2 * len(self)).reshape(-1, 2)
    return both[:, 0], both[:, 1]

  def _starts(self) -> range:
    return range(0, len(self), READ_RECORDS)

  def _stop(self, start: int) -> int:
    return min(start + READ_RECORDS, len(self))


def _decode(record: bytes) -> Sequence:
  document, domain, itemsize = HEADER.unpack_from(record)
  return Sequence(np.frombuffer(record, f'<u{itemsize}', offset=HEADER.size), document, domain)


# Packing.


def write_shards(
  sequences: Sequences,
  assignment: np.ndarray,
  num_paths: int,
  out_dir: str,
  *,
  seq_len: int,
  seed: int,
  holdout_fraction: float,
  num_domains: int,
  progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
  """Writes `<path>/train.array_record` and `<path>/holdout.array_record` for every path, and `meta.json`.

  A document is held back whole, from all paths [2.7]: its sequences are the hold-out of the path they are routed to
  first, and every other sequence trains all its paths.

  Args:
    assignment: [N, top_n] paths of each sequence, the best first.
    seed: of the draw of held-back documents.
    holdout_fraction: of the documents.
    progress: called with the number of paths done, and of all.

  Returns:
    What meta.json holds: per path `shard_tokens`, `shard_sequences`, `shard_rows`, `holdout_rows`,
    `sequences_by_path_and_domain`; and `padding_fraction` of the training rows.
  """
  documents, domains = sequences.columns()
  held = held_out(documents, assignment[:, 0], num_paths, seed, holdout_fraction)
  train = _by_path(np.where(held[:, None], -1, assignment), num_paths)
  holdout = _by_path(np.where(held, assignment[:, 0], -1)[:, None], num_paths)
  table = np.zeros((num_paths, num_domains), np.int64)
  np.add.at(table, (assignment[:, 0], domains), 1)
  tokens, rows, holdout_rows = [], [], []
  for path in range(num_paths):
    folder = os.path.join(out_dir, str(path))
    os.makedirs(folder)
    num_tokens, num_rows = _write_rows(f'{folder}/train.array_record', sequences, train[path], seq_len)
    tokens.append(num_tokens)
    rows.append(num_rows)
    holdout_rows.append(_write_rows(f'{folder}/holdout.array_record', sequences, holdout[path], seq_len)[1])
    progress(path + 1, num_paths)
  return _write_meta(
    out_dir,
    {
      'shard_tokens': tokens,
      'shard_sequences': [len(indices) for indices in train],
      'shard_rows': rows,
      'holdout_rows': holdout_rows,
      'sequences_by_path_and_domain': table.tolist(),
      'padding_fraction': 1 - sum(tokens) / max(1, sum(rows) * seq_len),
      'seq_len': seq_len,
    },
  )


def held_out(documents: np.ndarray, first: np.ndarray, num_paths: int, seed: int, fraction: float) -> np.ndarray:
  """bool [N]: whether a sequence's document is held back.

  A document is drawn by a hash of (seed, its number). A path of MIN_DOCUMENTS or more that no draw hit gets its lowest.

  Args:
    documents, first: [N] document and first path of each sequence.
  """
  draw = _hash(seed, documents)
  held = draw < np.uint64(fraction * 2**64)
  chosen: list[int] = []
  for indices in _by_path(first[:, None], num_paths) if fraction else ():
    mine = documents[indices]
    if not held[indices].any() and not np.isin(mine, chosen).any() and len(np.unique(mine)) >= MIN_DOCUMENTS:
      chosen.append(int(mine[draw[indices].argmin()]))
  return held | np.isin(documents, chosen)


def _by_path(assignment: np.ndarray, num_paths: int) -> list[np.ndarray]:
  """Per path the sequences assigned to it, in their order."""
  order = np.argsort(assignment, axis=None, kind='stable')
  bounds = np.searchsorted(assignment.ravel()[order], np.arange(num_paths + 1))
  return [order[a:b] // assignment.shape[1] for a, b in itertools.pairwise(bounds)]


def _write_rows(file: str, sequences: Sequences, indices: np.ndarray, seq_len: int) -> tuple[int, int]:
  """Packs the sequences at `indices`; returns the numbers of tokens and of rows."""
  num_tokens = num_rows = 0
  with _writer(file) as writer:
    chunks = (sequences.read(indices[i : i + READ_RECORDS]) for i in range(0, len(indices), READ_RECORDS))
    for row in pack((sequence.tokens for chunk in chunks for sequence in chunk), seq_len):
      writer.write(row.tobytes())
      num_tokens += int(np.count_nonzero(row[1]))
      num_rows += 1
  return num_tokens, num_rows


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


class Shard:
  """An endless stream of batches of one path's rows, shuffled anew in every epoch."""

  def __init__(self, file: str, batch_size: int, seq_len: int, seed: int, path: int):
    """Raises ValueError for a missing or damaged file, or one without rows."""
    self._file, self._batch_size, self._seq_len, self._seed, self._path = file, batch_size, seq_len, seed, path
    self._order = functools.lru_cache(2)(self._shuffle)
    self.num_rows: int = self._reader().num_records()
    if not self.num_rows:
      raise ValueError(f'path {path} has no text ({file}): use more text, or fewer paths in config.grid')

  def _reader(self) -> ArrayRecordReader:
    modified_ns = os.stat(self._file).st_mtime_ns if os.path.exists(self._file) else 0
    return _open_cached(os.path.abspath(self._file), modified_ns)

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
    return _unpack(self._reader().read(rows[begin:end].tolist()), self._seq_len)


def read_rows(file: str, batch_size: int, seq_len: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """All rows in their order, as `Shard.batch` gives them; the last batch is filled up with padding."""
  reader = _open(os.fspath(file))
  for start in range(0, reader.num_records(), batch_size):
    records = reader.read(start, min(start + batch_size, reader.num_records()))
    records += [bytes(len(records[0]))] * (batch_size - len(records))
    yield _unpack(records, seq_len)


def _unpack(records: list[bytes], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
  rows = np.frombuffer(b''.join(records), f'<u{len(records[0]) // (2 * seq_len)}').reshape(-1, 2, seq_len)
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


def prefetch(load: Callable[[int], T], start: int, stop: int, depth: int = 2) -> Iterator[T]:
  """`load(i)` for i from start to stop, up to `depth` of them ahead in a thread that ends with the iterator."""
  pool = concurrent.futures.ThreadPoolExecutor(1, 'prefetch')
  try:
    waiting = collections.deque(pool.submit(load, i) for i in range(start, min(start + depth, stop)))
    for i in range(start, stop):
      value = waiting.popleft().result()
      if i + depth < stop:
        waiting.append(pool.submit(load, i + depth))
      yield value
  finally:
    pool.shutdown(cancel_futures=True)
