"""Screening: paths whose outer gradient is not finite, or far too long, take no part in the outer step. Pure.

With d_{i,l} = old - new (with compression, the message that is sent for it) of path i on level l after a phase whose
inner steps had the learning rates eta_s, h_{l,e} the usual move of module e, and f = `outer.exclude_above`:

    r_{i,l} = |d_{i,l}| / sum_s eta_s                               the move, per unit of learning rate
    path i takes part  <=>  r_{i,l} is finite and r_{i,l} <= f h_{l,e}, for every level l
    h_{l,e} <- max((h_{l,e} + mean_i r_{i,l}) / 2, h_0 / 10)        over the paths that take part; unchanged without any

Division by the learning rates makes moves comparable over warm-up and decay. A step of AdamW moves a parameter by about
eta_s at most, and one of Muon by 0.2 eta_s in the mean: h_0 is the square root of the module's number of parameters,
and with f = 10 nothing that they do is ever excluded. For other optimizers no such bound is known: h_0 is infinite, the
first phase sets h to the mean of r, and h has no lower bound. Screening is not in the papers; without it one path that
fails reaches every module within a few phases.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dipaco_jax.algorithm.errors import Diverged
from dipaco_jax.algorithm.grid import Coordinates, Grid, Level
from dipaco_jax.algorithm.modules import Layout

MAX_RMS = 1e3  # maximum root mean square of parameters or momentum; thousands of times that of usual models
BOUNDED = ('adamw', 'muon')  # inner optimizers of which h_0 is known
FRESH = 'fresh optimizer state'
NO_PATH_FIX = 'lower config.train.learning_rate, or raise config.outer.exclude_above'


def first_usual(num_parameters: int, optimizer: str) -> float:
  """Returns h_0 of a module from its number of parameters and `inner.optimizer`."""
  return math.sqrt(num_parameters) if optimizer in BOUNDED else math.inf


def sum_of_rates(rate: Callable[[Any], Any], first_step: ArrayLike, num_steps: ArrayLike) -> jax.Array:
  """Returns the divisor sum_s eta_s over `num_steps` steps from `first_step` on, or inf if the sum is 0.

  At a rate of 0, parameters do not move, and messages contain only rests of compression, so r is 0.
  """
  total = jax.lax.fori_loop(0, num_steps, lambda i, total: total + rate(first_step + i), 0.0)
  return jnp.where(total > 0, total, jnp.inf)


def is_plausible(moved: jax.Array, usual: jax.Array, exclude_above: jax.Array) -> jax.Array:
  """Returns whether r is finite and at most `exclude_above` times h; if that is 0, whether r is finite.

  Example:
    >>> is_plausible(jnp.array([1.0, 30.0, jnp.nan]), usual=jnp.array(2.0), exclude_above=jnp.array(10.0))
    Array([ True, False, False], dtype=bool)
  """
  return jnp.isfinite(moved) & ((moved <= exclude_above * usual) | (exclude_above == 0))


def next_usual(usual: jax.Array, moved: jax.Array, paths: jax.Array, first: float) -> jax.Array:
  """Returns h of one module after a phase from `usual`, that before; `first` is h_0.

  `moved` is the sum of r over the `paths` that took part; without any h is unchanged.

  Example:
    >>> next_usual(jnp.array(8.0), moved=jnp.array(12.0), paths=jnp.array(3), first=10.0).item()  # (8 + 12 / 3) / 2
    6.0
  """
  mean = moved / jnp.maximum(paths, 1)
  least = first / 10 if math.isfinite(first) else 0.0
  after = jnp.where(jnp.isfinite(usual), jnp.maximum((usual + mean) / 2, least), mean)
  return jnp.where(paths > 0, after, usual)


def is_sound(tree: Any) -> jax.Array:
  """Returns whether all arrays of a module and its OuterOpt state have a root mean square up to MAX_RMS."""
  leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
  return jnp.all(jnp.stack([jnp.sqrt(jnp.mean(jnp.square(x))) <= MAX_RMS for x in leaves]))


def exclusion_reason(moved: Mapping[str, float], usual: Mapping[str, float], exclude_above: float) -> str:
  """Returns why a path is excluded, from its r and its modules' h by level."""
  for level, r in moved.items():
    if not math.isfinite(r):
      return f'its outer gradient is not finite (level {level})'
  times = {level: r / max(usual[level], 1e-30) for level, r in moved.items()}
  worst = max(times, key=lambda level: times[level])
  return (
    f'its outer gradient is {times[worst]:.3g} times as long as is usual (level {worst}), more than '
    f'config.outer.exclude_above={exclude_above:g} times'
  )


