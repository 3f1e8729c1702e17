"""Levels of any pytree of arrays: which modules a path consists of [2.3].

`modules` says the same of a flat dict of arrays; here parameters may be any pytree, and their structure and shapes are
checked where they enter.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dipaco_jax.algorithm import checks, modules as modules_lib
from dipaco_jax.algorithm.checks import Tree
from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.algorithm.modules import Modules

ARRAYS_FIX = (
  'give the floating-point arrays of the model, as nnx.state(model, nnx.Param) or '
  'eqx.partition(model, eqx.is_inexact_array)[0] do'
)


class Levels:
  """The levels of a model over a grid: which module of each level a path picks [2.3].

  A level is a pattern over the names of parameters and the axes that it varies over. It has one module for each point
  of those axes, and paths that differ only along other axes share it. A parameter's name consists of the keys on the
  way to its leaf, joined by '/', such as 'block_0/w'. The key in a list or tuple is the index: 'layers/0/w'.

  Attributes:
    grid: the grid.
    layout: the level of each parameter.

  Examples:
    >>> params = {'embed': jnp.ones(3), 'block_0': {'w': jnp.ones((2, 2))}, 'block_1': {'w': jnp.ones((2, 2))}}
    >>> levels = Levels(Grid(a=2, b=3), params, low=('block_0', 'a'), high=('block_1', 'b'), ends=('embed', ''))
    >>> jax.tree.map(jnp.shape, levels.start(params))
    {'ends': {'embed': (3,)}, 'high': {'block_1/w': (3, 2, 2)}, 'low': {'block_0/w': (2, 2, 2)}}
    >>> levels
    level  axes  modules  parameters of each
    low    a     2        4
    high   b     3        4
    ends   -     1        3
    grid a2xb3: 6 paths of 11 parameters, all modules 23
  """

  def __init__(self, grid: Grid, params: Tree, /, **levels: tuple[str, str | Sequence[str]]):
    """Assigns each parameter to a level.

    Args:
      grid: the axes.
      params: parameters of one path, or their jax.ShapeDtypeStruct; values are not used.
      **levels: (pattern, axes) by name. `pattern` is searched in parameters' names (re.search), so that 'layers/1'
        also matches 'layers/10/w' and 'layers/1/' does not; `axes` are names of the grid's axes, a sequence or
        separated by spaces. No axes: one module that all paths share; all axes: one for each path [2.6.1].

    Raises:
      ValueError: a parameter matches no level or several, a level matches nothing or names an axis that is not there,
        two parameters have one name, or a leaf is not an array of floating-point numbers.
    """
    named = _name_leaves(params)
    self.grid = grid
    specs = [_spec(*level) for level in levels.items()]
    self.layout = modules_lib.make_layout(grid.sizes.items(), specs, named, source='the arguments of Levels')
    self._shapes = {name: tuple(x.shape) for name, x in named.items()}
    self._params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    self._modules = jax.eval_shape(self.start, self._params)

  def __repr__(self) -> str:
    rows = [('level', 'axes', 'modules', 'parameters of each')]
    for level in self.layout.levels:
      size = sum(math.prod(self._shapes[name]) for name in self.layout.names(level))
      rows.append((level.name, ' '.join(level.axes) or '-', f'{self.grid.num_modules(level):,}', f'{size:,}'))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ['  '.join(map(str.ljust, row, widths)).rstrip() for row in rows]
    one_path, all_modules = (sum(math.prod(x.shape) for x in jax.tree.leaves(t)) for t in (self._params, self._modules))
    paths = f'{self.grid.num_paths:,} paths of {one_path:,} parameters'
    lines.append(f'grid {self.grid}: {paths}, all modules {all_modules:,}')
    return '\n'.join(lines)

  def start(self, params: Tree) -> Modules:
    """Returns all modules, each a copy of its part of one pretrained model [Algorithm 1, initialization].

    Args:
      params: parameters of the pretrained model.

    Returns:
      {level: {parameter: [K_a for each axis a of the level, ...]}}.

    Raises:
      ValueError: structure, shapes or dtypes differ from those of the parameters that the levels are made of.

    Examples:
      >>> params = {'w': jnp.array([1.0, 2.0])}
      >>> Levels(Grid(a=2), params, all=('w', 'a')).start(params)['all']['w'].tolist()
      [[1.0, 2.0], [1.0, 2.0]]
    """
    checks.check_like('params', params, self._params, 'give parameters like those that Levels got', dtypes=True)
    return modules_lib.stack(self.layout, self.flat(params))

  def path(self, modules: Modules, path: Any) -> Tree:
    """Returns the parameters of one path, a pytree like those of the model.

    Args:
      modules: all modules.
      path: its index in [0, P), which may be a traced integer; the last axis of the grid is the fastest.

    Raises:
      ValueError: the grid has no such path, or `modules` have another structure or other shapes.

    Examples:
      >>> params = {'w': jnp.ones(2)}
      >>> levels = Levels(Grid(a=2, b=3), params, all=('w', 'b'))
      >>> modules = {'all': {'w': jnp.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])}}
      >>> levels.path(modules, 4)  # its coordinates are a=1, b=1
      {'w': Array([2., 2.], dtype=float32)}
    """
    self.check_modules(modules)
    if not isinstance(path, jax.core.Tracer):  # an integer of NumPy or JAX outside [0, P) would be clipped below
      coordinates: Any = self.grid.coordinates(operator.index(path))
    else:
      modules = jax.tree.map(jnp.asarray, modules)  # an array of NumPy has no traced index
      coordinates = jnp.unravel_index(path, self.grid.shape) if self.grid.shape else ()
    return self.tree(modules_lib.take(self.layout, modules, coordinates))

  def paths(self, modules: Modules) -> Tree:
    """Returns the parameters of all paths, stacked: [P, ...].

    Examples:
      >>> params = {'w': jnp.zeros(3)}
      >>> levels = Levels(Grid(a=2, b=3), params, all=('w', 'b'))
      >>> levels.paths(levels.start(params))['w'].shape
      (6, 3)
    """
    return jax.vmap(functools.partial(self.path, modules))(jnp.arange(self.grid.num_paths))

  def per_path(self, tree: Tree) -> Tree:
    """Returns a copy of any arrays for each path, stacked: [P, ...]; for example a fresh inner state.

    A random key is copied too: use `jax.random.split(key, grid.num_paths)` for a different key in each path.

    Examples:
      >>> Levels(Grid(a=2), {'w': jnp.ones(1)}, all=('w', '')).per_path({'count': jnp.int32(7)})
      {'count': Array([7, 7], dtype=int32)}
    """
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.grid.num_paths, *jnp.shape(x))), tree)

  def renew(self, states: Tree, fresh: Tree, excluded: jax.Array) -> Tree:
    """Returns inner states with a fresh state for excluded paths, because the cause of a failure may be in the state.

    Args:
      states: inner states of all paths, [P, ...].
      fresh: the state of a path before its first step.
      excluded: `Report.excluded`, bool [P].

    Examples:
      >>> levels = Levels(Grid(a=3), {'w': jnp.ones(1)}, all=('w', ''))
      >>> levels.renew(jnp.array([1.0, jnp.nan, 3.0]), jnp.array(0.0), jnp.array([False, True, False]))
      Array([1., 0., 3.], dtype=float32)
    """
    return jax.tree.map(functools.partial(where_path, excluded), self.per_path(fresh), states)

  def take_over(self, paths: Tree, modules: Modules, only: str | Sequence[str]) -> Tree:
    """Returns paths with the modules' parameters for some levels, and their own parameters for the others.

    For streaming [arXiv 2501.18512]: levels are exchanged at different steps, and paths train in between.

    Args:
      paths: parameters of all paths, [P, ...].
      modules: the new modules.
      only: names of the levels, a sequence or separated by spaces.

    Raises:
      ValueError: a level does not exist, or `paths` has other shapes.

    Examples:
      >>> params = {'x': jnp.float32(0), 'y': jnp.float32(0)}
      >>> levels = Levels(Grid(a=2), params, first=('x', ''), second=('y', ''))
      >>> paths = {'x': jnp.array([1.0, 2.0]), 'y': jnp.array([3.0, 4.0])}
      >>> levels.take_over(paths, levels.start(params), 'first')
      {'x': Array([0., 0.], dtype=float32), 'y': Array([3., 4.], dtype=float32)}
    """
    chosen = self.select(only)
    names = [name for name, level in self.layout.owner.items() if level.name in chosen]
    new = self.flat(self.paths(modules))
    return self.tree(self.flat_paths(paths) | {name: new[name] for name in names})

  def select(self, only: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the names of some levels, in order; of all if `only` is None. Raises ValueError for an unknown name.

    Examples:
      >>> levels = Levels(Grid(), {'x': jnp.ones(1), 'y': jnp.ones(1)}, first=('x', ''), second=('y', ''))
      >>> levels.select('second'), levels.select(None)
      (('second',), ('first', 'second'))
    """
    every_level = tuple(level.name for level in self.layout.levels)
    if only is None:
      return every_level
    names = _split(only)
    if unknown := sorted(set(names) - set(every_level)):
      raise ValueError(
        f'only={only!r}: no level is named {", ".join(unknown)}; the levels are {", ".join(every_level)}'
      )
    return tuple(name for name in every_level if name in names)

  def flat(self, tree: Tree) -> dict[str, jax.Array]:
    """Returns a pytree like the parameters as {name: array}; raises ValueError for another structure.

    Examples:
      >>> Levels(Grid(), {'block': {'w': jnp.ones(1)}}, all=('', '')).flat({'block': {'w': 5}})
      {'block/w': 5}
    """
    structure: Any = jax.tree.structure(self._params)
    return dict(zip(self._shapes, structure.flatten_up_to(tree), strict=True))

  def flat_paths(self, paths: Tree, argument: str = 'paths') -> dict[str, jax.Array]:
    """Returns stacked parameters of all paths as {name: [P, ...]}; raises ValueError for other shapes.

    Errors name the `argument`.

    Examples:
      >>> Levels(Grid(a=2), {'w': jnp.ones(1)}, all=('', '')).flat_paths({'w': jnp.ones((2, 1))})
      {'w': Array([[1.],
             [1.]], dtype=float32)}
    """
    num_paths = self.grid.num_paths
    expected = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_paths, *x.shape), x.dtype), self._params)
    checks.check_like(argument, paths, expected, f'give arrays of all {num_paths} paths, stacked like the parameters')
    return self.flat(paths)

  def check_modules(self, modules: Modules) -> None:
    """Raises ValueError if modules have another structure or other shapes than `start` makes.

    Examples:
      >>> levels = Levels(Grid(a=2), {'w': jnp.ones(1)}, all=('w', ''))
      >>> levels.check_modules(levels.start({'w': jnp.ones(1)}))
    """
    checks.check_like('modules', modules, self._modules, 'give modules that levels.start or outer.step has made')

  def tree(self, named: dict[str, Any]) -> Tree:
    """Returns {name: array} as a pytree like the parameters; `flat` is the inverse.

    Examples:
      >>> Levels(Grid(), {'block': {'w': jnp.ones(1)}}, all=('', '')).tree({'block/w': 5})
      {'block': {'w': 5}}
    """
    return jax.tree.unflatten(jax.tree.structure(self._params), [named[name] for name in self._shapes])


