"""Which documents are held back from training: whole, from all paths, drawn by a hash of their number [2.7]."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from dipaco_jax.core import seeded_hash
from dipaco_jax.data.sequences import Sequences
from dipaco_jax.storage.records import (
  READ_RECORDS,
)

BLOCK_SEQUENCES = 1 << 18  # that are dealt out at one time
MIN_DOCUMENTS = 8  # a path with so many has one for its hold-out, whatever the draw
LEAST_PIECES = 16  # of longer texts, that are held back at least, up to MOST_PIECES
MOST_PIECES = 0.1  # of them


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


def blocks(count: int) -> Iterator[slice]:
  """Of all sequences: what is computed of them is in memory a block at a time."""
  return (slice(start, start + BLOCK_SEQUENCES) for start in range(0, count, BLOCK_SEQUENCES))


def drawn(documents: np.ndarray, seed: int, fraction: float, purpose: str, pieces: Drawn | None = None) -> np.ndarray:
  """bool [N]: whether a hash of (seed, purpose, document) falls below `fraction`; of longer texts, those `pieces`."""
  key = int.from_bytes(purpose.encode()[:7], 'big')
  found = np.empty(len(documents), bool)
  for block in blocks(len(documents)):
    found[block] = seeded_hash.of_integers(seed, key, documents[block]) < np.uint64(fraction * 2**64)
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
    at = int(np.where(draws < 0, seeded_hash.of_integers(seed, mine) / 2.0**64, draws).argmin())
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
  by_hash = seeded_hash.of_integers(seed, documents) < np.uint64(fraction * 2**64)
  return by_hash if pieces is None else np.where(pieces.draws[block] < 0, by_hash, pieces.of(block))


def spread_out(sequences: Sequences, chunks: Iterable[np.ndarray], seed: int) -> Iterator[np.ndarray]:
  """The sequences at the indices, one of every document before any has its second, documents in a drawn order.

  Early stopping looks at the first rows of a hold-out, and in the order of the text these would be of few documents.
  """
  both = [(indices, np.array([x.document for x in sequences.read(indices)], np.int64)) for indices in chunks]
  if not both:
    return
  indices, documents = (np.concatenate(arrays) for arrays in zip(*both, strict=True))
  order = np.lexsort((seeded_hash.of_integers(seed, 1, indices), documents))  # those of a document in a drawn order
  starts = np.flatnonzero(np.diff(documents[order], prepend=-1))
  rank = np.empty(len(order), np.int64)
  rank[order] = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
  order = np.lexsort((seeded_hash.of_integers(seed, 2, documents), rank))
  yield from (indices[order[i : i + READ_RECORDS]] for i in range(0, len(order), READ_RECORDS))
