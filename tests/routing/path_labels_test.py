"""Labels of documents, and their mutual information, against scikit-learn."""

import numpy as np
import pytest
from label_scores import BAD, NUM, diverged
from sklearn import metrics

from dipaco_jax.routing import path_labels


def test_exact_takes_the_lower_of_equals():
  assert path_labels.exact(np.array([[1, 3, 3], [2, 2, 1], [0, 0, 0], [1, 2, 3.5]])).paths.tolist() == [1, 0, 0, 2]


@pytest.mark.parametrize('bad', BAD)
def test_a_path_that_has_diverged_is_no_label(bad):
  """The others' labels are those of a grid without it; one document has no finite score."""
  gone = 6
  scores_NP, expected_N = diverged(gone, bad)
  found = path_labels.exact(scores_NP)
  np.testing.assert_array_equal(found.paths, expected_N)
  assert (found.failed[gone], found.failed.sum(), found.scored) == (NUM, NUM + 15, scores_NP.size)


@pytest.mark.parametrize('noise', [0, 0.3, 1])
def test_mutual_information_is_that_of_sklearn(noise):
  rng = np.random.default_rng(0)
  one_N = rng.integers(0, 4, 200)
  other_N = np.where(rng.random(200) < noise, rng.integers(0, 3, 200), one_N % 3)
  table_KL = metrics.cluster.contingency_matrix(one_N, other_N)
  expected = metrics.normalized_mutual_info_score(one_N, other_N)
  assert path_labels.normalized_mutual_information(table_KL) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize('table', [[[3, 4]], [[5]], [[0, 0], [0, 0]]])
def test_constant_labels_share_no_information(table):
  assert path_labels.normalized_mutual_information(np.array(table)) == pytest.approx(0, abs=1e-12)
