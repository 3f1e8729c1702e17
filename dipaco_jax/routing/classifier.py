"""The discriminative router: a classifier from z to the path that scores best, calibrated [2.4.2, 7.2.1]. Pure.

    label_n = argmax_p sum_j S[n, j, p]        prob(p | z_n) = softmax_p score_p(z_n)

is trained by cross-entropy, then biased so that the predicted document-to-path distribution matches a target one.
Everything is full-batch L-BFGS: no learning rate, no batches, and it says when it has converged.

Dimensions: N documents, D width, H hidden units, X = H or D, P paths.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dipaco_jax.routing import router as router_lib

T = TypeVar('T')


class Weights(NamedTuple):
  hidden: jax.Array  # [D, H]
  hidden_bias: jax.Array  # [H]
  w: jax.Array  # [P, X]
  b: jax.Array  # [P]


def fit_classifier(
  key: jax.Array,
  z_ND: jax.Array,
  labels_N: jax.Array,
  num_paths: int,
  *,
  hidden: int = 0,
  l2: Sequence[float] = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003),
  held_fraction: float = 0.2,
  weight_N: jax.Array | None = None,
  iterations: int = 500,
  tolerance: float = 1e-5,
) -> router_lib.Router:
  """P-class logistic regression on standardized features [7.2.1], or behind a hidden layer, which the paper has not.

      minimize  sum_n weight_n nats_n / sum_n weight_n + l2 / 2 (|w|^2 + |hidden|^2)

  nats_n = -log prob(label_n | z_n). Of several l2 the one that does best on held-out documents is used on all of them.
  scikit-learn's C is 1 / (N l2).

  Args:
    key: of the held-out documents, and of the hidden layer's start.
    z_ND: features, float32.
    labels_N: paths, integers.
    hidden: units of the hidden layer; 0: none.
    l2: candidates.
    held_fraction: of the documents, to choose among candidates by; of no use with one.
    weight_N: of each document; none: all equal.
    iterations: of L-BFGS, at most.
    tolerance: of the gradient's largest entry.

  Raises:
    ValueError: a label is no path, or a feature is not finite.
  """
  if not (np.min(labels_N) >= 0 and np.max(labels_N) < num_paths):
    raise ValueError(f'labels go from {np.min(labels_N)} to {np.max(labels_N)}; paths from 0 to {num_paths - 1}')
  router_lib.check_features(z_ND)
  mean_D, scale_D = router_lib.standardization(jnp.asarray(z_ND))
  x_ND, labels_N = (jnp.asarray(z_ND) - mean_D) / scale_D, jnp.asarray(labels_N)
  weight_N = jnp.ones(len(x_ND)) if weight_N is None else jnp.asarray(weight_N, jnp.float32)
  start_key, split_key = jax.random.split(key)
  start = _start(start_key, x_ND.shape[1], hidden, num_paths)

  def train(weight_N, l2):
    return _train(start, x_ND, labels_N, weight_N, l2, iterations, tolerance)

  best = l2[0]
  if len(l2) > 1:
    is_held_N = jnp.zeros(len(x_ND)).at[split(split_key, len(x_ND), held_fraction)[1]].set(1.0)
    candidates = [train(weight_N * (1 - is_held_N), value) for value in l2]
    held_nats = np.array([nats(c, x_ND, labels_N, weight_N * is_held_N) for c in candidates])
    best = l2[int(np.where(np.isfinite(held_nats), held_nats, np.inf).argmin())]
  fitted = train(weight_N, best)
  centroids_PX = fitted.w / 2
  bias_P = fitted.b + jnp.sum(centroids_PX**2, axis=-1)
  return router_lib.Router(mean_D, scale_D, fitted.hidden, fitted.hidden_bias, centroids_PX, bias_P)


def _start(key: jax.Array, width: int, hidden: int, num_paths: int) -> Weights:
  """A random hidden layer; all else is 0."""
  hidden_DH = jax.random.normal(key, (width, hidden)) * width**-0.5
  return Weights(hidden_DH, jnp.zeros(hidden), jnp.zeros((num_paths, hidden or width)), jnp.zeros(num_paths))


@jax.jit
def _train(start: Weights, x_ND, labels_N, weight_N, l2, iterations, tolerance) -> Weights:
  def loss(weights: Weights):
    decay = jnp.sum(weights.w**2) + jnp.sum(weights.hidden**2)
    return nats(weights, x_ND, labels_N, weight_N) + l2 / 2 * decay

  return minimize(loss, start, iterations, tolerance)


@jax.jit
def nats(weights: Weights, x_ND: jax.Array, labels_N: jax.Array, weight_N: jax.Array) -> jax.Array:
  """Weighted mean of -log prob(label)."""
  x_NX = router_lib.hidden_layer(x_ND, weights.hidden, weights.hidden_bias)
  logits_NP = jnp.einsum('NX,PX->NP', x_NX, weights.w, precision='highest') + weights.b
  nats_N = optax.softmax_cross_entropy_with_integer_labels(logits_NP, labels_N)
  return jnp.sum(weight_N * nats_N) / jnp.sum(weight_N)


def minimize(loss: Callable[[T], jax.Array], start: T, iterations: int, tolerance: float) -> T:
  """L-BFGS from `start` until no entry of the gradient exceeds `tolerance`, or for so many iterations."""
  optimizer = optax.lbfgs()
  value_and_grad = optax.value_and_grad_from_state(loss)

  def unsettled(carry):
    _, state = carry
    done, gradient = optax.tree.get(state, 'count'), optax.tree.get(state, 'grad')
    return (done == 0) | ((done < iterations) & (optax.tree.norm(gradient, ord=jnp.inf) > tolerance))

  def iterate(carry):
    params, state = carry
    value, gradient = value_and_grad(params, state=state)
    updates, state = optimizer.update(gradient, state, params, value=value, grad=gradient, value_fn=loss)
    return optax.apply_updates(params, updates), state

  return jax.lax.while_loop(unsettled, iterate, (start, optimizer.init(start)))[0]


def split(key: jax.Array, num: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
  """Indices 0..num-1 in two parts, each rising: those kept, and round(fraction * num) of them drawn to be held out."""
  drawn, held = np.asarray(jax.random.permutation(key, num)), round(fraction * num)
  return np.sort(drawn[held:]), np.sort(drawn[:held])


def accuracy(router: router_lib.Router, z_ND: jax.Array, labels_N: jax.Array) -> float:
  """Fraction of the documents whose route is their label."""
  return float(np.mean(np.asarray(router_lib.route(router, z_ND))[:, 0] == np.asarray(labels_N)))


def calibrate(router: router_lib.Router, z_ND: jax.Array, target_P: jax.Array | np.ndarray) -> router_lib.Router:
  """The router with the bias by which routes of documents like these are distributed as the target: see below."""
  return router._replace(bias=router.bias + calibration(router_lib.scores(router, jnp.asarray(z_ND)), target_P))


def calibration(scores_NP: jax.Array, target_P: jax.Array | np.ndarray, iterations: int = 50) -> jax.Array:
  """A bias [P] such that argmax_p (score_np + bias_p) is p for a share target_p of the documents [2.4.2, 7.2.1].

  The paper doesn't say how. With one temperature after another, from the spread of the scores down to 10^-4 of it,

      minimize over b  sum_n temperature logsumexp_p((score_np + b_p) / temperature) / N - sum_p target_p b_p

  a convex function whose gradient is the softened frequencies less the target: where it is 0 they are equal, and as the
  temperature falls a softened route becomes the route. It is the dual of optimal transport from documents to paths: of
  all assignments with these frequencies the routes are the one of the highest total score. Of the biases of all
  temperatures, and of none, the result is the one whose routes have the lowest total variation from the target.

  Args:
    target_P: shares, above 0, of any sum.
    iterations: of L-BFGS at each temperature, at most.

  Raises:
    ValueError: a share is not above 0.
  """
  share_P = np.asarray(target_P, np.float64)  # before the sum, which an array of JAX would make in float32
  share_P = share_P / share_P.sum()
  if not (share_P > 0).all():
    raise ValueError(f'shares of paths {np.flatnonzero(~(share_P > 0)).tolist()} are not above 0: give each path one')
  return _calibration(jnp.asarray(scores_NP, jnp.float32), jnp.asarray(share_P, jnp.float32), iterations)


TEMPERATURES = tuple(10 ** -(step / 2) for step in range(9))


@jax.jit
def _calibration(scores_NP, share_P, iterations) -> jax.Array:
  N, P = scores_NP.shape
  mean_P = scores_NP.mean(axis=0)
  spread = jnp.mean(jnp.std(scores_NP - mean_P, axis=1))

  def variation(bias_P):
    count_P = jnp.zeros(P).at[jnp.argmax(scores_NP + bias_P, axis=1)].add(1.0)
    return jnp.abs(count_P / N - share_P).sum() / 2

  def cool(carry, temperature):
    bias_P, best_P, lowest = carry
    # In these units the Hessian's diagonal is that of equal shares, whatever the shares.
    unit_P = temperature * jax.lax.rsqrt(P * share_P)

    def dual(u_P):
      softened_N = jax.nn.logsumexp((scores_NP + u_P * unit_P) / temperature, axis=1)
      return softened_N.mean() - jnp.sum(share_P * u_P * unit_P) / temperature

    bias_P = minimize(dual, bias_P / unit_P, iterations, 0.5 / N) * unit_P
    bias_P -= bias_P.mean()  # which changes no route
    now = variation(bias_P)
    return (bias_P, jnp.where(now < lowest, bias_P, best_P), jnp.minimum(now, lowest)), None

  none_P = jnp.zeros(P)
  start = (-mean_P, none_P, variation(none_P))
  return jax.lax.scan(cool, start, spread * jnp.asarray(TEMPERATURES))[0][1]
