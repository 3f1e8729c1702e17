"""DiPaCo around a training step of your own, over any pytree of arrays [Algorithm 1].

    grid = Grid(a=2, b=2)
    levels = Levels(grid, params, low=('block_0', 'a'), high=('block_1', 'b'), ends=('embed|head', ()))
    outer = OuterStep(levels, optax.sgd(0.7, 0.9, nesterov=True), rescale=True)
    run_phase = jax.jit(functools.partial(train_phase, train_step))
    make_outer_step = jax.jit(outer.step)

    modules = levels.start(params)                       # all paths start from these parameters
    outer_state = outer.init(modules)
    inner_states = levels.per_path(optimizer.init(params))
    for batches in phases:                               # [P, tau, ...], each path's from its own shard
      paths, inner_states, metrics = run_phase(levels.paths(modules), inner_states, batches)
      modules, outer_state, report = make_outer_step(modules, outer_state, paths)

`train_step(params, state, batch) -> (params, state, metrics)` is yours. Parameters are those of one path, in any
pytree of floating-point arrays: dicts, NamedTuples, `nnx.state(model, nnx.Param)`,
`eqx.partition(model, eqx.is_inexact_array)[0]`. Modules and states are pytrees of arrays too, so `jax.jit`,
checkpoints and `jax.device_put` work as always. The programs of this package make their outer steps with the same
functions.

`levels.py` has `Levels`, and `outer_step.py` has `OuterStep`.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dipaco_jax.algorithm import checks
from dipaco_jax.algorithm.checks import Tree

TrainStep = Callable[[Tree, Tree, Tree], tuple[Tree, Tree, Tree]]  # (params, state, batch) -> (params, state, metrics)


def train_path(train_step: TrainStep, params: Tree, state: Tree, batches: Tree) -> tuple[Tree, Tree, Tree]:
  """Trains one path alone for tau steps [Algorithm 1, InnerOpt].

  Args:
    train_step: (params, state, batch) -> (params, state, metrics).
    params: the path's parameters.
    state: the path's inner state.
    batches: tau batches from the path's shard, stacked: [tau, ...].

  Returns:
    (params, state, metrics [tau, ...]).

  Examples:
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
    params: parameters of all paths, [P, ...].
    states: inner states of all paths, [P, ...].
    batches: [P, tau, ...]; path i's are from its shard D_i.
    mesh: devices over which paths are spread, along all of its axes; their number divides P. None: where arrays are.
    in_turn: paths of one device are trained one after the other, which takes less memory, instead of by vmap.

  Returns:
    (params, states, metrics), [P, ...] and [P, tau, ...].

  Raises:
    ValueError: leading axes differ, or the mesh has a number of devices that does not divide P.

  Examples:
    >>> move = lambda w, n, x: (w + x, n + 1, w)
    >>> train_phase(move, jnp.zeros(2), jnp.zeros(2, int), jnp.array([[1.0, 1.0], [2.0, 2.0]]))[0]
    Array([2., 4.], dtype=float32)
  """
  _check_leading_axes(params, states, batches)
  one = functools.partial(train_path, train_step)
  work = (lambda *trees: jax.lax.map(lambda xs: one(*xs), trees)) if in_turn else jax.vmap(one)
  if mesh is None:
    return work(params, states, batches)
  _check_divisible(params, mesh)
  spec = PartitionSpec(mesh.axis_names)
  spread_work = jax.shard_map(work, mesh=_automatic(mesh), in_specs=spec, out_specs=spec, check_vma=False)
  return spread_work(params, states, batches)


def spread(tree: Tree, mesh: Mesh) -> Tree:
  """Puts arrays of all paths on a mesh's devices, as `train_phase` with this mesh wants them.

  Args:
    tree: arrays [P, ...].
    mesh: devices, whose number divides P; each gets the same number of paths.

  Raises:
    ValueError: the mesh has a number of devices that does not divide P.

  Examples:
    >>> spread(jnp.arange(4), jax.make_mesh((1,), ('path',))).sharding.mesh.axis_names
    ('path',)
  """
  _check_divisible(tree, mesh)
  return jax.device_put(tree, NamedSharding(_automatic(mesh), PartitionSpec(mesh.axis_names)))


def _check_leading_axes(params: Tree, states: Tree, batches: Tree) -> None:
  """Raises ValueError unless params and states are [P, ...] and batches are [P, tau, ...]."""
  num_paths = _leading_axes(params, ('P',))
  tau = _leading_axes(batches, ('P', 'tau'))[1:]
  checks.check_leading_axes('params', params, num_paths, 'give those of all paths, levels.paths(modules)')
  states_fix = 'give those of all paths; levels.per_path(optimizer.init(params)) are the first'
  checks.check_leading_axes('states', states, num_paths, states_fix)
  checks.check_leading_axes('batches', batches, num_paths + tau, 'give each path tau batches, [P, tau, ...]')


def _leading_axes(tree: Tree, names: tuple[str, ...]) -> tuple[int | str, ...]:
  """Returns the sizes of the leading axes of a pytree's first leaf; of those that it lacks, their names."""
  shape = next(map(np.shape, jax.tree.leaves(tree)), ())
  return shape[: len(names)] + names[len(shape) :]


def _check_divisible(tree: Tree, mesh: Mesh) -> None:
  """Raises ValueError if paths cannot be spread evenly over the mesh."""
  sizes = {x.shape[0] for x in jax.tree.leaves(tree)}
  for num_paths in sizes:
    if num_paths % mesh.size:
      raise ValueError(
        f'{num_paths} paths cannot be spread evenly over {mesh.size} devices: use a divisor of P devices'
      )


def _automatic(mesh: Mesh) -> Mesh:
  """Returns the mesh with axes along which XLA chooses shardings, so that modules need no annotations."""
  return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
