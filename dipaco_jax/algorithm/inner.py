"""The inner optimization: AdamW of one path, for tau steps on its own shard [2.5, 7.1]. Pure.

With g the gradient clipped to norm c, and eta_s the learning rate of the global step s (pretraining included):

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    theta <- theta - eta_s (m^ / (sqrt(v^) + epsilon) + lambda theta)      m^, v^: divided by 1 - b^t

lambda is 0 for vectors (the scales of norms). With Muon, the first term is that of muon.py. t counts the path's own
updates and s is an argument: the schedule belongs to the run, the moments to the path. A step with a loss or |g| that
is not finite is skipped, up to `inner.max_skipped` times in a row: theta, m, v and t do not change. Frozen parameters
have neither a gradient nor an update.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dipaco_jax.algorithm import muon
from dipaco_jax.algorithm.errors import InputError
from dipaco_jax.algorithm.grid import largest_divisor

MANY_STEPS = 1 << 20
METRICS = ('loss', 'grad_norm', 'learning_rate', 'skipped')

Loss = Callable[..., tuple[jax.Array, jax.Array]]  # (params, *batch) -> (summed nll, number of targets)
Gradient = Callable[..., tuple[jax.Array, Any, jax.Array]]  # (params, *batch) -> (mean loss, gradients, their norm)


class InnerState(NamedTuple):
  """State of a path's optimizer between steps."""

  optimizer: Any  # of the Optax transformation
  skipped: jax.Array  # latest steps in a row that were not finite; int32


Stepped = tuple[Any, InnerState, dict[str, jax.Array]]  # params, state and {name: value} of METRICS


