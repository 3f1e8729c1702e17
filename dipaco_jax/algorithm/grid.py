"""The grid of modules: named axes, levels that vary over some of them, paths that pick one module per level [2.3].

A path is a point of the grid. A level is a set of parameters (a pattern over their names) plus the axes it varies over,
so that it has one module for each point of those axes, shared by all paths that differ only elsewhere:

    axes of the level    what it is                   modules K_l    paths through each, P_{l,e}
    ('a',)               a DiPaCo level               K_a            P / K_a
    ()                   shared by all paths          1              P
    all                  path-specific [2.6.1]        P              1

DiLoCo is one axis that no level varies over; flat MoE is every level over all axes; a dense model is the empty grid.
"""

import dataclasses
import itertools
import math
import numbers
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dipaco_jax.algorithm.errors import InputError

Coordinates = tuple[int, ...]
Axis = int | tuple[str, ...] | list[str]  # the size of an axis, or the names of its coordinates
CONFIG_LEVELS = 'config.levels'  # in errors: where a user of the program names the levels


def largest_divisor(size: int, most: int) -> int:
  """Returns the largest divisor of `size` that is at most `most`."""
  return next(d for d in range(min(most, size), 0, -1) if size % d == 0)


@dataclasses.dataclass(frozen=True)
class Level:
  """A set of parameters, those whose names `pattern` matches (re.search), with one module per point of `axes`."""

  name: str
  pattern: str
  axes: tuple[str, ...]


