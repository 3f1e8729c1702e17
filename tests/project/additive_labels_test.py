"""The experiments' additive labels, against exact ones and by hand."""

import itertools
import math
import sys

import numpy as np
import pytest
import repository
from label_scores import BAD, NUM, Table, diverged, drawn, starts

from dipaco_jax.routing import path_labels

sys.path.insert(0, str(repository.ROOT / 'experiments'))

import additive_labels
import coordinate_labels

GRIDS = [(4, 4), (8, 8), (16, 16)]


@pytest.mark.parametrize('shape', [*GRIDS, (2, 3, 4)], ids=str)
def test_without_interaction_the_fit_is_exact(shape):
  scores_NP, start_N = drawn(shape, 0), starts(shape)
  exact_N, cost = path_labels.exact(scores_NP).paths, 1 + sum(size - 1 for size in shape)
  found = additive_labels.additive(Table(scores_NP), additive_labels.cross(start_N, shape), shape)
  assert found.scored == NUM * cost
  np.testing.assert_array_equal(found.paths, exact_N)
  assert additive_labels.agreement(found.paths, exact_N) == 1 and additive_labels.regret(scores_NP, found.paths) == 0


@pytest.mark.parametrize('shape', GRIDS, ids=str)
def test_with_interaction_most_labels_are_exact_at_a_part_of_the_cost(shape):
  """Terms of 10 nats, noise of 3. Ascent that settles beats one sweep, which beats the fit to as many scores."""
  scores_NP, start_N = drawn(shape, 3), starts(shape)
  exact_N = path_labels.exact(scores_NP).paths
  settled, swept = (coordinate_labels.coordinate_ascent(Table(scores_NP), start_N, shape, sweeps) for sweeps in (10, 1))
  fitted = additive_labels.additive(Table(scores_NP), additive_labels.cross(start_N, shape), shape)
  found = (settled, swept, fitted)
  regrets = [additive_labels.regret(scores_NP, x.paths) for x in found]
  agreements = [additive_labels.agreement(x.paths, exact_N) for x in found]
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
  found = additive_labels.additive(Table(scores_NP), paths_NM, shape)
  assert found.paths.tolist() == expected and found.scored == 20 * 9


def test_a_cross_is_all_paths_but_for_one_coordinate():
  for shape in ((4, 4), (3, 5, 2), (7,)):
    start_N = np.arange(math.prod(shape))
    for start, paths_M in zip(start_N, additive_labels.cross(start_N, shape), strict=True):
      at = np.array(np.unravel_index(start, shape))
      near = [p for p in start_N if (np.array(np.unravel_index(p, shape)) != at).sum() <= 1]
      assert paths_M[0] == start and sorted(paths_M) == near


def test_groups_of_documents_have_the_same_labels(monkeypatch):
  scores_NP, start_N = drawn((4, 4), 5), starts((4, 4))
  whole = additive_labels.additive(Table(scores_NP), additive_labels.cross(start_N, (4, 4)), (4, 4))
  monkeypatch.setattr(path_labels, 'BLOCK', 7)
  found = additive_labels.additive(Table(scores_NP), additive_labels.cross(start_N, (4, 4)), (4, 4))
  np.testing.assert_array_equal(found.paths, whole.paths)


@pytest.mark.parametrize('bad', BAD)
def test_a_path_that_has_diverged_is_no_label(bad):
  """The others' labels are those of a grid without it; one document has no finite score."""
  shape, gone = (4, 4), 6
  scores_NP, expected_N = diverged(gone, bad)
  assert np.isfinite(additive_labels.regret(scores_NP, path_labels.exact(scores_NP).paths))
  found = additive_labels.additive(Table(scores_NP), np.tile(np.arange(16), (NUM, 1)), shape)
  assert gone not in found.paths and found.failed[gone] == NUM
  assert (found.paths == path_labels.NONE).nonzero()[0].tolist() == [7]
  assert (found.paths == expected_N).mean() > 0.95


def test_regret_is_what_labels_lose_against_the_best_paths():
  scores_NP = np.array([[-5.0, -3, -4], [-1, -9, -2]])
  assert additive_labels.regret(scores_NP, np.array([2, 0])) == 0.5
  assert additive_labels.regret(scores_NP, np.array([path_labels.NONE, 2])) == 1
  assert additive_labels.agreement(np.array([2, 0]), path_labels.exact(scores_NP).paths) == 0.5
