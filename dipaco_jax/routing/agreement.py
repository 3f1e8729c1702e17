"""Measures of how far labels, clusters and routers agree. Pure."""

import numpy as np

from dipaco_jax.routing import path_labels


def normalized_mutual_information(table_KL: np.ndarray) -> float:
  """Returns I(K; L) / mean(H(K), H(L)) of two labelings from their contingency table; 0 if one is constant."""
  joint = np.asarray(table_KL, np.float64) / max(1, np.sum(table_KL))
  rows, columns = joint.sum(1), joint.sum(0)

  def entropy(p):
    return -float(np.sum(p * np.log(np.where(p > 0, p, 1))))

  mean = (entropy(rows) + entropy(columns)) / 2
  return (entropy(rows) + entropy(columns) - entropy(joint)) / mean if mean else 0.0


def agreement(labels_N: np.ndarray, exact_N: np.ndarray) -> float:
  """Returns the fraction of documents whose label is the exact one."""
  return float(np.mean(labels_N == exact_N))


def regret(scores_NP: np.ndarray, labels_N: np.ndarray) -> float:
  """Returns the mean of max_p s(d, p) - s(d, label) in nats, over the documents that have a label."""
  known_N = labels_N != path_labels.NONE
  scores_NP, labels_N = path_labels.comparable(np.asarray(scores_NP, np.float64))[known_N], labels_N[known_N]
  return float(np.mean(scores_NP.max(axis=1) - np.take_along_axis(scores_NP, labels_N[:, None], 1)[:, 0]))