class Grid:
  """A grid of paths: named axes, sorted by name; paths are numbered in row-major order, the last axis fastest.

  The coordinates of an axis may have names. Then a path has a name too.

  Examples:
    >>> grid = Grid(a=2, b=3)
    >>> grid, grid.num_paths, grid.coordinates(4), grid.path((1, 1))
    (a2xb3, 6, (1, 1), 4)
    >>> grid = Grid(owner=('clinic', 'court'), topic=2)
    >>> grid, grid.path_name(3), grid.find('court,1')
    (owner2xtopic2, 'court,1', 3)
  """

  def __init__(self, /, *axes: Mapping[str, Axis] | Iterable[tuple[str, Axis]], **sizes: Axis):
    """Makes a grid from the sizes of its axes, as in Grid(a=2, b=4), or from their coordinates' names.

    Raises InputError for sizes without names, a size that is not an integer of at least 1, the name of an axis that is
    'data' or no identifier, or coordinates' names that are no identifiers or occur twice.
    """
    try:
      given_axes: dict[str, Axis] = dict(sorted(dict(*axes, **sizes).items()))
    except (TypeError, ValueError) as e:
      given = ', '.join(map(repr, axes))
      raise InputError(f"Grid({given}): name the axes, as in Grid(a=2, b=4) or Grid({{'a': 2, 'b': 4}})") from e
    self.coordinate_names = {name: tuple(x) for name, x in given_axes.items() if isinstance(x, tuple | list)}
    for name, coordinates in self.coordinate_names.items():
      _check_coordinate_names(name, coordinates)
    self.sizes = {name: len(x) if isinstance(x, tuple | list) else x for name, x in given_axes.items()}
    for name, size in self.sizes.items():
      if not isinstance(size, numbers.Integral) or size < 1:
        raise InputError(f'grid axis {name!r} has size {size!r}; it should be an integer of at least 1')
      if not isinstance(name, str) or not name.isidentifier() or len(name) > 60 or name == 'data':
        raise InputError(f"grid axis {name!r}: use a short identifier other than 'data' (the devices inside a path)")

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Grid) and self._axes == other._axes

  def __hash__(self) -> int:
    return hash(self._axes)

  @property
  def _axes(self) -> tuple[tuple[str, Axis], ...]:
    return tuple((self.sizes | self.coordinate_names).items())

  def __repr__(self) -> str:
    return 'x'.join(f'{name}{size}' for name, size in self.sizes.items()) or 'single'

  @property
  def names(self) -> tuple[str, ...]:
    return tuple(self.sizes)

  @property
  def shape(self) -> Coordinates:
    return tuple(self.sizes.values())

  @property
  def num_paths(self) -> int:
    """P, the product of the axes' sizes."""
    return math.prod(self.shape)

  def coordinates(self, path: int) -> Coordinates:
    """Converts a path's index in [0, P) to one coordinate per axis. Raises InputError outside the grid."""
    if not 0 <= path < self.num_paths:
      raise InputError(f'path {path} is not in the grid {self}: paths go from 0 to {self.num_paths - 1}')
    coords = []
    for size in reversed(self.shape):
      path, c = divmod(path, size)
      coords.append(c)
    return tuple(reversed(coords))

  def path(self, coordinates: Coordinates) -> int:
    """Converts one coordinate per axis to the path's index. Raises InputError outside the grid."""
    index = 0
    for c, size in zip(coordinates, self.shape, strict=True):
      if not 0 <= c < size:
        raise InputError(f'coordinates {coordinates} are outside the grid {self}')
      index = index * size + c
    return index

  def path_name(self, path: int) -> str:
    """Returns a path's coordinates by their names, such as 'court' or 'court,1'; its number if no axis has names."""
    if not self.coordinate_names:
      return str(path)
    by_axis = zip(self.names, self.coordinates(path), strict=True)
    return ','.join(self.coordinate_names[axis][c] if axis in self.coordinate_names else str(c) for axis, c in by_axis)

  def find(self, path: int | str | Sequence[int | str]) -> int:
    """Returns the index of a path that is given by its index or by coordinates, each a number or a name.

    Raises InputError if the grid has no such path.

    Example:
      >>> Grid(a=2, b=3).find('1,2'), Grid(a=2, b=3).find('5'), Grid(owner=('clinic', 'court')).find('court')
      (5, 5, 1)
    """
    text = ','.join(map(str, path)) if isinstance(path, tuple | list) else str(path)
    if text.strip().isdecimal() and not isinstance(path, tuple | list):
      if int(text) < self.num_paths:
        return int(text)
    elif len(given := text.split(',') if text else []) == len(self.names):
      found = [self._coordinate(axis, c) for axis, c in zip(self.names, given, strict=True)]
      if None not in found:
        return self.path(tuple(c for c in found if c is not None))
    raise InputError(f'{text}: {self._describe_paths()}')

  def _coordinate(self, axis: str, given: str) -> int | None:
    """Returns a coordinate that is given by its number or its name; None if the axis lacks it."""
    if given in (named := self.coordinate_names.get(axis, ())):
      return named.index(given)
    return int(given) if given.strip().isdecimal() and int(given) < self.sizes[axis] else None

  def _describe_paths(self) -> str:
    sizes = ' x '.join(map(str, self.shape)) or 'one path'
    named = ''.join(f'; {axis} is one of {", ".join(names)}' for axis, names in self.coordinate_names.items())
    return f'the paths are 0 to {self.num_paths - 1}, of a grid of {sizes}{named}'

  def points(self) -> Iterator[Coordinates]:
    """Yields the coordinates of all paths, in the order of their indices."""
    return itertools.product(*map(range, self.shape))

  def positions(self, level: Level) -> tuple[int, ...]:
    """Returns the positions in `names` of the axes that the level varies over."""
    return tuple(i for i, name in enumerate(self.names) if name in level.axes)

  def level_shape(self, level: Level) -> Coordinates:
    """Returns the sizes of the level's axes: the leading dimensions of its stacked parameters."""
    return tuple(self.shape[i] for i in self.positions(level))

  def num_modules(self, level: Level) -> int:
    """K_l, the product of the sizes of the level's axes."""
    return math.prod(self.level_shape(level))

  def paths_through(self, level: Level) -> int:
    """P_{l,e}, the product of the sizes of the axes that the level lacks.

    Example:
      >>> Grid(a=2, b=3).paths_through(Level('high', 'block_1', ('b',)))
      2
    """
    return self.num_paths // self.num_modules(level)

  def module(self, level: Level, coordinates: Coordinates) -> Coordinates:
    """Returns the module that a path picks: the path's coordinates on the level's axes.

    Example:
      >>> Grid(a=2, b=3).module(Level('high', 'block_1', ('b',)), (1, 2))
      (2,)
    """
    return tuple(coordinates[i] for i in self.positions(level))

  def modules(self, level: Level) -> Iterator[Coordinates]:
    """Yields all modules of a level, row-major."""
    return itertools.product(*map(range, self.level_shape(level)))

  def lacking(self, level: Level) -> tuple[int, ...]:
    """Returns the positions of the other axes: those that the outer gradient is averaged over."""
    return tuple(i for i, name in enumerate(self.names) if name not in level.axes)


