"""The router: k-means against scikit-learn and against plain numpy, scores and routes, the hashed control."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import cluster

from dipaco_jax import router, settings

pytestmark = pytest.mark.usefixtures('strict_dtypes')


def blobs(num_points: int, width: int, num_blobs: int, spread: float, seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  centres = rng.normal(size=(num_blobs, width))
  return (centres[rng.integers(num_blobs, size=num_points)] + spread * rng.normal(size=(num_points, width))).astype('f')


def hidden_like(num_points: int, width: int, seed: int = 0) -> np.ndarray:
  """Unequal overlapping clusters, a decaying spectrum, heavy tails."""
  rng = np.random.default_rng(seed)
  centres = rng.normal(size=(40, width))
  label = rng.choice(40, size=num_points, p=rng.dirichlet(np.full(40, 0.5)))
  spectrum = np.arange(1, width + 1) ** -0.5
  return ((centres[label] + rng.standard_t(5, size=(num_points, width))) * spectrum).astype('f')


def squared_distances(z_ND, centroids_KD) -> np.ndarray:
  z_ND, centroids_KD = (np.asarray(x, np.float64) for x in (z_ND, centroids_KD))
  return np.stack([((z_ND - c_D) ** 2).sum(1) for c_D in centroids_KD], 1)


ODD = (router.ROWS + 1, 24)  # one more point than are looked at together


@pytest.mark.parametrize(
  'z_ND', [blobs(*ODD, 12, 0.1), blobs(*ODD, 20, 1.0), hidden_like(*ODD)], ids=['apart', 'overlapping', 'hidden-like']
)
def test_inertia_is_that_of_sklearn(z_ND):
  ours = squared_distances(z_ND, router.kmeans(jax.random.key(0), z_ND, 12, 50, 5)).min(1).sum()
  theirs = cluster.KMeans(12, n_init=5, max_iter=50, random_state=0).fit(z_ND).inertia_
  assert ours < 1.01 * theirs


def test_lloyd_from_the_same_centroids_is_that_of_sklearn():
  z_ND = hidden_like(router.ROWS + 1000, 32)
  start_KD = z_ND[:10]
  theirs = cluster.KMeans(10, init=start_KD, n_init=1, max_iter=4, tol=0, algorithm='lloyd').fit(z_ND)
  ours_KD = router.lloyd(z_ND, start_KD, 4)
  # Sums of up to 5,000 values in float32, in another order.
  np.testing.assert_allclose(ours_KD, theirs.cluster_centers_, atol=1e-4)
  fitted = router.Router(np.zeros(32, 'f'), np.ones(32, 'f'), ours_KD, np.zeros(10, 'f'))
  assert (np.asarray(router.route(fitted, z_ND))[:, 0] == theirs.predict(z_ND)).mean() > 0.999


def test_lloyd_stops_where_nothing_moves():
  z_ND = blobs(500, 4, 3, 0.05)
  settled_KD = router.lloyd(z_ND, z_ND[:3], 200)
  np.testing.assert_array_equal(router.lloyd(z_ND, settled_KD, 1), settled_KD)


def test_inertia_by_hand():
  z_ND, centroids_KD = blobs(router.ROWS + 7, 8, 4, 0.5), blobs(6, 8, 6, 0.1, seed=1)
  by_hand = squared_distances(z_ND, centroids_KD).min(1).sum()
  assert float(router.inertia(z_ND, centroids_KD)) == pytest.approx(by_hand, rel=1e-5)


def test_an_empty_cluster_goes_to_the_farthest_point():
  z_ND = np.array([[0, 0], [0, 1], [1, 0], [9, 9], [-8, 0]], 'f')
  start_KD = np.array([[0, 0], [100, 100], [200, 200]], 'f')
  moved_KD = router.lloyd(z_ND, start_KD, 1)
  np.testing.assert_array_equal(moved_KD[1:], [[9, 9], [-8, 0]])


def test_no_cluster_is_left_empty():
  z_ND = blobs(40, 3, 5, 0.3)
  for first in range(0, 20, 5):
    centroids_KD = router.lloyd(z_ND, np.repeat(z_ND[first : first + 5], 4, axis=0), 50)
    assert len(set(squared_distances(z_ND, centroids_KD).argmin(1))) == 20


def test_draws_are_in_proportion_to_weights():
  weight_N = np.array([0, 1, 2, 0, 5, 0], 'f')
  drawn = np.asarray(router.draw(jax.random.key(0), weight_N, 8000))
  share_N = np.bincount(drawn, minlength=6) / 8000
  assert share_N[[0, 3, 5]].sum() == 0
  # 4 standard deviations of a binomial share: 4 sqrt(p (1 - p) / 8000) is at most 0.023.
  np.testing.assert_allclose(share_N, weight_N / 8, atol=0.023)


def test_seeding_finds_blobs_that_are_far_apart():
  z_ND = blobs(600, 8, 12, 0.01)
  for key in range(10):
    seeds_KD = np.asarray(router.seed(jax.random.key(key), z_ND, 12))
    assert squared_distances(z_ND, seeds_KD).min(1).max() < 0.1  # one seed in each: others are 4 or more away
    assert all((seed_D == z_ND).all(1).any() for seed_D in seeds_KD)


def test_seeding_is_as_good_as_that_of_sklearn():
  z_ND = hidden_like(200, 8)
  ours = [squared_distances(z_ND, router.seed(jax.random.key(i), z_ND, 9)).min(1).sum() for i in range(60)]
  theirs = [
    squared_distances(z_ND, cluster.kmeans_plusplus(z_ND, 9, random_state=i)[0]).min(1).sum() for i in range(60)
  ]
  # 3 standard errors of the difference of two means of 60.
  assert abs(np.mean(ours) - np.mean(theirs)) < 3 * np.sqrt((np.var(ours) + np.var(theirs)) / 60)


def test_best_restart_wins():
  z_ND = hidden_like(200, 8)
  keys = jax.random.split(jax.random.key(3), 4)
  alone = [router.inertia(z_ND, router.lloyd(z_ND, router.seed(key, z_ND, 9), 30)) for key in keys]
  best = router.inertia(z_ND, router.kmeans(jax.random.key(3), z_ND, 9, 30, 4))
  assert min(alone) < max(alone)
  assert float(best) == pytest.approx(float(min(alone)), rel=1e-5)


def test_one_compilation_for_given_shapes():
  z_ND = blobs(300, 5, 4, 0.3)
  before = router.kmeans._cache_size()
  for key in range(3):
    router.kmeans(jax.random.key(key), z_ND + key, 4, 10, 2)
  assert router.kmeans._cache_size() == before + 1


def fit(z_ND, shape=(2, 3), key=0) -> router.Router:
  return router.fit('kmeans', jax.random.key(key), z_ND, shape, settings.Routing())


def test_same_key_same_bits():
  z_ND = hidden_like(200, 8)
  for one, two in zip(fit(z_ND), fit(z_ND), strict=True):
    np.testing.assert_array_equal(one, two)
  assert (np.asarray(fit(z_ND).centroids) != np.asarray(fit(z_ND, key=1).centroids)).any()


def test_scores_are_negative_squared_distances_of_standardized_features():
  z_ND = hidden_like(200, 8) * 3 + 7
  fitted = fit(z_ND)
  x_ND = (z_ND - z_ND.mean(0)) / z_ND.std(0)
  expected_NP = -squared_distances(x_ND, fitted.centroids)
  np.testing.assert_allclose(router.scores(fitted, z_ND), expected_NP, rtol=1e-4, atol=1e-3)
  by_bias = router.scores(fitted._replace(bias=np.arange(6, dtype='f')), z_ND)
  np.testing.assert_allclose(by_bias, expected_NP + np.arange(6), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize('num', [1, 7, router.ROWS + 3])
def test_routes_are_the_best_scores_in_order(num):
  z_ND = hidden_like(num, 8)
  fitted = fit(hidden_like(200, 8, seed=1))
  paths_N3 = np.asarray(router.route(fitted, z_ND, 3))
  assert paths_N3.shape == (num, 3) and paths_N3.dtype == np.int32
  scores_N3 = np.take_along_axis(np.asarray(router.scores(fitted, z_ND)), paths_N3, 1)
  best_N3 = -np.sort(-np.asarray(router.scores(fitted, z_ND)), 1)[:, :3]
  np.testing.assert_allclose(scores_N3, best_N3, rtol=1e-4, atol=1e-4)


def test_a_dominant_or_constant_dimension_does_not_decide():
  z_ND, noise_N = blobs(200, 6, 6, 0.05), np.random.default_rng(1).normal(size=200)
  expected_N = squared_distances(z_ND, z_ND[[0]])[:, 0] < 1  # in the blob of the first
  massive_ND = np.concatenate([z_ND, 1000 * noise_N[:, None], np.full((200, 1), 1e4)], 1).astype('f')
  paths_N = np.asarray(router.route(fit(massive_ND), massive_ND))[:, 0]
  np.testing.assert_array_equal(paths_N == paths_N[0], expected_N)


def test_a_router_is_its_arrays():
  fitted = fit(hidden_like(200, 8))
  assert {name: x.shape for name, x in fitted._asdict().items()} == {
    'mean': (8,), 'scale': (8,), 'centroids': (6, 8), 'bias': (6,)
  }  # fmt: skip


def test_a_logistic_classifier_has_the_same_shape():
  rng = np.random.default_rng(0)
  w_PD, b_P, z_ND = (rng.normal(size=s).astype('f') for s in ((5, 7), 5, (50, 7)))
  as_router = router.Router(np.zeros(7, 'f'), np.ones(7, 'f'), w_PD / 2, b_P + ((w_PD / 2) ** 2).sum(1))
  np.testing.assert_array_equal(router.route(as_router, z_ND)[:, 0], (z_ND @ w_PD.T + b_P).argmax(1))


def test_fewer_sequences_than_paths():
  with pytest.raises(ValueError, match=r'5 sequences .* fewer than the 6 paths of config\.grid'):
    fit(hidden_like(5, 4))


def test_features_that_are_not_finite():
  z_ND = hidden_like(50, 4)
  z_ND[7, 2] = np.nan
  with pytest.raises(ValueError, match='not finite'):
    fit(z_ND)


@given(st.integers(1, 9), st.data())
def test_random_paths_differ_and_depend_on_the_id_alone(num_paths, data):
  top_n = data.draw(st.integers(1, num_paths))
  ids = data.draw(st.lists(st.text(), max_size=20))
  paths = router.random_assignment(3, ids, num_paths, top_n)
  assert paths.shape == (len(ids), top_n) and paths.dtype == np.int32
  assert all(len(set(row)) == top_n and min(row) >= 0 and max(row) < num_paths for row in paths.tolist())
  np.testing.assert_array_equal(router.random_assignment(3, ids[::-1], num_paths, top_n), paths[::-1])


def test_random_paths_are_uniform():
  paths = router.random_assignment(0, map(str, range(12_000)), 4, 2)
  counts = np.zeros((4, 4))
  np.add.at(counts, tuple(paths.T), 1)
  # Each of the 12 ordered pairs is expected 1,000 times, give or take 4 sqrt(1000).
  assert (np.diag(counts) == 0).all()
  np.testing.assert_allclose(counts[~np.eye(4, dtype=bool)], 1000, atol=127)
  assert (router.random_assignment(1, map(str, range(100)), 4, 2) != paths[:100]).any()


def test_random_paths_are_the_same_in_every_version():
  assert router.random_assignment(0, 'abcd', 256, 2).tolist() == [[140, 207], [135, 148], [242, 121], [115, 26]]
