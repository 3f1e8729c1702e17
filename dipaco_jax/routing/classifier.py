"""The discriminative router: a classifier from z to the path that scores best, calibrated [2.4.2, 7.2.1]. Pure.

    label_n = argmax_p sum_j S[n, j, p]        prob(p | z_n) = softmax_p score_p(z_n)

with S[n, j, p] the log-likelihood of token j of document n under path p. The classifier is trained by cross-entropy,
and then a bias makes the predicted document-to-path distribution match a target. Both use full-batch L-BFGS: no
learning rate, no batches, and a test of convergence.

Dimensions: N documents, D width, H hidden units, X = H or D, P paths.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dipaco_jax.routing import router as router_lib

T = TypeVar('T')
L2 = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)  # candidates for the decay
HELD_FRACTION = 0.2  # of the documents, to choose among candidates
MOST_EXCESS = 100.0  # see `fit_to_losses`
ITERATIONS, TOLERANCE = 500, 1e-5  # of L-BFGS, see `minimize`


class Weights(NamedTuple):
  """Parameters of the classifier: logits are x w^T + b, with the hidden layer of router.py."""

  hidden: jax.Array  # [D, H]
  hidden_bias: jax.Array  # [H]
  w: jax.Array  # [P, X]
  b: jax.Array  # [P]


def fit_classifier(
  key: jax.Array, z_ND: jax.Array, labels_N: jax.Array, num_paths: int, hidden: int = 0, l2: Sequence[float] = L2
) -> router_lib.Router:
  """Fits a P-class logistic regression on standardized features [2.4.2, 7.2.1].

      minimize  mean_n -log prob(label_n | z_n) + l2 / 2 (|w|^2 + |hidden|^2)

  Of several l2 the one that does best on HELD_FRACTION of the documents, trained on the others, is used on all of them.
  scikit-learn's C is 1 / (N l2). A hidden layer, of `hidden` units, is not in the paper. `key` draws the held-out
  documents and the initial hidden layer. Raises ValueError if a label is no path, or a feature is not finite.
  """
  if not (np.min(labels_N) >= 0 and np.max(labels_N) < num_paths):
    raise ValueError(f'labels go from {np.min(labels_N)} to {np.max(labels_N)}; paths from 0 to {num_paths - 1}')
  router_lib.check_features(z_ND)
  mean_D, scale_D = router_lib.standardization(jnp.asarray(z_ND))
  x_ND, labels_N = (jnp.asarray(z_ND) - mean_D) / scale_D, jnp.asarray(labels_N)
  start_key, split_key = jax.random.split(key)
  start, best = init_weights(start_key, x_ND.shape[1], hidden, num_paths), 0
  if len(l2) > 1:
    is_held_N = jnp.zeros(len(x_ND)).at[split(split_key, len(x_ND), HELD_FRACTION)[1]].set(1.0)
    fitted = [train(start, x_ND, labels_N, 1 - is_held_N, decay) for decay in l2]
    held_nats = np.array([mean_nats(weights, x_ND, labels_N, is_held_N) for weights in fitted])
    best = int(np.where(np.isfinite(held_nats), held_nats, np.inf).argmin())
  return as_router(train(start, x_ND, labels_N, jnp.ones(len(x_ND)), l2[best]), mean_D, scale_D)


def fit_to_losses(
  z_ND: jax.Array | np.ndarray,
  nll_NP: np.ndarray,
  weight_N: np.ndarray,
  is_held_N: np.ndarray,
  l2: Sequence[float] = L2,
) -> tuple[router_lib.Router, float]:
  """Fits a linear router on standardized features to the losses of sequences under each path, instead of to labels.

      minimize  mean_n weight_n sum_p prob(p | z_n) (nll_np - min_q nll_nq) / u + l2 / 2 |w|^2

  u is the mean excess of a path at random, so that l2 has no unit. A label says which path is best, and counts as much
  where paths are equal as where they are nats apart; this counts what is lost. It isn't in the paper. It isn't convex:
  it starts from the classifier of the labels. Of several l2 the one whose routes lose least on the sequences that
  `is_held_N` marks, trained on the others, is used on all of them. An excess counts as at most MOST_EXCESS times
  what is usual of a path where it isn't best, that of losses that aren't finite too: one bad path then doesn't hide
  what others differ in.

  Args:
    z_ND: features.
    nll_NP: nats of each sequence under each path.
    weight_N: of each sequence.
    is_held_N: bool; if it marks none or all, the last l2 is used.

  Returns:
    The router, and the weighted mean nats of the held sequences under its routes, before it was trained on them.

  Raises:
    ValueError: if no loss is finite, or a feature isn't.
  """
  router_lib.check_features(z_ND)
  nll_NP, excess_NP = _finite_and_excess(nll_NP)
  weight_N = np.asarray(weight_N, np.float32)
  train_with = functools.partial(_train_on_losses, z_ND, nll_NP, excess_NP)
  if not is_held_N.any() or is_held_N.all():
    return train_with(weight_N, l2[-1]), float('nan')
  routers = (train_with(np.where(is_held_N, 0, weight_N), decay) for decay in l2)
  nats = [_routed_nats(router, z_ND, nll_NP, weight_N, is_held_N) for router in routers]
  best = int(np.argmin(nats))
  return train_with(weight_N, l2[best]), nats[best]


def _routed_nats(
  router: router_lib.Router,
  z_ND: jax.Array | np.ndarray,
  nll_NP: np.ndarray,
  weight_N: np.ndarray,
  counted_N: np.ndarray,
) -> float:
  """Returns the weighted mean nats of the counted sequences under the paths that a router chooses."""
  paths_N = np.asarray(router_lib.route(router, jnp.asarray(z_ND)))[:, 0]
  return float(np.average(nll_NP[counted_N, paths_N[counted_N]], weights=weight_N[counted_N]))


def _train_on_losses(
  z_ND: jax.Array | np.ndarray, nll_NP: np.ndarray, excess_NP: np.ndarray, weight_N: np.ndarray, decay: float
) -> router_lib.Router:
  """Trains the classifier of the best paths, and from there the router of `fit_to_losses`."""
  costs_NP = jnp.asarray(excess_NP / max(excess_NP.mean(), 1e-9), jnp.float32)
  mean_D, scale_D = router_lib.standardization(jnp.asarray(z_ND))
  x_ND = (jnp.asarray(z_ND) - mean_D) / scale_D
  start = init_weights(jax.random.key(0), x_ND.shape[1], 0, nll_NP.shape[1])
  start = train(start, x_ND, jnp.asarray(nll_NP.argmin(axis=1)), jnp.asarray(weight_N), decay)
  return as_router(_train_on_costs(start, x_ND, costs_NP, jnp.asarray(weight_N), decay), mean_D, scale_D)


def finite_losses(nll_NP: np.ndarray) -> np.ndarray:
  """Returns nats with those that aren't finite as `fit_to_losses` counts them. Raises ValueError if none is finite."""
  return _finite_and_excess(nll_NP)[0]


