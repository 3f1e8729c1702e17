"""The experiments' labels by coordinate ascent, against exact ones and path by path."""

import sys

import numpy as np
import pytest
import repository
from label_scores import BAD, NUM, Table, diverged, drawn, starts

from dipaco_jax.routing import path_labels

sys.path.insert(0, str(repository.ROOT / 'experiments'))

import coordinate_labels


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


@pytest.mark.parametrize('sweeps', [1, 2, 10])
@pytest.mark.parametrize('noise', [0, 4, 40])
@pytest.mark.parametrize('shape', [(4, 4), (3, 5), (6,), (2, 3, 4)], ids=str)
def test_coordinate_ascent_by_hand(shape, noise, sweeps):
  scores_NP, start_N = np.round(drawn(shape, noise, 40)), starts(shape, 40)  # rounded, so that some are equal
  table = Table(scores_NP)
  found = coordinate_labels.coordinate_ascent(table, start_N, shape, sweeps)
  by_hand = [ascend(scores_P, start, shape, sweeps) for scores_P, start in zip(scores_NP, start_N, strict=True)]
  assert found.paths.tolist() == [label for label, _ in by_hand]
  assert found.scored == table.asked.sum() == sum(num for _, num in by_hand)


@pytest.mark.parametrize('shape', [(4, 4), (2, 3, 4)], ids=str)
def test_without_interaction_one_sweep_is_exact(shape):
  scores_NP, start_N = drawn(shape, 0), starts(shape)
  found = coordinate_labels.coordinate_ascent(Table(scores_NP), start_N, shape, 1)
  assert found.scored == NUM * (1 + sum(size - 1 for size in shape))
  np.testing.assert_array_equal(found.paths, path_labels.exact(scores_NP).paths)


@pytest.mark.parametrize('bad', BAD)
def test_a_path_that_has_diverged_is_no_label(bad):
  """The others' labels are nearly those of a grid without it; one document has no finite score."""
  shape, gone = (4, 4), 6
  scores_NP, expected_N = diverged(gone, bad)
  found = coordinate_labels.coordinate_ascent(Table(scores_NP), np.full(NUM, gone), shape, 10)
  assert gone not in found.paths and found.failed[gone] == NUM
  assert (found.paths == path_labels.NONE).nonzero()[0].tolist() == [7]
  # Where the best path of all is gone, ascent may end at one that no change of one coordinate makes better.
  assert (found.paths == expected_N).mean() > 0.95


def test_ascent_leaves_a_line_of_which_no_score_is_finite():
  scores_NP = np.array([[np.nan, np.nan, 1.0, 3.0], [np.nan, np.nan, np.nan, 2.0], [np.nan] * 4])
  found = coordinate_labels.coordinate_ascent(Table(scores_NP), np.zeros(3, int), (2, 2), 8)
  assert found.paths.tolist() == [3, path_labels.NONE, path_labels.NONE]  # of the second, (0, 0)'s cross has none
  assert found.failed.tolist() == [3, 3, 2, 0]
