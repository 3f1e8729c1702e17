"""The outer optimization: one step per phase, on the mean outer gradient of the paths of a module [2.5, 2.7]. Pure.

For each module (l, e), with w_i the weight of path i and sums over the active paths through the module (Algorithm 1):

    Delta = sum_i w_i (old - new_i) / sum_i w_i  [* sqrt(number of those paths), norm rescaling]
    module <- OuterOpt(module, Delta)

w_i is 1, or |D_i| / mean_j |D_j| with D_i the shard (loss reweighing: alpha_i = w_i / sum_j w_j) [2.7]. A module
without active paths does not change, nor does its momentum. A path-specific module is treated the same way, with one
path [2.6.1].

With `outer.row_weights`, which is not in the papers, a path's weight differs between the rows r of a parameter (its
first dimension), by the size of the path's gradients there, estimated by AdamW's second moment v^. The mean is over
the row's elements, and epsilon is AdamW's:

    s_{i,r} = sqrt(mean v^_{i,r}) + epsilon
    Delta_r = sum_i w_i s_{i,r} (old - new_i)_r / sum_i w_i s_{i,r}

AdamW divides each path's gradients by about s before they are averaged. A row that matters to only one path, such as
the embedding of a word of its language, therefore moves equally far in the other paths, by noise, and the mean undoes
the learning of the one. Multiplied by s, moves are gradients again, and their sum is divided once, as in data-parallel
AdamW. Weighting by the diagonal of the Fisher information when merging models is similar (arXiv 2111.09832). Cosines
between outer gradients are then computed from moves times s.

A row is a word only in an embedding [V, D]. In an untied head [D, V] it is a hidden dimension, and in attention's o
[H, K, D] a head: there the weights differ less between paths, and Delta_r is closer to the plain mean. It is a weighted
mean of the paths' moves whatever a row is, because s is positive and the same for all elements of the row.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dipaco_jax.algorithm import compression, screening
from dipaco_jax.algorithm.grid import Level
from dipaco_jax.algorithm.modules import Layout, Modules


class OuterState(NamedTuple):
  """State of a module between phases, beside its parameters; stacked over a level as the modules are."""

  optimizer: Any  # of OuterOpt
  usual: jax.Array  # h of screening.py, float32


X = TypeVar('X', jax.Array, np.ndarray)
OuterOpt: TypeAlias = optax.GradientTransformation


class Outer(NamedTuple):
  """The outer step: OuterOpt, and how Delta is scaled and modules are published."""

  optimizer: OuterOpt
  rescale: bool = False  # Delta is times sqrt(number of active paths through the module); not with row weights
  compress: str = 'none'  # one of compression.KINDS


class Sums(NamedTuple):
  """What the paths have sent of some levels since the last outer step."""

  deltas: Modules  # sum_i w_i (old - new_i), shaped like the modules; with row weights each term is times s_{i,r}
  weights: jax.Array  # w_i, shaped like the grid; 0 for paths that take no part
  masses: dict[str, dict[str, jax.Array]] = {}  # with row weights sum_i w_i s_{i,r}, [K_a, ..., rows] by parameter
  capped: dict[str, jax.Array] = {}  # w_i by level, where they differ between levels [weight_cap.py]


States = dict[str, OuterState]  # by level


def make_optimizer(name: str, learning_rate: float, momentum: float, b2: float, epsilon: float) -> OuterOpt:
  """Returns OuterOpt, with eta = `learning_rate` and mu = `momentum`; in the paper Nesterov's, 0.7 and 0.9 [2.5].

  m <- mu m + Delta
  module <- module - eta (Delta + mu m)     nesterov
  module <- module - eta m                  momentum
  module <- module - eta Delta              sgd

  adam: b1 = `momentum`; the other optimizers do not use `b2` and `epsilon`.

  Any other optax.GradientTransformation can be used instead: its update is added to the module.
  A new name needs an entry here, an entry in the choices of `settings.Outer`, and a case in the reference and in the
  tests that compare with it, which name missing cases.

  Example:
    >>> opt = make_optimizer('nesterov', 0.5, 0.5, b2=0.99, epsilon=0.1)
    >>> opt.update(jnp.array(1.0), opt.init(jnp.array(0.0)))[0].item()  # -0.5 (1 + 0.5)
    -0.75
  """
  rate, mu = learning_rate, momentum
  return {
    'nesterov': lambda: optax.sgd(rate, mu, nesterov=True),
    'momentum': lambda: optax.sgd(rate, mu),
    'sgd': lambda: optax.sgd(rate),
    'adam': lambda: optax.adam(rate, b1=mu, b2=b2, eps=epsilon),
  }[name]()


def vmap_modules(function: Callable, num_axes: int) -> Callable:
  """Maps a function of one module over the leading axes of a level's stacked modules."""
  for _ in range(num_axes):
    function = jax.vmap(function)
  return function


