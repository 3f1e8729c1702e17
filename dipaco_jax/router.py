"""The router r(x): which path a sequence takes, from its feature z alone [2.4, 7.2, 7.3]. Pure.

z is the mean over the first 32 tokens of the last block's output of the base model. With x = (z - mean) / scale,

    score_p(z) = -|x - c_p|^2 + bias_p        r(z) = argmax_p score_p(z); the top n where shards overlap [2.4.4]

One shape for every router: k-means is its centroids and no bias; product k-means [7.3] is the centroids that all
pairs of its two halves' centroids make; a logistic classifier x w_p + b_p [7.2.1] is c_p = w_p / 2,
bias_p = b_p + |c_p|^2, up to a term that all paths share. So callers know `scores` and `route`, whatever was fitted.

Features are standardized per dimension: a few dimensions of a language model's hidden state are hundreds of times
larger than the rest (massive activations, arXiv 2402.17762) and would alone decide every distance. The paper is silent.

Dimensions: N sequences, D width, P paths, K clusters, R rows at one time, T trials.
"""

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax import settings

ROWS = 4096  # whose distances exist at one time


class Router(NamedTuple):
  """Self-contained: `router._asdict()` is what a file holds, and `Router(**arrays)` is back."""

  mean: jax.Array  # [D]
  scale: jax.Array  # [D]
  centroids: jax.Array  # [P, D]
  bias: jax.Array  # [P]


def scores(router: Router, z_ND: jax.Array) -> jax.Array:
  """How well each path suits each sequence, higher is better: [N, P] float32."""
  x_ND = (z_ND - router.mean) / router.scale
  return _closeness(x_ND, router.centroids) - jnp.sum(x_ND**2, axis=-1, keepdims=True) + router.bias


@functools.partial(jax.jit, static_argnames='top_n')
def route(router: Router, z_ND: jax.Array, top_n: int = 1) -> jax.Array:
  """The `top_n` best paths of each sequence, best first, ties to the lower index: [N, top_n] int32."""

  def best(z_D):
    return jax.lax.top_k(scores(router, z_D[None])[0], top_n)[1]

  return jax.lax.map(best, z_ND, batch_size=ROWS)


def fit(method: str, key: jax.Array, z_ND: jax.Array, grid_shape: Sequence[int], config: settings.Routing) -> Router:
  """A router fitted on the features of a sample of training sequences.

  Args:
    method: a key of `FITS`; the other methods of the settings look at no feature, see `random_assignment`.
    key: the same key gives the same router.
    z_ND: features, float32.
    grid_shape: sizes of the grid's axes; their product is P.
    config: restarts and iterations of k-means.

  Raises:
    ValueError: there are fewer sequences than paths, or a feature is not finite.
  """
  num_paths = math.prod(grid_shape)
  if len(z_ND) < num_paths:
    raise ValueError(
      f'the router has {len(z_ND)} sequences to be fitted on, fewer than the {num_paths} paths of config.grid: '
      'make config.grid smaller, give more text or raise config.routing.sample'
    )
  if not np.isfinite(z_ND).all():
    raise ValueError('the features of the base model are not finite: did it diverge? lower config.inner.learning_rate')
  return FITS[method](key, jnp.asarray(z_ND, jnp.float32), tuple(grid_shape), config)


def fit_kmeans(key: jax.Array, z_ND: jax.Array, grid_shape: Sequence[int], config: settings.Routing) -> Router:
  """One centroid per path [2.4.1]."""
  num_paths = math.prod(grid_shape)
  mean_D, scale_D = standardization(z_ND)
  x_ND = (z_ND - mean_D) / scale_D
  centroids_PD = kmeans(key, x_ND, num_paths, config.iterations, config.restarts)
  return Router(mean_D, scale_D, centroids_PD, jnp.zeros(num_paths, jnp.float32))


# (key, features [N, D], sizes of the grid's axes, settings) -> Router
FITS = {'kmeans': fit_kmeans}


