"""Labels of the discriminative router [2.4.2]. Pure.

The label of a document is its best path, argmax_p s(d, p), with s = sum_j log p(token j | before) in nats.

Documents are independent, so that a caller may pass them in groups to save memory, which is N P scores. A score
that is not finite, as of a path that has diverged, is below all others; a document without a finite score has the label
NONE.

Dimensions: N documents, P paths.
"""

from typing import NamedTuple

import numpy as np

BLOCK = 1024  # documents that are compared at one time
NONE = -1


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
    labels_N[rows] = best(comparable(scores_NP[rows]))
    failed_P += (~np.isfinite(scores_NP[rows])).sum(axis=0)
  return Labels(labels_N, scores_NP.size, failed_P)


def comparable(scores: np.ndarray) -> np.ndarray:
  """Replaces scores that are not finite by -inf."""
  return np.where(np.isfinite(scores), scores, -np.inf)


def best(scores_NP: np.ndarray) -> np.ndarray:
  """Returns the path of each document's highest score, NONE if all are -inf."""
  return np.where(scores_NP.max(axis=1) > -np.inf, scores_NP.argmax(axis=1), NONE)


def normalized_mutual_information(table_KL: np.ndarray) -> float:
  """Returns I(K; L) / mean(H(K), H(L)) of two labelings from their contingency table; 0 if one is constant."""
  joint = np.asarray(table_KL, np.float64) / max(1, np.sum(table_KL))
  rows, columns = joint.sum(1), joint.sum(0)

  def entropy(p: np.ndarray) -> float:
    return -float(np.sum(p * np.log(np.where(p > 0, p, 1))))

  mean = (entropy(rows) + entropy(columns)) / 2
  return (entropy(rows) + entropy(columns) - entropy(joint)) / mean if mean else 0.0
