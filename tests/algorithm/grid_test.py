"""The grid's arithmetic against brute force: a list of all paths, each a dict from axis to coordinate."""

import collections
import itertools
import math

import pytest
from hypothesis import given, settings, strategies as st

from dipaco_jax.algorithm import grid as grids
from dipaco_jax.algorithm.grid import Grid, Level

AXES = st.dictionaries(st.sampled_from(['a', 'b', 'c', 'd', 'replica']), st.integers(1, 5), max_size=4)


def all_paths(axes: dict[str, int]) -> list[dict[str, int]]:
  """Index to coordinates, by counting up: the last axis, in the order of names, turns fastest."""
  paths: list[dict[str, int]] = [{}]
  for name in sorted(axes):
    paths = [path | {name: c} for path in paths for c in range(axes[name])]
  return paths


@st.composite
def grids_with_level(draw):
  axes = draw(AXES)
  return axes, Level('level', '.*', tuple(draw(st.permutations([name for name in axes if draw(st.booleans())]))))


@given(AXES)
def test_paths_and_coordinates_are_inverse(axes):
  grid, paths = Grid(axes), all_paths(axes)
  assert grid.names == tuple(sorted(axes)) and grid.num_paths == len(paths)
  assert list(grid.points()) == [tuple(path.values()) for path in paths]
  for index, path in enumerate(paths):
    assert grid.coordinates(index) == tuple(path.values())
    assert grid.path(tuple(path.values())) == index


@given(AXES)
def test_order_of_axes_does_not_matter(axes):
  backwards = Grid(reversed(list(axes.items())))
  assert Grid(axes) == backwards and hash(Grid(axes)) == hash(backwards) and Grid(axes | {'a': 6}) != backwards
  assert repr(Grid(axes)) == repr(backwards) and Grid(axes).sizes == backwards.sizes


@settings(deadline=None)  # a large grid takes long on a busy machine
@given(grids_with_level())
def test_modules_are_what_paths_share(axes_and_level):
  axes, level = axes_and_level
  grid, paths = Grid(axes), all_paths(axes)
  through = collections.defaultdict(list)
  for index, path in enumerate(paths):
    through[frozenset((name, path[name]) for name in level.axes)].append(index)
  assert grid.num_modules(level) == len(through) == math.prod(grid.level_shape(level))
  assert {len(indices) for indices in through.values()} == {grid.paths_through(level)}
  for one, two in itertools.product(range(min(40, len(paths))), repeat=2):
    shared = any(one in indices and two in indices for indices in through.values())
    assert shared == (grid.module(level, grid.coordinates(one)) == grid.module(level, grid.coordinates(two)))


@settings(deadline=None)  # a large grid takes long on a busy machine
@given(grids_with_level())
def test_modules_are_listed_once_and_row_major(axes_and_level):
  axes, level = axes_and_level
  grid = Grid(axes)
  modules = list(grid.modules(level))
  assert modules == sorted({grid.module(level, coordinates) for coordinates in grid.points()})
  assert all(len(module) == len(level.axes) for module in modules)


@given(grids_with_level())
def test_an_axis_is_either_the_levels_or_lacking(axes_and_level):
  axes, level = axes_and_level
  grid = Grid(axes)
  assert {grid.names[i] for i in grid.positions(level)} == set(level.axes)
  assert {grid.names[i] for i in grid.lacking(level)} == set(axes) - set(level.axes)
  assert math.prod(grid.shape[i] for i in grid.lacking(level)) == grid.paths_through(level)


def test_the_special_cases_are_configs():
  grid = Grid({'a': 4, 'b': 3, 'replica': 2})
  counts = {
    axes: (grid.num_modules(level), grid.paths_through(level))
    for axes in ((), ('a',), ('a', 'b'), grid.names)
    for level in [Level('x', '.*', axes)]
  }
  assert counts == {(): (1, 24), ('a',): (4, 6), ('a', 'b'): (12, 2), grid.names: (24, 1)}
  dense = Grid()
  assert (dense.num_paths, dense.coordinates(0), dense.path(())) == (1, (), 0)
  assert list(dense.points()) == [()] and repr(dense) == 'single'
  assert repr(grid) == 'a4xb3xreplica2'


@pytest.mark.parametrize('axes', [{'a': 0}, {'a': -1}, {'a b': 2}, {'': 2}, {'1': 2}, {'data': 2}])
def test_bad_axes_are_rejected(axes):
  with pytest.raises(ValueError, match='grid axis'):
    Grid(axes)


@pytest.mark.parametrize('sizes', [(2, 2), (4,), ('a',), ({'a': 2}, {'b': 2})])
def test_sizes_without_names_are_rejected(sizes):
  with pytest.raises(ValueError, match=r'name the axes, as in Grid\(a=2, b=4\)'):
    Grid(*sizes)


@pytest.mark.parametrize('size', ['2', 2.0, None])
def test_a_size_is_an_integer(size):
  with pytest.raises(ValueError, match=r"grid axis 'a' has size .*; it should be an integer"):
    Grid(a=size)


