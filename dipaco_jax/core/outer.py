"""The outer optimization: what paths that share a module exchange, once per phase [2.5, 2.7]. Pure.

For each module (l, e), with w_i the weight of path i and the sums over the active paths through it:

    Delta = sum_i w_i (old - new_i) / sum_i w_i  [* sqrt(number of those paths)]
    module <- OuterOpt(module, Delta)

`w_i` is 1, or in proportion to the shard's tokens (loss reweighing: alpha_i = |D_i| / sum |D_j|). A module that no
active path goes through stays as it is, momentum included. Path-specific modules get the same treatment, with one path
[2.6.1].

With `outer.row_weights` paths weigh differently in every row r of a parameter (its first dimension), by how large their
gradients there have been, which their AdamW knows: v^ is its second moment, epsilon its own, means are over the row's
elements.

    s_{i,r} = sqrt(mean v^_{i,r}) + epsilon
    Delta_r = sum_i w_i s_{i,r} (old - new_i)_r / sum_i w_i s_{i,r}

AdamW divides each path's gradients by about s before they are averaged: a row that one path needs, as the embedding of
a word of its language, moves as far in the paths that hardly know it, by noise, and the mean of all undoes what the one
has learned. Times s, moves are gradients again, and their sum is divided once, as data-parallel AdamW would. Not in the
papers; weighting by the diagonal of Fisher's information, in merging models, is akin to it (arXiv 2111.09832). The
cosines between outer gradients are then those of moves times s.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dipaco_jax.core import screening, settings
from dipaco_jax.core.modules import Layout, Modules


class OuterState(NamedTuple):
  """What a module keeps from phase to phase beside its parameters; of a level, stacked as its modules are."""

  optimizer: Any  # of OuterOpt
  usual: jax.Array  # how far its paths move it, see screening.py; float32


def make(config: settings.Outer) -> optax.GradientTransformation:
  """OuterOpt; Nesterov 0.7 / 0.9 by default: m <- mu m + Delta, module <- module - eta (Delta + mu m)."""
  rate, mu = config.learning_rate, config.momentum
  return {
    'nesterov': lambda: optax.sgd(rate, mu, nesterov=True),
    'momentum': lambda: optax.sgd(rate, mu),
    'sgd': lambda: optax.sgd(rate),
    'adam': lambda: optax.adam(rate, b1=mu, b2=0.99, eps=config.epsilon),
  }[config.optimizer]()


def vmap_modules(function, num_axes: int):
  """`function` of one module, over the leading axes of a level's stacked modules."""
  for _ in range(num_axes):
    function = jax.vmap(function)
  return function


def init(layout: Layout, transformation: optax.GradientTransformation, modules: Modules, inner_optimizer='adamw'):
  """Each module's own outer state, stacked like the modules: `{level name: OuterState}`."""

  def one(module):
    size = sum(x.size for x in jax.tree.leaves(module))
    return OuterState(transformation.init(module), jnp.float32(screening.first_usual(size, inner_optimizer)))

  return {level.name: vmap_modules(one, len(level.axes))(modules[level.name]) for level in layout.levels}


def step(transformation: optax.GradientTransformation, module, state, delta):
  """OuterOpt of one module, from Delta: the new module and its new state."""
  updates, state = transformation.update(delta, state, module)
  return optax.apply_updates(module, updates), state


def path_weights(active: np.ndarray, shard_tokens: Sequence[float], reweigh: bool, shape: Sequence[int]):
  """w_i, shaped like the grid, float32: 0 where not active; else by shard tokens (their mean is 1), or 1."""
  tokens = np.asarray(shard_tokens, np.float64)
  weights = tokens / tokens.mean() if reweigh else np.ones_like(tokens)
  return (weights * active).astype(np.float32).reshape(shape)


def row_weights(inner_state, b2: float, epsilon: float, over_slice=lambda name, x: x) -> dict[str, jax.Array]:
  """s_{i,r} of one path, [rows] by parameter; scalars count as one row.

  Args:
    inner_state: `inner.InnerState` of AdamW.
    b2, epsilon: AdamW's.
    over_slice: (name, mean over the rest of a row that is here) -> the same over the path's slice.
  """
  adam = inner_state.optimizer[0]
  corrected = 1 - b2 ** jnp.maximum(adam.count, 1).astype(jnp.float32)
  means = {name: over_slice(name, jnp.mean(v, axis=tuple(range(1, v.ndim)))) for name, v in adam.nu.items()}
  return {name: jnp.sqrt(mean / corrected) + epsilon for name, mean in means.items()}


def by_row(weights: jax.Array, x: jax.Array) -> jax.Array:
  """Row weights [..., rows], shaped to be multiplied with a parameter [..., rows, ...]."""
  return weights.reshape(*weights.shape, *(1,) * (x.ndim - weights.ndim))


def over_mass(x: jax.Array, mass: jax.Array) -> jax.Array:
  """A sum over its rows' weights; 0 where nobody has a weight."""
  rows = by_row(mass, x)
  return jnp.where(rows > 0, x / jnp.where(rows > 0, rows, 1), 0)


