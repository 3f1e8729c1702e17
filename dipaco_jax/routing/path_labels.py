"""Labels of the discriminative router [2.4.2]: exact, or with fewer scores, which the paper leaves open [6]. Pure.

The label of a document is its best path, argmax_p s(d, p), with s = sum_j log p(token j | before) in nats. Exact labels
need all P scores. The paths of a grid share modules, so that s is nearly a sum of one term per axis, and a label can be
found from about sum_a K_a of the prod_a K_a scores, which is not in the paper:

    coordinate_ascent   the best of the K_a paths along each axis in turn, the other coordinates fixed
    additive            argmax_p m_d + sum_a u_{d, a, p_a}, fitted by least squares to the paths that were scored

Both are exact if no axis' term depends on another's coordinate. Documents are independent, so that a caller may pass
them in groups to save memory, which is that of N P scores. No score is requested twice. A score that is not finite, as
of a path that has diverged, is below all others; a document without a finite score has the label NONE.

Dimensions: N documents, P paths, A axes, K size of an axis, M paths scored, F = 1 + sum_a K_a terms of a path.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

FIT_DOCUMENTS = 1024  # documents whose fits are in memory at one time
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
  for start in range(0, len(labels_N), FIT_DOCUMENTS):
    rows = slice(start, start + FIT_DOCUMENTS)
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

  Args:
    score: called once per axis and sweep, with the new pairs of all documents.
    start_N: paths to start from, for instance those of the generative router.
    grid_shape: sizes of the grid's axes; paths are in row-major order.
    sweeps: at most so many over all axes; stops when nothing changes.
  """
  coordinates_AN = np.stack(np.unravel_index(start_N, grid_shape))
  known_NP = np.full((len(start_N), math.prod(grid_shape)), np.nan)
  for _ in range(sweeps):
    before_AN = coordinates_AN.copy()
    for axis, size in enumerate(grid_shape):
      paths_NK = _line(coordinates_AN, axis, np.tile(np.arange(size), (len(start_N), 1)), grid_shape)
      _ask(score, known_NP, paths_NK)
      best_N = _best(np.take_along_axis(known_NP, paths_NK, 1))
      coordinates_AN[axis] = np.where(best_N == NONE, coordinates_AN[axis], best_N)  # another axis may lead further
    if (coordinates_AN == before_AN).all():
      break
  paths_N = np.ravel_multi_index(tuple(coordinates_AN), grid_shape)
  found_N = np.take_along_axis(known_NP, paths_N[:, None], 1)[:, 0] > -np.inf
  return _labels(np.where(found_N, paths_N, NONE), known_NP)


def cross(start_N: np.ndarray, grid_shape: Sequence[int]) -> np.ndarray:
  """Returns the start path and those that differ from it in one coordinate: [N, M], M = 1 + sum_a (K_a - 1)."""
  coordinates_AN = np.stack(np.unravel_index(start_N, grid_shape))
  arms = (
    _line(coordinates_AN, axis, (coordinates_AN[axis][:, None] + np.arange(1, size)) % size, grid_shape)
    for axis, size in enumerate(grid_shape)
  )
  return np.concatenate([np.asarray(start_N)[:, None], *arms], axis=1)


def additive(score: Score, paths_NM: np.ndarray, grid_shape: Sequence[int]) -> Labels:
  """Returns the path with the highest fitted sum, whether it was scored or not; ties go to the lower.

  The fit is the least-squares solution of minimum norm: a coordinate that no scored path has gets the term 0. A path
  whose score is not finite is neither in the fit nor the label.

  Args:
    score: called once, for all pairs.
    paths_NM: paths to score for each document, for instance `cross` and further ones drawn at random.
    grid_shape: sizes of the grid's axes; paths are in row-major order.
  """
  terms_PF = _terms(grid_shape)
  known_NP = np.full((len(paths_NM), len(terms_PF)), np.nan)
  _ask(score, known_NP, paths_NM)
  scores_NM = np.take_along_axis(known_NP, paths_NM, 1)
  found_NM = scores_NM > -np.inf
  labels_N = np.zeros(len(paths_NM), np.int64)
  for start in range(0, len(labels_N), FIT_DOCUMENTS):
    rows = slice(start, start + FIT_DOCUMENTS)
    # The matrix is of zeros and ones: singular values that should be 0 are 0 up to rounding.
    terms_BMF = terms_PF[paths_NM[rows]] * found_NM[rows][:, :, None]
    scores_BM = np.where(found_NM[rows], scores_NM[rows], 0)
    fit_BF1 = np.linalg.pinv(terms_BMF, rcond=1e-9) @ scores_BM[:, :, None]
    sums_BP = np.where(np.isneginf(known_NP[rows]), -np.inf, fit_BF1[:, :, 0] @ terms_PF.T)
    labels_N[rows] = np.where(found_NM[rows].any(axis=1), sums_BP.argmax(axis=1), NONE)
  return _labels(labels_N, known_NP)


def _line(coordinates_AN: np.ndarray, axis: int, values_NK: np.ndarray, grid_shape: Sequence[int]) -> np.ndarray:
  """Returns the paths that have the given values of one coordinate, [N, K]."""
  line_ANK = np.repeat(coordinates_AN[:, :, None], values_NK.shape[1], axis=2)
  line_ANK[axis] = values_NK
  return np.ravel_multi_index(tuple(line_ANK), grid_shape)


def _ask(score: Score, known_NP: np.ndarray, paths_NM: np.ndarray):
  """Fills in the scores of these paths that are still unknown (NaN)."""
  wanted_NP = np.zeros(known_NP.shape, bool)
  np.put_along_axis(wanted_NP, paths_NM, True, axis=1)
  documents, paths = np.nonzero(wanted_NP & np.isnan(known_NP))
  if len(documents):
    known_NP[documents, paths] = comparable(score(documents, paths))


def _labels(paths_N: np.ndarray, known_NP: np.ndarray) -> Labels:
  """Makes Labels from scores: NaN for pairs that were not scored, -inf for scores that are not finite."""
  return Labels(paths_N, int(np.count_nonzero(~np.isnan(known_NP))), np.isneginf(known_NP).sum(axis=0))


def _terms(grid_shape: Sequence[int]) -> np.ndarray:
  """Returns the design matrix [P, F], of zeros and ones; its first column is that of m_d."""
  coordinates_AP = np.unravel_index(np.arange(math.prod(grid_shape)), grid_shape)
  one_hot = [c_P[:, None] == np.arange(size) for c_P, size in zip(coordinates_AP, grid_shape, strict=True)]
  return np.concatenate([np.ones((len(coordinates_AP[0]), 1)), *one_hot], axis=1)