def init(layout: Layout, opt: OuterOpt, modules: Modules, inner_optimizer: str) -> States:
  """Returns the outer states before the first phase; h_0 depends on the name of the inner optimizer [screening.py]."""

  def init_module(module: dict[str, jax.Array]) -> OuterState:
    size = sum(x.size for x in jax.tree.leaves(module))
    return OuterState(opt.init(module), jnp.float32(screening.first_usual(size, inner_optimizer)))

  return {level.name: vmap_modules(init_module, len(level.axes))(modules[level.name]) for level in layout.levels}


def module_step(opt: OuterOpt, module: Any, state: Any, delta: Any) -> tuple[Any, Any, jax.Array]:
  """Applies OuterOpt to one module: returns the module, the optimizer's state and |Delta| [Algorithm 1].

  Example:
    >>> opt = optax.sgd(0.5)
    >>> module = {'w': jnp.array([1.0, 1.0])}
    >>> module, _, norm = module_step(opt, module, opt.init(module), {'w': jnp.array([3.0, 4.0])})
    >>> module, norm
    ({'w': Array([-0.5, -1. ], dtype=float32)}, Array(5., dtype=float32))
  """
  updates, state = opt.update(delta, state, module)
  return optax.apply_updates(module, updates), state, optax.tree.norm(delta)


def path_weights(active: np.ndarray, shard_tokens: Sequence[float], reweigh: bool, shape: Sequence[int]) -> np.ndarray:
  """Returns w_i, float32, shaped like the grid; 0 for paths that are not active.

  Args:
    active: which paths take part, bool [P].
    shard_tokens: tokens in each path's shard, [P].
    reweigh: loss reweighing, w_i = |D_i| / mean_j |D_j|, so that alpha_i = w_i / sum w_j [2.7]; otherwise w_i = 1.
    shape: sizes of the grid's axes.

  Example:
    >>> path_weights(np.array([True, True, False]), [100, 200, 300], True, (3,))
    array([0.5, 1. , 0. ], dtype=float32)
  """
  tokens = np.asarray(shard_tokens, np.float64)
  weights = tokens / tokens.mean() if reweigh else np.ones_like(tokens)
  return (weights * active).astype(np.float32).reshape(shape)


def row_weights(
  moments: Mapping[str, jax.Array], count: jax.Array, b2: float, epsilon: float,
  over_slice: Callable = lambda name, x: x,
) -> dict[str, jax.Array]:  # fmt: skip
  """Returns s_{i,r} of one path, [rows] by parameter; a scalar counts as one row.

  Args:
    moments: AdamW's second moments v, by parameter.
    count: steps that AdamW has taken.
    b2, epsilon: those of AdamW.
    over_slice: (name, mean over this device's part of each row) -> mean over the path's slice of devices.
  """
  corrected = 1 - b2 ** jnp.maximum(count, 1).astype(jnp.float32)
  means = {name: over_slice(name, jnp.mean(v, axis=tuple(range(1, v.ndim)))) for name, v in moments.items()}
  return {name: jnp.sqrt(mean / corrected) + epsilon for name, mean in means.items()}


def broadcast_rows(weights: X, x: X) -> X:
  """Reshapes row weights [..., rows] to be multiplied with a parameter [..., rows, ...].

  Example:
    >>> broadcast_rows(np.ones(4), np.ones((4, 5, 6))).shape
    (4, 1, 1)
  """
  return weights.reshape((*weights.shape, *(1,) * (x.ndim - weights.ndim)))