def where_path(mask_P: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns x of the paths where the mask holds, else y, [P, ...]."""
  return jnp.where(mask_P.reshape(-1, *[1] * (x.ndim - 1)), x, y)


def _split(names: str | Sequence[str]) -> tuple[str, ...]:
  """Returns names that are given as a sequence or separated by spaces."""
  return tuple(names.split() if isinstance(names, str) else names)


def _spec(name: str, level: Any) -> tuple[str, str, tuple[str, ...]]:
  """Returns (name, pattern, axes) of a level."""
  if not isinstance(level, tuple | list) or len(level) != 2 or not isinstance(level[0], str):
    raise ValueError(f'level {name!r} is {level!r}: give a pattern and axes, as in {name}=("block_0", "a")')
  pattern, axes = level
  return name, pattern, _split(axes)


def _name_leaves(params: Tree) -> dict[str, Any]:
  """Returns the leaves of a pytree by the keys on the way to them, joined by '/'."""
  named: dict[str, Any] = {}
  for name, x in checks.name_leaves(params):
    if not hasattr(x, 'shape') or not hasattr(x, 'dtype'):
      raise ValueError(f'{name or "the model"} is {type(x).__name__}, not an array: {ARRAYS_FIX}')
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f'{name!r} has dtype {x.dtype}, which cannot be averaged: {ARRAYS_FIX}')
    if name in named:
      raise ValueError(f'two parameters have the name {name!r}: rename one of their keys')
    named[name] = x
  return named
