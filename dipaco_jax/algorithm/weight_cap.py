"""A cap on the share of one owner, or of one path where paths have no owners, in a module's mean outer gradient. Pure.

With W_g = sum_i w_i over the paths of owner g through a module, s_g = W_g / sum_h W_h, and c = `outer.max_weight`:

    repeat until no s_g exceeds c:
      s_g <- c                                                     for all g with s_g > c, from then on
      s_g <- s_g (1 - |capped| c) / sum_{h not capped} s_h         for the others
    w_i <- w_i s_g sum_h W_h / W_g                                 for the paths i of owner g

If even equal shares exceed c, because a module has too few owners, its owners get equal shares. Within an owner, paths
keep their ratios. Shares are those of the paths that train in the phase; where one is left out of the outer step
afterwards, the shares of the others grow in proportion. The cap is not in the papers: it limits what one owner can do
to a module that others share.

With shares in falling order t_0 >= t_1 >= ..., the first k are capped, where k is the smallest number with
t_k r_k <= c, r_k = (1 - k c) / (1 - sum_{j<k} t_j); then s_g <- min(s_g r_k, c).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dipaco_jax.algorithm.grid import Grid, Level


def cap_weights(grid: Grid, level: Level, weights: np.ndarray, most: float) -> np.ndarray:
  """Returns w_i of all paths for the modules of one level, shaped like the grid, with the cap applied.

  Args:
    grid: its only named axis, if there is one, is that of the owners.
    level: the level whose modules average the paths.
    weights: w_i, shaped like the grid; 0 for paths that do not train.
    most: c, the largest share; 1 changes nothing.

  Example:
    >>> cap_weights(Grid(a=3), Level('all', '.*', ()), np.array([8.0, 1.0, 1.0]), most=0.5)
    array([5. , 2.5, 2.5])
  """
  lacking = tuple(grid.lacking(level))
  owners = [i for i, name in enumerate(grid.names) if name in grid.coordinate_names]
  across = lacking if len(owners) != 1 else tuple(set(owners) & set(lacking))
  if most >= 1 or not across:
    return weights
  inside = tuple(axis for axis in lacking if axis not in across)
  exact = np.asarray(weights, np.float64)
  moved = np.moveaxis(exact.sum(inside, keepdims=True), across, range(-len(across), 0))
  factors = cap_factors(moved.reshape(*moved.shape[: -len(across)], -1), most).reshape(moved.shape)
  return (exact * np.moveaxis(factors, range(-len(across), 0), across)).astype(weights.dtype)


def cap_factors(totals: np.ndarray, most: float) -> np.ndarray:
  """Returns s_g after the cap, divided by s_g before it, from W_g [..., G]; 1 where W_g is 0."""
  shares = _divide(totals, totals.sum(-1, keepdims=True))
  falling = -np.sort(-shares, axis=-1)
  rest = np.cumsum(falling[..., ::-1], -1)[..., ::-1]  # 1 - sum_{j<k} t_j, without cancellation
  scales = _divide(1 - np.arange(totals.shape[-1]) * most, rest)
  first = np.argmax(falling * scales <= most, axis=-1, keepdims=True)
  capped = np.minimum(shares * np.take_along_axis(scales, first, -1), most)
  count = (shares > 0).sum(-1, keepdims=True)
  capped = np.where(count * most > 1, capped, 1 / np.maximum(count, 1))
  return np.where(shares > 0, _divide(capped, shares), 1.0)


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Returns x / y, or 0 where y is 0."""
  return np.where(y > 0, x / np.where(y > 0, y, 1), 0)


def by_level(grid: Grid, levels: Sequence[Level], weights: np.ndarray, most: float) -> Any:
  """Returns w_i as they are if there is no cap, otherwise by level, each shaped like the grid."""
  return weights if most >= 1 else {level.name: cap_weights(grid, level, weights, most) for level in levels}