class Term(NamedTuple):
  """What one path adds to the sums of a module."""

  moves: dict[str, jax.Array]  # old - new; with row weights times s_{i,r}
  delta: dict[str, jax.Array]  # w_i times that, 0 if the path does not count
  mass: dict[str, jax.Array]  # w_i s_{i,r}, {} without row weights


def term(delta: dict[str, jax.Array], weight: jax.Array, counts: jax.Array, rows: Mapping[str, jax.Array]) -> Term:
  """Returns the terms that one path adds to the sums of a module.

  Args:
    delta: old - new.
    weight: w_i, [].
    counts: whether the path takes part, bool []. If not, values that are not finite have no effect.
    rows: row weights s_{i,r} by parameter, or {} for none.
  """
  moves = {n: d * broadcast_rows(rows[n], d) if rows else d for n, d in delta.items()}
  weighted = {n: jnp.where(counts, weight * d, 0) for n, d in moves.items()}
  return Term(moves, weighted, {n: jnp.where(counts, weight * rows[n], 0) for n in moves} if rows else {})


def divide(x: jax.Array, mass: jax.Array) -> jax.Array:
  """Divides weighted sums by the sums of the weights, or 0 if the weight is 0."""
  return jnp.where(mass > 0, x / jnp.where(mass > 0, mass, 1), 0)


def per_module(layout: Layout, level: Level, x: jax.Array) -> jax.Array:
  """Sums an array shaped like the grid over the paths through each module of a level: [K_a, ...]."""
  return jnp.sum(x, axis=layout.grid.lacking(level))


def update(
  layout: Layout, outer: Outer, modules: Modules, state: States, sums: Sums, masters: Modules | None = None
) -> tuple[Modules, Modules, States, dict[str, jax.Array]]:
  """Makes one outer step of the levels in `sums`: Delta from the paths' sums, and OuterOpt [Algorithm 1; 2.5, 2.7].

  Args:
    layout: grid and levels.
    outer: OuterOpt and how Delta is scaled.
    modules, state: modules and outer state before the step.
    sums: sums over the paths.
    masters: M of the levels that are compressed; `modules` are m, which paths read [compression.py].

  Returns:
    The new modules, masters and states, and {level name: norm of Delta of each module}.

  Raises:
    ValueError: `outer.rescale` with row weights, whose equation has no norm rescaling.
  """
  check_rescale(outer.rescale, sums.masses)
  new_modules, new_masters = dict(modules), dict(masters or {})
  new_state = dict(state)
  norms: dict[str, jax.Array] = {}
  for level in layout.levels:
    if (name := level.name) not in sums.deltas:
      continue
    total = per_module(layout, level, sums.capped.get(name, sums.weights))
    factor = divide(jnp.ones_like(total), total)
    factor = factor * jnp.sqrt(num_active(layout, level, sums.weights)) if outer.rescale else factor
    over_modules = functools.partial(vmap_modules, num_axes=len(level.axes))
    delta = over_modules(mean_delta)(sums.deltas[name], sums.masses.get(name, {}), factor)
    before = new_masters.get(name, modules[name])
    step = over_modules(functools.partial(_step_if_active, outer.optimizer))
    after, optimizer, norms[name] = step(before, state[name].optimizer, delta, total > 0)
    if name in new_masters:
      new_masters[name] = after
      kind = compression.of_modules(outer.compress)
      after = over_modules(functools.partial(follow, kind))(modules[name], after, total > 0)
    new_modules[name], new_state[name] = after, state[name]._replace(optimizer=optimizer)
  return new_modules, new_masters, new_state, norms


def mean_delta(sums: dict[str, jax.Array], masses: dict[str, jax.Array], factor: jax.Array) -> dict[str, jax.Array]:
  """Returns Delta of one module: its sums times `factor`, or, with row weights, each row divided by its weights."""
  if masses:
    return {name: divide(x, broadcast_rows(masses[name], x)) for name, x in sums.items()}
  return {name: x * factor for name, x in sums.items()}


