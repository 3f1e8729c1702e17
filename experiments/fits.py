"""Power laws of losses, with their intervals: least squares on logarithms, and a bootstrap over the points."""

import math
from collections.abc import Sequence

import numpy as np

from dipaco_jax.core.errors import InputError

LEVEL = 0.9
RESAMPLES = 2000


def power(points: Sequence[tuple[float, float]]) -> tuple[float, tuple[float, float]]:
  """b of y = a x^-b, and its interval; points (x, y) above 0, of two x at least."""
  logs = np.log(np.asarray(points, float))
  if len(set(logs[:, 0])) < 2:
    raise InputError('a power law needs two different x')
  rng = np.random.default_rng(0)
  slopes = []
  while len(slopes) < RESAMPLES:
    sample = logs[rng.integers(len(logs), size=len(logs))]
    if len(set(sample[:, 0])) > 1:
      slopes.append(-np.polyfit(*sample.T, 1)[0])
  tail = (1 - LEVEL) / 2
  low, high = np.quantile(slopes, (tail, 1 - tail))
  return float(-np.polyfit(*logs.T, 1)[0]), (float(low), float(high))


def surface(points: Sequence[tuple[float, ...]]) -> np.ndarray:
  """[c_0, c_1, ...] of log y = c_0 - c_1 log x_1 - c_2 log x_2 ...; points (x_1, ..., y), more than coefficients."""
  logs = np.log(np.asarray(points, float))
  design = np.column_stack([np.ones(len(logs)), -logs[:, :-1]])
  if np.linalg.matrix_rank(design) < design.shape[1]:
    raise InputError('the points do not tell the exponents apart: vary each of the x')
  return np.linalg.lstsq(design, logs[:, -1], rcond=None)[0]


def at(coefficients: np.ndarray, *x: float) -> float:
  """y of a `surface`."""
  return math.exp(coefficients[0] - float(np.dot(coefficients[1:], np.log(x))))
