"""Exact sums of outer gradients with row weights, which do not depend on the order of the paths, to the bit.

With `outer.row_weights` a contribution is w s_r (old - new)_r, and the mean is divided by sum_i w_i s_{i,r} (outer.py).
A row that a path's text does not contain has a weight near AdamW's epsilon, 1e-8, so that a contribution may be far
below 2^-40, to which exact_sum.py rounds. Each float32 number x is therefore added in two parts:

    high = x rounded to a multiple of 2^-40        low = 2^40 (x - high)

Both are exact in float32, and the low part is again rounded to a multiple of 2^-40, which is 2^-80 of x.
"""

from collections.abc import Mapping

import numpy as np

from dipaco_jax.algorithm import exact_sum, outer
from dipaco_jax.algorithm.exact_sum import ExactSum

Arrays = Mapping[str, np.ndarray]
LOW, ROWS = ':low', ':rows'  # after a parameter's name: the low part of its sum; its row weights


class RowSum:
  """The sums sum_i w_i s_{i,r} (old - new_i)_r and sum_i w_i s_{i,r}, by name; 16 bytes per parameter."""

  def __init__(self, parts: ExactSum | None = None) -> None:
    self.parts = parts or ExactSum()

  @property
  def contributions(self) -> int:
    """Returns how many paths have been added."""
    return self.parts.contributions

  def add(self, weight: float, old: Arrays, new: Arrays, rows: Arrays) -> float:
    """Adds a path's contribution, and returns the square of its norm; raises what `ExactSum.add` raises."""
    parts, nothing = contribution(weight, old, new, rows)
    self.parts.add(1.0, parts, nothing)
    return sum(float(np.linalg.norm(x)) ** 2 for name, x in parts.items() if name in old)

  def take_back(self, weight: float, old: Arrays, new: Arrays, rows: Arrays) -> None:
    """Undoes an `add` of the same contribution, to the bit."""
    self.parts.take_back(1.0, *contribution(weight, old, new, rows))

  def mean(self) -> dict[str, np.ndarray]:
    """Returns sum_i w_i s_i (old - new_i) / sum_i w_i s_i, float32, 0 in rows whose weights are all 0.

    Raises ValueError if nothing has been added.
    """
    means, result = self.parts.mean(), {}
    for name in [name for name in means if not name.endswith((LOW, ROWS))]:
      total, mass = _both_parts(means, name), _both_parts(means, name + ROWS)
      mass = np.broadcast_to(outer.broadcast_rows(mass, total), total.shape)
      result[name] = np.divide(total, mass, out=np.zeros_like(total), where=mass > 0).astype(np.float32)
    return result

  def square(self) -> float:
    """Returns |sum_i w_i s_i (old - new_i)|^2, the square of the sum's norm."""
    means = self.parts.mean()
    norms = [np.linalg.norm(_both_parts(means, name)) for name in means if not name.endswith((LOW, ROWS))]
    return float(sum(norm**2 for norm in norms)) * self.contributions**2

  def state(self) -> dict[str, np.ndarray]:
    """Returns the arrays from which `from_state` restores the sum; views, not copies."""
    return self.parts.state()

  @classmethod
  def from_state(cls, state: Arrays) -> 'RowSum':
    """Restores a sum from its `state`."""
    return cls(ExactSum.from_state(state))


def contribution(weight: float, old: Arrays, new: Arrays, rows: Arrays) -> tuple[Arrays, Arrays]:
  """Returns a path's contribution in parts, and zeros of the same shapes. Raises ValueError if shapes differ."""
  w, _ = exact_sum.quantize(weight)
  exact_sum.check_arrays(old, new)
  exact_sum.check_arrays({name: np.zeros(x.shape[:1], np.float32) for name, x in old.items()}, rows)
  parts: dict[str, np.ndarray] = {}
  for name, x in old.items():
    if (rows[name] < 0).any():
      raise ValueError(f'{name}: a row weight is negative')
    with np.errstate(over='ignore', invalid='ignore'):
      mass = w * rows[name]
      parts |= _split(name, (x - new[name]) * outer.broadcast_rows(mass, x)) | _split(name + ROWS, mass)
  return parts, {name: np.zeros(x.shape, np.float32) for name, x in parts.items()}


def _split(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
  """Returns the high and the low part of float32 numbers; those out of range are rejected by `ExactSum.add`."""
  high = ((x.astype(np.float64) + exact_sum.M) - exact_sum.M).astype(np.float32)
  return {name: high, name + LOW: (x - high) / np.float32(exact_sum.QUANTUM)}


def _both_parts(means: Arrays, name: str) -> np.ndarray:
  return means[name].astype(np.float64) + means[name + LOW].astype(np.float64) * exact_sum.QUANTUM