def over_lacking(layout: Layout, level, x: jax.Array, reduce=jnp.sum) -> jax.Array:
  """Reduces an array shaped like the grid over the axes that the level lacks: one value per module."""
  return reduce(x, axis=layout.grid.lacking(level))


def update(
  layout: Layout, transformation, rescale: bool, modules: Modules, state: dict, sums: Modules, weights,
  moved: Mapping[str, jax.Array] | None = None, inner_optimizer: str = 'adamw', masses: Modules | None = None,
):  # fmt: skip
  """One outer step of all modules.

  Args:
    layout: grid and levels.
    transformation: OuterOpt, for one module.
    rescale: multiply Delta by sqrt(number of active paths through the module), P_{l,e} when all are; not with masses.
    modules: the old modules.
    state: outer states, as `init` makes them.
    sums: sum_i w_i (old - new_i), shaped like the modules.
    weights: w_i, shaped like the grid; 0 means that the path took no part.
    moved: r_i by level, each shaped like the grid, from which the modules learn what is usual; None: they don't.
    inner_optimizer: whose r these are.
    masses: sum_i w_i s_{i,r}, shaped like the rows of the modules' parameters, where `sums` are times s; None: s is 1.

  Returns:
    The new modules, the new state, and {level name: norm of Delta per module}.
  """
  new_modules, new_state, norms = {}, {}, {}
  for level in layout.levels:
    total = over_lacking(layout, level, weights)
    active = over_lacking(layout, level, (weights > 0).astype(jnp.float32))
    factor = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
    factor = factor * jnp.sqrt(active) if rescale else factor

    def one(module, state, sum_of_module, mass_of_module, factor, touched):
      if mass_of_module:
        delta = {name: over_mass(s, mass_of_module[name]) for name, s in sum_of_module.items()}
      else:
        delta = jax.tree.map(lambda s: s * factor, sum_of_module)
      new = step(transformation, module, state, delta)
      kept = jax.tree.map(lambda n, o: jnp.where(touched, n, o), new, (module, state))
      return *kept, optax.tree.norm(delta)

    name = level.name
    new_modules[name], optimizer, norms[name] = vmap_modules(one, len(level.axes))(
      modules[name], state[name].optimizer, sums[name], masses[name] if masses else {}, factor, total > 0
    )
    usual = state[name].usual
    if moved is not None:
      sum_of_moves = over_lacking(layout, level, jnp.where(weights > 0, moved[name], 0))
      size = sum(x[(0,) * len(level.axes)].size for x in modules[name].values())
      usual = screening.next_usual(usual, sum_of_moves, active, screening.first_usual(size, inner_optimizer))
    new_state[name] = OuterState(optimizer, usual)
  return new_modules, new_state, norms


def cosine(paths: jax.Array, square_of_sum: jax.Array, sum_of_squares: jax.Array) -> jax.Array:
  """Mean cosine between the outer gradients d of n paths, (|sum d|^2 - sum |d|^2) / ((n - 1) sum |d|^2).

  Exact where the d are of one length. NaN where n = `paths` is below 2.
  """
  mean = (square_of_sum - sum_of_squares) / jnp.maximum((paths - 1) * sum_of_squares, 1e-30)
  return jnp.where(paths > 1, mean, jnp.nan)


def exchanged_bytes(layout: Layout, shapes, active: float, row_weights: bool = False) -> int:
  """What an outer step of `active` paths (their mean, where they are sampled) sends. Arithmetic.

  Each path sends its copy of every module it shares, and receives the new one; path-specific modules (P_{l,e} = 1) are
  not exchanged. With `row_weights` it sends one number a row beside its copy.
  """
  shared = [shapes[name].shape for name, level in layout.owner.items() if layout.grid.paths_through(level) > 1]
  rows = sum(shape[0] for shape in shared) if row_weights else 0
  return round(active * 4 * (2 * sum(map(math.prod, shared)) + rows))


def lost_paths(lost: float, shape: Sequence[int], seed: int, phase: int) -> np.ndarray:
  """Whose outer gradient is lost in a phase, bool, shaped like the grid: each with that probability [2311.08105, 3.2].

  Such a path takes no part in the outer step, and goes on from its own parameters where others take the new modules.
  """
  return np.random.default_rng([seed, phase, 1]).random(shape) < lost


def active_paths(train: settings.Train, num_paths: int, seed: int, phase: int) -> np.ndarray:
  """Which paths train in a phase [2.6.2], bool [P]: by `train.schedule`, or so many drawn by (seed, phase), or all."""
  if train.schedule:
    chosen = [paths for first, paths in train.schedule if first <= phase][-1]
  elif train.paths_per_phase:
    chosen = tuple(np.random.default_rng([seed, phase]).permutation(num_paths)[: train.paths_per_phase])
  else:
    chosen = tuple(range(num_paths))
  return np.isin(np.arange(num_paths), chosen)
