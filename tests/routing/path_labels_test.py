"""Labels from a part of the scores, against all of them."""

import itertools
import math

import numpy as np
import pytest

from dipaco_jax.routing import agreement, path_labels

GRIDS = [(4, 4), (8, 8), (16, 16)]
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


def ascend(scores_P, start, shape, sweeps) -> tuple[int, int]:
  """One document's coordinate ascent, path by path: (label, number of paths scored)."""
  known, best = {}, list(np.unravel_index(start, shape))
  for _ in range(sweeps):
    before = list(best)
    for axis, size in enumerate(shape):
      for c in range(size):
        at = (*best[:axis], c, *best[axis + 1 :])
        known[at] = scores_P[np.ravel_multi_index(at, shape)]
      best[axis] = max(range(size), key=lambda c: known[*best[:axis], c, *best[axis + 1 :]])
    if best == before:
      break
  return int(np.ravel_multi_index(best, shape)), len(known)


def starts(shape, num: int = NUM) -> np.ndarray:
  return np.random.default_rng(1).integers(0, math.prod(shape), num)


def test_exact_takes_the_lower_of_equals():
  assert path_labels.exact(np.array([[1, 3, 3], [2, 2, 1], [0, 0, 0], [1, 2, 3.5]])).paths.tolist() == [1, 0, 0, 2]


@pytest.mark.parametrize('sweeps', [1, 2, 10])
@pytest.mark.parametrize('noise', [0, 4, 40])
@pytest.mark.parametrize('shape', [(4, 4), (3, 5), (6,), (2, 3, 4)], ids=str)
def test_coordinate_ascent_by_hand(shape, noise, sweeps):
  scores_NP, start_N = np.round(drawn(shape, noise, 40)), starts(shape, 40)  # rounded, so that some are equal
  table = Table(scores_NP)
  found = path_labels.coordinate_ascent(table, start_N, shape, sweeps)
  by_hand = [ascend(scores_P, start, shape, sweeps) for scores_P, start in zip(scores_NP, start_N, strict=True)]
  assert found.paths.tolist() == [label for label, _ in by_hand]
  assert found.scored == table.asked.sum() == sum(num for _, num in by_hand)


@pytest.mark.parametrize('shape', [*GRIDS, (2, 3, 4)], ids=str)
def test_without_interaction_both_are_exact(shape):
  scores_NP, start_N = drawn(shape, 0), starts(shape)
  exact_N, cost = path_labels.exact(scores_NP).paths, 1 + sum(size - 1 for size in shape)
  for found in (
    path_labels.coordinate_ascent(Table(scores_NP), start_N, shape, 1),
    path_labels.additive(Table(scores_NP), path_labels.cross(start_N, shape), shape),
  ):
    assert found.scored == NUM * cost
    np.testing.assert_array_equal(found.paths, exact_N)
    assert agreement.agreement(found.paths, exact_N) == 1 and agreement.regret(scores_NP, found.paths) == 0


@pytest.mark.parametrize('shape', GRIDS, ids=str)
def test_with_interaction_most_labels_are_exact_at_a_part_of_the_cost(shape):
  """Terms of 10 nats, noise of 3. Ascent that settles beats one sweep, which beats the fit to as many scores."""
  scores_NP, start_N = drawn(shape, 3), starts(shape)
  exact_N = path_labels.exact(scores_NP).paths
  settled, swept = (path_labels.coordinate_ascent(Table(scores_NP), start_N, shape, sweeps) for sweeps in (10, 1))
  fitted = path_labels.additive(Table(scores_NP), path_labels.cross(start_N, shape), shape)
  found = (settled, swept, fitted)
  regrets = [agreement.regret(scores_NP, x.paths) for x in found]
  agreements = [agreement.agreement(x.paths, exact_N) for x in found]
  print(shape, [x.scored / NUM for x in found], agreements, regrets)
  assert swept.scored == fitted.scored == NUM * (1 + sum(size - 1 for size in shape))
  assert swept.scored < settled.scored < 2 * swept.scored
  assert agreements[0] > 0.9 and agreements == sorted(agreements, reverse=True)
  assert regrets[0] < 0.3 and regrets == sorted(regrets)