class Inner(NamedTuple):
  """A path's optimizer: AdamW without learning rate, the rate by global step, what `step` does about bad gradients."""

  init: Callable[[Any], InnerState]
  update: Callable[[Any, Any, Any], tuple[Any, Any]]  # of `InnerState.optimizer` alone
  learning_rate: Callable[[jax.Array], jax.Array]  # by global step
  clip_norm: float
  max_skipped: int


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Learning rate eta_s by global step s: a cosine [7.1], or warm-up, stable, decay; warmed up again after pretraining.

      eta_s = eta min(1, (s + 1) / warmup) (f + (1 - f) c_s)
      c_s = (1 + cos(pi min(1, s / decay))) / 2                           cosine: decay_fraction = 0
      c_s = min(1, (1 - min(1, s / decay)) / decay_fraction)              warm-up, stable, decay

  From s = pretrain_steps on it is multiplied by min(1, (s - pretrain_steps + 1) / rewarm_steps), if rewarm_steps > 0.
  """

  rate: float  # eta
  decay_steps: int  # length of the schedule in global steps
  warmup_steps: int = 0
  final_fraction: float = 0.0  # f
  decay_fraction: float = 0.0  # share of the steps in which the rate decays; 0: a cosine over all of them
  pretrain_steps: int = 0  # the first global step of the paths
  path_rate: float = 0.0  # eta from that step on; 0: the same
  rewarm_steps: int = 0

  def __call__(self, step: jax.Array) -> jax.Array:
    """Returns eta_s of the global step s, int32 []."""
    s = step.astype(jnp.float32)
    warm = jnp.minimum(1.0, (s + 1) / max(1, self.warmup_steps))
    done = jnp.minimum(1.0, s / max(1, self.decay_steps))
    if self.decay_fraction:
      left = jnp.minimum(1.0, (1 - done) / self.decay_fraction)
    else:
      left = 0.5 * (1 + jnp.cos(jnp.pi * done))
    again = jnp.minimum(1.0, (s - self.pretrain_steps + 1) / max(1, self.rewarm_steps))
    again = jnp.where(step >= self.pretrain_steps, again, 1.0)
    eta = jnp.where(step >= self.pretrain_steps, self.path_rate, self.rate) if self.path_rate else self.rate
    return eta * warm * again * (self.final_fraction + (1 - self.final_fraction) * left)


def make(
  transformation: optax.GradientTransformation, rate: Callable[[jax.Array], jax.Array], clip_norm: float = 0.0,
  max_skipped: int = 0,
) -> Inner:  # fmt: skip
  """Makes a path's optimizer.

  Args:
    transformation: u of theta <- theta - eta_s u, without a learning rate.
    rate: eta_s by global step.
    clip_norm: c, to which the gradient is clipped; 0: it is not.
    max_skipped: steps in a row that are skipped because they are not finite.
  """
  return Inner(
    init=lambda params: InnerState(transformation.init(params), jnp.zeros((), jnp.int32)),
    update=transformation.update,
    learning_rate=rate,
    clip_norm=clip_norm,
    max_skipped=max_skipped,
  )


def adamw(b1: float, b2: float, epsilon: float, weight_decay: float) -> optax.GradientTransformation:
  """Returns u of AdamW, without a learning rate; only arrays of more than one dimension decay."""
  return _with_decay(optax.scale_by_adam(b1, b2, epsilon), weight_decay)


def muon_or_adamw(
  momentum: float, b1: float, b2: float, epsilon: float, weight_decay: float
) -> optax.GradientTransformation:  # fmt: skip
  """Returns u of Muon for the matrices of blocks, of AdamW for all else [muon.py]."""
  return _with_decay(muon.scale_by_muon(momentum, optax.scale_by_adam(b1, b2, epsilon)), weight_decay)


def freeze(frozen: str) -> optax.GradientTransformation:
  """Makes the updates 0 of parameters in whose names a regular expression is found."""
  return optax.masked(optax.set_to_zero(), lambda tree: {name: bool(re.search(frozen, name)) for name in tree})


def check_frozen(frozen: str, names: Collection[str]) -> None:
  """Raises InputError if a regular expression for frozen parameters is found in none of the names, or in all."""
  matching = [name for name in names if re.search(frozen, name)]
  if frozen and len(matching) in (0, len(names)):
    which = 'all' if matching else 'none'
    problem = f'matches {which} of the parameters, such as {min(names)}: name those that are not trained'
    raise InputError(f'config.inner.frozen={frozen!r} {problem}')


def without_gradients(loss: Loss, frozen: str) -> Loss:
  """Returns a loss that gives no gradients to parameters in whose names a regular expression is found.

  They are then in no norm of a gradient, and XLA does not compute them.
  """

  def of_trained(params: Mapping[str, jax.Array], *batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    is_frozen = {name: bool(re.search(frozen, name)) for name in params}
    return loss({name: jax.lax.stop_gradient(x) if is_frozen[name] else x for name, x in params.items()}, *batch)

  return of_trained if frozen else loss


def _with_decay(transformation: optax.GradientTransformation, weight_decay: float) -> optax.GradientTransformation:
  mask = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)  # noqa: E731
  return optax.chain(transformation, optax.add_decayed_weights(weight_decay, mask=mask))


def highest_rate(schedule: Callable[[jax.Array], jax.Array], first: int, end: int) -> float:
  """Returns the highest learning rate of the global steps from `first` to `end` - 1, or 0 if there are none.

  If there are more than MANY_STEPS steps, only MANY_STEPS evenly spaced ones are evaluated.
  """
  if first >= end:
    return 0.0
  steps = np.linspace(first, end - 1, min(end - first, MANY_STEPS)).astype(np.int32)
  return float(jnp.max(jax.vmap(schedule)(jnp.asarray(steps))))


def rows_at_once(size: int, rows: int) -> int:
  """Returns the largest divisor of `size` that is at most `rows`; `size` if `rows` is 0."""
  return largest_divisor(size, rows or size)


def in_parts(function: Callable, rows: int, *arrays: jax.Array) -> Any:
  """Applies a function that acts on each row of arrays [B, ...] alone to `rows_at_once` of them at a time."""
  size = arrays[0].shape[0]
  part = rows_at_once(size, rows)
  if part == size:
    return function(*arrays)
  results = jax.lax.map(lambda xs: function(*xs), tuple(x.reshape(-1, part, *x.shape[1:]) for x in arrays))
  return jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), results)


def summed_gradient(loss: Loss, rows: int, params: Any, *batch: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
  """Returns ((summed nll, number of targets), gradients of the sum), added up over `rows_at_once` of the batch."""
  both = jax.value_and_grad(loss, has_aux=True)
  part = rows and rows_at_once(batch[0].shape[0], rows)
  if not rows or part == batch[0].shape[0]:
    return both(params, *batch)
  parts = tuple(x.reshape(-1, part, *x.shape[1:]) for x in batch)
  blank = jax.eval_shape(both, params, *(x[0] for x in parts))
  start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), blank)
  return jax.lax.scan(lambda sums, xs: (jax.tree.map(jnp.add, sums, both(params, *xs)), None), start, parts)[0]


def gradient(loss: Loss, rows: int, params: Any, *batch: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
  """Computes the `Gradient` of the mean loss over the targets that count. `rows`: microbatch, 0 for all rows."""
  (nll, count), grads = summed_gradient(loss, rows, params, *batch)
  count = jnp.maximum(count, 1)
  grads = jax.tree.map(lambda g: g / count, grads)
  return nll / count, grads, optax.tree.norm(grads)


def gradient_over_data(
  loss: Loss, dims: dict[str, int | None], rows: int, shards: dict[str, jax.Array], *batch: jax.Array
) -> tuple[jax.Array, Any, jax.Array]:
  """Computes a `Gradient` of rows split over the mesh axis `data`, and parameters split along `dims` (None: whole)."""
  (nll, count), grads = summed_gradient(loss, rows, gather(shards, dims), *batch)
  nll, count = jax.lax.psum((nll, count), 'data')
  count = jnp.maximum(count, 1)
  scatter = functools.partial(jax.lax.psum_scatter, axis_name='data', tiled=True)
  sharded = {n: scatter(grads[n], scatter_dimension=d) / count for n, d in dims.items() if d is not None}
  replicated = {n: jax.lax.psum(grads[n], 'data') / count for n, d in dims.items() if d is None}
  square = jax.lax.psum(optax.tree.norm(sharded, squared=True), 'data') + optax.tree.norm(replicated, squared=True)
  return nll / count, dict(sorted((sharded | replicated).items())), jnp.sqrt(square)


def gather(shards: dict[str, jax.Array], dims: dict[str, int | None]) -> dict[str, jax.Array]:
  """Gathers one path's parameters, so that every device of its slice has them whole."""
  all_gather = functools.partial(jax.lax.all_gather, axis_name='data', tiled=True)
  return {n: x if dims[n] is None else all_gather(x, axis=dims[n]) for n, x in shards.items()}


