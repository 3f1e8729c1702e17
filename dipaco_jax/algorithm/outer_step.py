"""The outer step of stacked paths, over any pytree of arrays [Algorithm 1; 2.5, 2.7].

The mathematics is that of `outer`, `screening` and `compression`; here the paths are stacked, [P, ...], and all state
is in one pytree.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dipaco_jax.algorithm import checks, compression, outer as outer_lib, screening
from dipaco_jax.algorithm.checks import Tree
from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.algorithm.levels import Levels, where_path
from dipaco_jax.algorithm.modules import Modules

INNER_OPTIMIZERS = (*screening.BOUNDED, 'other')


class State(NamedTuple):
  """State of the outer step between phases, float32 where parameters have fewer bits."""

  levels: outer_lib.States  # OuterOpt's, and h of screening.py
  masters: Modules  # M of levels that are compressed [compression.py]
  residuals: dict[str, jax.Array]  # e of each path, [P, ...] by parameter, of the same levels


class _Sent(NamedTuple):
  """What the paths send of the levels that exchange, and how it counts."""

  deltas: Modules  # c_i, [P, ...]
  residuals: dict[str, jax.Array]  # after it, [P, ...] by parameter
  weights: jax.Array  # w_i, [P]
  rows: Any  # row weights by parameter, [P, rows], or None
  rates: jax.Array  # by which moves are divided, []


class Report(NamedTuple):
  """What an outer step has seen."""

  excluded: jax.Array  # paths that took no part because of their outer gradients, bool [P]
  moved: dict[str, jax.Array]  # r of screening.py by level, [P]
  norms: dict[str, jax.Array]  # |Delta| by level, [K_a, ...]


@dataclasses.dataclass(frozen=True)
class OuterStep:
  """The outer step: what paths have learned moves the modules that they share [Algorithm 1, OuterOpt; 2.5, 2.7].

      Delta_{l,e} = sum_i w_i (old - new_i) / sum_i w_i  [* sqrt(number of those paths), norm rescaling]
      module_{l,e} <- OuterOpt(module_{l,e}, Delta_{l,e})

  over the paths i through module e of level l. A path whose outer gradient is not finite takes no part; neither does
  one whose move is more than `exclude_above` times as long as is usual [screening.py]. The step is computed in float32
  if parameters have fewer bits, and modules keep their dtype.

  Attributes:
    levels: the levels.
    optimizer: OuterOpt, any Optax transformation; its update is added to the module.
    rescale: norm rescaling [2.7]; not with row weights.
    exclude_above: f of screening.py; 0: paths are left out only where they are not finite.
    compress: how outer gradients and new modules are rounded on the wire, one of compression.KINDS.
    inner_optimizer: 'adamw' or 'muon', whose moves are bounded [screening.py], or 'other': no bound is known.

  Raises:
    ValueError: `compress` is not one of compression.KINDS, `exclude_above` is negative, or `inner_optimizer` has
      another name.

  Examples:
    >>> params = {'w': jnp.zeros(2)}
    >>> levels = Levels(Grid(a=2), params, all=('w', ''))  # DiLoCo: two replicas of one model
    >>> outer = OuterStep(levels, optax.sgd(1.0))
    >>> modules = levels.start(params)
    >>> paths = {'w': jnp.array([[1.0, 1.0], [3.0, 5.0]])}
    >>> outer.step(modules, outer.init(modules), paths)[0]
    {'all': {'w': Array([2., 3.], dtype=float32)}}
  """

  levels: Levels = dataclasses.field(repr=False)  # a table
  optimizer: optax.GradientTransformation
  rescale: bool = False
  exclude_above: float = 0.0
  compress: str = 'none'
  inner_optimizer: str = 'adamw'

  def __post_init__(self):
    if self.compress not in compression.KINDS:
      raise ValueError(f'compress={self.compress!r}: use one of {", ".join(compression.KINDS)}')
    if self.exclude_above < 0:
      raise ValueError(f'exclude_above={self.exclude_above} is negative: use 0 to exclude only non-finite values')
    if self.inner_optimizer not in INNER_OPTIMIZERS:
      names = ', '.join(INNER_OPTIMIZERS)
      raise ValueError(f'inner_optimizer={self.inner_optimizer!r}: use one of {names} (of which no bound is known)')

  def init(self, modules: Modules) -> State:
    """Returns the state before the first outer step.

    Examples:
      >>> levels = Levels(Grid(a=2), {'w': jnp.zeros(3)}, all=('w', 'a'))
      >>> state = OuterStep(levels, optax.sgd(0.7, 0.9)).init(levels.start({'w': jnp.zeros(3)}))
      >>> jax.tree.map(jnp.shape, state.levels['all'].optimizer[0].trace)
      {'w': (2, 3)}
    """
    self.levels.check_modules(modules)
    layout, num_paths = self.levels.layout, self.levels.grid.num_paths
    exact = _at_least_float32(modules)
    masters = {level: exact[level] for level in self._compressed}
    residuals = {
      name: jnp.zeros((num_paths, *modules[level.name][name].shape[len(level.axes) :]), jnp.bfloat16)
      for name, level in layout.owner.items()
      if level.name in masters
    }
    return State(outer_lib.init(layout, self.optimizer, exact, self.inner_optimizer), masters, residuals)

  def step(
    self, modules: Modules, state: State, paths: Tree, weights: Any = None, rows: Any = None, rates: Any = None,
    only: str | Sequence[str] | None = None,
  ) -> tuple[Modules, State, Report]:  # fmt: skip
    """Makes one outer step.

    Args:
      modules: the modules that the paths started from.
      state: the outer state of these modules.
      paths: the paths' parameters after the phase, [P, ...].
      weights: w_i, [P]; |D_i| for loss reweighing [2.7], 0 for a path that has not trained [2.6.2]; None: 1. Where
        values are not known, inside `jax.jit`, weights that are negative or NaN count as 0.
      rows: row weights by parameter, [P, rows], as `row_weights` makes them, or None.
      rates: sum of the inner learning rates of the phase, [], by which moves are divided to compare them between
        phases [screening.py]; needed with `exclude_above`.
      only: names of the levels to exchange, a sequence or separated by spaces. None means all.

    Returns:
      The new modules and state, and a report. An excluded path continues from the new modules; give it a fresh inner
      state (`Levels.renew`).

    Raises:
      ValueError: shapes differ from those of the levels, `state` is that of another outer step, weights are negative
        or NaN, a level in `only` does not exist, `rates` is missing, or `rows` are given with `rescale`.

    Examples:
      >>> params = {'w': jnp.array(0.0)}
      >>> levels = Levels(Grid(a=3), params, all=('w', ''))
      >>> outer, modules = OuterStep(levels, optax.sgd(1.0)), levels.start(params)
      >>> paths = {'w': jnp.array([1.0, 4.0, jnp.nan])}
      >>> modules, _, report = outer.step(modules, outer.init(modules), paths, weights=[2, 1, 1])
      >>> modules, report.excluded
      ({'all': {'w': Array(2., dtype=float32)}}, Array([False, False,  True], dtype=bool))
    """
    weights, rates = self._check(weights, rows, rates)
    checks.check_like('state', state, jax.eval_shape(self.init, modules), 'give outer.init(modules) or a later state')
    chosen = self.levels.select(only)
    deltas, residuals = self._send(self._outer_gradients(modules, paths, chosen), state.residuals)
    return self._move(modules, state, _Sent(deltas, residuals, weights, rows, rates))

  def _move(self, modules: Modules, state: State, sent: _Sent) -> tuple[Modules, State, Report]:
    """Updates the modules with the paths' messages. Returns the same as `step`."""
    moved = {level: jax.vmap(optax.tree.norm)(delta) / sent.rates for level, delta in sent.deltas.items()}
    excluded = self._excluded(moved, state)
    counts = ~excluded & (sent.weights > 0)
    sums = self._sum(sent.deltas, jnp.where(counts, sent.weights, 0), counts, sent.rows)
    before = modules | {level: _at_least_float32(modules[level]) for level in sent.deltas}
    layout, outer = self.levels.layout, outer_lib.Outer(self.optimizer, self.rescale, self.compress)
    masters = {level: state.masters[level] for level in state.masters if level in sent.deltas}
    after, masters, states, norms = outer_lib.update(layout, outer, before, state.levels, sums, masters)
    on_grid = {level: r.reshape(self.levels.grid.shape) for level, r in moved.items()}
    states = outer_lib.update_usual(layout, after, states, sums.weights, on_grid, self.inner_optimizer)
    new_modules = modules | {level: _with_dtypes_of(modules[level], after[level]) for level in sent.deltas}
    kept = {name: where_path(counts, e, state.residuals[name]) for name, e in sent.residuals.items()}
    kept = {name: where_path(excluded, jnp.zeros_like(e), e) for name, e in (state.residuals | kept).items()}
    return new_modules, State(states, state.masters | masters, kept), Report(excluded, moved, norms)

  def _check(self, weights: Any, rows: Any, rates: Any) -> tuple[jax.Array, jax.Array]:
    """Returns w_i, float32 [P], and what moves are divided by."""
    outer_lib.check_rescale(self.rescale, rows)
    return self._check_weights(weights), self._check_rates(rates)

  def _check_weights(self, weights: Any) -> jax.Array:
    """Returns w_i, float32 [P]."""
    num_paths = self.levels.grid.num_paths
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(weights))
    if weights is not None and not traced and not np.all(np.asarray(weights) >= 0):
      raise ValueError(f'weights={np.asarray(weights)} are negative or NaN: give 0 for paths that have not trained')
    weights = jnp.ones(num_paths) if weights is None else jnp.asarray(weights, jnp.float32)
    if weights.shape != (num_paths,):
      raise ValueError(f'weights have shape {weights.shape}: give one for each of the {num_paths} paths')
    return weights

  def _check_rates(self, rates: Any) -> jax.Array:
    """Returns what moves are divided by; inf at a rate of 0, at which nothing moves."""
    if rates is None and self.exclude_above:
      raise ValueError('exclude_above compares moves of different phases: give rates, the sum of the learning rates')
    rates = jnp.float32(1 if rates is None else rates)
    return jnp.where(rates > 0, rates, jnp.inf)

  def _outer_gradients(self, modules: Modules, paths: Tree, chosen: Sequence[str]) -> Modules:
    """Returns old - new of all paths, [P, ...] by level and parameter."""
    old, new = (
      _at_least_float32(x) for x in (self.levels.flat(self.levels.paths(modules)), self.levels.flat_paths(paths))
    )
    names = {level.name: self.levels.layout.names(level) for level in self.levels.layout.levels}
    return {level: {name: old[name] - new[name] for name in names[level]} for level in chosen}

  @property
  def _compressed(self) -> list[str]:
    """The levels whose messages are rounded: those that paths share."""
    layout = self.levels.layout
    return [l.name for l in layout.levels if self.compress != 'none' and layout.grid.paths_through(l) > 1]

  def _send(self, deltas: Modules, residuals: dict[str, jax.Array]) -> tuple[Modules, dict[str, jax.Array]]:
    """Returns the paths' messages, c_i = Q(Delta_i + e_i), and the residuals after them, [P, ...]."""
    sent = dict(deltas)
    new_residuals: dict[str, jax.Array] = {}
    for level in (name for name in deltas if name in self._compressed):
      totals = {name: compression.total(d, residuals[name]) for name, d in deltas[level].items()}
      sent[level] = {n: jax.vmap(lambda x: compression.rounded(x, self.compress))(x) for n, x in totals.items()}
      new_residuals |= {name: compression.next_residual(totals[name], x) for name, x in sent[level].items()}
    return sent, new_residuals

  def _excluded(self, moved: dict[str, jax.Array], state: State) -> jax.Array:
    """Returns which paths take no part because of how far they have moved, bool [P]."""
    grid, limit = self.levels.grid, jnp.float32(self.exclude_above)
    excluded = jnp.zeros(grid.num_paths, bool)
    for level in (level for level in self.levels.layout.levels if level.name in moved):
      usual = jnp.asarray(state.levels[level.name].usual)  # of a checkpoint: NumPy's
      of_path = jax.vmap(lambda at, level=level, usual=usual: usual[grid.module(level, tuple(at))])(_points(grid))
      excluded |= ~screening.is_plausible(moved[level.name], of_path, limit)
    return excluded

  def _sum(self, sent: Modules, weights: jax.Array, counts: jax.Array, rows: Any) -> outer_lib.Sums:
    """Sums the messages of the paths through each module."""
    layout, grid = self.levels.layout, self.levels.grid
    deltas: Modules = {}
    masses: Modules = {}
    for level in (level for level in layout.levels if level.name in sent):
      of_level = {name: rows[name] for name in sent[level.name]} if rows else {}
      term = jax.vmap(outer_lib.term)(sent[level.name], weights, counts, of_level)
      add = lambda x, level=level: jnp.sum(x.reshape(*grid.shape, *x.shape[1:]), axis=grid.lacking(level))  # noqa: E731
      deltas[level.name] = jax.tree.map(add, term.delta)
      masses |= {level.name: jax.tree.map(add, term.mass)} if rows else {}
    return outer_lib.Sums(deltas, weights.reshape(grid.shape), masses)


