"""Scores of documents under paths, to make labels from."""

import math

import numpy as np

NUM = 300


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