def exclusion_message(grid: Grid, path: int, why: str, worker: str = '', state: str = FRESH) -> str:
  """Returns the log message for a path that is left out of an outer step; `worker` trained it, if that is known.

  `state` names the optimizer state that it continues with.
  """
  where = ' '.join(f'{name}{c}' for name, c in zip(grid.names, grid.coordinates(path), strict=True))
  who = f'path {grid.path_name(path)}' + (f' ({where})' if where else '') + (f' of {worker}' if worker else '')
  return f'{who} takes no part in the outer step: {why}; it continues from the new modules, with {state}'


def count_in_a_row(before: Sequence[int], trained: np.ndarray, excluded: np.ndarray) -> list[int]:
  """Counts the phases in a row in which each path has been excluded; phases in which it does not train do not count."""
  return [n if not t else n + 1 if e else 0 for n, t, e in zip(before, trained.flat, excluded.flat, strict=True)]


def module_name(level: Level, module: Coordinates) -> str:
  """Returns a module's name, such as 'low/0-1'; the level's name if it has one module."""
  return f'{level.name}/{"-".join(map(str, module))}' if module else level.name


def module_without_paths(layout: Layout, expected: np.ndarray, excluded: np.ndarray) -> str | None:
  """Returns the name of a module that several paths should have moved and none did, or None.

  A module of one path stays as it is instead, and the path tries again until it has been excluded too often in a row.
  `expected`: paths whose outer gradient should reach the outer step, bool, shaped like the grid; `excluded` is alike.
  """
  for level in layout.levels:
    num_expected, num_left = (np.sum(x, axis=layout.grid.lacking(level)) for x in (expected, expected & ~excluded))
    for module in layout.grid.modules(level):
      if num_expected[module] > 1 and not num_left[module]:
        return module_name(level, module)
  return None


def no_path_left(module: str) -> Diverged:
  """Makes the error for a module that several paths should have moved and none did."""
  return Diverged(f'no path of module {module} has an outer gradient that is finite and plausible; {NO_PATH_FIX}')


def check_paths(layout: Layout, expected: np.ndarray, excluded: np.ndarray, in_a_row: Sequence[int], most: int) -> None:
  """Raises Diverged if all paths, all paths of a module, or one path in more than `most` phases in a row are excluded.

  `in_a_row`: see `count_in_a_row`; includes this phase. The other arguments are as in `module_without_paths`.
  """
  if expected.any() and not (expected & ~excluded).any():
    raise Diverged(f'no path has an outer gradient that is finite and plausible; {NO_PATH_FIX}')
  if module := module_without_paths(layout, expected, excluded):
    raise no_path_left(module)
  for path, n in enumerate(in_a_row):
    if n > most:
      raise Diverged(f'path {path} was excluded in {n} phases in a row, more than config.outer.max_excluded={most}')


def check_modules(layout: Layout, sound: Mapping[str, np.ndarray]) -> None:
  """Raises Diverged if an outer step made a module that is not sound; `sound` is bool by level, [K_a, ...]."""
  for level in layout.levels:
    for module in layout.grid.modules(level):
      if not sound[level.name][module]:
        raise module_too_large(module_name(level, module))


def module_too_large(module: str) -> Diverged:
  """Makes the error for a module that is not sound after an outer step."""
  return Diverged(
    f'after the outer step the parameters or the momentum of module {module} have a root mean square above '
    f'{MAX_RMS:g}: lower config.outer.learning_rate'
  )
