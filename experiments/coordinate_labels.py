"""Labels from fewer scores than all paths', which the paper leaves open [6], by coordinate ascent. Pure.

Exact labels (routing/path_labels.py) need all P scores of a document. The paths of a grid share modules, so that a
score s is nearly a sum of one term per axis, and coordinate ascent finds a label from about sum_a K_a of the prod_a K_a
scores, which is not in the paper: the best of the K_a paths along each axis in turn, the other coordinates fixed. It is
exact if no axis' term depends on another's coordinate. No score is requested twice.

Dimensions: N documents, P paths, A axes, K size of an axis, M paths to score.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from dipaco_jax.routing.path_labels import NONE, Labels, best, comparable

# (documents [M], paths [M]) -> s [M] in nats, higher is better
Score = Callable[[np.ndarray, np.ndarray], np.ndarray]


def coordinate_ascent(score: Score, start_N: np.ndarray, grid_shape: Sequence[int], sweeps: int) -> Labels:
  """Improves one coordinate of the path at a time, in turn over the axes; ties go to the lower coordinate.

  The first sweep needs 1 + sum_a (K_a - 1) scores of a document, later ones those on the lines that it has moved to.
  `score` is called once per axis and sweep, with the new pairs of all documents; it stops when nothing changes, or
  after so many `sweeps`. It starts from the paths `start_N`, for instance those of the generative router.
  """
  coordinates_AN = np.stack(np.unravel_index(start_N, grid_shape))
  known_NP = np.full((len(start_N), math.prod(grid_shape)), np.nan)
  for _ in range(sweeps):
    before_AN = coordinates_AN.copy()
    for axis, size in enumerate(grid_shape):
      paths_NK = line(coordinates_AN, axis, np.tile(np.arange(size), (len(start_N), 1)), grid_shape)
      ask(score, known_NP, paths_NK)
      best_N = best(np.take_along_axis(known_NP, paths_NK, 1))
      coordinates_AN[axis] = np.where(best_N == NONE, coordinates_AN[axis], best_N)  # another axis may lead further
    if (coordinates_AN == before_AN).all():
      break
  paths_N = np.ravel_multi_index(tuple(coordinates_AN), grid_shape)
  found_N = np.take_along_axis(known_NP, paths_N[:, None], 1)[:, 0] > -np.inf
  return as_labels(np.where(found_N, paths_N, NONE), known_NP)


def line(coordinates_AN: np.ndarray, axis: int, values_NK: np.ndarray, grid_shape: Sequence[int]) -> np.ndarray:
  """Returns the paths that have the given values of one coordinate, [N, K]."""
  line_ANK = np.repeat(coordinates_AN[:, :, None], values_NK.shape[1], axis=2)
  line_ANK[axis] = values_NK
  return np.ravel_multi_index(tuple(line_ANK), grid_shape)


def ask(score: Score, known_NP: np.ndarray, paths_NM: np.ndarray) -> None:
  """Fills in the scores of these paths that are still unknown (NaN)."""
  wanted_NP = np.zeros(known_NP.shape, bool)
  np.put_along_axis(wanted_NP, paths_NM, True, axis=1)
  documents, paths = np.nonzero(wanted_NP & np.isnan(known_NP))
  if len(documents):
    known_NP[documents, paths] = comparable(score(documents, paths))


def as_labels(paths_N: np.ndarray, known_NP: np.ndarray) -> Labels:
  """Makes Labels from scores: NaN for pairs that were not scored, -inf for scores that are not finite."""
  return Labels(paths_N, int(np.count_nonzero(~np.isnan(known_NP))), np.isneginf(known_NP).sum(axis=0))
