"""Losses of routing more frequently at test time, from all paths' token losses [2.4.3]. Pure.

A sequence is cut into chunks of W tokens: chunk i is the tokens at positions iW to (i+1)W - 1. One path scores all of
a chunk. The path of chunk 0 is the prefix router's. That of chunk i + 1 depends on chunks 0 to i, but for the bound:

    oracle       the path with the least nats on chunk i
    history      the path with the least nats on chunks 0 to i; not in the paper
    by_chooser   the path that the learned chooser (chunk_router.py) prefers at the last token of chunk i
    hindsight    the path with the least nats on chunk i + 1 itself: a bound for all choices of paths for chunks

In papers on mixtures of experts an oracle sees the text that it routes. Here, as in runs' results, it sees the chunk
before, and `hindsight` is what they call an oracle.

The prefix, whose targets do not count, is cut likewise, and the oracle looks at its nats too. With W = 16 the first
token that counts, at position 32, is scored by the path that chunk 1 chooses; with W = 64 by the prefix router's path.

Arrays hold the nats of token t at index t - 1, that of the token that predicts it; the first token has none.

Token losses are a list of P arrays [N, L], which may be memory maps: sequences are read a block at a time. Nats beyond
a sequence's end are 0. Nats that are not finite, from a path that has diverged, become inf: such a path is not chosen
while another is left. Results are sums over the targets that count, float64 [N].

Dimensions: N sequences, B sequences of a block, L length, P paths, C chunks.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

Nats = Sequence[np.ndarray]  # P arrays [N, L]
BLOCK_BYTES = 1 << 26  # of all paths' token losses, float32, in memory at one time


def oracle(nll: Nats, counts_NL: np.ndarray, W: int, first_N: np.ndarray) -> np.ndarray:
  """Returns the nats of every sequence, [N], with oracle routing: by the nats on chunk i; ties go to the lower path.

  Args:
    nll: nats of every target inside a sequence, including the prefix.
    counts_NL: which targets count.
    W: tokens in a chunk, 2 or more; ValueError otherwise, as chunk 0 would have no nats to choose by.
    first_N: the path of chunk 0.
  """
  return _by_least_nats(nll, counts_NL, W, first_N, lambda nats_BPC: nats_BPC)


def history(nll: Nats, counts_NL: np.ndarray, W: int, first_N: np.ndarray) -> np.ndarray:
  """Returns the nats of every sequence, [N], chosen by the nats on chunks 0 to i; for the arguments see `oracle`."""
  return _by_least_nats(nll, counts_NL, W, first_N, lambda nats_BPC: nats_BPC.cumsum(axis=-1))


def _by_least_nats(nll: Nats, counts_NL: np.ndarray, W: int, first_N: np.ndarray, seen: Callable) -> np.ndarray:
  """Chooses the path of chunk i + 1 with the least nats, as `seen` computes them from chunks 0 to i, [B, P, C]."""

  def scored(rows: slice, nll_BPL: np.ndarray) -> np.ndarray:
    best_BC = seen(_by_chunk(nll_BPL, W)).argmin(axis=1)
    return _scored(nll_BPL, counts_NL[rows], W, first_N[rows], best_BC[:, :-1])

  return _by_block(nll, scored)


def by_chooser(nll: Nats, counts_NL: np.ndarray, W: int, first_N: np.ndarray, chosen_NL: np.ndarray) -> np.ndarray:
  """Returns the nats of every sequence, [N], with the path of chunk i + 1 chosen at the last token of chunk i.

  `chosen_NL`: the path that the chooser prefers after each token, see `chunk_router.choose`. The other
  arguments are those of `oracle`.
  """
  before = _starts(W, counts_NL.shape[1])[1:]  # the last token before a chunk predicts its first
  chosen_NC = chosen_NL[:, before]
  return _by_block(nll, lambda rows, x: _scored(x, counts_NL[rows], W, first_N[rows], chosen_NC[rows]))


def hindsight(nll: Nats, counts_NL: np.ndarray, W: int) -> np.ndarray:
  """Returns the nats of every sequence, [N], with the best path for every chunk: a bound for any choice of paths.

  With chunks as long as a sequence it is the bound for routing once.
  """
  return _by_block(nll, lambda rows, x: _by_chunk(np.where(counts_NL[rows][:, None], x, 0), W).min(axis=1).sum(axis=1))


def blocks(nll: Nats) -> Iterator[tuple[slice, np.ndarray]]:
  """Yields slices of sequences with all paths' token losses on them, float32 [B, P, L], inf if not finite."""
  N, L = nll[0].shape
  size = max(1, BLOCK_BYTES // (4 * len(nll) * L))
  for start in range(0, N, size):
    rows = slice(start, min(start + size, N))
    nll_BPL = np.stack([nll_NL[rows] for nll_NL in nll], axis=1)
    nll_BPL[~np.isfinite(nll_BPL)] = np.inf
    yield rows, nll_BPL


def _by_block(nll: Nats, nats_of: Callable[[slice, np.ndarray], np.ndarray]) -> np.ndarray:
  """Returns `nats_of(rows, token losses [B, P, L])` of all blocks of sequences, [N]."""
  return np.concatenate([nats_of(rows, nll_BPL) for rows, nll_BPL in blocks(nll)])


def _starts(W: int, L: int) -> list[int]:
  """Returns the indices whose targets are the first of each chunk, [C]; the last index has no target."""
  if W < 2:
    raise ValueError(f'chunks of {W} tokens: the first token has no nats to choose by; use 2 or more')
  return [0, *range(W - 1, L - 1, W)]


def _by_chunk(nll_BPL: np.ndarray, W: int) -> np.ndarray:
  """Returns the nats of every chunk, float64 [B, P, C]."""
  return np.add.reduceat(nll_BPL, _starts(W, nll_BPL.shape[-1]), axis=-1, dtype=np.float64)


def _scored(
  nll_BPL: np.ndarray, counts_BL: np.ndarray, W: int, first_B: np.ndarray, later_BC: np.ndarray
) -> np.ndarray:
  """Returns the nats that count, [B], with path `first_B` on chunk 0 and `later_BC` on the chunks after it."""
  paths_BC = np.concatenate([first_B[:, None], later_BC], axis=1)
  nats_BPC = _by_chunk(np.where(counts_BL[:, None], nll_BPL, 0), W)
  return np.take_along_axis(nats_BPC, paths_BC[:, None], 1).sum(axis=(1, 2))
