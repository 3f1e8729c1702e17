"""Measures of agreement: against scikit-learn, and by hand."""

import numpy as np
import pytest
from sklearn import metrics

from dipaco_jax.routing import agreement, path_labels


@pytest.mark.parametrize('noise', [0, 0.3, 1])
def test_mutual_information_is_that_of_sklearn(noise):
  rng = np.random.default_rng(0)
  one_N = rng.integers(0, 4, 200)
  other_N = np.where(rng.random(200) < noise, rng.integers(0, 3, 200), one_N % 3)
  table_KL = metrics.cluster.contingency_matrix(one_N, other_N)
  expected = metrics.normalized_mutual_info_score(one_N, other_N)
  assert agreement.normalized_mutual_information(table_KL) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize('table', [[[3, 4]], [[5]], [[0, 0], [0, 0]]])
def test_constant_labels_share_no_information(table):
  assert agreement.normalized_mutual_information(np.array(table)) == pytest.approx(0, abs=1e-12)


def test_regret_is_what_labels_lose_against_the_best_paths():
  scores_NP = np.array([[-5.0, -3, -4], [-1, -9, -2]])
  assert agreement.regret(scores_NP, np.array([2, 0])) == 0.5
  assert agreement.regret(scores_NP, np.array([path_labels.NONE, 2])) == 1
  assert agreement.agreement(np.array([2, 0]), path_labels.exact(scores_NP).paths) == 0.5
