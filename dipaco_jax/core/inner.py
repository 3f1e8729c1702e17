"""The inner optimization: AdamW of one path, for tau steps on its own shard [2.5, 7.1]. Pure.

With g the gradient clipped to norm c, and eta_s the learning rate of the global step s (pretraining included):

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    theta <- theta - eta_s (m^ / (sqrt(v^) + epsilon) + lambda theta)      ^: divided by 1 - b^t

lambda is 0 for vectors (the scales of norms). t counts the path's own updates and s is an argument: the schedule
belongs to the run, the moments to the path. A step whose loss or |g| is not finite is skipped, up to
`inner.max_skipped` in a row: theta, m, v and t stay.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dipaco_jax.core import settings
from dipaco_jax.core.grid import largest_divisor

METRICS = ('loss', 'grad_norm', 'learning_rate', 'skipped')

# (params, tokens [B, L], segments [B, L]) -> (mean loss, gradients, their global norm)
Gradient = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any, jax.Array]]


class InnerState(NamedTuple):
  """State of a path's optimizer between steps."""

  optimizer: Any  # of the Optax transformation
  skipped: jax.Array  # latest steps in a row that were not finite; int32


class Inner(NamedTuple):
  """A path's optimizer: AdamW without learning rate, the rate by global step, and what `step` does about bad gradients.

  It is no Optax pair: `init` makes an InnerState, `update` takes and returns its `optimizer` alone.
  """

  init: Callable[[Any], InnerState]
  update: Callable[[Any, Any, Any], tuple[Any, Any]]
  learning_rate: Callable[[jax.Array], jax.Array]
  clip_norm: float
  max_skipped: int


def learning_rate(
  config: settings.Inner, decay_steps: int, pretrain_steps: int, path_rate: float
) -> Callable[[jax.Array], jax.Array]:
  """Returns the cosine schedule of the global step s [7.1], warmed up again after pretraining.

      eta_s = eta min(1, (s + 1) / warmup) (f + (1 - f) (1 + cos(pi min(1, s / decay))) / 2)

  From s = pretrain_steps on it is multiplied by min(1, (s - pretrain_steps + 1) / rewarm_steps), if rewarm_steps > 0.

  Args:
    config: eta = learning_rate, warmup_steps, rewarm_steps, f = final_fraction.
    decay_steps: length of the cosine in global steps.
    pretrain_steps: the first global step of the paths.
    path_rate: eta from that step on; 0: config.learning_rate.
  """

  def rate(step):
    s = step.astype(jnp.float32)
    warm = jnp.minimum(1.0, (s + 1) / max(1, config.warmup_steps))
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(1.0, s / max(1, decay_steps))))
    again = jnp.minimum(1.0, (s - pretrain_steps + 1) / max(1, config.rewarm_steps))
    again = jnp.where(step >= pretrain_steps, again, 1.0)
    eta = jnp.where(step >= pretrain_steps, path_rate, config.learning_rate) if path_rate else config.learning_rate
    return eta * warm * again * (config.final_fraction + (1 - config.final_fraction) * cosine)

  return rate


def make_optimizer(config: settings.Inner, decay_steps: int, pretrain_steps: int, path_rate: float) -> Inner:
  """Makes AdamW, or plain SGD for comparison with data-parallel training; for the arguments see `learning_rate`."""
  transformation = optax.identity()
  if config.optimizer == 'adamw':
    transformation = optax.chain(
      optax.scale_by_adam(config.b1, config.b2, config.epsilon),
      optax.add_decayed_weights(config.weight_decay, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    )
  rate = learning_rate(config, decay_steps, pretrain_steps, path_rate)

  def init(params):
    return InnerState(transformation.init(params), jnp.zeros((), jnp.int32))

  return Inner(init, transformation.update, rate, config.clip_norm, config.max_skipped)


def rows_at_once(size: int, rows: int) -> int:
  """Returns the largest divisor of `size` that is at most `rows`; `size` if `rows` is 0."""
  return largest_divisor(size, rows or size)


def in_parts(function: Callable, rows: int) -> Callable:
  """Makes a function of arrays [B, ...] that acts on each row alone compute `rows_at_once` of them at a time."""

  def compute(*arrays):
    size = arrays[0].shape[0]
    part = rows_at_once(size, rows)
    if part == size:
      return function(*arrays)
    found = jax.lax.map(lambda xs: function(*xs), tuple(x.reshape(-1, part, *x.shape[1:]) for x in arrays))
    return jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), found)

  return compute


