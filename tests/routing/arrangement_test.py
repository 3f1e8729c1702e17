"""Clusters on the grid, against all orders where there are few, and against clusters whose best places are known."""

import itertools

import numpy as np
import pytest

from dipaco_jax.routing import arrangement


@pytest.mark.parametrize('shape', [(2, 2), (2, 3), (1, 2, 3), (2, 2, 2)])
@pytest.mark.parametrize('unlike', [False, True])
def test_no_order_is_better(shape, unlike):
  centroids = np.random.default_rng(len(shape)).normal(size=(np.prod(shape), 5))
  shared = np.array(
    [
      [sum(x == y and n > 1 for x, y, n in zip(a, b, shape, strict=True)) * (a != b) for b in np.ndindex(shape)]
      for a in np.ndindex(shape)
    ]
  )
  apart = ((centroids[:, None] - centroids[None]) ** 2).sum(-1)
  orders = itertools.permutations(range(len(centroids))) if len(centroids) < 8 else []
  costs = [arrangement.cost(shared, apart, np.array(order)) for order in orders]
  found = arrangement.arrange(centroids, shape, 0, unlike)
  assert sorted(found) == list(range(len(centroids)))
  mine, as_they_come = (arrangement.cost(shared, apart, order) for order in (found, np.arange(len(centroids))))
  assert (mine > as_they_come) if unlike else (mine < as_they_come)
  if costs:
    assert mine == pytest.approx((max if unlike else min)(costs))


def test_clusters_of_a_lattice_find_their_rows_and_columns():
  lattice = np.stack(np.meshgrid(np.arange(4) * 3.0, np.arange(4) * 1.0, indexing='ij'), -1).reshape(16, 2)
  mixed = np.random.default_rng(1).permutation(16)
  found = lattice[mixed][arrangement.arrange(lattice[mixed], (4, 4), 0)].reshape(4, 4, 2)
  shared, apart = arrangement.shared_axes((4, 4)), arrangement.distances(found.reshape(16, 2))
  best = arrangement.cost(shared, arrangement.distances(lattice), np.arange(16))
  assert arrangement.cost(shared, apart, np.arange(16)) <= best * 1.0001


def test_there_is_nothing_to_arrange_where_no_two_paths_meet_in_one_module_of_several():
  centroids = np.random.default_rng(0).normal(size=(6, 3))
  for shape in ((6,), (1, 6)):
    assert arrangement.arrange(centroids, shape, 0).tolist() == list(range(6))
