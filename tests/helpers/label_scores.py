"""Scores of documents under paths, to make labels from."""

import math

import numpy as np

from dipaco_jax.routing import path_labels

NUM = 300
BAD = [np.nan, np.inf, -np.inf]


def drawn(shape, noise: float, num: int = NUM, seed: int = 0) -> np.ndarray:
  """[N, P] scores in nats: a document's level, a normal term per axis and coordinate, and noise for every path."""
  rng = np.random.default_rng(seed)
  total = rng.normal(-3000, 300, (num, *(1,) * len(shape)))
  for axis, size in enumerate(shape):
    term = rng.normal(0, 10, (num, size))
    total = total + term.reshape(num, *(size if i == axis else 1 for i in range(len(shape))))
  return (total + rng.normal(0, noise, (num, *shape))).reshape(num, -1)


class Table:
  """Scores that say which they were asked for, and refuse to be asked twice."""

  def __init__(self, scores_NP: np.ndarray):
    self.scores, self.asked = scores_NP, np.zeros(scores_NP.shape, int)

  def __call__(self, documents, paths):
    np.add.at(self.asked, (documents, paths), 1)
    assert self.asked.max() == 1
    return self.scores[documents, paths]


def starts(shape, num: int = NUM) -> np.ndarray:
  return np.random.default_rng(1).integers(0, math.prod(shape), num)


def diverged(gone: int, bad: float) -> tuple[np.ndarray, np.ndarray]:
  """Scores [N, P] of a 4x4 grid, bad for a path and all of document 7, and the labels of a grid without that path."""
  scores_NP = drawn((4, 4), 0)
  without_NP = scores_NP.copy()
  without_NP[:, gone] = -np.inf
  expected_N = without_NP.argmax(1)
  assert 0 < (scores_NP.argmax(1) == gone).sum() < NUM
  scores_NP[:, gone], scores_NP[7] = bad, bad
  expected_N[7] = path_labels.NONE
  return scores_NP, expected_N
