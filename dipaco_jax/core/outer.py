"""The outer optimization: one step per phase, on what the paths that share a module have learned [2.5, 2.7]. Pure.

For each module (l, e), with w_i the weight of path i and sums over the active paths through the module (Algorithm 1):

    Delta = sum_i w_i (old - new_i) / sum_i w_i  [* sqrt(number of those paths), norm rescaling]
    module <- OuterOpt(module, Delta)

w_i is 1, or |D_i| / mean_j |D_j| with D_i the shard (loss reweighing: alpha_i = w_i / sum_j w_j) [2.7]. A module that
no active path goes through stays as it is, momentum included. A path-specific module is treated alike, with one path
[2.6.1].

With `outer.row_weights`, which is not in the papers, a path's weight differs between the rows r of a parameter (its
first dimension), by the size of the path's gradients there. AdamW's second moment v^ tells it; the mean is over the
row's elements, and epsilon is AdamW's:

    s_{i,r} = sqrt(mean v^_{i,r}) + epsilon
    Delta_r = sum_i w_i s_{i,r} (old - new_i)_r / sum_i w_i s_{i,r}

AdamW divides each path's gradients by about s before they are averaged. A row that matters to one path only, as the
embedding of a word of its language, therefore moves as far in the other paths, by noise, and the mean undoes what the
one has learned. Multiplied by s, moves are gradients again, and their sum is divided once, as data-parallel AdamW
would. Weighting by the diagonal of the Fisher information when merging models is akin (arXiv 2111.09832). Cosines
between outer gradients are then those of moves times s.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dipaco_jax.core import compression, extension, screening
from dipaco_jax.core.grid import Level
from dipaco_jax.core.modules import Layout, Modules
from dipaco_jax.core.settings import Inner, Outer, Train


class OuterState(NamedTuple):
  """State of a module between phases, beside its parameters; stacked over a level as the modules are."""

  optimizer: Any  # of OuterOpt
  usual: jax.Array  # h of screening.py, float32


X = TypeVar('X', jax.Array, np.ndarray)
OuterOpt: TypeAlias = optax.GradientTransformation
States = dict[str, OuterState]  # by level


def make_optimizer(config: Outer) -> OuterOpt:
  """Returns OuterOpt, with eta = `learning_rate` and mu = `momentum`; by default Nesterov's, 0.7 and 0.9 [2.5].

  m <- mu m + Delta
  module <- module - eta (Delta + mu m)     nesterov
  module <- module - eta m                  momentum
  module <- module - eta Delta              sgd

  adam: b1 = `momentum`. 'package.module:make' is make(config) -> optax.GradientTransformation, whose update is added to
  the module [extension.py]. Another built-in optimizer needs an entry here, its name among the choices of
  `settings.Outer`, and a case in the naive twin (tests/helpers/twin.py) and the tests that compare it, which name what
  is missing. A new field of the settings says `added=True`, so that older workdirs go on.
  """
  if extension.is_reference(config.optimizer):
    return extension.make('outer.optimizer', config.optimizer, config)
  rate, mu = config.learning_rate, config.momentum
  return {
    'nesterov': lambda: optax.sgd(rate, mu, nesterov=True),
    'momentum': lambda: optax.sgd(rate, mu),
    'sgd': lambda: optax.sgd(rate),
    'adam': lambda: optax.adam(rate, b1=mu, b2=config.b2, eps=config.epsilon),
  }[config.optimizer]()


def vmap_modules(function: Callable, num_axes: int) -> Callable:
  """Maps a function of one module over the leading axes of a level's stacked modules."""
  for _ in range(num_axes):
    function = jax.vmap(function)
  return function


def init(layout: Layout, config: Outer, modules: Modules, inner_optimizer: str) -> States:
  """Returns the outer states before the first phase; h_0 depends on `inner.optimizer`."""
  initial = make_optimizer(config).init

  def init_module(module: dict[str, jax.Array]) -> OuterState:
    size = sum(x.size for x in jax.tree.leaves(module))
    return OuterState(initial(module), jnp.float32(screening.first_usual(size, inner_optimizer)))

  return {level.name: vmap_modules(init_module, len(level.axes))(modules[level.name]) for level in layout.levels}


def step(opt: OuterOpt, module: Any, state: Any, delta: Any) -> tuple[Any, Any, jax.Array]:
  """Applies OuterOpt to one module: returns the module, the optimizer's state and |Delta| [Algorithm 1]."""
  updates, state = opt.update(delta, state, module)
  return optax.apply_updates(module, updates), state, optax.tree.norm(delta)


