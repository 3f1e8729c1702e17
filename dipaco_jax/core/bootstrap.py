"""Confidence intervals of perplexities: the bootstrap over documents. Pure.

As many documents as there are get drawn with replacement, RESAMPLES times, and each draw has a perplexity. The interval
is the middle LEVEL of those perplexities (percentile bootstrap; B. Efron, 1979). Equal documents are drawn together, as
are the sequences of one document: they say nothing about other documents.

    perplexity           exp(sum_i n_i / sum_i t_i)             n_i nats, t_i tokens of document i
    ratio of two models  exp(sum_i (n_i - m_i) / sum_i t_i)     on the same documents, which are drawn together

Two models agree on which documents are hard, so that their ratio is known far better than either perplexity. An
interval covers other documents of the same source, not other sources or other seeds.
"""

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
  nats_N, tokens_N = (np.asarray(x, np.float64)[counts_N] for x in (nats_N, tokens_N))
  if contents_N is not None:
    document_N = np.unique(np.asarray(contents_N)[counts_N], return_inverse=True)[1]
    nats_N, tokens_N = (np.bincount(document_N, x) for x in (nats_N, tokens_N))
  count = len(tokens_N)
  if count < MIN_DOCUMENTS or not np.isfinite(nats_N).all():
    return None
  rng = np.random.default_rng(seed)
  rows = max(1, CELLS // count)
  means = []
  for start in range(0, RESAMPLES, rows):
    drawn = rng.integers(count, size=(min(rows, RESAMPLES - start), count))
    means.append(nats_N[drawn].sum(1) / tokens_N[drawn].sum(1))
  low, high = np.exp(np.minimum(np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]), 700.0))
  return float(low), float(high)