def check_rescale(rescale: bool, rows: Any) -> None:
  """Raises ValueError for norm rescaling with row weights, whose equation has none."""
  if rescale and rows:
    raise ValueError('row weights go with rescale=False: a row that one path has moved would go further than the path')


def follow(kind: str, module: Any, master: Any, active: Any) -> Any:
  """Returns m(v) = m(v-1) + Q'(M(v) - m(v-1)), what paths read of one module, if one took part [compression.py]."""
  return jax.tree.map(lambda m, M: jnp.where(active, m + compression.rounded(M - m, kind), m), module, master)


def _step_if_active(opt: OuterOpt, module: Any, state: Any, delta: Any, active: Any) -> tuple[Any, Any, jax.Array]:
  """Returns one module after its outer step, if a path took part, its optimizer's state and the norm of Delta."""
  *new, norm = module_step(opt, module, state, delta)
  module, state = jax.tree.map(lambda n, o: jnp.where(active, n, o), new, [module, state])
  return module, state, norm


def num_active(layout: Layout, level: Level, weights: jax.Array) -> jax.Array:
  """Returns how many paths of positive weight go through each module of a level, float32 [K_a, ...]."""
  return per_module(layout, level, (weights > 0).astype(jnp.float32))


def update_usual(
  layout: Layout, modules: Modules, state: States, weights: jax.Array, moved: Mapping[str, jax.Array], optimizer: str
) -> States:
  """Returns the outer states with new h, from r_{i,l}, shaped like the grid, of some levels [screening.py]."""
  new_states = dict(state)
  for level in (level for level in layout.levels if level.name in moved):
    total = per_module(layout, level, jnp.where(weights > 0, moved[level.name], 0))
    size = sum(math.prod(x.shape[len(level.axes) :]) for x in modules[level.name].values())
    first, old = screening.first_usual(size, optimizer), state[level.name]
    weights_of_moved = jnp.where(moved[level.name] > 0, weights, 0)  # without paths that had a rate of 0
    usual = screening.next_usual(old.usual, total, num_active(layout, level, weights_of_moved), first)
    new_states[level.name] = old._replace(usual=usual)
  return new_states


def cosine(paths: Any, square_of_sum: Any, sum_of_squares: Any, xp: Any = jnp) -> Any:
  """Returns the mean cosine between the outer gradients d_i of n paths; NaN where n = `paths` is below 2.

  (|sum_i d_i|^2 - sum_i |d_i|^2) / ((n - 1) sum_i |d_i|^2)       exact where the d_i are equally long

  `xp`: jax.numpy, or numpy for numbers in float64.

  Example:
    >>> cosine(2, square_of_sum=2.0, sum_of_squares=2.0, xp=np).item()  # two that are orthogonal and of length 1
    0.0
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
    compress: how [compression.py].
  """
  shared = [shapes[name].shape for name, level in layout.owner.items() if layout.grid.paths_through(level) > 1]
  rows = sum(shape[0] if shape else 1 for shape in shared) if row_weights else 0
  both_ways = compress, compression.of_modules(compress)
  sent = sum(compression.sent_bytes(shape, kind) for shape in shared for kind in both_ways)
  return round(active * (sent + 4 * rows))


def lost_paths(lost: float, shape: Sequence[int], seed: int, phase: int) -> np.ndarray:
  """Draws the paths that lose their outer gradient in a phase, each with probability `lost` [arXiv 2311.08105].

  Such a path takes no part in the outer step, and continues from its own parameters instead of the new modules.
  Returns bool, shaped like the grid.
  """
  return np.random.default_rng([seed, phase, 1]).random(shape) < lost


def sampled_paths(num_paths: int, count: int, seed: int, phase: int) -> tuple[int, ...]:
  """Draws the `count` paths that train in a phase [2.6.2].

  Example:
    >>> len(set(sampled_paths(num_paths=16, count=4, seed=0, phase=3)))
    4
  """
  return tuple(np.random.default_rng([seed, phase]).permutation(num_paths)[:count])
