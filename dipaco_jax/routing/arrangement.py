"""Which cluster of text takes which place in the grid [2.3, 2.4.1]. Pure.

k-means numbers its clusters as they come, and a path's number is its place: paths of near numbers share modules,
whatever they read. With D_cd the squared distance between centroids c and d, and M_ij on how many axes the places i and
j have the same coordinate, which is how many modules their paths share where a level varies over one axis,

    cost(pi) = sum_{i < j} M_ij D_{pi(i) pi(j)}

is least where paths that meet in a module read what is alike. That is a quadratic assignment: we swap the two clusters
that lower the cost the most until none do, from the given order and from random ones, and keep the best.
"""

from collections.abc import Sequence

import numpy as np

MOST = 2048  # paths; above, M and D would not fit, and the order stays
STARTS = 8


def meetings(shape: Sequence[int]) -> np.ndarray:
  """M [P, P]: on how many axes of more than one module two places agree; 0 for a place with itself."""
  places = np.indices(shape).reshape(len(shape), -1)[[size > 1 for size in shape]]
  shared = (places[:, :, None] == places[:, None, :]).sum(0)
  np.fill_diagonal(shared, 0)
  return shared


def distances(centroids_PX: np.ndarray) -> np.ndarray:
  """D [P, P], squared."""
  squares = (centroids_PX**2).sum(1)
  return np.maximum(squares[:, None] + squares[None] - 2 * centroids_PX @ centroids_PX.T, 0)


def cost(shared: np.ndarray, apart: np.ndarray, order: np.ndarray) -> float:
  """cost(pi) of cluster order[i] in place i."""
  return float((shared * apart[np.ix_(order, order)]).sum() / 2)


def descend(shared: np.ndarray, apart: np.ndarray, order: np.ndarray) -> np.ndarray:
  """Swaps pairs of clusters, the one that lowers the cost the most at a time, until no swap does."""
  order = order.copy()
  least = 1e-9 * (1 + abs(cost(shared, apart, order)))
  while True:
    here = apart[np.ix_(order, order)]
    A = shared @ here
    change = A + A.T - np.diag(A)[:, None] - np.diag(A)[None] + 2 * shared * here
    i, j = np.unravel_index(change.argmin(), change.shape)
    if change[i, j] > -least:
      return order
    order[[i, j]] = order[[j, i]]


def arrange(centroids_PX: np.ndarray, shape: Sequence[int], seed: int, unlike: bool = False) -> np.ndarray:
  """The cluster of every place, a permutation [P]; as they come where no two paths share one module of several.

  Args:
    centroids_PX: of the clusters.
    shape: sizes of the grid's axes, whose product is P.
    seed: of the random orders.
    unlike: the highest cost instead of the lowest, for comparisons.
  """
  num_paths, several = len(centroids_PX), sum(size > 1 for size in shape)
  if several < 2 or num_paths > MOST:
    return np.arange(num_paths)
  shared, apart = meetings(shape).astype(float), distances(np.asarray(centroids_PX, float))
  apart = -apart if unlike else apart
  rng = np.random.default_rng([seed, num_paths])
  starts = [np.arange(num_paths), *(rng.permutation(num_paths) for _ in range(STARTS))]
  return min((descend(shared, apart, start) for start in starts), key=lambda order: cost(shared, apart, order))
