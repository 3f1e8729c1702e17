"""DiPaCo around a training step of your own, over any pytree of arrays [Algorithm 1].

    grid = Grid(a=2, b=2)
    levels = Levels(grid, params, low=('block_0', 'a'), high=('block_1', 'b'), ends=('embed|head', ''))
    outer = OuterStep(levels, optax.sgd(0.7, 0.9, nesterov=True), rescale=True)
    modules = levels.start(params)                       # every path starts from these parameters
    state, inner = outer.init(modules), levels.per_path(optimizer.init(params))
    for batches in phases:                               # [P, tau, ...], each path's from its own shard
      paths, inner, losses = train_phase(train_step, levels.paths(modules), inner, batches)
      modules, state, report = outer.step(modules, state, paths)

`train_step(params, state, batch) -> (params, state, metrics)` is yours. Parameters are those of one path, in any
pytree whose leaves are arrays: dicts, NamedTuples, `nnx.state(model)`, `eqx.filter(model, eqx.is_array)`. Modules and
states are pytrees of arrays too, so `jax.jit`, checkpoints and `jax.device_put` work as always. The programs of this
package make their outer steps with the same functions.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dipaco_jax.algorithm import compression, grid as grid_lib, modules as modules_lib, outer as outer_lib, screening
from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.algorithm.modules import Modules

Tree = Any  # a pytree of arrays
TrainStep = Callable[[Tree, Tree, Tree], tuple[Tree, Tree, Tree]]  # (params, state, batch) -> (params, state, metrics)


class Levels:
  """The levels of a model over a grid: which module of each level a path picks [2.3].

  A level is a pattern over the names of parameters and the axes that it varies over: one module for each point of
  those axes, which all paths share that differ only elsewhere. Names are the keys on the way to a leaf, joined by '/'.

  Example:
    >>> params = {'embed': jnp.ones(3), 'block_0': {'w': jnp.ones((2, 2))}, 'block_1': {'w': jnp.ones((2, 2))}}
    >>> levels = Levels(Grid(a=2, b=3), params, low=('block_0', 'a'), high=('block_1', 'b'), ends=('embed', ''))
    >>> jax.tree.map(jnp.shape, levels.start(params))
    {'ends': {'embed': (3,)}, 'high': {'block_1/w': (3, 2, 2)}, 'low': {'block_0/w': (2, 2, 2)}}
  """

  def __init__(self, grid: Grid, params: Tree, **levels: tuple[str, str | Sequence[str]]):
    """Assigns each parameter to a level.

    Args:
      grid: the axes.
      params: parameters of one path; only their structure is used.
      **levels: (pattern, axes) by name. `pattern` is searched in parameters' names (re.search); `axes` are names of
        the grid's axes, a sequence or separated by spaces. No axes: one module that all paths share; all axes: one
        for each path [2.6.1].

    Raises:
      ValueError: a parameter matches no level or several, a level matches nothing or names an axis that is not there,
        or a leaf is not an array.
    """
    named = _named(params)
    specs = [(n, pattern, axes.split() if isinstance(axes, str) else axes) for n, (pattern, axes) in levels.items()]
    self.grid = grid
    self.layout = modules_lib.make_layout(grid.sizes.items(), specs, named)
    self._order = tuple(named)
    self._structure: Any = jax.tree.structure(params)

  def start(self, params: Tree) -> Modules:
    """Returns all modules, each a copy of its part of one pretrained model [Algorithm 1, initialization].

    Returns:
      {level: {parameter: [K_a for each axis a of the level, ...]}}.
    """
    return modules_lib.stack(self.layout, self.flat(params))

  def path(self, modules: Modules, path: Any) -> Tree:
    """Returns the parameters of one path, a pytree like those of the model.

    Args:
      modules: all modules.
      path: its index in [0, P), which may be a traced integer; the last axis of the grid is the fastest.
    """
    coordinates = jnp.unravel_index(path, self.grid.shape) if self.grid.shape else ()
    return self.tree(modules_lib.take(self.layout, modules, coordinates))

  def paths(self, modules: Modules) -> Tree:
    """Returns the parameters of all paths, stacked: [P, ...]."""
    return jax.vmap(functools.partial(self.path, modules))(jnp.arange(self.grid.num_paths))

  def per_path(self, tree: Tree) -> Tree:
    """Returns a copy of any arrays for each path, stacked: [P, ...]; for example a fresh inner state."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.grid.num_paths, *jnp.shape(x))), tree)

  def take_over(self, paths: Tree, modules: Modules, only: Sequence[str]) -> Tree:
    """Returns paths whose parameters of some levels are those of the modules, and the others their own.

    For streaming [arXiv 2501.18512]: levels exchange at different steps, and paths train on in between.
    """
    names = [name for name, level in self.layout.owner.items() if level.name in only]
    new = self.flat(self.paths(modules))
    return self.tree(self.flat(paths) | {name: new[name] for name in names})

  def flat(self, tree: Tree) -> dict[str, jax.Array]:
    """Returns a pytree like the parameters as {name: array}."""
    return dict(zip(self._order, self._structure.flatten_up_to(tree), strict=True))

  def tree(self, named: dict[str, Any]) -> Tree:
    """Returns {name: array} as a pytree like the parameters; `flat` is the inverse."""
    return self._structure.unflatten([named[name] for name in self._order])


