"""Power laws of losses: least squares on logarithms."""

import math
from collections.abc import Sequence

import numpy as np

from dipaco_jax.core.errors import InputError


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
