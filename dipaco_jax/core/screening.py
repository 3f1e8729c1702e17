"""Screening of outer gradients: a path whose own is not finite, or far too long, takes no part in the outer step. Pure.

With d_{i,l} = old - new of path i on level l after a phase whose inner steps had the learning rates eta_s, h_{l,e} how
far module e has been moved by its paths so far, and f = `outer.exclude_above`:

    r_{i,l} = |d_{i,l}| / sum_s eta_s                               the move, per unit of learning rate
    path i takes part  <=>  r_{i,l} is finite and r_{i,l} <= f h_{l,e}, for every level l
    h_{l,e} <- max((h_{l,e} + mean_i r_{i,l}) / 2, h_0 / 10)        over the paths that take part; as it is without any

Divided by the learning rates, moves compare over warm-up and decay. AdamW moves a parameter by about eta_s in a step at
most: h begins at h_0, the square root of the module's number of parameters, and with f = 10 nothing that AdamW does is
ever excluded. Of plain SGD nothing is known before the first phase: h begins at infinity, and has no lower bound. Not
in the papers: there, one path that fails is in every module a few phases later.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.core.errors import Diverged
from dipaco_jax.core.grid import Coordinates, Grid, Level
from dipaco_jax.core.modules import Layout

MOST = 1e3  # root mean square of parameters or momentum; in models that work it is thousands of times less


def first_usual(num_parameters: int, optimizer: str) -> float:
  """h before the first phase, of a module with so many parameters, by `inner.optimizer`."""
  return math.sqrt(num_parameters) if optimizer == 'adamw' else math.inf


def sum_of_rates(rate, first_step, num_steps) -> jax.Array:
  """sum_s eta_s of the steps first_step, ..., first_step + num_steps - 1; at least 1e-30, since it divides."""
  return jnp.maximum(jax.lax.fori_loop(0, num_steps, lambda i, total: total + rate(first_step + i), 0.0), 1e-30)


def is_plausible(moved: jax.Array, usual: jax.Array, exclude_above: jax.Array) -> jax.Array:
  """Whether r is finite, and at most `exclude_above` times h; 0: whether it is finite."""
  return jnp.isfinite(moved) & ((moved <= exclude_above * usual) | (exclude_above == 0))


def next_usual(usual: jax.Array, moved: jax.Array, paths: jax.Array, first: float) -> jax.Array:
  """h after a phase, of one module.

  Args:
    usual: h before it.
    moved: the sum of r over the paths that took part.
    paths: how many these were; 0: h stays as it is.
    first: h_0.
  """
  mean = moved / jnp.maximum(paths, 1)
  least = first / 10 if math.isfinite(first) else 0.0
  after = jnp.where(jnp.isfinite(usual), jnp.maximum((usual + mean) / 2, least), mean)
  return jnp.where(paths > 0, after, usual)


def is_sound(tree: Any) -> jax.Array:
  """Whether a module and the state of its OuterOpt are finite, with no array whose root mean square is above `MOST`."""
  leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
  return jnp.all(jnp.stack([jnp.sqrt(jnp.mean(jnp.square(x))) <= MOST for x in leaves]))


def why(moved: Mapping[str, float], usual: Mapping[str, float], exclude_above: float) -> str:
  """Words for a path that takes no part, from its r and its modules' h by level."""
  for level, r in moved.items():
    if not math.isfinite(r):
      return f'its outer gradient is not finite (level {level})'
  times = {level: r / max(usual[level], 1e-30) for level, r in moved.items()}
  worst = max(times, key=lambda level: times[level])
  return (
    f'its outer gradient is {times[worst]:.3g} times as long as is usual (level {worst}), more than '
    f'config.outer.exclude_above={exclude_above:g} times'
  )


def takes_no_part(grid: Grid, path: int, why: str, worker: str = '') -> str:
  """Words of logs for a path that is left out of an outer step; `worker`: who trained it, where that is known."""
  where = ' '.join(f'{name}{c}' for name, c in zip(grid.names, grid.coordinates(path), strict=True))
  who = f'path {path}' + (f' ({where})' if where else '') + (f' of {worker}' if worker else '')
  return f'{who} takes no part in the outer step: {why}; it goes on from the new modules, with a fresh optimizer state'


def count_in_a_row(before: Sequence[int], trained: np.ndarray, excluded: np.ndarray) -> list[int]:
  """In how many phases in a row each path has been excluded, after one more; phases that it sits out do not count."""
  return [n if not t else n + 1 if e else 0 for n, t, e in zip(before, trained.flat, excluded.flat, strict=True)]


def named(level: Level, module: Coordinates) -> str:
  """A module, for messages: as 'low/0-1', or the level alone where it has one module."""
  return f'{level.name}/{"-".join(map(str, module))}' if module else level.name


def module_without_paths(layout: Layout, heard: np.ndarray, excluded: np.ndarray) -> str | None:
  """A module that several paths were to move and none did, by its level and coordinates; None where there is none.

  A module of one path alone rests instead: that path tries again, until it has been excluded too often in a row.

  Args:
    layout: grid and levels.
    heard: which paths were to take part in the outer step, bool, shaped like the grid.
    excluded: which of them did not.
  """
  for level in layout.levels:
    wanted, left = (np.sum(x, axis=layout.grid.lacking(level)) for x in (heard, heard & ~excluded))
    for module in layout.grid.modules(level):
      if wanted[module] > 1 and not left[module]:
        return named(level, module)
  return None


def without_paths(module: str) -> Diverged:
  """What to raise where a module is to be moved by several paths, and is by none."""
  return Diverged(f'no path of module {module} has an outer gradient that is finite and plausible')


def check(layout: Layout, heard: np.ndarray, excluded: np.ndarray, in_a_row: Sequence[int], most: int):
  """Raises Diverged where it is no use to go on: in all paths of a module, in all there are, or too often in one path.

  Args:
    layout, heard, excluded: as of `module_without_paths`.
    in_a_row: as `count_in_a_row` counts, this phase included.
    most: phases in a row that a path may be excluded.
  """
  if heard.any() and not (heard & ~excluded).any():
    raise Diverged('no path has an outer gradient that is finite and plausible')
  if module := module_without_paths(layout, heard, excluded):
    raise without_paths(module)
  for path, n in enumerate(in_a_row):
    if n > most:
      raise Diverged(f'path {path} was excluded in {n} phases in a row, more than config.outer.max_excluded={most}')


def check_modules(layout: Layout, sound: Mapping[str, np.ndarray]):
  """Raises Diverged where an outer step has made what is not sound; `sound` is bool by level, [K_a, ...]."""
  for level in layout.levels:
    for module in layout.grid.modules(level):
      if not sound[level.name][module]:
        raise unsound(named(level, module))


def unsound(module: str) -> Diverged:
  """What to raise where an outer step has made what is not sound."""
  return Diverged(f'the outer step makes module {module} as large as no model that works is')