def train_path(train_step: TrainStep, params: Tree, state: Tree, batches: Tree) -> tuple[Tree, Tree, Tree]:
  """Trains one path alone for tau steps [Algorithm 1, InnerOpt].

  Args:
    train_step: (params, state, batch) -> (params, state, metrics).
    params, state: of the path.
    batches: tau batches from the path's shard, stacked: [tau, ...].

  Returns:
    (params, state, metrics [tau, ...]).

  Example:
    >>> train_path(lambda w, n, x: (w - 0.5 * (w - x), n + 1, w), jnp.float32(0), 0, jnp.array([4.0, 4.0]))
    (Array(3., dtype=float32), Array(2, dtype=int32, weak_type=True), Array([0., 2.], dtype=float32))
  """

  def step(carry: tuple[Tree, Tree], batch: Tree) -> tuple[tuple[Tree, Tree], Tree]:
    params, state, metrics = train_step(*carry, batch)
    return (params, state), metrics

  (params, state), metrics = jax.lax.scan(step, (params, state), batches)
  return params, state, metrics


def train_phase(
  train_step: TrainStep, params: Tree, states: Tree, batches: Tree, mesh: Mesh | None = None, in_turn: bool = False
) -> tuple[Tree, Tree, Tree]:
  """Trains all paths, each alone, for tau steps [Algorithm 1].

  Nothing is exchanged between paths. They may as well be trained elsewhere and at other times, by `train_path`.

  Args:
    train_step: (params, state, batch) -> (params, state, metrics) of one path.
    params, states: of all paths, [P, ...].
    batches: [P, tau, ...]; path i's are from its shard D_i.
    mesh: devices over which paths are spread, along all of its axes; their number divides P. None: where arrays are.
    in_turn: paths of one device are trained one after the other, which takes less memory, instead of by vmap.

  Returns:
    (params, states, metrics), [P, ...] and [P, tau, ...].

  Example:
    >>> move = lambda w, n, x: (w + x, n + 1, w)
    >>> train_phase(move, jnp.zeros(2), jnp.zeros(2, int), jnp.array([[1.0, 1.0], [2.0, 2.0]]))[0]
    Array([2., 4.], dtype=float32)
  """
  one = functools.partial(train_path, train_step)
  work = (lambda *trees: jax.lax.map(lambda xs: one(*xs), trees)) if in_turn else jax.vmap(one)
  if mesh is None:
    return work(params, states, batches)
  spec = PartitionSpec(mesh.axis_names)
  spread_work = jax.shard_map(work, mesh=_automatic(mesh), in_specs=spec, out_specs=spec, check_vma=False)
  return spread_work(params, states, batches)


def spread(tree: Tree, mesh: Mesh) -> Tree:
  """Puts arrays [P, ...] on a mesh's devices, some paths on each, as `train_phase` with this mesh wants them."""
  return jax.device_put(tree, NamedSharding(_automatic(mesh), PartitionSpec(mesh.axis_names)))


def _automatic(mesh: Mesh) -> Mesh:
  """Returns the mesh with axes along which XLA chooses shardings, so that modules need no annotations."""
  return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


