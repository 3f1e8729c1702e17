"""Labels from an additive fit to a part of the scores, and how far labels are from the exact ones.

    label_d = argmax_p m_d + sum_a u_{d, a, p_a}        fitted by least squares to the paths that were scored

Dimensions as in routing/path_labels.py; F = 1 + sum_a K_a terms of a path.
"""

import math
from collections.abc import Sequence

import coordinate_labels
import numpy as np

from dipaco_jax.routing import path_labels


def cross(start_N: np.ndarray, grid_shape: Sequence[int]) -> np.ndarray:
  """Returns the start path and those that differ from it in one coordinate: [N, M], M = 1 + sum_a (K_a - 1)."""
  coordinates_AN = np.stack(np.unravel_index(start_N, grid_shape))
  arms = (
    coordinate_labels.line(
      coordinates_AN, axis, (coordinates_AN[axis][:, None] + np.arange(1, size)) % size, grid_shape
    )
    for axis, size in enumerate(grid_shape)
  )
  return np.concatenate([np.asarray(start_N)[:, None], *arms], axis=1)


def additive(score: coordinate_labels.Score, paths_NM: np.ndarray, grid_shape: Sequence[int]) -> path_labels.Labels:
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
  coordinate_labels.ask(score, known_NP, paths_NM)
  scores_NM = np.take_along_axis(known_NP, paths_NM, 1)
  found_NM = scores_NM > -np.inf
  labels_N = np.zeros(len(paths_NM), np.int64)
  for start in range(0, len(labels_N), path_labels.BLOCK):
    rows = slice(start, start + path_labels.BLOCK)
    # The matrix is of zeros and ones: singular values that should be 0 are 0 up to rounding.
    terms_BMF = terms_PF[paths_NM[rows]] * found_NM[rows][:, :, None]
    scores_BM = np.where(found_NM[rows], scores_NM[rows], 0)
    fit_BF1 = np.linalg.pinv(terms_BMF, rcond=1e-9) @ scores_BM[:, :, None]
    sums_BP = np.where(np.isneginf(known_NP[rows]), -np.inf, fit_BF1[:, :, 0] @ terms_PF.T)
    labels_N[rows] = np.where(found_NM[rows].any(axis=1), sums_BP.argmax(axis=1), path_labels.NONE)
  return coordinate_labels.as_labels(labels_N, known_NP)


def _terms(grid_shape: Sequence[int]) -> np.ndarray:
  """Returns the design matrix [P, F], of zeros and ones; its first column is that of m_d."""
  coordinates_AP = np.unravel_index(np.arange(math.prod(grid_shape)), grid_shape)
  one_hot = [c_P[:, None] == np.arange(size) for c_P, size in zip(coordinates_AP, grid_shape, strict=True)]
  return np.concatenate([np.ones((len(coordinates_AP[0]), 1)), *one_hot], axis=1)


def agreement(labels_N: np.ndarray, exact_N: np.ndarray) -> float:
  """Returns the fraction of documents whose label is the exact one."""
  return float(np.mean(labels_N == exact_N))


def regret(scores_NP: np.ndarray, labels_N: np.ndarray) -> float:
  """Returns the mean of max_p s(d, p) - s(d, label) in nats, over the documents that have a label."""
  known_N = labels_N != path_labels.NONE
  scores_NP, labels_N = path_labels.comparable(np.asarray(scores_NP, np.float64))[known_N], labels_N[known_N]
  return float(np.mean(scores_NP.max(axis=1) - np.take_along_axis(scores_NP, labels_N[:, None], 1)[:, 0]))