def path_weights(active: np.ndarray, shard_tokens: Sequence[float], reweigh: bool, shape: Sequence[int]) -> np.ndarray:
  """Returns w_i, float32, shaped like the grid; 0 for paths that are not active.

  Args:
    active: which paths take part, bool [P].
    shard_tokens: tokens in each path's shard, [P].
    reweigh: loss reweighing, w_i = |D_i| / mean_j |D_j|, so that alpha_i = w_i / sum w_j [2.7]; otherwise w_i = 1.
    shape: sizes of the grid's axes.
  """
  tokens = np.asarray(shard_tokens, np.float64)
  weights = tokens / tokens.mean() if reweigh else np.ones_like(tokens)
  return (weights * active).astype(np.float32).reshape(shape)


def row_weights(
  moments: Mapping[str, jax.Array], count: jax.Array, config: Inner, over_slice: Callable = lambda name, x: x
) -> dict[str, jax.Array]:  # fmt: skip
  """Returns s_{i,r} of one path, [rows] by parameter; a scalar counts as one row.

  Args:
    moments: AdamW's second moments v, by parameter.
    count: steps that AdamW has taken.
    config: has its b2 and epsilon.
    over_slice: (name, mean over this device's part of each row) -> mean over the path's slice of devices.
  """
  corrected = 1 - config.b2 ** jnp.maximum(count, 1).astype(jnp.float32)
  means = {name: over_slice(name, jnp.mean(v, axis=tuple(range(1, v.ndim)))) for name, v in moments.items()}
  return {name: jnp.sqrt(mean / corrected) + config.epsilon for name, mean in means.items()}


def broadcast_rows(weights: X, x: X) -> X:
  """Reshapes row weights [..., rows] to be multiplied with a parameter [..., rows, ...]."""
  return weights.reshape((*weights.shape, *(1,) * (x.ndim - weights.ndim)))


def divide(x: jax.Array, mass: jax.Array) -> jax.Array:
  """Divides weighted sums by the sums of the weights; 0 where the weight is 0."""
  return jnp.where(mass > 0, x / jnp.where(mass > 0, mass, 1), 0)


def per_module(layout: Layout, level: Level, x: jax.Array) -> jax.Array:
  """Sums an array shaped like the grid over the paths through each module of a level: [K_a, ...]."""
  return jnp.sum(x, axis=layout.grid.lacking(level))


def update(
  layout: Layout, config: Outer, modules: Modules, state: States, sums: Modules, weights: jax.Array, masses: Any = None,
  masters: Modules | None = None, compress: str = 'none',
) -> tuple[Modules, Modules, States, dict[str, jax.Array]]:  # fmt: skip
  """Makes one outer step of the levels in `sums`: Delta from the paths' sums, and OuterOpt [Algorithm 1; 2.5, 2.7].

  Args:
    layout: grid and levels.
    config: of OuterOpt; `rescale`: Delta is times sqrt(number of active paths through the module), not with `masses`.
    modules, state: those before the step.
    sums: sum_i w_i (old - new_i), shaped like the modules.
    weights: w_i, shaped like the grid; 0 for paths that take no part.
    masses: with row weights sum_i w_i s_{i,r}, [K_a, ..., rows] by parameter; the terms of `sums` are then times s.
    masters: M of the levels that are compressed; `modules` are m, what paths read [compression.py].
    compress: how.

  Returns:
    The new modules, masters and states, and {level name: norm of Delta of each module}.
  """
  new_modules, new_masters, new_state, norms = dict(modules), dict(masters or {}), dict(state), {}
  for level in layout.levels:
    if (name := level.name) not in sums:
      continue
    total = per_module(layout, level, weights)
    factor = divide(jnp.ones_like(total), total)
    factor = factor * jnp.sqrt(num_active(layout, level, weights)) if config.rescale else factor
    update_module = vmap_modules(functools.partial(_update_module, make_optimizer(config)), len(level.axes))
    before = new_masters.get(name, modules[name])
    after, optimizer, norms[name] = update_module(
      before, state[name].optimizer, sums[name], masses[name] if masses else {}, factor, total > 0
    )
    if name in new_masters:
      new_masters[name] = after
      after = vmap_modules(functools.partial(follow, compress), len(level.axes))(modules[name], after, total > 0)
    new_modules[name], new_state[name] = after, state[name]._replace(optimizer=optimizer)
  return new_modules, new_masters, new_state, norms


def follow(kind: str, module: Any, master: Any, active: Any) -> Any:
  """Returns m(v) = m(v-1) + Q(M(v) - m(v-1)), what paths read of one module, if one took part [compression.py]."""
  return jax.tree.map(lambda m, M: jnp.where(active, m + compression.rounded(M - m, kind), m), module, master)


