"""The router: scores and routes, product k-means against scikit-learn, the hashed control."""

import jax
import numpy as np
import pytest
import slow
from hypothesis import given, strategies as st
from points import blobs, hidden_like, squared_distances
from safetensors import numpy as safetensors
from sklearn import cluster

from dipaco_jax.config import settings
from dipaco_jax.routing import kmeans, router

pytestmark = pytest.mark.usefixtures('strict_dtypes')


def fit(z_ND, shape=(2, 3), key=0, **changes) -> router.Router:
  return router.fit('kmeans', jax.random.key(key), z_ND, shape, settings.Routing(**changes))


def test_equal_keys_give_equal_bits():
  z_ND = hidden_like(200, 8)
  for one, two in zip(fit(z_ND), fit(z_ND), strict=True):
    np.testing.assert_array_equal(one, two)
  assert (np.asarray(fit(z_ND).centroids) != np.asarray(fit(z_ND, key=1).centroids)).any()


def test_scores_are_negative_squared_distances_but_for_what_all_paths_share():
  z_ND = hidden_like(200, 8) * 3 + 7
  fitted = fit(z_ND)
  x_ND = (z_ND - z_ND.mean(0)) / z_ND.std(0)
  expected_NP = (x_ND**2).sum(1)[:, None] - squared_distances(x_ND, fitted.centroids)
  np.testing.assert_allclose(router.scores(fitted, z_ND), expected_NP, rtol=1e-4, atol=1e-3)
  by_bias = router.scores(fitted._replace(bias=np.arange(6, dtype='f')), z_ND)
  np.testing.assert_allclose(by_bias, expected_NP + np.arange(6), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize('num', [1, 7, kmeans.ROWS + 3])
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


def random_mlp(width: int, hidden: int, num_paths: int) -> router.Router:
  rng = np.random.default_rng(0)
  shapes = ((width,), (width,), (width, hidden), (hidden,), (num_paths, hidden or width), (num_paths,))
  arrays = router.Router(*(rng.normal(size=shape).astype('f') for shape in shapes))
  return arrays._replace(scale=np.exp(arrays.scale))


@pytest.mark.parametrize('hidden', [0, 5])
def test_a_router_is_its_arrays(hidden):
  fitted, z_ND = random_mlp(8, hidden, 6), hidden_like(50, 8)
  arrays = safetensors.load(safetensors.save(fitted._asdict()))
  assert {name: x.shape for name, x in arrays.items()} == {
    'mean': (8,),
    'scale': (8,),
    'hidden': (8, hidden),
    'hidden_bias': (hidden,),
    'centroids': (6, hidden or 8),
    'bias': (6,),
  }
  np.testing.assert_array_equal(router.route(router.Router(**arrays), z_ND), router.route(fitted, z_ND))


def test_a_fitted_router_has_the_shapes_of_every_router():
  fitted = fit(hidden_like(200, 8))
  assert [x.shape for x in fitted] == [x.shape for x in random_mlp(8, 0, 6)]


def test_a_logistic_classifiers_scores_are_its_logits():
  rng = np.random.default_rng(0)
  w_PD, b_P, z_ND = (rng.normal(size=s).astype('f') for s in ((5, 7), 5, (50, 7)))
  as_router = router.linear(np.zeros(7, 'f'), np.ones(7, 'f'), w_PD / 2, b_P + ((w_PD / 2) ** 2).sum(1))
  np.testing.assert_allclose(router.scores(as_router, z_ND), z_ND @ w_PD.T + b_P, atol=1e-5)


def test_scores_behind_a_hidden_layer_are_their_equation():
  fitted, z_ND = random_mlp(8, 5, 6), hidden_like(50, 8)
  u_NH = (z_ND - fitted.mean) / fitted.scale @ fitted.hidden + fitted.hidden_bias
  x_NH = u_NH / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (u_NH + 0.044715 * u_NH**3)))
  expected_NP = (x_NH**2).sum(1)[:, None] - squared_distances(x_NH, fitted.centroids) + fitted.bias
  np.testing.assert_allclose(router.scores(fitted, z_ND), expected_NP, rtol=1e-4, atol=1e-3)


# The grid's shape, the axes of more than one module, and the dimensions of each one's group.
GRIDS = [
  ((6,), (6,), [9]),
  ((4, 3), (4, 3), [5, 4]),
  ((2, 3, 2), (2, 3, 2), [3, 3, 3]),
  ((1, 4, 1, 3), (4, 3), [5, 4]),
  ((1, 1), (1,), [9]),
  ((), (1,), [9]),
]


@pytest.mark.parametrize('shape, sizes, widths', slow.all_but(GRIDS, GRIDS[1]), ids=str)
def test_product_kmeans_is_kmeans_of_each_group(shape, sizes, widths):
  z_ND = hidden_like(600, 9) * 3 + 7
  fitted = router.fit('product_kmeans', jax.random.key(0), z_ND, shape, settings.Routing())
  coordinates = np.unravel_index(np.asarray(router.route(fitted, z_ND))[:, 0], sizes)
  ends = np.cumsum(widths)[:-1]
  groups = np.split((z_ND - z_ND.mean(0)) / z_ND.std(0), ends, axis=1)
  parts = [c.reshape(*sizes, -1) for c in np.split(np.asarray(fitted.centroids), ends, axis=1)]
  for axis, (x_ND, c, k_N) in enumerate(zip(groups, parts, coordinates, strict=True)):
    c_KD = np.moveaxis(c, axis, 0).reshape(sizes[axis], -1, c.shape[-1])[:, 0]
    distance_NK = squared_distances(x_ND, c_KD)
    # The distance to the grid's coordinate is that to the nearest; equal ones may swap.
    np.testing.assert_allclose(distance_NK[np.arange(600), k_N], distance_NK.min(1), atol=1e-4)
    theirs = cluster.KMeans(sizes[axis], n_init=5, random_state=0).fit(x_ND)
    assert distance_NK.min(1).sum() < 1.02 * theirs.inertia_


@pytest.mark.slow
def test_product_kmeans_has_its_own_randomness_in_each_group():
  z_ND = np.tile(hidden_like(60, 4), 2)
  config = settings.Routing(restarts=1, iterations=1)
  centroids = np.asarray(router.fit('product_kmeans', jax.random.key(0), z_ND, (3, 3), config).centroids)
  assert (np.sort(centroids[::4, :4], 0) != np.sort(centroids[::4, 4:], 0)).any()


def test_fewer_sequences_than_paths_are_rejected():
  with pytest.raises(ValueError, match=r'5 sequences .* fewer than the 6 paths of config\.grid'):
    fit(hidden_like(5, 4))


def test_features_that_are_not_finite_are_rejected():
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
