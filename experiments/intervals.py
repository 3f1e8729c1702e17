"""Intervals of differences between two rows of a table. Pure.

Two rows are compared seed by seed. Two or three seeds alone give a poor variance, so that it is pooled over the rows of
the table, as the mean of the variances of all differences between rows of the two kinds:

    s^2 = mean over rows a of one kind and b of the other of  var over seeds of (y_a - y_b)

Rows are of one kind if their paths differ, or if all are one model, and if they are as large (claims.model_kind). Rows
of two kinds differ in variance, and rows of one kind differ too: the variance of a difference is never less than that
of its own seeds. With rows as unlike as those of tables (1) and (2) and no true difference, that finds one in 7% of all
pairs, and in 9 to 20% of those with the noisiest rows; one variance for all rows would find one in up to 32%.

Where losses by source are known, the choice of validation text counts too (`over_sources`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dipaco_jax.core import bootstrap

LEVEL = 0.9
# Student's t by degrees of freedom: quantiles of 95% and 80%.
STUDENT = {
  1: (6.314, 1.376), 2: (2.920, 1.061), 3: (2.353, 0.978), 4: (2.132, 0.941), 5: (2.015, 0.920), 6: (1.943, 0.906),
  7: (1.895, 0.896), 8: (1.860, 0.889), 9: (1.833, 0.883), 10: (1.812, 0.879), 12: (1.782, 0.873), 15: (1.753, 0.866),
  20: (1.725, 0.860), 30: (1.697, 0.854), 60: (1.671, 0.848),
}  # fmt: skip


class Pool(NamedTuple):
  """A variance and its degrees of freedom."""

  variance: float
  df: float


def student(df: float) -> tuple[float, float]:
  """Returns the quantiles of 95% and 80% of Student's t, of the next lower degrees of freedom in the table.

  Example:
    >>> student(2), student(14.9)
    ((2.92, 1.061), (1.782, 0.873))
  """
  return STUDENT[max((x for x in STUDENT if x <= df), default=1)]


def half_width(numbers: Sequence[float]) -> float:
  """Returns half of the 90% interval of the mean, by Student's t of these numbers alone; inf for one number."""
  if len(numbers) < 2:
    return math.inf
  return student(len(numbers) - 1)[0] * float(np.std(numbers, ddof=1)) / math.sqrt(len(numbers))


def smallest_detectable(half_width: float, df: float) -> float:
  """Returns the difference that would be found in 80% of cases, `(t_0.95 + t_0.8) * SE`, by half of the 90% interval.

  Example:
    >>> round(smallest_detectable(2.92, 2), 3)  # a standard error of 1 by three seeds
    3.981
  """
  sure, powerful = student(df)
  return half_width * (1 + powerful / sure)


# -- pools


def pool_alike(values_RN: np.ndarray) -> Pool:
  """Returns the variance of a difference between two of R rows, pooled over all of them, with N seeds.

  Example:
    >>> pool_alike(np.array([[1.0, 2.0], [1.0, 4.0], [1.0, 3.0]]))  # differences change by 2, 1 and 1
    Pool(variance=1.0, df=2.0)
  """
  squares, df = _squares_within(values_RN)
  return Pool(2 * squares / df, df)


def pool_pairs(differences_RN: np.ndarray) -> Pool:
  """Returns the variance of a difference, pooled over R differences of one kind that may share what a seed does."""
  return _sum_of_parts([_mean_variance(differences_RN)], differences_RN.mean(0))


def pool_kinds(values_RN: np.ndarray, others_QN: np.ndarray) -> Pool:
  """Returns the variance of a difference between a row of one kind and a row of another, pooled over all pairs."""
  parts = [_mean_variance(values_RN), _mean_variance(others_QN)]
  return _sum_of_parts(parts, values_RN.mean(0) - others_QN.mean(0))


def _squares_within(values_RN: np.ndarray) -> tuple[float, float]:
  """The sum of squares of what neither a row nor a seed explains, and its degrees of freedom."""
  rest_RN = values_RN - values_RN.mean(0) - values_RN.mean(1, keepdims=True) + values_RN.mean()
  return float((rest_RN**2).sum()), float((values_RN.shape[0] - 1) * (values_RN.shape[1] - 1))


def _mean_variance(values_RN: np.ndarray) -> Pool:
  """The mean over rows of the variance over seeds, less what all rows share."""
  squares, df = _squares_within(values_RN)
  return Pool(squares / (values_RN.shape[0] * (values_RN.shape[1] - 1)), df)


def _sum_of_parts(parts: Sequence[Pool], shared_N: np.ndarray) -> Pool:
  """Adds the variance of what is shared; degrees of freedom by Welch and Satterthwaite."""
  parts = [*parts, Pool(float(shared_N.var(ddof=1)), len(shared_N) - 1.0)]
  variance = sum(part.variance for part in parts)
  of_df = sum(part.variance**2 / part.df for part in parts if part.df)
  return Pool(variance, variance**2 / of_df if of_df else parts[-1].df)


# -- sources


def over_sources(
  nats_2NS: np.ndarray, tokens_NS: np.ndarray, groups_GS: np.ndarray, of_loss: np.ufunc, error: float, df: float
) -> tuple[float, float] | None:
  """Returns the 90% interval of a difference over sources and seeds together; None for fewer than 8 sources.

  A draw takes as many sources as there are, with replacement, the same for both models and for all seeds, as these were
  measured on one text. To its difference, a mean over seeds, noise of the seeds is added: `error * t`, t from Student's
  distribution. To draw three seeds with replacement instead would cover the truth in 66% of cases where seeds are most
  of the noise; this covers it in 88 to 93%.

  Args:
    nats_2NS: of both models, by seed and source.
    tokens_NS: that count.
    groups_GS: which sources belong to each group; the loss is the mean of the groups' mean losses.
    of_loss: maps a loss to what is compared, as `np.exp` to perplexity.
    error, df: standard error of the difference by seed, and its degrees of freedom.
  """
  chosen_S = groups_GS.any(0)
  columns_3NS = np.concatenate([nats_2NS, tokens_NS[None]])[..., chosen_S]
  columns_3NGS = columns_3NS[:, :, None] * groups_GS[:, chosen_S]
  rng = np.random.default_rng(0)

  def difference(sums_KD: np.ndarray) -> np.ndarray:
    nats_ND, others_ND, tokens_ND = sums_KD.reshape(*columns_3NGS.shape[:3], -1)
    with np.errstate(invalid='ignore'):  # a small group may have no source in a draw
      losses = [np.nanmean(x / tokens_ND, axis=1) for x in (nats_ND, others_ND)]
    return (of_loss(losses[0]) - of_loss(losses[1])).mean(0) + error * rng.standard_t(df, sums_KD.shape[-1])

  columns_KS = columns_3NGS.reshape(-1, columns_3NGS.shape[-1])
  return bootstrap.quantiles(difference, columns_KS, np.arange(columns_KS.shape[-1]), level=LEVEL)
