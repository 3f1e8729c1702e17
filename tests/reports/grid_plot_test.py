"""The drawn grid."""

import pytest

from dipaco_jax.algorithm import grid as grids
from dipaco_jax.reports import grid_plot


@pytest.mark.parametrize('axes', [(), ('a',), ('b',), ('a', 'b'), ('a', 'c')])
def test_patches_of_the_drawn_grid_are_the_modules(axes):
  grid = grids.Grid({'a': 2, 'b': 3, 'c': 4})
  level = grids.Level('x', '', axes)
  index = grid_plot.modules_of_paths(grid, level)
  assert index.shape == (2, 12)
  modules = list(grid.modules(level))
  assert [modules[i] for i in index.ravel()] == [grid.module(level, c) for c in grid.points()]
