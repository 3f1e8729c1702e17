"""Confidence intervals of perplexities: the bootstrap over documents. Pure.

As many documents as there are get drawn with replacement, RESAMPLES times, and each draw has a perplexity. The interval
is the middle LEVEL of those perplexities (percentile bootstrap; B. Efron, 1979). Equal documents are drawn together, as
are the sequences of one document: they say nothing about other documents.

    perplexity           exp(sum_i n_i / sum_i t_i)             n_i nats, t_i tokens of document i
    ratio of two models  exp(sum_i (n_i - m_i) / sum_i t_i)     on the same documents, which are drawn together

Two models agree on which documents are hard, so that their ratio is known far better than either perplexity. An
interval covers other documents of the same source, not other sources or other seeds.
"""

from collections.abc import Callable

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
MIN_DOCUMENTS = 8  # different ones: an interval from fewer would be misleading
CELLS = 1 << 20  # drawn indices in memory at one time


def interval(
  nats_N: np.ndarray, tokens_N: np.ndarray, seed: int = 0, contents_N: np.ndarray | None = None
) -> tuple[float, float] | None:
  """Returns the interval of exp(sum nats / sum tokens); None for fewer than MIN_DOCUMENTS, or nats that are not finite.

  Args:
    nats_N: of each sequence; for a ratio, the difference between the two models.
    tokens_N: that count; sequences without any are left out.
    contents_N: the digest of each sequence's document; None: each is another document.
  """
  counts_N = np.asarray(tokens_N) > 0
  contents_N = np.arange(len(counts_N)) if contents_N is None else np.asarray(contents_N)
  pair_2N = np.stack([nats_N, tokens_N])[:, counts_N]
  bounds = quantiles(lambda sums: sums[0] / sums[1], pair_2N, contents_N[counts_N], seed)
  return bounds and (_perplexity(bounds[0]), _perplexity(bounds[1]))


def quantiles(
  statistic: Callable[[np.ndarray], np.ndarray],
  columns_KN: np.ndarray,
  contents_N: np.ndarray,
  seed: int = 0,
  level: float = LEVEL,
) -> tuple[float, float] | None:
  """Returns the middle part of a statistic of K sums over documents; None in the cases that `interval` names.

  Args:
    statistic: maps the sums of each draw [K, draws] to a number for each draw [draws].
    columns_KN: the K quantities of each sequence.
    contents_N: the digest of each sequence's document; sequences with equal ones are drawn together.
    level: how large the middle part is.
  """
  documents, document_N = np.unique(contents_N, return_inverse=True)
  count = len(documents)
  columns_KD = np.stack([np.bincount(document_N, column, count) for column in columns_KN.astype(np.float64)])
  if count < MIN_DOCUMENTS or not np.isfinite(columns_KD).all():
    return None
  rng = np.random.default_rng(seed)
  rows = max(1, CELLS // count)
  drawn_statistics = []
  for start in range(0, RESAMPLES, rows):
    drawn = rng.integers(count, size=(min(rows, RESAMPLES - start), count))
    drawn_statistics.append(statistic(np.stack([column_D[drawn].sum(-1) for column_D in columns_KD])))
  low, high = np.quantile(np.concatenate(drawn_statistics), [(1 - level) / 2, (1 + level) / 2])
  return float(low), float(high)


def _perplexity(nats: float) -> float:
  return float(np.exp(min(nats, 700.0)))