def standardization(z_ND: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Mean and standard deviation of each dimension; 1 for one that is constant but for rounding."""
  mean_D, std_D = z_ND.mean(axis=0), z_ND.std(axis=0)
  return mean_D, jnp.where(std_D > 1e-6 * jnp.abs(mean_D), std_D, 1.0)


def random_assignment(seed: int, ids: Iterable[str], num_paths: int, top_n: int = 1) -> np.ndarray:
  """The control that looks at no feature: `top_n` different paths per id, uniform, by hash: [N, top_n] int32.

  An id goes to the same paths in every order, subset and process. With one path this is routing.method 'single'.
  """
  ids = list(ids)
  paths = np.empty((len(ids), top_n), np.int64)
  for n in range(top_n):
    # The n-th draw is among the paths not yet drawn: count past those that were, from the lowest.
    paths[:, n] = [_hash(f'{seed}/{n}/{name}') % (num_paths - n) for name in ids]
    for drawn in np.sort(paths[:, :n], axis=1).T:
      paths[:, n] += paths[:, n] >= drawn
  return paths.astype(np.int32)


def _hash(text: str) -> int:
  return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'little')


@functools.partial(jax.jit, static_argnames=('k', 'iterations', 'restarts'))
def kmeans(key: jax.Array, z_ND: jax.Array, k: int, iterations: int, restarts: int) -> jax.Array:
  """Centroids [K, D] of the restart with the lowest inertia, sum_n min_k |z_n - c_k|^2.

  Greedy k-means++ and then Lloyd's iterations until nothing moves. Distances are made `ROWS` at a time: beside z,
  memory is that of [ROWS, K], [T, N] and the centroids.

  Args:
    key: of the seeding.
    z_ND: points, float32, centred or nearly so: distances come from products, and far from 0 they cancel.
    k: number of clusters, at most N.
    iterations: of Lloyd, at most, in each restart.
    restarts: how often to start from a new seeding.
  """

  def once(key):
    centroids_KD = lloyd(z_ND, seed(key, z_ND, k), iterations)
    return centroids_KD, inertia(z_ND, centroids_KD)

  centroids_RKD, inertia_R = jax.lax.map(once, jax.random.split(key, restarts))
  return centroids_RKD[jnp.argmin(inertia_R)]


@jax.jit
def inertia(z_ND: jax.Array, centroids_KD: jax.Array) -> jax.Array:
  """Sum of the squared distances to the nearest centroid, a scalar."""
  return _assign(z_ND, centroids_KD)[2].sum()


@functools.partial(jax.jit, static_argnames='k')
def seed(key: jax.Array, z_ND: jax.Array, k: int) -> jax.Array:
  """Greedy k-means++ (Arthur and Vassilvitskii, 2007): centroids [K, D] among the points.

  Each next one is the best of 2 + log(k) candidates, drawn in proportion to the squared distance from those chosen.
  """
  trials = 2 + int(math.log(k))
  square_N = jnp.sum(z_ND**2, axis=-1)
  key, first_key = jax.random.split(key)
  first = jax.random.randint(first_key, (), 0, z_ND.shape[0])

  def distances(points_T):
    return jnp.maximum(square_N - _closeness(z_ND, z_ND[points_T]).T, 0.0)

  def choose(nearest_N, key):
    candidates_T = draw(key, nearest_N, trials)
    nearest_TN = jnp.minimum(nearest_N, distances(candidates_T))
    best = jnp.argmin(nearest_TN.sum(axis=1))
    return nearest_TN[best], candidates_T[best]

  _, others = jax.lax.scan(choose, distances(first[None])[0], jax.random.split(key, k - 1))
  return z_ND[jnp.concatenate([first[None], others])]


def draw(key: jax.Array, weight_N: jax.Array, num: int) -> jax.Array:
  """Indices [num] drawn in proportion to their weights, with replacement; a weight of 0 is not drawn."""
  cumulative_N = jnp.cumsum(weight_N)
  places = jax.random.uniform(key, (num,)) * cumulative_N[-1]
  return jnp.minimum(jnp.searchsorted(cumulative_N, places, side='right'), weight_N.shape[0] - 1)


@jax.jit
def lloyd(z_ND: jax.Array, centroids_KD: jax.Array, iterations: int) -> jax.Array:
  """Moves every centroid to the mean of its points, until none moves; one without points goes to the farthest one."""

  def unsettled(carry):
    i, _, moved = carry
    return (i < iterations) & moved

  def iterate(carry):
    i, old_KD, _ = carry
    sums_KD, counts_K, distance_N = _assign(z_ND, old_KD)
    _, farthest_K = jax.lax.top_k(distance_N, old_KD.shape[0])
    empty_K = counts_K == 0
    place_K = jnp.cumsum(empty_K) - 1  # the first empty cluster takes the farthest point, the second the next
    means_KD = sums_KD / jnp.maximum(counts_K, 1.0)[:, None]
    new_KD = jnp.where(empty_K[:, None], z_ND[farthest_K[place_K]], means_KD)
    return i + 1, new_KD, jnp.any(new_KD != old_KD)

  return jax.lax.while_loop(unsettled, iterate, (0, centroids_KD, True))[1]


def _assign(z_ND, centroids_KD):
  """One pass over all points: (sum [K, D] and number [K] of each cluster's points, squared distance [N] of each)."""
  N, D = z_ND.shape
  K, R = centroids_KD.shape[0], min(ROWS, N)

  def rows(carry, first):
    sums_KD, counts_K, distance_N = carry
    start = jnp.minimum(first, N - R)  # the last rows overlap those before: they count once
    z_RD = jax.lax.dynamic_slice_in_dim(z_ND, start, R)
    closeness_RK = _closeness(z_RD, centroids_KD)
    fresh_R = (start + jnp.arange(R) >= first).astype(jnp.float32)
    # A product with the one-hot labels, not a scatter: sums then have one order, and so the same bits, everywhere.
    member_RK = jax.nn.one_hot(closeness_RK.argmax(axis=1), K, dtype=jnp.float32) * fresh_R[:, None]
    sums_KD += jnp.einsum('RK,RD->KD', member_RK, z_RD, precision='highest')
    distance_R = jnp.maximum(jnp.sum(z_RD**2, axis=-1) - closeness_RK.max(axis=1), 0.0)
    distance_N = jax.lax.dynamic_update_slice_in_dim(distance_N, distance_R, start, 0)
    return (sums_KD, counts_K + member_RK.sum(axis=0), distance_N), None

  empty = tuple(jnp.zeros(shape, jnp.float32) for shape in ((K, D), (K,), (N,)))
  return jax.lax.scan(rows, empty, jnp.arange(0, N, R))[0]


def _closeness(z_ND, centroids_KD):
  """2 z c - |c|^2, which is |z|^2 - |z - c|^2: [N, K]. In full precision: accelerators would round the products."""
  products_NK = jnp.einsum('ND,KD->NK', z_ND, centroids_KD, precision='highest')
  return 2 * products_NK - jnp.sum(centroids_KD**2, axis=-1)
