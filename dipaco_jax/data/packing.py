"""Sequences packed into rows of `seq_len` with segment ids; attention does not cross a segment.

A token of a conversation that is given, ~t in its sequence (`answers`), has the negative id of its segment.
"""

import collections
from collections.abc import Iterable, Iterator

import numpy as np

OPEN_ROWS = 64  # rows being packed


def pack(sequences: Iterable[np.ndarray], seq_len: int) -> Iterator[np.ndarray]:
  """Packs sequences into rows [2, seq_len] of tokens and of segment ids (1, 2...; 0 is padding).

  A sequence goes into the least recently filled of the open rows that has room; none crosses rows. If more than
  OPEN_ROWS would be open, the fullest is closed.
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
      fullest = max(range(len(open_rows)), key=lambda i: open_rows[i][1])
      yield _row(open_rows.pop(fullest)[0], seq_len)
  for row, _ in open_rows:
    yield _row(row, seq_len)


def pack_in_order(sequences: Iterable[np.ndarray], seq_len: int) -> Iterator[np.ndarray]:
  """Packs like `pack`, but yields rows in the order of their first sequences, perhaps with more padding."""
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
    if tokens.dtype.kind == 'i' and (given := tokens < 0).any():
      row[:, begin:end][:, given] = ~tokens[given], np.full(given.sum(), -segment)
  return row


def pad(sequences: Iterable[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens and segment ids, int32 [B, length] each, with one sequence in a row, cut at `length`."""
  rows = np.stack([_row([np.asarray(tokens[:length], np.int32)], length) for tokens in sequences])
  return rows[:, 0], rows[:, 1]