class State(NamedTuple):
  """State of the outer step, between phases."""

  levels: outer_lib.States  # OuterOpt's, and h of screening.py
  masters: Modules  # M of levels that are compressed [compression.py]
  residuals: dict[str, jax.Array]  # e of each path, [P, ...] by parameter, of the same levels


class Report(NamedTuple):
  """What an outer step has seen."""

  excluded: jax.Array  # paths that took no part because of what they sent, bool [P]
  moved: dict[str, jax.Array]  # r of screening.py by level, [P]
  norms: dict[str, jax.Array]  # |Delta| by level, [K_a, ...]


@dataclasses.dataclass(frozen=True)
class OuterStep:
  """The outer step: what paths have learned moves the modules that they share [Algorithm 1, OuterOpt; 2.5, 2.7].

      Delta_{l,e} = sum_i w_i (old - new_i) / sum_i w_i  [* sqrt(number of those paths), norm rescaling]
      module_{l,e} <- OuterOpt(module_{l,e}, Delta_{l,e})

  over the paths i through module e of level l. A path whose outer gradient is not finite takes no part; neither does
  one whose move is more than `exclude_above` times as long as is usual [screening.py].

  Attributes:
    levels: the levels.
    optimizer: OuterOpt, any Optax transformation; its update is added to the module.
    rescale: norm rescaling [2.7].
    exclude_above: f of screening.py; 0: paths are left out only where they are not finite.
    compress: how outer gradients and new modules are rounded on the wire, one of compression.KINDS.
    inner_optimizer: 'adamw' or 'muon', whose moves are bounded [screening.py]; another name: no bound is known.

  Example:
    >>> params = {'w': jnp.zeros(2)}
    >>> levels = Levels(Grid(a=2), params, all=('w', ''))  # DiLoCo: two replicas of one model
    >>> outer = OuterStep(levels, optax.sgd(1.0))
    >>> modules = levels.start(params)
    >>> paths = {'w': jnp.array([[1.0, 1.0], [3.0, 5.0]])}
    >>> outer.step(modules, outer.init(modules), paths)[0]
    {'all': {'w': Array([2., 3.], dtype=float32)}}
  """

  levels: Levels
  optimizer: optax.GradientTransformation
  rescale: bool = False
  exclude_above: float = 0.0
  compress: str = 'none'
  inner_optimizer: str = 'adamw'

  def init(self, modules: Modules) -> State:
    """Returns the state before the first outer step."""
    layout, num_paths = self.levels.layout, self.levels.grid.num_paths
    masters = {level: modules[level] for level in self._compressed}
    residuals = {
      name: jnp.zeros((num_paths, *modules[level.name][name].shape[len(level.axes) :]), jnp.bfloat16)
      for name, level in layout.owner.items()
      if level.name in masters
    }
    return State(outer_lib.init(layout, self.optimizer, modules, self.inner_optimizer), masters, residuals)

  def step(
    self, modules: Modules, state: State, paths: Tree, weights: Any = None, rows: Any = None, rates: Any = 1.0,
    only: Sequence[str] | None = None,
  ) -> tuple[Modules, State, Report]:  # fmt: skip
    """Makes one outer step.

    Args:
      modules, state: those that the paths have started from.
      paths: the paths' parameters after the phase, [P, ...].
      weights: w_i, [P]; |D_i| for loss reweighing [2.7], 0 for a path that has not trained [2.6.2]; None: 1.
      rows: row weights by parameter, [P, rows], as `row_weights` makes them; None: without.
      rates: sum of the inner learning rates of the phase, [], by which `exclude_above` measures moves.
      only: the levels that exchange now; None: all.

    Returns:
      The new modules and state, and what was seen. A path that was excluded goes on from the new modules; give it a
      fresh inner state.
    """
    layout, num_paths = self.levels.layout, self.levels.grid.num_paths
    chosen = [level for level in layout.levels if only is None or level.name in only]
    weights = jnp.ones(num_paths) if weights is None else jnp.asarray(weights, jnp.float32)
    old, new = self.levels.flat(self.levels.paths(modules)), self.levels.flat(paths)
    names = {level.name: layout.names(level) for level in chosen}
    deltas = {level: {name: old[name] - new[name] for name in of_level} for level, of_level in names.items()}
    sent, residuals = self._send(deltas, state.residuals)
    moved = {level: jax.vmap(optax.tree.norm)(delta) / rates for level, delta in sent.items()}
    excluded = self._excluded(moved, state)
    counts = ~excluded & (weights > 0)
    sums = self._sum(sent, jnp.where(counts, weights, 0), counts, rows)
    new_modules, masters, states, norms = outer_lib.update(
      layout, outer_lib.Outer(self.optimizer, self.rescale, self.compress), modules, state.levels, sums,
      {level: state.masters[level] for level in state.masters if level in names},
    )  # fmt: skip
    on_grid = {level: r.reshape(self.levels.grid.shape) for level, r in moved.items()}
    states = outer_lib.update_usual(layout, modules, states, sums.weights, on_grid, self.inner_optimizer)
    kept = {name: _where(counts, e, state.residuals[name]) for name, e in residuals.items()}
    kept = {name: _where(excluded, jnp.zeros_like(e), e) for name, e in (state.residuals | kept).items()}
    return new_modules, State(states, state.masters | masters, kept), Report(excluded, moved, norms)

  @property
  def _compressed(self) -> list[str]:
    """The levels whose messages are rounded: those that paths share."""
    layout = self.levels.layout
    return [l.name for l in layout.levels if self.compress != 'none' and layout.grid.paths_through(l) > 1]

  def _send(self, deltas: Modules, residuals: dict[str, jax.Array]) -> tuple[Modules, dict[str, jax.Array]]:
    """Returns what the paths send, c_i = Q(Delta_i + e_i), and the residuals after it, [P, ...]."""
    sent = dict(deltas)
    new_residuals: dict[str, jax.Array] = {}
    for level in (name for name in deltas if name in self._compressed):
      wanted = {name: compression.total(d, residuals[name]) for name, d in deltas[level].items()}
      sent[level] = {n: jax.vmap(lambda x: compression.rounded(x, self.compress))(x) for n, x in wanted.items()}
      new_residuals |= {name: compression.next_residual(wanted[name], x) for name, x in sent[level].items()}
    return sent, new_residuals

  def _excluded(self, moved: dict[str, jax.Array], state: State) -> jax.Array:
    """Returns which paths take no part because of how far they have moved, bool [P]."""
    grid, limit = self.levels.grid, jnp.float32(self.exclude_above)
    excluded = jnp.zeros(grid.num_paths, bool)
    for level in (level for level in self.levels.layout.levels if level.name in moved):
      usual = state.levels[level.name].usual
      of_path = jax.vmap(lambda at, level=level, usual=usual: usual[grid.module(level, tuple(at))])(_points(grid))
      excluded |= ~screening.is_plausible(moved[level.name], of_path, limit)
    return excluded

  def _sum(self, sent: Modules, weights: jax.Array, counts: jax.Array, rows: Any) -> outer_lib.Sums:
    """Adds up what the paths through each module have sent."""
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

  Args:
    levels: the levels.
    moments: AdamW's second moments of all paths, a pytree like the parameters, [P, ...].
    count: steps that AdamW has taken.
    b2, epsilon: those of AdamW.

  Returns:
    {parameter: [P, rows]}.
  """
  one = lambda v: outer_lib.row_weights(v, jnp.asarray(count), b2, epsilon)  # noqa: E731
  return jax.vmap(one)(levels.flat(moments))


def _named(params: Tree) -> dict[str, Any]:
  """Returns the leaves of a pytree by the keys on the way to them, joined by '/'."""
  named = {}
  for keys, x in jax.tree_util.tree_leaves_with_path(params):
    name = jax.tree_util.keystr(keys, simple=True, separator='/')
    if not hasattr(x, 'shape') or not hasattr(x, 'dtype'):
      raise ValueError(f'{name or "the model"} is {type(x).__name__}, not an array: give the arrays of the model alone')
    named[name] = x
  return named


def _points(grid: grid_lib.Grid) -> jax.Array:
  """Returns the coordinates of all paths, int32 [P, number of axes]."""
  return jnp.array([*grid.points()], jnp.int32).reshape(grid.num_paths, len(grid.names))


def _where(mask_P: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns x of the paths where the mask holds, else y, [P, ...]."""
  return jnp.where(mask_P.reshape(-1, *[1] * (x.ndim - 1)), x, y)
