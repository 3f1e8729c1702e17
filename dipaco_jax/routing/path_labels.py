"""Labels of the discriminative router [2.4.2]: exact, or with fewer scores, which the paper leaves open [6]. Pure.

The label of a document is its best path, argmax_p s(d, p), with s = sum_j log p(token j | before) in nats. Exact labels
need all P scores. The paths of a grid share modules, so that s is nearly a sum of one term per axis, and coordinate
ascent finds a label from about sum_a K_a of the prod_a K_a scores, which is not in the paper: the best of the K_a paths
along each axis in turn, the other coordinates fixed. It is exact if no axis' term depends on another's coordinate.

Documents are independent, so that a caller may pass them in groups to save memory, which is that of N P scores. No
score is requested twice. A score that is not finite, as of a path that has diverged, is below all others; a document
without a finite score has the label NONE.

Dimensions: N documents, P paths, A axes, K size of an axis, M paths to score.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

BLOCK = 1024  # documents that are compared at one time
NONE = -1

# (documents [M], paths [M]) -> s [M] in nats, higher is better
Score = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Labels(NamedTuple):
  """Labels, and the scores that they needed."""

  paths: np.ndarray  # [N] int64
  scored: int  # number of pairs of a document and a path
  failed: np.ndarray  # [P] int64: number of those pairs whose scores are not finite


def exact(scores_NP: np.ndarray) -> Labels:
  """Returns the best path of each document, ties to the lower."""
  labels_N, failed_P = np.empty(len(scores_NP), np.int64), np.zeros(scores_NP.shape[1], np.int64)
  for start in range(0, len(labels_N), BLOCK):
    rows = slice(start, start + BLOCK)
    labels_N[rows] = _best(comparable(scores_NP[rows]))
    failed_P += (~np.isfinite(scores_NP[rows])).sum(axis=0)
  return Labels(labels_N, scores_NP.size, failed_P)


def comparable(scores: np.ndarray) -> np.ndarray:
  """Replaces scores that are not finite by -inf."""
  return np.where(np.isfinite(scores), scores, -np.inf)


def _best(scores_NP: np.ndarray) -> np.ndarray:
  """Returns the path of each document's highest score, NONE if all are -inf."""
  return np.where(scores_NP.max(axis=1) > -np.inf, scores_NP.argmax(axis=1), NONE)


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
      best_N = _best(np.take_along_axis(known_NP, paths_NK, 1))
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


def normalized_mutual_information(table_KL: np.ndarray) -> float:
  """Returns I(K; L) / mean(H(K), H(L)) of two labelings from their contingency table; 0 if one is constant."""
  joint = np.asarray(table_KL, np.float64) / max(1, np.sum(table_KL))
  rows, columns = joint.sum(1), joint.sum(0)

  def entropy(p: np.ndarray) -> float:
    return -float(np.sum(p * np.log(np.where(p > 0, p, 1))))

  mean = (entropy(rows) + entropy(columns)) / 2
  return (entropy(rows) + entropy(columns) - entropy(joint)) / mean if mean else 0.0
