"""Differences between two models that were measured on the same documents, after training from the same seeds. Pure.

    difference = mean over seeds of  sum_i (n_i - m_i) / sum_i t_i      n_i, m_i nats, t_i tokens of document i

Two sources of noise count. The first is the choice of documents: the interval of `bootstrap` over different documents,
where the losses of one document with all seeds are drawn together. The second is the seed of training: with several
seeds, twice the standard error of the seeds' differences; with one seed SEED_NOISE, as differences between methods
varied by 0.3 to 3.6% from seed to seed in experiments/. On each side the interval is the wider of the two.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dipaco_jax.core import bootstrap

SEED_NOISE = 0.02  # nats per token, 2% in perplexity


class Losses(NamedTuple):
  """Losses of the documents of one seed, [N] each."""

  nats: np.ndarray
  tokens: np.ndarray
  contents: np.ndarray | None = None  # digests of the documents; None: each is another one


class Difference(NamedTuple):
  """A difference in nats per token, with its interval; a model is better where all of the interval is below 0."""

  mean: float
  low: float
  high: float


def compare(one: Sequence[Losses], other: Sequence[Losses]) -> Difference | None:
  """Returns by how much the loss of `one` is above that of `other`; None for too few documents, or other documents.

  Args:
    one, other: losses of each seed, in the same order.
  """
  pairs = list(zip(one, other, strict=True))
  if not pairs or any(not np.array_equal(a.tokens, b.tokens) for a, b in pairs):
    return None
  nats = [a.nats - b.nats for a, b in pairs]
  by_seed = np.array([x.sum() / a.tokens.sum() for x, (a, _) in zip(nats, pairs, strict=True)])
  contents = [np.arange(len(a.tokens)) if a.contents is None else a.contents for a, _ in pairs]
  tokens = np.concatenate([a.tokens for a, _ in pairs])
  interval = bootstrap.interval(np.concatenate(nats), tokens, contents_N=np.concatenate(contents))
  if interval is None:
    return None
  mean = float(by_seed.mean())
  noise = 2 * float(by_seed.std(ddof=1)) / math.sqrt(len(by_seed)) if len(by_seed) > 1 else SEED_NOISE
  return Difference(mean, min(math.log(interval[0]), mean - noise), max(math.log(interval[1]), mean + noise))