@given(AXES)
def test_paths_and_coordinates_outside_the_grid_are_rejected(axes):
  grid = Grid(axes)
  for index in (-1, grid.num_paths):
    with pytest.raises(ValueError, match='is not in the grid'):
      grid.coordinates(index)
  for i, size in enumerate(grid.shape):
    for c in (-1, size):
      with pytest.raises(ValueError, match='outside the grid'):
        grid.path((*(0,) * i, c, *(0,) * (len(grid.shape) - i - 1)))
  with pytest.raises(ValueError):
    grid.path((0,) * (len(grid.shape) + 1))


def test_a_path_is_found_by_number_name_and_coordinates():
  named = Grid(owner=('clinic', 'court', 'press'), topic=2)
  assert named != Grid(owner=3, topic=2) and named == Grid({'topic': 2, 'owner': ['clinic', 'court', 'press']})
  assert [named.path_name(path) for path in range(3)] == ['clinic,0', 'clinic,1', 'court,0']
  for path in range(named.num_paths):
    forms = path, str(path), named.path_name(path), named.coordinates(path)
    assert [named.find(form) for form in forms] == [path] * 4
  assert Grid(a=2, b=2).path_name(3) == '3' and Grid(a=2, b=2).find('1,0') == 2


@pytest.mark.parametrize('path', ['bank', 'court', 'court,2', '6', 6, -1, '-1', '', (1,), ('court', 'clinic'), '1,1,1'])
def test_a_path_that_is_not_in_the_grid_is_not_found(path):
  message = 'the paths are 0 to 5, of a grid of 3 x 2; owner is one of clinic, court, press'
  with pytest.raises(ValueError, match=message):
    Grid(owner=('clinic', 'court', 'press'), topic=2).find(path)


@pytest.mark.parametrize('names', [('a', 'A'), ('1',), (), ('a b',), ('a/b',), ('',), ('x' * 61,), (1, 2)])
def test_bad_names_of_coordinates_are_rejected(names):
  with pytest.raises(ValueError, match="grid axis 'owner' has"):
    Grid(owner=names)


def test_levels_take_the_grids_order_of_axes():
  grid = Grid({'a': 2, 'b': 3})
  levels = grids.make_levels(grid, [('one', 'x', ['b', 'a']), ('two', 'y', ())])
  assert levels == (Level('one', 'x', ('a', 'b')), Level('two', 'y', ()))


@pytest.mark.parametrize(
  'spec, message',
  [
    (('x', '.*', ('c',)), r"level 'x' varies over \['c'\], but the grid has \['a'\]; mend config.levels"),
    (('x', 'a', ('block_0',)), r"varies over \['block_0'\], .*; swap its pattern and its axes in config.levels"),
    (('x', '(', ()), r"level 'x': pattern '\(' is no regular expression"),
    (('taken', '.*', ()), r"level name 'taken': .* each name once"),
    (('a/b', '.*', ()), "level name 'a/b': use letters"),
    (('', '.*', ()), "level name ''"),
    (('Taken', '.*', ()), "level name 'Taken': .* each name once"),  # files' names may not differ by case
    (('x' * 61, '.*', ()), 'use letters, digits and _, 60 at most'),  # nor have more than 255 bytes
  ],
)
def test_bad_levels_are_rejected(spec, message):
  with pytest.raises(ValueError, match=message):
    grids.make_levels(Grid({'a': 2}), [('taken', 'y', ()), spec])


PARAMETERS = ['embed/tokens', 'block_0/w', 'block_1/w', 'block_10/w']


def levels_of(*patterns: str) -> list[Level]:
  return [Level(f'level_{i}', pattern, ()) for i, pattern in enumerate(patterns)]


def test_every_parameter_is_in_its_level():
  one, two = levels_of('embed|block_1/', 'block_0/|block_10/')
  owner = grids.assign_levels([one, two], PARAMETERS)
  assert owner == {'embed/tokens': one, 'block_1/w': one, 'block_0/w': two, 'block_10/w': two}
  assert list(owner) == sorted(PARAMETERS)


@pytest.mark.parametrize(
  'patterns, message',
  [
    (['block'], "parameter 'embed/tokens' matches no level; add a pattern to config.levels"),
    (['embed|block_1', 'block_0', 'w$'], "parameter 'block_0/w' matches levels 'level_1' and 'level_2'; make the"),
    (['.*', 'head'], "level 'level_1': 'head' matches no parameter; there are .*embed/tokens"),
    ([], 'matches no level'),
  ],
)
def test_parameters_that_fit_no_level_or_two_are_rejected(patterns, message):
  with pytest.raises(ValueError, match=message):
    grids.assign_levels(levels_of(*patterns), PARAMETERS)


@given(st.lists(st.sampled_from(PARAMETERS), unique=True, min_size=1), st.lists(st.sampled_from('ebt01w'), max_size=4))
def test_assignment_succeeds_exactly_when_it_is_a_partition(names, patterns):
  levels = levels_of(*patterns)
  matches = {name: [level for level in levels if level.pattern in name] for name in names}
  partition = all(len(found) == 1 for found in matches.values())
  every_level_used = {level.name for found in matches.values() for level in found} == {level.name for level in levels}
  if partition and every_level_used:
    assert grids.assign_levels(levels, names) == {name: found[0] for name, found in matches.items()}
  else:
    with pytest.raises(ValueError):
      grids.assign_levels(levels, names)
