"""Modules as stacked pytrees: the parameters of a level have the level's axes in front [2.3].

`Modules` is `{level name: {parameter name: array [K_a for each axis a of the level, ...]}}`. A path's parameters are a
flat dict of arrays without those axes: index them.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dipaco_jax.algorithm import grid as grid_lib

Modules = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Layout:
  """The grid, its levels, and the level that owns each parameter."""

  grid: grid_lib.Grid
  levels: tuple[grid_lib.Level, ...]
  owner: Mapping[str, grid_lib.Level]

  def level(self, name: str) -> grid_lib.Level:
    """Returns the level of this name."""
    return next(level for level in self.levels if level.name == name)

  def names(self, level: grid_lib.Level) -> tuple[str, ...]:
    """Returns the names of the level's parameters, sorted."""
    return tuple(sorted(name for name, owner in self.owner.items() if owner == level))

  def models(self) -> list[list[int]]:
    """Groups paths into models: replicas, which differ only along axes that no level varies over, are one model."""
    varied = [i for i, axis in enumerate(self.grid.names) if any(axis in level.axes for level in self.levels)]
    models: dict[grid_lib.Coordinates, list[int]] = {}
    for path, point in enumerate(self.grid.points()):
      models.setdefault(tuple(point[i] for i in varied), []).append(path)
    return list(models.values())

  def num_parameters(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Returns the number of parameters of all modules together, from the shapes of one path's."""
    return sum(shapes[name].size * self.grid.num_modules(level) for name, level in self.owner.items())

  def shared_sizes(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, int]:
    """Returns how many parameters a path shares with others by level, from the shapes of one path's; 0: its own."""
    sizes = dict.fromkeys((level.name for level in self.levels), 0)
    for name, level in self.owner.items():
      sizes[level.name] += shapes[name].size * (self.grid.paths_through(level) > 1)
    return sizes


def make_layout(
  axes: Iterable[tuple[str, grid_lib.Axis]], specs: Iterable[tuple[str, str, Sequence[str]]], names: Iterable[str],
  source: str = grid_lib.CONFIG_LEVELS,
) -> Layout:  # fmt: skip
  """Makes a layout from the settings' `grid` and `levels` and parameters' names; raises InputError as `grid` does."""
  grid = grid_lib.Grid(axes)
  levels = grid_lib.make_levels(grid, specs, source)
  return Layout(grid, levels, grid_lib.assign_levels(levels, names, source))


def stack(layout: Layout, params: Mapping[str, Any]) -> Modules:
  """Copies one path's parameters into every module: training starts from the base model [Algorithm 1].

  Example:
    >>> layout = make_layout([('a', 2)], [('all', 'w', ('a',))], ['w'])
    >>> stack(layout, {'w': jnp.array([1.0, 2.0])})['all']['w'].shape
    (2, 2)
  """
  modules: Modules = {}
  for level in layout.levels:
    shape = layout.grid.level_shape(level)
    modules[level.name] = {n: jnp.broadcast_to(params[n], (*shape, *params[n].shape)) for n in layout.names(level)}
  return modules


def take(layout: Layout, modules: Modules, coordinates: Sequence[Any]) -> dict[str, Any]:
  """Returns a path's parameters; its coordinates may be traced integers.

  Example:
    >>> layout = make_layout([('a', 2)], [('all', 'w', ('a',))], ['w'])
    >>> take(layout, {'all': {'w': jnp.array([3.0, 4.0])}}, (1,))
    {'w': Array(4., dtype=float32)}
  """
  params: dict[str, Any] = {}
  for level in layout.levels:
    index = layout.grid.module(level, tuple(coordinates))
    params |= {name: stacked[index] for name, stacked in modules[level.name].items()}
  return dict(sorted(params.items()))
