"""Arrangement of clusters of text on the grid, so that paths that share modules read similar text. Pure.

This is not in the paper: k-means [2.4.1] numbers its clusters arbitrarily, while a path's number decides with which
paths it shares modules. With D_cd the squared distance between centroids c and d, and M_ij the number of axes on which
places i and j of the grid have the same coordinate (the number of modules that their paths share, where each level
varies over one axis),

    cost(pi) = sum_{i < j} M_ij D_{pi(i) pi(j)}

is least if paths that share modules read similar text. This is a quadratic assignment problem. Local search swaps the
two clusters that lower the cost the most until no swap does, from the given order and from random ones.
"""

from collections.abc import Sequence

import numpy as np

MAX_PATHS = 2048  # with more paths M and D would not fit in memory, and the order stays
STARTS = 8


def shared_axes(shape: Sequence[int]) -> np.ndarray:
  """Returns M [P, P]: the number of axes of size above 1 on which two paths have the same coordinate; diagonal 0."""
  paths_AP = np.indices(shape).reshape(len(shape), -1)[[size > 1 for size in shape]]
  shared = (paths_AP[:, :, None] == paths_AP[:, None, :]).sum(0)
  np.fill_diagonal(shared, 0)
  return shared


def distances(centroids_PX: np.ndarray) -> np.ndarray:
  """Returns D [P, P], the squared distances between centroids."""
  squares = (centroids_PX**2).sum(1)
  return np.maximum(squares[:, None] + squares[None] - 2 * centroids_PX @ centroids_PX.T, 0)


def cost(shared: np.ndarray, apart: np.ndarray, order: np.ndarray) -> float:
  """Returns cost(pi), with cluster order[i] in place i."""
  return float((shared * apart[np.ix_(order, order)]).sum() / 2)


def descend(shared: np.ndarray, apart: np.ndarray, order: np.ndarray) -> np.ndarray:
  """Swaps the pair of clusters that lowers the cost the most, until no swap does."""
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
  """Returns the cluster of every place, a permutation [P]; the given order if fewer than two axes have several modules.

  `seed` draws the random orders; with `unlike` the highest cost is sought instead of the lowest, for comparison.
  """
  num_paths, several = len(centroids_PX), sum(size > 1 for size in shape)
  if several < 2 or num_paths > MAX_PATHS:
    return np.arange(num_paths)
  shared, apart = shared_axes(shape).astype(float), distances(np.asarray(centroids_PX, float))
  apart = -apart if unlike else apart
  rng = np.random.default_rng([seed, num_paths])
  starts = [np.arange(num_paths), *(rng.permutation(num_paths) for _ in range(STARTS))]
  return min((descend(shared, apart, start) for start in starts), key=lambda order: cost(shared, apart, order))
