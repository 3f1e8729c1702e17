"""k-means on features: the clusters of the generative router, one per path [2.4.1]. Pure.

Greedy k-means++, restarts, Lloyd's iterations. Dimensions: N points, D width, K clusters, R rows at one time, T
trials, S restarts.
"""

import functools
import math

import jax
import jax.numpy as jnp

ROWS = 4096  # rows of distances in memory at one time


@functools.partial(jax.jit, static_argnames=('k', 'iterations', 'restarts'))
def fit(key: jax.Array, z_ND: jax.Array, k: int, iterations: int, restarts: int) -> jax.Array:
  """Returns the centroids [K, D] of the restart with the lowest inertia, sum_n min_k |z_n - c_k|^2; K <= N.

  Each restart seeds by greedy k-means++ and runs Lloyd's iterations until no centroid moves. Distances are computed
  `ROWS` at a time: beside z and the centroids, memory is that of [ROWS, K] and [T, N]. The points, float32, are centred
  or nearly so: distances are computed from products, which cancel far from 0.
  """

  def once(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    centroids_KD = lloyd(z_ND, initial_centroids(key, z_ND, k), iterations)
    return centroids_KD, inertia(z_ND, centroids_KD)

  centroids_SKD, inertia_S = jax.lax.map(once, jax.random.split(key, restarts))
  return centroids_SKD[jnp.argmin(inertia_S)]


@jax.jit
def inertia(z_ND: jax.Array, centroids_KD: jax.Array) -> jax.Array:
  """Returns the sum of the squared distances to the nearest centroid."""
  return _assign(z_ND, centroids_KD)[2].sum()


@functools.partial(jax.jit, static_argnames='k')
def initial_centroids(key: jax.Array, z_ND: jax.Array, k: int) -> jax.Array:
  """Chooses K initial centroids [K, D] among the points by greedy k-means++ (Arthur and Vassilvitskii, 2007).

  Each is the best of 2 + log(k) candidates, drawn in proportion to the squared distance from the centroids so far.
  """
  trials = 2 + int(math.log(k))
  square_N = jnp.sum(z_ND**2, axis=-1)
  key, first_key = jax.random.split(key)
  first = jax.random.randint(first_key, (), 0, z_ND.shape[0])

  def distances(points_T: jax.Array) -> jax.Array:
    return jnp.maximum(square_N - closeness(z_ND, z_ND[points_T]).T, 0.0)

  def choose(nearest_N: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    candidates_T = draw(key, nearest_N, trials)
    nearest_TN = jnp.minimum(nearest_N, distances(candidates_T))
    best = jnp.argmin(nearest_TN.sum(axis=1))
    return nearest_TN[best], candidates_T[best]

  _, others = jax.lax.scan(choose, distances(first[None])[0], jax.random.split(key, k - 1))
  return z_ND[jnp.concatenate([first[None], others])]


def draw(key: jax.Array, weight_N: jax.Array, num: int) -> jax.Array:
  """Draws indices [num] in proportion to their weights, with replacement; never one of weight 0."""
  cumulative_N = jnp.cumsum(weight_N)
  places = jax.random.uniform(key, (num,)) * cumulative_N[-1]
  return jnp.minimum(jnp.searchsorted(cumulative_N, places, side='right'), weight_N.shape[0] - 1)


@jax.jit
def lloyd(z_ND: jax.Array, centroids_KD: jax.Array, iterations: int) -> jax.Array:
  """Runs Lloyd's algorithm until no centroid moves, at most `iterations`; an empty cluster takes the farthest point."""

  def iterate(carry: tuple) -> tuple:
    i, old_KD, _ = carry
    sums_KD, counts_K, distance_N = _assign(z_ND, old_KD)
    _, farthest_K = jax.lax.top_k(distance_N, old_KD.shape[0])
    empty_K = counts_K == 0
    place_K = jnp.cumsum(empty_K) - 1  # the first empty cluster takes the farthest point, the second the next
    means_KD = sums_KD / jnp.maximum(counts_K, 1.0)[:, None]
    new_KD = jnp.where(empty_K[:, None], z_ND[farthest_K[place_K]], means_KD)
    return i + 1, new_KD, jnp.any(new_KD != old_KD)

  return jax.lax.while_loop(lambda carry: (carry[0] < iterations) & carry[2], iterate, (0, centroids_KD, True))[1]


def _assign(z_ND: jax.Array, centroids_KD: jax.Array) -> tuple[jax.Array, ...]:
  """Returns the sum [K, D] and number [K] of each cluster's points, and the squared distance [N] of each point."""
  N, D = z_ND.shape
  K, R = centroids_KD.shape[0], min(ROWS, N)

  def rows(carry: tuple, first: jax.Array) -> tuple[tuple, None]:
    sums_KD, counts_K, distance_N = carry
    start = jnp.minimum(first, N - R)  # the last rows overlap earlier ones, which count once
    z_RD = jax.lax.dynamic_slice_in_dim(z_ND, start, R)
    closeness_RK = closeness(z_RD, centroids_KD)
    fresh_R = (start + jnp.arange(R) >= first).astype(jnp.float32)
    # A product with the one-hot labels, not a scatter: sums then have one order, and so the same bits, everywhere.
    member_RK = jax.nn.one_hot(closeness_RK.argmax(axis=1), K, dtype=jnp.float32) * fresh_R[:, None]
    sums_KD += jnp.einsum('RK,RD->KD', member_RK, z_RD, precision='highest')
    distance_R = jnp.maximum(jnp.sum(z_RD**2, axis=-1) - closeness_RK.max(axis=1), 0.0)
    distance_N = jax.lax.dynamic_update_slice_in_dim(distance_N, distance_R, start, 0)
    return (sums_KD, counts_K + member_RK.sum(axis=0), distance_N), None

  empty = tuple(jnp.zeros(shape, jnp.float32) for shape in ((K, D), (K,), (N,)))
  return jax.lax.scan(rows, empty, jnp.arange(0, N, R))[0]


def closeness(z_ND: jax.Array, centroids_KD: jax.Array) -> jax.Array:
  """Returns 2 z c - |c|^2 = |z|^2 - |z - c|^2, [N, K]; in full precision, as accelerators would round the products."""
  products_NK = jnp.einsum('ND,KD->NK', z_ND, centroids_KD, precision='highest')
  return 2 * products_NK - jnp.sum(centroids_KD**2, axis=-1)
