"""A cap on weights: the closed form is the loop of the reference, for owners and for paths."""

import numpy as np
import pytest

from dipaco_jax.algorithm import reference, weight_cap
from dipaco_jax.algorithm.grid import Grid, Level

GRIDS = {
  'paths': (Grid(a=3, b=4), ('a',)),
  'paths of one module': (Grid(a=3, b=4), ()),
  'owners': (Grid(a=3, owner=tuple('wxyz')), ('a',)),
  'owners of one module': (Grid(a=3, owner=tuple('wxyz')), ()),
  'modules of one owner': (Grid(a=3, owner=tuple('wxyz')), ('owner',)),
}


@pytest.mark.parametrize('name', GRIDS)
@pytest.mark.parametrize('most', [0.2, 0.3, 0.5, 0.9])
def test_is_the_loop_of_the_reference(name, most):
  grid, axes = GRIDS[name]
  level = Level('all', '.*', axes)
  for seed in range(20):
    rng = np.random.default_rng(seed)
    weights = rng.exponential(1, grid.shape) ** 2 * (rng.random(grid.shape) < 0.8)
    capped = weight_cap.cap_weights(grid, level, weights, most)
    assert ((capped > 0) == (weights > 0)).all()
    for module in grid.modules(level):
      paths = [i for i in range(grid.num_paths) if reference.module_of(grid, level, i)[1] == module]
      shares = {i: w for i in paths if (w := weights.reshape(-1)[i])}
      if not shares:
        continue
      expected = reference.cap_shares(shares, {i: reference.owner_of(grid, i) for i in shares}, most)
      actual = {i: capped.reshape(-1)[i] for i in shares}
      total = sum(actual.values())
      np.testing.assert_allclose([actual[i] / total for i in shares], [expected[i] for i in shares], rtol=1e-9)
      sums = {}
      for i in shares:
        owner = reference.owner_of(grid, i)
        sums[owner] = sums.get(owner, 0) + actual[i] / total
      assert max(sums.values()) <= max(most, 1 / len(sums)) + 1e-9


def test_without_a_cap_weights_are_the_same_array():
  weights = np.array([[1.0, 5.0]])
  level = Level('all', '.*', ())
  assert weight_cap.cap_weights(Grid(a=1, b=2), level, weights, 1.0) is weights
  assert weight_cap.by_level(Grid(a=1, b=2), [level], weights, 1.0) is weights