def at_rest(state: InnerState) -> InnerState:
  """Returns an inner state, on the host, with first moments m = 0: the lengths of steps without their direction."""

  def is_first_moment(at: tuple[Any, ...]) -> bool:
    return any(getattr(key, 'name', '') == 'mu' for key in at)  # as Optax names it

  return jax.tree_util.tree_map_with_path(lambda at, x: np.zeros_like(x) if is_first_moment(at) else x, state)


def step(inner: Inner, compute: Gradient, params: Any, state: InnerState, batch: tuple, s: jax.Array) -> Stepped:
  """Makes the update of the global step s, int32 []; the loss among the metrics is that before the update.

  After `max_skipped` skipped steps in a row the update is made even if it is not finite: screening then excludes the
  path at the end of its phase.
  """
  loss, grads, norm = compute(params, *batch)
  if inner.clip_norm:
    scale = jnp.minimum(1.0, inner.clip_norm / jnp.maximum(norm, 1e-12))
    grads = jax.tree.map(lambda g: g * scale, grads)
  updates, optimizer = inner.update(grads, state.optimizer, params)
  rate = inner.learning_rate(s)
  finite = jnp.isfinite(loss) & jnp.isfinite(norm)
  skip = ~finite & (state.skipped < inner.max_skipped)
  # Selected, not multiplied: 0 times NaN is NaN.
  params = jax.tree.map(lambda p, u: jnp.where(skip, p, p - rate * u), params, updates)
  optimizer = jax.tree.map(lambda new, old: jnp.where(skip, old, new), optimizer, state.optimizer)
  state = InnerState(optimizer, jnp.where(finite, 0, state.skipped + 1))
  return params, state, {'loss': loss, 'grad_norm': norm, 'learning_rate': rate, 'skipped': skip.astype(jnp.float32)}


def steps(inner: Inner, compute: Gradient, params: Any, state: InnerState, batches: tuple, first: jax.Array) -> Stepped:
  """Makes K updates in a scan, see `step`; batches have K in front, and metrics are stacked, [K]."""

  def one(carry: tuple[Any, InnerState], xs: tuple) -> tuple[tuple[Any, InnerState], dict[str, jax.Array]]:
    *batch, offset = xs
    params, state, metrics = step(inner, compute, *carry, tuple(batch), first + offset)
    return (params, state), metrics

  offsets_K = jnp.arange(batches[0].shape[0], dtype=jnp.int32)
  (params, state), metrics = jax.lax.scan(one, (params, state), (*batches, offsets_K))
  return params, state, metrics