def summed_gradient(loss: Callable, rows: int = 0) -> Callable:
  """Returns `compute(params, tokens_BL, segments_BL) -> ((summed nll, number of targets), gradients of the sum)`.

  Args:
    loss: `(params, tokens, segments) -> (summed nll, number of targets)`.
    rows: microbatch, see `rows_at_once`: the gradients of its parts are added up.
  """
  both = jax.value_and_grad(loss, has_aux=True)
  if not rows:
    return both

  def compute(params, tokens_BL, segments_BL):
    part = rows_at_once(tokens_BL.shape[0], rows)
    if part == tokens_BL.shape[0]:
      return both(params, tokens_BL, segments_BL)
    parts = tuple(x.reshape(-1, part, x.shape[1]) for x in (tokens_BL, segments_BL))
    blank = jax.eval_shape(both, params, *(x[0] for x in parts))
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), blank)
    return jax.lax.scan(lambda sums, xs: (jax.tree.map(jnp.add, sums, both(params, *xs)), None), start, parts)[0]

  return compute


def gradient(loss: Callable, rows: int = 0) -> Gradient:
  """Returns the `Gradient` of the mean loss over the targets that count; for the arguments see `summed_gradient`."""
  summed = summed_gradient(loss, rows)

  def compute(params, tokens_BL, segments_BL):
    (nll, count), grads = summed(params, tokens_BL, segments_BL)
    count = jnp.maximum(count, 1)
    grads = jax.tree.map(lambda g: g / count, grads)
    return nll / count, grads, optax.tree.norm(grads)

  return compute


def gradient_over_data(loss: Callable, dims: dict[str, int | None], rows: int = 0) -> Gradient:
  """Returns a `Gradient` for rows split over the mesh axis `data`, and parameters split along `dims` (None: whole)."""
  summed = summed_gradient(loss, rows)

  def compute(shards, tokens_BL, segments_BL):
    (nll, count), grads = summed(gather(shards, dims), tokens_BL, segments_BL)
    nll, count = jax.lax.psum((nll, count), 'data')
    count = jnp.maximum(count, 1)
    sharded = {
      n: jax.lax.psum_scatter(grads[n], 'data', scatter_dimension=d, tiled=True) / count
      for n, d in dims.items()
      if d is not None
    }
    whole = {n: jax.lax.psum(grads[n], 'data') / count for n, d in dims.items() if d is None}
    square = jax.lax.psum(optax.tree.norm(sharded, squared=True), 'data') + optax.tree.norm(whole, squared=True)
    return nll / count, dict(sorted((sharded | whole).items())), jnp.sqrt(square)

  return compute


def gather(shards: dict[str, jax.Array], dims: dict[str, int | None]) -> dict[str, jax.Array]:
  """Gathers one path's parameters, so that every device of its slice has them whole."""
  return {
    n: x if dims[n] is None else jax.lax.all_gather(x, 'data', axis=dims[n], tiled=True) for n, x in shards.items()
  }


def step(
  inner: Inner,
  compute: Gradient,
  params: Any,
  state: InnerState,
  tokens_BL: Any,
  segments_BL: Any,
  global_step: jax.Array,
) -> tuple[Any, InnerState, dict[str, jax.Array]]:
  """Makes one update: returns (params, state, {name: value} of METRICS), with the loss before the update.

  After `max_skipped` skipped steps in a row the update is made even if it is not finite: screening then excludes the
  path at the end of its phase.

  Args:
    inner: the optimizer.
    compute: the gradient.
    params, state: of one path.
    tokens_BL, segments_BL: a batch, as `compute` takes it.
    global_step: s, int32 [].
  """
  loss, grads, norm = compute(params, tokens_BL, segments_BL)
  if inner.clip_norm:
    scale = jnp.minimum(1.0, inner.clip_norm / jnp.maximum(norm, 1e-12))
    grads = jax.tree.map(lambda g: g * scale, grads)
  updates, optimizer = inner.update(grads, state.optimizer, params)
  rate = inner.learning_rate(global_step)
  finite = jnp.isfinite(loss) & jnp.isfinite(norm)
  skip = ~finite & (state.skipped < inner.max_skipped)
  # Selected, not multiplied: 0 times NaN is NaN.
  params = jax.tree.map(lambda p, u: jnp.where(skip, p, p - rate * u), params, updates)
  optimizer = jax.tree.map(lambda new, old: jnp.where(skip, old, new), optimizer, state.optimizer)
  state = InnerState(optimizer, jnp.where(finite, 0, state.skipped + 1))
  return params, state, {'loss': loss, 'grad_norm': norm, 'learning_rate': rate, 'skipped': skip.astype(jnp.float32)}


def steps(
  inner: Inner,
  compute: Gradient,
  params: Any,
  state: InnerState,
  tokens_KBL: jax.Array,
  segments_KBL: jax.Array,
  first_step: jax.Array,
) -> tuple[Any, InnerState, dict[str, jax.Array]]:
  """Makes K updates in a scan, see `step`; metrics are stacked, [K]."""

  def one(carry, xs):
    tokens_BL, segments_BL, offset = xs
    params, state = carry
    params, state, metrics = step(inner, compute, params, state, tokens_BL, segments_BL, first_step + offset)
    return (params, state), metrics

  offsets_K = jnp.arange(tokens_KBL.shape[0], dtype=jnp.int32)
  (params, state), metrics = jax.lax.scan(one, (params, state), (tokens_KBL, segments_KBL, offsets_K))
  return params, state, metrics
