"""k-means against scikit-learn and against plain numpy."""

import jax
import numpy as np
import pytest
from points import blobs, hidden_like, squared_distances
from sklearn import cluster

from dipaco_jax.routing import kmeans

pytestmark = pytest.mark.usefixtures('strict_dtypes')

ODD = (kmeans.ROWS + 1, 24)  # one more point than are looked at together


@pytest.mark.parametrize(
  'z_ND', [blobs(*ODD, 12, 0.1), blobs(*ODD, 20, 1.0), hidden_like(*ODD)], ids=['apart', 'overlapping', 'hidden-like']
)
def test_inertia_is_that_of_sklearn(z_ND):
  ours = squared_distances(z_ND, kmeans.fit(jax.random.key(0), z_ND, 12, 50, 5)).min(1).sum()
  theirs = cluster.KMeans(12, n_init=5, max_iter=50, random_state=0).fit(z_ND).inertia_
  assert ours < 1.01 * theirs


def test_lloyd_from_the_same_centroids_is_that_of_sklearn():
  z_ND = hidden_like(kmeans.ROWS + 1000, 32)
  start_KD = z_ND[:10]
  theirs = cluster.KMeans(10, init=start_KD, n_init=1, max_iter=4, tol=0, algorithm='lloyd').fit(z_ND)
  ours_KD = kmeans.lloyd(z_ND, start_KD, 4)
  # Sums of up to 5,000 values in float32, in another order.
  np.testing.assert_allclose(ours_KD, theirs.cluster_centers_, atol=1e-4)


def test_lloyd_stops_where_nothing_moves():
  z_ND = blobs(500, 4, 3, 0.05)
  settled_KD = kmeans.lloyd(z_ND, z_ND[:3], 200)
  np.testing.assert_array_equal(kmeans.lloyd(z_ND, settled_KD, 1), settled_KD)


def test_inertia_is_the_sum_of_squares_to_the_nearest_centroid():
  z_ND, centroids_KD = blobs(kmeans.ROWS + 7, 8, 4, 0.5), blobs(6, 8, 6, 0.1, seed=1)
  by_hand = squared_distances(z_ND, centroids_KD).min(1).sum()
  assert float(kmeans.inertia(z_ND, centroids_KD)) == pytest.approx(by_hand, rel=1e-5)


def test_an_empty_cluster_goes_to_the_farthest_point():
  z_ND = np.array([[0, 0], [0, 1], [1, 0], [9, 9], [-8, 0]], 'f')
  start_KD = np.array([[0, 0], [100, 100], [200, 200]], 'f')
  moved_KD = kmeans.lloyd(z_ND, start_KD, 1)
  np.testing.assert_array_equal(moved_KD[1:], [[9, 9], [-8, 0]])


def test_no_cluster_is_left_empty():
  z_ND = blobs(40, 3, 5, 0.3)
  for first in range(0, 20, 5):
    centroids_KD = kmeans.lloyd(z_ND, np.repeat(z_ND[first : first + 5], 4, axis=0), 50)
    assert len(set(squared_distances(z_ND, centroids_KD).argmin(1))) == 20


def test_draws_are_in_proportion_to_weights():
  weight_N = np.array([0, 1, 2, 0, 5, 0], 'f')
  drawn = np.asarray(kmeans.draw(jax.random.key(0), weight_N, 8000))
  share_N = np.bincount(drawn, minlength=6) / 8000
  assert share_N[[0, 3, 5]].sum() == 0
  # 4 standard deviations of a binomial share: 4 sqrt(p (1 - p) / 8000) is at most 0.023.
  np.testing.assert_allclose(share_N, weight_N / 8, atol=0.023)


def test_seeding_finds_blobs_that_are_far_apart():
  z_ND = blobs(600, 8, 12, 0.01)
  for key in range(10):
    seeds_KD = np.asarray(kmeans.initial_centroids(jax.random.key(key), z_ND, 12))
    assert squared_distances(z_ND, seeds_KD).min(1).max() < 0.1  # one seed in each: others are 4 or more away
    assert all((seed_D == z_ND).all(1).any() for seed_D in seeds_KD)


def test_seeding_is_as_good_as_that_of_sklearn():
  z_ND = hidden_like(200, 8)
  ours = [squared_distances(z_ND, kmeans.initial_centroids(jax.random.key(i), z_ND, 9)).min(1).sum() for i in range(60)]
  theirs = [
    squared_distances(z_ND, cluster.kmeans_plusplus(z_ND, 9, random_state=i)[0]).min(1).sum() for i in range(60)
  ]
  # 3 standard errors of the difference of two means of 60.
  assert abs(np.mean(ours) - np.mean(theirs)) < 3 * np.sqrt((np.var(ours) + np.var(theirs)) / 60)


def test_best_restart_wins():
  z_ND = hidden_like(200, 8)
  keys = jax.random.split(jax.random.key(3), 4)
  alone = [kmeans.inertia(z_ND, kmeans.lloyd(z_ND, kmeans.initial_centroids(key, z_ND, 9), 30)) for key in keys]
  best = kmeans.inertia(z_ND, kmeans.fit(jax.random.key(3), z_ND, 9, 30, 4))
  assert min(alone) < max(alone)
  assert float(best) == pytest.approx(float(min(alone)), rel=1e-5)


def test_one_compilation_for_given_shapes():
  z_ND = blobs(300, 5, 4, 0.3)
  before = kmeans.fit._cache_size()
  for key in range(3):
    kmeans.fit(jax.random.key(key), z_ND + key, 4, 10, 2)
  assert kmeans.fit._cache_size() == before + 1