def _finite_and_excess(nll_NP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the losses, all finite, and what paths lose above the least of their sequence, capped; both [N, P]."""
  if not np.isfinite(nll_NP).any():
    raise ValueError('no loss of any path is finite')
  nll_NP = np.where(np.isfinite(nll_NP), nll_NP, np.inf)
  least_N1 = nll_NP.min(axis=1, keepdims=True)
  least_N1 = np.where(np.isfinite(least_N1), least_N1, 0)
  excess_NP = nll_NP - least_N1
  losing = [of_path[np.isfinite(of_path) & (of_path > 0)] for of_path in excess_NP.T]
  usual = sorted(float(np.median(some)) for some in losing if len(some))  # of a path: lost ones are the last
  most = MOST_EXCESS * usual[(len(usual) - 1) // 2] if usual else 1.0
  excess_NP = np.minimum(excess_NP, most)
  return np.where(np.isfinite(nll_NP), nll_NP, least_N1 + excess_NP), excess_NP


@jax.jit
def _train_on_costs(
  start: Weights, x_ND: jax.Array, costs_NP: jax.Array, weight_N: jax.Array, l2: jax.Array | float
) -> Weights:
  """Minimizes the weighted mean of what routes drawn from prob(p | z) cost, plus decay, by L-BFGS."""

  def loss(weights: Weights) -> jax.Array:
    logits_NP = jnp.einsum('ND,PD->NP', x_ND, weights.w, precision='highest') + weights.b
    cost_N = jnp.sum(jax.nn.softmax(logits_NP) * costs_NP, axis=1)
    return jnp.sum(weight_N * cost_N) / jnp.sum(weight_N) + l2 / 2 * jnp.sum(weights.w**2)

  return minimize(loss, start, ITERATIONS, TOLERANCE)


def as_router(weights: Weights, mean_D: jax.Array, scale_D: jax.Array) -> router_lib.Router:
  """Returns the router whose scores are the classifier's logits: c_p = w_p / 2, bias_p = b_p + |c_p|^2."""
  centroids_PX = weights.w / 2
  bias_P = weights.b + jnp.sum(centroids_PX**2, axis=-1)
  return router_lib.Router(mean_D, scale_D, weights.hidden, weights.hidden_bias, centroids_PX, bias_P)


def init_weights(key: jax.Array, width: int, hidden: int, num_paths: int) -> Weights:
  """Returns weights of 0, but for a random hidden layer."""
  hidden_DH = jax.random.normal(key, (width, hidden)) * width**-0.5
  return Weights(hidden_DH, jnp.zeros(hidden), jnp.zeros((num_paths, hidden or width)), jnp.zeros(num_paths))


@jax.jit
def train(
  start: Weights, x_ND: jax.Array, labels_N: jax.Array, weight_N: jax.Array, l2: float, tolerance: float = TOLERANCE
) -> Weights:
  """Minimizes the weighted mean loss plus decay by L-BFGS."""

  def loss(weights: Weights) -> jax.Array:
    decay = jnp.sum(weights.w**2) + jnp.sum(weights.hidden**2)
    return mean_nats(weights, x_ND, labels_N, weight_N) + l2 / 2 * decay

  return minimize(loss, start, ITERATIONS, tolerance)


@jax.jit
def mean_nats(weights: Weights, x_ND: jax.Array, labels_N: jax.Array, weight_N: jax.Array) -> jax.Array:
  """Returns the weighted mean of -log prob(label | z), nats."""
  x_NX = router_lib.hidden_layer(x_ND, weights.hidden, weights.hidden_bias)
  logits_NP = jnp.einsum('NX,PX->NP', x_NX, weights.w, precision='highest') + weights.b
  nats_N = optax.softmax_cross_entropy_with_integer_labels(logits_NP, labels_N)
  return jnp.sum(weight_N * nats_N) / jnp.sum(weight_N)


def minimize(loss: Callable[[T], jax.Array], start: T, iterations: int, tolerance: float) -> T:
  """Runs L-BFGS until no entry of the gradient exceeds `tolerance`, for a limited number of iterations."""
  optimizer = optax.lbfgs()
  value_and_grad = optax.value_and_grad_from_state(loss)

  def not_converged(carry: tuple) -> jax.Array:
    _, state = carry
    done, gradient = optax.tree.get(state, 'count'), optax.tree.get(state, 'grad')
    return (done == 0) | ((done < iterations) & (optax.tree.norm(gradient, ord=jnp.inf) > tolerance))

  def iterate(carry: tuple) -> tuple:
    params, state = carry
    value, gradient = value_and_grad(params, state=state)
    updates, state = optimizer.update(gradient, state, params, value=value, grad=gradient, value_fn=loss)
    return optax.apply_updates(params, updates), state

  return jax.lax.while_loop(not_converged, iterate, (start, optimizer.init(start)))[0]


def split(key: jax.Array, num: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
  """Splits 0..num-1 into indices to keep and round(fraction * num) random ones to hold out, both ascending."""
  drawn, held = np.asarray(jax.random.permutation(key, num)), round(fraction * num)
  return np.sort(drawn[held:]), np.sort(drawn[:held])


def accuracy(router: router_lib.Router, z_ND: jax.Array, labels_N: jax.Array) -> float:
  """Returns the fraction of the documents whose route is their label."""
  return float(np.mean(np.asarray(router_lib.route(router, z_ND))[:, 0] == np.asarray(labels_N)))


def calibrate(router: router_lib.Router, z_ND: jax.Array, target_P: jax.Array | np.ndarray) -> router_lib.Router:
  """Biases a router so that routes of documents like these are distributed as the target, see `calibration`."""
  return router._replace(bias=router.bias + calibration(router_lib.scores(router, jnp.asarray(z_ND)), target_P))


def calibration(scores_NP: jax.Array, target_P: jax.Array | np.ndarray) -> jax.Array:
  """Returns a bias [P] by which argmax_p (score_np + bias_p) is p for a share target_p of the documents [2.4.2, 7.2.1].

  The paper does not say how. At falling temperatures T, from the spread of the scores down to 10^-4 of it,

      minimize over b  mean_n T logsumexp_p((score_np + b_p) / T) - sum_p target_p b_p

  The function is convex, and its gradient is the softened frequencies minus the target; as T falls, a softened route
  becomes the route. It is the dual of optimal transport from documents to paths: of all assignments with these
  frequencies, the routes have the highest total score. Of the biases at all temperatures, and no bias, the result is
  the one whose routes have the lowest total variation from the target. The target's shares may have any sum; ValueError
  if one is not above 0.
  """
  share_P = np.asarray(target_P, np.float64)  # first, as JAX would sum in float32
  share_P = share_P / share_P.sum()
  if not (share_P > 0).all():
    raise ValueError(f'shares of paths {np.flatnonzero(~(share_P > 0)).tolist()} are not above 0: give each path one')
  return _calibration(jnp.asarray(scores_NP, jnp.float32), jnp.asarray(share_P, jnp.float32))


TEMPERATURES = tuple(10 ** -(step / 2) for step in range(9))


@jax.jit
def _calibration(scores_NP: jax.Array, share_P: jax.Array) -> jax.Array:
  N, P = scores_NP.shape
  mean_P = scores_NP.mean(axis=0)
  spread = jnp.mean(jnp.std(scores_NP - mean_P, axis=1))

  def variation(bias_P: jax.Array) -> jax.Array:
    count_P = jnp.zeros(P).at[jnp.argmax(scores_NP + bias_P, axis=1)].add(1.0)
    return jnp.abs(count_P / N - share_P).sum() / 2

  def cool(carry: tuple, temperature: jax.Array) -> tuple[tuple, None]:
    bias_P, best_P, lowest = carry
    # In these units the diagonal of the Hessian does not depend on the shares.
    unit_P = temperature * jax.lax.rsqrt(P * share_P)

    def dual(u_P: jax.Array) -> jax.Array:
      softened_N = jax.nn.logsumexp((scores_NP + u_P * unit_P) / temperature, axis=1)
      return softened_N.mean() - jnp.sum(share_P * u_P * unit_P) / temperature

    bias_P = minimize(dual, bias_P / unit_P, 50, 0.5 / N) * unit_P
    bias_P -= bias_P.mean()  # changes no route
    now = variation(bias_P)
    return (bias_P, jnp.where(now < lowest, bias_P, best_P), jnp.minimum(now, lowest)), None

  none_P = jnp.zeros(P)
  start = (-mean_P, none_P, variation(none_P))
  return jax.lax.scan(cool, start, spread * jnp.asarray(TEMPERATURES))[0][1]
