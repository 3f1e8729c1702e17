"""Documents held back from training: whole, from all paths, with all copies, drawn by a hash of their content [2.7]."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from dipaco_jax.core import seeded_hash
from dipaco_jax.storage.records import READ_RECORDS

BLOCK_SEQUENCES = 1 << 18  # drawn at one time
MIN_DOCUMENTS = 8  # a path with this many documents has at least one in its hold-out
LEAST_PIECES = 16  # pieces of longer texts to hold back at least, while these are at most MOST_PIECES
MOST_PIECES = 0.1  # of all pieces


class DrawnPieces(NamedTuple):
  """Pieces of longer texts with draws in a span: ends of texts, or whole texts, next to the validation text.

  So neighbours are on the same side; a hash would leave every held-back piece between two training pieces.
  """

  draws: np.ndarray  # [N]; -1 for documents that are drawn by a hash
  begin: float
  end: float

  def inside(self, block: slice) -> np.ndarray:
    """Tells which sequences of a block have a draw in the span, bool."""
    return (self.draws[block] >= self.begin) & (self.draws[block] < self.end)


Pieces = DrawnPieces | None  # None: no document is a piece of a longer text


def draw_pieces(contents: np.ndarray, draws: np.ndarray, fraction: float, after: float = 0.0) -> DrawnPieces:
  """Chooses a span of draws with `fraction` of the pieces, or with LEAST_PIECES if these are at most MOST_PIECES.

  The span begins at `after`, behind the validation text. `contents`, the digests of documents, and `draws` have one
  entry per sequence, [N].
  """
  if not fraction:
    return DrawnPieces(draws, after, after)
  near = [
    block.start + np.flatnonzero((draws[block] >= after) & (draws[block] < after + MOST_PIECES))
    for block in blocks(len(draws))
  ]
  indices = np.concatenate(near) if near else np.zeros(0, np.int64)
  indices = indices[np.argsort(draws[indices], kind='stable')]
  _, first = np.unique(contents[indices], return_index=True)  # each document where it comes first
  needed = np.sort(draws[indices[first]])[:LEAST_PIECES]
  least = np.nextafter(needed[-1], np.float32(2)) if len(needed) else after
  return DrawnPieces(draws, after, float(max(after + fraction, least)))


def blocks(count: int) -> Iterator[slice]:
  """Yields slices of all sequences, so that results are in memory one block at a time."""
  return (slice(start, start + BLOCK_SEQUENCES) for start in range(0, count, BLOCK_SEQUENCES))


def draw_documents(contents: np.ndarray, seed: int, fraction: float, purpose: str, pieces: Pieces = None) -> np.ndarray:
  """Draws documents by a hash of (seed, purpose, content) below `fraction`, and of longer texts `pieces`: bool [N].

  `contents` are the digests of each sequence's document, [N]. Only the first 7 bytes of a purpose count; the same
  purpose draws the same documents.
  """
  key = int.from_bytes(purpose.encode()[:7], 'big')
  drawn = np.empty(len(contents), bool)
  for block in blocks(len(contents)):
    drawn[block] = _below((seed, key), contents, fraction, pieces, block)
  _add_copies(drawn, contents, pieces)
  return drawn


def _add_copies(drawn: np.ndarray, contents: np.ndarray, pieces: Pieces):
  """Adds the copies of documents that are held back, in place: pieces are not drawn by their contents."""
  if pieces is None:
    return
  copied = np.unique(np.concatenate([contents[block][drawn[block]] for block in blocks(len(contents))] or [contents]))
  for block in blocks(len(contents)):
    drawn[block] |= np.isin(contents[block], copied)


def held_out(
  contents: np.ndarray, first: np.ndarray, num_paths: int, seed: int, fraction: float, pieces: Pieces = None
) -> tuple[np.ndarray, list[int]]:
  """Returns whether the document of each sequence is held back, bool [N], and the paths that no draw hit.

  A `fraction` of the documents is drawn by a hash of (seed, its content), a piece of a longer text by its own draw. A
  path with MIN_DOCUMENTS or more that no draw hit gets the document of its lowest draw, on which other models, such as
  the base, may have been trained: their held-back documents do not depend on routes.

  Args:
    contents, first: [N] digest of the document, and first path, of each sequence; path -1: it is neither used nor held
      back.
  """
  held = np.empty(len(contents), bool)
  hit = np.zeros(num_paths, bool)
  for block in blocks(len(contents)):
    held[block] = _below((seed,), contents, fraction, pieces, block) & (first[block] >= 0)
  _add_copies(held, contents, pieces)
  for block in blocks(len(contents)):
    held[block] &= first[block] >= 0
    hit[first[block][held[block]]] = True

  chosen = _choose(np.flatnonzero(~hit).tolist() if fraction else [], contents, first, seed, pieces)
  for block in blocks(len(contents)) if chosen.contents else ():
    held[block] |= np.isin(contents[block], np.array(chosen.contents, contents.dtype))
    if pieces is not None:  # all pieces of a text that is held back whole
      held[block] |= np.isin(pieces.draws[block], chosen.draws)
  if chosen.contents:
    _add_copies(held, contents, pieces)
  for block in blocks(len(contents)):
    held[block] &= first[block] >= 0
  return held, chosen.paths


class _Chosen(NamedTuple):
  """Documents that are held back for paths that no draw hit."""

  contents: list[int]  # digests of the documents
  draws: list[float]  # of those that are pieces of longer texts
  paths: list[int]


def _choose(paths: Iterable[int], contents: np.ndarray, first: np.ndarray, seed: int, pieces: Pieces) -> _Chosen:
  """Chooses the document of the lowest draw of each path that has MIN_DOCUMENTS and none of those chosen before."""

  def of_path(column: np.ndarray, path: int) -> np.ndarray:
    return np.concatenate([column[block][first[block] == path] for block in blocks(len(contents))])

  chosen = _Chosen([], [], [])
  for path in paths:
    path_contents = of_path(contents, path)
    if np.isin(path_contents, np.array(chosen.contents, path_contents.dtype)).any():
      chosen.paths.append(path)
    elif len(np.unique(path_contents)) >= MIN_DOCUMENTS:
      draws = np.full(len(path_contents), -1.0) if pieces is None else of_path(pieces.draws, path)
      lowest = np.where(draws < 0, seeded_hash.of_integers(seed, path_contents) / 2.0**64, draws).argmin()
      chosen.contents.append(int(path_contents[lowest]))
      chosen.paths.append(path)
      if draws[lowest] >= 0:
        chosen.draws.append(draws[lowest])
  return chosen


def _below(key: tuple[int, ...], contents: np.ndarray, fraction: float, pieces: Pieces, block: slice) -> np.ndarray:
  by_hash = seeded_hash.of_integers(*key, contents[block]) < np.uint64(fraction * 2**64)
  return by_hash if pieces is None else np.where(pieces.draws[block] < 0, by_hash, pieces.inside(block))


def spread_out(documents: np.ndarray, chunks: Iterable[np.ndarray], seed: int) -> Iterator[np.ndarray]:
  """Yields indices so that every document has its first sequence before any has its second, documents in a drawn order.

  Early stopping reads the first rows of a hold-out, and in the order of the text these would be of few documents.
  """
  indices = np.concatenate([np.zeros(0, np.int64), *chunks])
  documents = documents[indices].astype(np.int64)
  order = np.lexsort((seeded_hash.of_integers(seed, 1, indices), documents))  # inside a document in a drawn order
  starts = np.flatnonzero(np.diff(documents[order], prepend=-1))
  rank = np.empty(len(order), np.int64)
  rank[order] = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
  order = np.lexsort((seeded_hash.of_integers(seed, 2, documents), rank))
  yield from (indices[order[i : i + READ_RECORDS]] for i in range(0, len(order), READ_RECORDS))