@pytest.mark.parametrize('shape', [(4, 4), (2, 3, 4)], ids=str)
def test_additive_is_the_least_squares_fit(shape):
  """Of the paths that were scored; against one equation per path and document, solved by itself."""
  scores_NP = drawn(shape, 4, 20)
  rng = np.random.default_rng(2)
  paths_NM = np.stack([rng.permutation(math.prod(shape))[:9] for _ in range(20)])
  points = list(itertools.product(*map(range, shape)))
  terms = np.array(
    [[1.0, *(float(c == k) for c, size in zip(point, shape, strict=True) for k in range(size))] for point in points]
  )
  expected = []
  for scores_P, paths_M in zip(scores_NP, paths_NM, strict=True):
    fit, *_ = np.linalg.lstsq(terms[paths_M], scores_P[paths_M], rcond=1e-9)
    expected.append(int((terms @ fit).argmax()))
  found = path_labels.additive(Table(scores_NP), paths_NM, shape)
  assert found.paths.tolist() == expected and found.scored == 20 * 9


def test_a_cross_is_all_paths_but_for_one_coordinate():
  for shape in ((4, 4), (3, 5, 2), (7,)):
    start_N = np.arange(math.prod(shape))
    for start, paths_M in zip(start_N, path_labels.cross(start_N, shape), strict=True):
      at = np.array(np.unravel_index(start, shape))
      near = [p for p in start_N if (np.array(np.unravel_index(p, shape)) != at).sum() <= 1]
      assert paths_M[0] == start and sorted(paths_M) == near


def test_groups_of_documents_have_the_same_labels(monkeypatch):
  scores_NP, start_N = drawn((4, 4), 5), starts((4, 4))
  whole = path_labels.additive(Table(scores_NP), path_labels.cross(start_N, (4, 4)), (4, 4))
  monkeypatch.setattr(path_labels, 'FIT_DOCUMENTS', 7)
  found = path_labels.additive(Table(scores_NP), path_labels.cross(start_N, (4, 4)), (4, 4))
  np.testing.assert_array_equal(found.paths, whole.paths)


BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize('bad', BAD)
def test_a_path_that_has_diverged_is_no_label(bad):
  """The others' labels are those of a grid without it; one document has no finite score."""
  shape, gone = (4, 4), 6
  scores_NP = drawn(shape, 0)
  without_NP = scores_NP.copy()
  without_NP[:, gone] = -np.inf
  expected_N = without_NP.argmax(1)
  assert 0 < (scores_NP.argmax(1) == gone).sum() < NUM
  scores_NP[:, gone], scores_NP[7] = bad, bad
  expected_N[7] = path_labels.NONE

  found = path_labels.exact(scores_NP)
  np.testing.assert_array_equal(found.paths, expected_N)
  assert (found.failed[gone], found.failed.sum(), found.scored) == (NUM, NUM + 15, scores_NP.size)
  assert np.isfinite(agreement.regret(scores_NP, found.paths))

  every_NP = np.tile(np.arange(16), (NUM, 1))
  for ways in (
    path_labels.coordinate_ascent(Table(scores_NP), np.full(NUM, gone), shape, 10),
    path_labels.additive(Table(scores_NP), every_NP, shape),
  ):
    assert gone not in ways.paths and ways.failed[gone] == NUM
    assert (ways.paths == path_labels.NONE).nonzero()[0].tolist() == [7]
    # Where the best path of all is gone, ascent may end at one that no change of one coordinate makes better.
    assert (ways.paths == expected_N).mean() > 0.95


def test_ascent_leaves_a_line_of_which_no_score_is_finite():
  scores_NP = np.array([[np.nan, np.nan, 1.0, 3.0], [np.nan, np.nan, np.nan, 2.0], [np.nan] * 4])
  found = path_labels.coordinate_ascent(Table(scores_NP), np.zeros(3, int), (2, 2), 8)
  assert found.paths.tolist() == [3, path_labels.NONE, path_labels.NONE]  # of the second, (0, 0)'s cross has none
  assert found.failed.tolist() == [3, 3, 2, 0]