def row_weights(levels: Levels, moments: Tree, count: Any, b2: float = 0.999, epsilon: float = 1e-8) -> dict[str, Any]:
  """Returns s_{i,r} of all paths, by which `OuterStep.step` weights the rows of parameters [outer.py].

      s_{i,r} = sqrt(mean of v^ over row r) + epsilon        v^ = v / (1 - b2^count)

  Args:
    levels: the levels.
    moments: AdamW's second moments v of all paths, a pytree like the parameters, [P, ...].
    count: steps that AdamW has taken, int [].
    b2: AdamW's decay rate of second moments.
    epsilon: AdamW's epsilon.

  Returns:
    {parameter: [P, rows]}.

  Raises:
    ValueError: `moments` has other shapes.

  Examples:
    >>> levels = Levels(Grid(a=1), {'w': jnp.zeros((2, 3))}, all=('w', ''))
    >>> row_weights(levels, {'w': jnp.ones((1, 2, 3)) * 0.25}, 1, b2=0.0)
    {'w': Array([[0.5, 0.5]], dtype=float32)}
  """
  weigh = functools.partial(outer_lib.row_weights, count=jnp.asarray(count), b2=b2, epsilon=epsilon)
  return jax.vmap(weigh)(levels.flat_paths(moments, 'moments'))


def _at_least_float32(tree: Tree) -> Tree:
  """Returns arrays with at least 32 bits."""
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32)), tree)


def _with_dtypes_of(old: Tree, new: Tree) -> Tree:
  """Returns new arrays in the dtypes of the old ones."""
  return jax.tree.map(lambda o, n: n.astype(o.dtype), old, new)


def _points(grid: Grid) -> jax.Array:
  """Returns the coordinates of all paths, int32 [P, number of axes]."""
  return jnp.array([*grid.points()], jnp.int32).reshape(grid.num_paths, len(grid.names))