def _update_module(opt: OuterOpt, module: Any, state: Any, sums: Any, masses: Any, factor: Any, active: Any) -> tuple:
  """Returns one module after its outer step, its optimizer's state and the norm of Delta."""
  if masses:
    delta = {name: divide(s, broadcast_rows(masses[name], s)) for name, s in sums.items()}
  else:
    delta = jax.tree.map(lambda s: s * factor, sums)
  *new, norm = step(opt, module, state, delta)
  kept = jax.tree.map(lambda n, o: jnp.where(active, n, o), new, [module, state])
  return *kept, norm


def num_active(layout: Layout, level: Level, weights: jax.Array) -> jax.Array:
  """Returns how many paths of positive weight go through each module of a level, float32 [K_a, ...]."""
  return per_module(layout, level, (weights > 0).astype(jnp.float32))


def update_usual(
  layout: Layout, modules: Modules, state: States, weights: jax.Array, moved: Mapping[str, jax.Array], optimizer: str
) -> States:
  """Returns the outer states with new h, from r_{i,l}, shaped like the grid, of some levels [screening.py]."""
  found = dict(state)
  for level in (level for level in layout.levels if level.name in moved):
    total = per_module(layout, level, jnp.where(weights > 0, moved[level.name], 0))
    size = sum(math.prod(x.shape[len(level.axes) :]) for x in modules[level.name].values())
    first, old = screening.first_usual(size, optimizer), state[level.name]
    told = jnp.where(moved[level.name] > 0, weights, 0)  # not those that had a rate of 0
    usual = screening.next_usual(old.usual, total, num_active(layout, level, told), first)
    found[level.name] = old._replace(usual=usual)
  return found


def cosine(paths: Any, square_of_sum: Any, sum_of_squares: Any, xp: Any = jnp) -> Any:
  """Returns the mean cosine between the outer gradients d_i of n paths; NaN where n = `paths` is below 2.

  (|sum_i d_i|^2 - sum_i |d_i|^2) / ((n - 1) sum_i |d_i|^2)       exact where the d_i are equally long

  `xp`: jax.numpy, or numpy for numbers in float64.
  """
  mean = (square_of_sum - sum_of_squares) / xp.maximum((paths - 1) * sum_of_squares, 1e-30)
  return xp.where(paths > 1, mean, xp.nan)


def exchanged_bytes(
  layout: Layout, shapes: Mapping[str, jax.ShapeDtypeStruct], active: float, row_weights: bool = False,
  compress: str = 'none',
) -> int:  # fmt: skip
  """Returns the bytes that the paths send and receive in a phase.

  Each path sends its copy of every module it shares, with `row_weights` also one float32 a row, and receives the new
  one, or its difference to the one before; path-specific modules (P_{l,e} = 1) are not exchanged [2.6.1].

  Args:
    layout: grid and levels.
    shapes: one path's parameters.
    active: number of paths that train in a phase; the mean over phases where paths are sampled.
    row_weights: as in settings.Outer.
    compress: how, both ways [compression.py].
  """
  shared = [shapes[name].shape for name, level in layout.owner.items() if layout.grid.paths_through(level) > 1]
  rows = sum(shape[0] if shape else 1 for shape in shared) if row_weights else 0
  return round(active * (2 * sum(compression.sent_bytes(shape, compress) for shape in shared) + 4 * rows))


def takes_over(layout: Layout, config: Outer) -> bool:
  """Returns whether paths go on from their own parameters: no module is shared, and theta <- theta - 1 Delta."""
  shared = any(layout.grid.paths_through(level) > 1 for level in layout.levels)
  return not shared and config.optimizer == 'sgd' and config.learning_rate == 1


def lost_paths(lost: float, shape: Sequence[int], seed: int, phase: int) -> np.ndarray:
  """Draws the paths whose outer gradient is lost in a phase, each with probability `lost` [arXiv 2311.08105].

  Such a path takes no part in the outer step, and goes on from its own parameters where others take the new modules.
  Returns bool, shaped like the grid.
  """
  return np.random.default_rng([seed, phase, 1]).random(shape) < lost


def active_paths(train: Train, num_paths: int, seed: int, phase: int) -> np.ndarray:
  """Returns which paths train in a phase, bool [P]: by schedule, by path sampling [2.6.2], or all of them."""
  if train.schedule:
    chosen = [paths for first, paths in train.schedule if first <= phase][-1]
  elif train.paths_per_phase:
    chosen = tuple(np.random.default_rng([seed, phase]).permutation(num_paths)[: train.paths_per_phase])
  else:
    chosen = tuple(range(num_paths))
  return np.isin(np.arange(num_paths), chosen)
