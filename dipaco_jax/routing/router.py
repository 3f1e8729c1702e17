"""The router r(x), which chooses a sequence's path from its feature z alone [2.4, 7.2, 7.3]. Pure.

z is the mean over the first `prefix_tokens` (the paper: 32) tokens of the hidden state after the base model's last
block, before its final norm.

    x = (z - mean) / scale, and then x = gelu(x hidden + hidden_bias) if there is a hidden layer
    score_p(z) = 2 x c_p - |c_p|^2 + bias_p
    r(z) = argmax_p score_p(z); the top n where shards overlap [2.4.4]

Every router has this form. k-means has centroids c_p and no bias: the score is |x|^2 - |x - c_p|^2, where |x|^2 changes
no argmax. In product k-means [7.3] the c_p are all combinations of the groups' centroids. A logistic classifier
x w_p + b_p [7.2.1] has c_p = w_p / 2 and bias_p = b_p + |c_p|^2, so that its scores are its logits.

Features are standardized per dimension, on which the paper is silent: a few dimensions of a language model's hidden
state are hundreds of times larger than the rest (massive activations, arXiv 2402.17762) and would decide all distances.

Dimensions: N sequences, D width, H hidden units, X = H or D, P paths, K clusters, G groups.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.config import settings
from dipaco_jax.core import seeded_hash
from dipaco_jax.core.errors import InputError
from dipaco_jax.routing import kmeans


class Router(NamedTuple):
  """The arrays of a router, as a file holds them: `router._asdict()` and `Router(**arrays)`."""

  mean: jax.Array  # [D]
  scale: jax.Array  # [D]
  hidden: jax.Array  # [D, H]; H = 0: no hidden layer
  hidden_bias: jax.Array  # [H]
  centroids: jax.Array  # [P, X]
  bias: jax.Array  # [P]


def linear(mean_D: jax.Array, scale_D: jax.Array, centroids_PD: jax.Array, bias_P: jax.Array) -> Router:
  """Makes a router without a hidden layer."""
  return Router(mean_D, scale_D, jnp.zeros((len(mean_D), 0)), jnp.zeros(0), centroids_PD, bias_P)


def scores(router: Router, z_ND: jax.Array) -> jax.Array:
  """Returns score_p(z) of each path for each sequence, higher is better: float32 [N, P]."""
  x_ND = (z_ND - router.mean) / router.scale
  return kmeans.closeness(hidden_layer(x_ND, router.hidden, router.hidden_bias), router.centroids) + router.bias


def hidden_layer(x_ND: jax.Array, hidden_DH: jax.Array, hidden_bias_H: jax.Array) -> jax.Array:
  """Returns gelu(x hidden + hidden_bias), [N, H]; x itself if H = 0."""
  if not hidden_DH.shape[1]:
    return x_ND
  return jax.nn.gelu(jnp.einsum('ND,DH->NH', x_ND, hidden_DH, precision='highest') + hidden_bias_H)


@functools.partial(jax.jit, static_argnames='top_n')
def route(router: Router, z_ND: jax.Array, top_n: int = 1) -> jax.Array:
  """Returns the `top_n` best paths of each sequence, best first, ties to the lower index: int32 [N, top_n]."""
  return jax.lax.map(lambda z_D: jax.lax.top_k(scores(router, z_D[None])[0], top_n)[1], z_ND, batch_size=kmeans.ROWS)


def fit(method: str, key: jax.Array, z_ND: jax.Array, grid_shape: Sequence[int], config: settings.Routing) -> Router:
  """Fits a router on the features of a sample of training sequences; equal keys give equal routers.

  `method` is a key of `FITS`; the other methods of the settings use no features, see `random_assignment`. Raises
  InputError if there are fewer sequences than paths, P = prod(grid_shape), or a feature is not finite.
  """
  num_paths = math.prod(grid_shape)
  if len(z_ND) < num_paths:
    raise InputError(
      f'the router has {len(z_ND)} sequences to be fitted on, fewer than the {num_paths} paths of config.grid: '
      'make config.grid smaller, give more text or raise config.routing.sample'
    )
  check_features(z_ND)
  return FITS[method](key, jnp.asarray(z_ND, jnp.float32), tuple(grid_shape), config)


def check_features(z_ND: jax.Array | np.ndarray) -> None:
  """Raises InputError if a feature is not finite."""
  if not np.isfinite(z_ND).all():
    raise InputError('the features of the base model are not finite: did it diverge? lower config.inner.learning_rate')


def fit_kmeans(key: jax.Array, z_ND: jax.Array, grid_shape: Sequence[int], config: settings.Routing) -> Router:
  """Fits one centroid per path [2.4.1]."""
  num_paths = math.prod(grid_shape)
  mean_D, scale_D = standardization(z_ND)
  x_ND = (z_ND - mean_D) / scale_D
  centroids_PD = kmeans.fit(key, x_ND, num_paths, config.iterations, config.restarts)
  return linear(mean_D, scale_D, centroids_PD, jnp.zeros(num_paths))


def fit_product_kmeans(key: jax.Array, z_ND: jax.Array, grid_shape: Sequence[int], config: settings.Routing) -> Router:
  """Fits k-means on each group of dimensions; a path's coordinates are its groups' clusters [7.3].

  x is split into as many contiguous groups as there are axes of size above 1, of equal width but for rounding. With
  c^a_k the k-th of the K_a centroids of axis a's group,

      c_p = (c^a_i, c^b_j, ...) for the path p of coordinates (i, j, ...)

  A squared distance is a sum over groups, so that the nearest c_p consists of each group's nearest centroid.
  """
  sizes = [size for size in grid_shape if size > 1] or [1]
  mean_D, scale_D = standardization(z_ND)
  groups = jnp.array_split((z_ND - mean_D) / scale_D, len(sizes), axis=1)
  keys = jax.random.split(key, len(sizes))
  each = zip(keys, groups, sizes, strict=True)
  centroids = [kmeans.fit(key, x, size, config.iterations, config.restarts) for key, x, size in each]
  coordinates = np.indices(sizes).reshape(len(sizes), -1)  # [G, P], paths in row-major order
  centroids_PD = jnp.concatenate([c_KD[k_P] for c_KD, k_P in zip(centroids, coordinates, strict=True)], axis=1)
  return linear(mean_D, scale_D, centroids_PD, jnp.zeros(len(centroids_PD)))


# (key, features [N, D], sizes of the grid's axes, settings) -> Router
FITS = {'kmeans': fit_kmeans, 'product_kmeans': fit_product_kmeans}


def standardization(z_ND: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the mean and standard deviation of each dimension; 1 for a dimension that is constant up to rounding."""
  mean_D, std_D = z_ND.mean(axis=0), z_ND.std(axis=0)
  return mean_D, jnp.where(std_D > 1e-6 * jnp.abs(mean_D), std_D, 1.0)


def random_assignment(seed: int, ids: Iterable[str], num_paths: int, top_n: int = 1) -> np.ndarray:
  """Draws `top_n` different paths for each id, uniformly and by hash, as a control: int32 [N, top_n].

  An id gets the same paths in every order, subset and process. With one path this is routing.method 'single'.
  """
  ids = list(ids)
  paths = np.empty((len(ids), top_n), np.int64)
  for n in range(top_n):
    # The n-th draw is among the remaining paths: skip those already drawn, from the lowest.
    paths[:, n] = [seeded_hash.of_name(f'{seed}/{n}/{name}', 'little') % (num_paths - n) for name in ids]
    for drawn in np.sort(paths[:, :n], axis=1).T:
      paths[:, n] += paths[:, n] >= drawn
  return paths.astype(np.int32)