def _check_coordinate_names(axis: str, names: Sequence[str]) -> None:
  """Raises InputError unless each name is a short identifier, so that it can be told from a number, and occurs once."""
  for name in names:
    if not isinstance(name, str) or not re.fullmatch(r'[A-Za-z]\w{0,59}', name, re.ASCII):
      fix = 'begin with a letter, and use letters, digits and _, 60 at most'
      raise InputError(f'grid axis {axis!r} has the name {name!r}: {fix}')
  if len({name.casefold() for name in names}) < len(names):
    raise InputError(f'grid axis {axis!r} has a name twice: {", ".join(names)}; use each once')
  if not names:
    raise InputError(f'grid axis {axis!r} has no names: give each coordinate one, or give their number')


def make_levels(
  grid: Grid, specs: Iterable[tuple[str, str, Sequence[str]]], source: str = CONFIG_LEVELS
) -> tuple[Level, ...]:  # fmt: skip
  """Makes levels from (name, pattern, axes); errors say that they come from `source`.

  Raises InputError for an axis that is not in the grid, a name that occurs twice or cannot be a file name, or a bad
  pattern.

  Example:
    >>> make_levels(Grid(a=2, b=2), [('low', 'block_0', ('a',)), ('ends', 'embed', ())])[1]
    Level(name='ends', pattern='embed', axes=())
  """
  levels: list[Level] = []
  for name, pattern, axes in specs:
    unknown = [axis for axis in axes if axis not in grid.names]
    if unknown:
      swapped = pattern.split() and set(pattern.split()) <= {*grid.names}
      fix = 'swap its pattern and its axes in' if swapped else 'mend'
      raise InputError(f'level {name!r} varies over {unknown}, but the grid has {list(grid.names)}; {fix} {source}')
    # Names become file names, also on file systems that ignore case or allow only 255 bytes.
    if not re.fullmatch(r'\w{1,60}', name) or name.casefold() in {level.name.casefold() for level in levels}:
      raise InputError(f'level name {name!r}: use letters, digits and _, 60 at most, and each name once')
    try:
      re.compile(pattern)
    except re.error as e:
      raise InputError(f'level {name!r}: pattern {pattern!r} is no regular expression: {e}') from e
    levels.append(Level(name, pattern, tuple(axis for axis in grid.names if axis in axes)))
  return tuple(levels)


def assign_levels(levels: Sequence[Level], names: Iterable[str], source: str = CONFIG_LEVELS) -> dict[str, Level]:
  """Returns each parameter's level; raises InputError if a parameter matches not exactly one, or a level nothing.

  Errors say that the levels come from `source`.

  Example:
    >>> levels = make_levels(Grid(a=2), [('blocks', 'block', ('a',)), ('ends', 'embed', ())])
    >>> {name: level.name for name, level in assign_levels(levels, ['embed', 'block_0/w']).items()}
    {'block_0/w': 'blocks', 'embed': 'ends'}
  """
  owner: dict[str, Level] = {}
  for name in sorted(names):
    matching = [level for level in levels if re.search(level.pattern, name)]
    if not matching:
      raise InputError(f'parameter {name!r} matches no level; add a pattern to {source}')
    if len(matching) > 1:
      both = ' and '.join(repr(level.name) for level in matching)
      raise InputError(f'parameter {name!r} matches levels {both}; make the patterns of {source} disjoint')
    owner[name] = matching[0]
  for level in levels:
    if level not in owner.values():
      names_without_numbers = ', '.join(sorted({re.sub(r'\d+', '*', name) for name in owner}))
      raise InputError(
        f'level {level.name!r}: {level.pattern!r} matches no parameter; there are {names_without_numbers}'
      )
  return owner
