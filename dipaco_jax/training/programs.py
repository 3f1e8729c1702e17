"""The compiled programs of a run. One path is the unit of computation: every program runs one path per mesh position.

    start        the base model's parameters -> modules, outer states, sums
    gather_path  modules -> parameters of the paths in flight           (Algorithm 1, 2.: copy the path's modules)
    fresh_state                                                      (of AdamW, before the first update)
    steps        k inner steps                                          (a scan; no collective crosses the grid's axes)
    accumulate   sums += w (old - new), of a path that is not excluded  (screening.py)
    outer        sums over the axes a level lacks, then OuterOpt        (Algorithm 1, 3.: the collectives are here)
    zero_sums    sums <- 0
    evaluate     nll per row
    unshard      modules as they are published, where states are sharded inside a path's slice

Those of the paths in flight are shard_maps over the whole mesh; the collectives of the others follow from the
shardings. Inside a path's slice, parameters and AdamW state are replicated over `data`, or sharded: then gathered for
each step, gradients scattered.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from dipaco_jax.core import (
  inner as inner_lib,
  modules as modules_lib,
  outer as outer_lib,
  screening,
  settings as settings_lib,
)
from dipaco_jax.models import loss as loss_lib, transformer as model_lib
from dipaco_jax.training import specs as specs_lib
from dipaco_jax.training.mesh import Placement

# Names of the programs, as XLA reports compilations.
NAMES = ('start', 'gather_path', 'fresh_state', 'steps', 'accumulate', 'outer', 'zero_sums', 'evaluate', 'unshard')


def in_flight(inputs: Callable[[specs_lib.Specs], tuple], outputs: Callable[[specs_lib.Specs], Any], **options):
  """Makes a method one program over the whole mesh, a property; `inputs` and `outputs` tell its PartitionSpecs."""
  return lambda method: functools.cached_property(
    lambda self: self.shard_map(method.__get__(self), inputs(self.specs), outputs(self.specs), **options)
  )


def of_all(inputs: Callable[[specs_lib.Specs], tuple], outputs: Callable[[specs_lib.Specs], Any], **options):
  """Makes a method one program on all paths, a property, whose collectives follow from the shardings."""
  return lambda method: functools.cached_property(
    lambda self: self.jit(method.__get__(self), inputs(self.specs), outputs(self.specs), **options)
  )


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity
class Programs:
  """The compiled programs of a run, for one placement; see the file's docstring."""

  placement: Placement
  layout: modules_lib.Layout
  model: model_lib.Transformer
  settings: settings_lib.Settings

  @functools.cached_property
  def specs(self) -> specs_lib.Specs:
    """Shapes and PartitionSpecs of the arrays."""
    return specs_lib.Specs(self.placement, self.layout, self.model, self.settings)

  @property
  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one path's parameters."""
    return self.specs.shapes

  # -- one path per position

  def squeeze(self, tree, at: int = 0):
    """Removes the mesh's axes, of size 1 at a position, behind the first `at` axes; `expand` is the inverse."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:at], *x.shape[at + self.specs.num_axes :]), tree)

  def expand(self, tree, at: int = 0):
    """Adds the mesh's axes, of size 1 at a position, behind the first `at` axes."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:at], *(1,) * self.specs.num_axes, *x.shape[at:]), tree)

  def jit(self, function, inputs, outputs, **options):
    """Compiles a function of all paths, with these PartitionSpecs."""
    at, to = self.specs.shardings(inputs), self.specs.shardings(outputs)
    return jax.jit(function, in_shardings=at, out_shardings=to, **options)

  def shard_map(self, function, in_specs, out_specs, **jit_options):
    """Compiles a function of what is in flight as one program over the whole mesh."""
    mapped = jax.shard_map(function, mesh=self.placement.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    # Stated, since one placement has several spellings: axes of one device may be named or not. What a checkpoint has
    # restored would be compiled for anew. Rows, and what is the host's, are spelled in one way only.
    in_shardings = tuple(None if isinstance(spec, P) else self.specs.shardings(spec) for spec in in_specs)
    return jax.jit(mapped, in_shardings=in_shardings, **jit_options)

  @in_flight(lambda s: (s.modules, P()), lambda s: s.params)
  def gather_path(self, modules, turn):
    """Returns the in-flight parameters of a turn [n]."""
    return self.expand(modules_lib.take(self.layout, modules, tuple(turn)))

  @in_flight(lambda s: (s.params,), lambda s: s.state)
  def fresh_state(self, params):
    """Returns the in-flight inner state before the first update."""
    return self.expand(self.specs.inner.init(self.squeeze(params)))

  @in_flight(
    lambda s: (s.params, s.state, s.rows(1), s.rows(1), P(), s.weights, P()),
    lambda s: (s.params, s.state, dict.fromkeys(inner_lib.METRICS, P(None, *s.layout.grid.names))),
    donate_argnums=(0, 1),
  )
  def steps(self, params, state, tokens, segments, first_step, weights, turn):
    """Returns (params, state, metrics [k, m..]) after k steps on tokens and segments [k, m.., B, L].

    Donates params and state. Where paths are sampled, one of weight 0 stays as it is.
    """
    loss = functools.partial(loss_lib.path_loss, self.model, self.settings.routing.prefix_tokens)
    at_once = self.settings.train.microbatch
    compute = functools.partial(inner_lib.gradient, loss, at_once)
    if self.placement.data > 1:
      compute = functools.partial(inner_lib.gradient_over_data, loss, self.specs.dims, at_once)

    def rest(params, state, batches, _):
      return params, state, {name: jnp.zeros(len(batches[0]), jnp.float32) for name in inner_lib.METRICS}

    work = functools.partial(inner_lib.steps, self.specs.inner, compute)
    operands = (*self.squeeze((params, state)), self.squeeze((tokens, segments), 1), first_step)
    sampled = self.settings.train.schedule or self.settings.train.paths_per_phase
    trained = jax.lax.cond(weights[tuple(turn)] > 0, work, rest, *operands) if sampled else work(*operands)
    return *self.expand(trained[:2]), self.expand(trained[2], 1)

  @in_flight(
    lambda s: (s.gathered, s.modules, s.usual, s.params, s.state, s.weights, s.weights, P(), P(), P()),
    lambda s: s.gathered,
    donate_argnums=0,
  )
  def accumulate(self, gathered, modules, usual, params, state, weights, limits, first_step, num_steps, turn):
    """Returns `gathered`, donated, with the parts of the paths in flight added.

    Their inner state is looked at with `outer.row_weights` only. `usual` is {level: h}, `limits` f of each path, where
    0 excludes only what is not finite; the steps are those of the phase.
    """
    turn = tuple(turn)
    rows = self._row_weights(self.squeeze(state)) if self.settings.outer.row_weights else {}
    old, new = modules_lib.take(self.layout, modules, turn), self.squeeze(params)
    rates = screening.sum_of_rates(self.specs.inner.learning_rate, first_step, num_steps)
    module = {level.name: self.layout.grid.module(level, turn) for level in self.layout.levels}
    delta = {l.name: {name: old[name] - new[name] for name in self.layout.names(l)} for l in self.layout.levels}
    square = {level: self._square(d) for level, d in delta.items()}
    moved = {level: jnp.sqrt(s) / rates for level, s in square.items()}
    plausible = [screening.is_plausible(moved[level], usual[level][at], limits[turn]) for level, at in module.items()]
    ok = jnp.all(jnp.stack(plausible))
    w, counts = weights[turn], ok & (weights[turn] > 0)
    sums, squares, masses = {}, {}, {}
    for level, at in module.items():
      moves = {name: d * outer_lib.broadcast_rows(rows[name], d) if rows else d for name, d in delta[level].items()}
      part = {name: jnp.where(counts, w * d, 0) for name, d in moves.items()}
      sums[level] = {name: gathered.sums[level][name].at[0, *at].add(d) for name, d in part.items()}
      of_part = self._square(moves) if rows else square[level]
      squares[level] = gathered.squares[level].at[0, *at].add(jnp.where(counts, w * w * of_part, 0))
      if rows:
        mass = {name: jnp.where(counts, w * rows[name], 0) for name in moves}
        masses[level] = {name: gathered.masses[level][name].at[0, *at].add(m) for name, m in mass.items()}
    of_path = {level: gathered.moved[level].at[turn].set(r) for level, r in moved.items()}
    return specs_lib.Gathered(sums, squares, of_path, gathered.excluded.at[turn].set(~ok), masses)

  def _row_weights(self, state) -> dict[str, jax.Array]:
    """Row weights of one path; for a row that is split over the devices of its slice, their mean."""
    inner, dims = self.settings.inner, self.specs.dims
    return outer_lib.row_weights(
      state, inner.b2, inner.epsilon, lambda name, x: x if dims[name] in (None, 0) else jax.lax.pmean(x, 'data')
    )

  def _square(self, delta: dict[str, jax.Array]):
    """|delta|^2 of one module's parameters, over the slice."""
    sharded = {n: d for n, d in delta.items() if self.specs.dims[n] is not None}
    whole = optax.tree.norm({n: d for n, d in delta.items() if self.specs.dims[n] is None}, squared=True)
    return whole + (jax.lax.psum(optax.tree.norm(sharded, squared=True), 'data') if sharded else 0)

  @in_flight(lambda s: (s.params, s.rows(), s.rows()), lambda s: (s.rows(), s.rows()))
  def evaluate(self, params, tokens, segments):
    """Returns (nll [m.., B], number of targets [m.., B]) of tokens and segments [m.., B, L]."""
    params, rows = inner_lib.gather(self.squeeze(params), self.specs.dims), self.squeeze((tokens, segments))
    losses = functools.partial(loss_lib.row_losses, self.model, self.settings.routing.prefix_tokens, params)
    return self.expand(inner_lib.in_parts(losses, self.settings.train.microbatch, *rows))

  # -- all paths

  @of_all(
    lambda s: (s.modules, s.outer, s.gathered, P()),  # every process has the weights on its host
    lambda s: (s.modules, s.outer, P()),
    donate_argnums=(0, 1),
  )
  def outer(self, modules, state, gathered, weights):
    """Returns (modules, outer state, statistics) after the outer step; donates the first two.

    Statistics are, per level and module, the norm of Delta, `outer.cosine`, h of screening.py before the step, and
    whether the new module and its state are sound; per path, who is excluded, and r by level.
    """
    totals, cosines = {}, {}
    weights = jnp.where(gathered.excluded, 0, weights)
    for level in self.layout.levels:
      totals[level.name] = {name: x.sum(0) for name, x in gathered.sums[level.name].items()}
      square = gathered.squares[level.name].sum(0)
      of_sum = outer_lib.vmap_modules(lambda t: optax.tree.norm(t, squared=True), len(level.axes))(totals[level.name])
      paths = outer_lib.num_active(self.layout, level, weights)
      cosines[level.name] = outer_lib.cosine(paths, of_sum, square)
    before, masses = usual(state), jax.tree.map(lambda x: x.sum(0), gathered.masses)
    inner, config = self.settings.inner.optimizer, self.settings.outer
    modules, state, norms = outer_lib.update(self.layout, config, modules, state, totals, weights, masses)
    state = outer_lib.update_usual(self.layout, modules, state, weights, gathered.moved, inner)
    sound = {
      l.name: outer_lib.vmap_modules(screening.is_sound, len(l.axes))((modules[l.name], state[l.name].optimizer))
      for l in self.layout.levels
    }
    of_modules = {'norm': norms, 'cosine': cosines, 'usual': before, 'sound': sound}
    return modules, state, of_modules | {'excluded': gathered.excluded, 'moved': gathered.moved}

  @of_all(lambda s: (s.gathered,), lambda s: s.gathered, donate_argnums=0, keep_unused=True)
  def zero_sums(self, gathered):
    """Returns zeros in the place of `gathered`.

    Apart from `outer`, where XLA would copy the sums before it writes zeros over what others still read.
    """
    return jax.tree.map(jnp.zeros_like, gathered)

  @functools.cached_property
  def unshard(self):
    """`unshard(modules) -> modules`, each in one piece on every device of its slice."""
    if all(dim is None for dim in self.specs.dims.values()):
      return lambda modules: modules

    def unshard(modules):
      return modules

    return jax.jit(unshard, out_shardings=self.specs.shardings(self.specs.whole))

  @of_all(lambda s: (None,), lambda s: (s.modules, s.outer, s.gathered))
  def start(self, params):
    """Returns (modules, outer state, gathered) with every module a copy of the base's part."""
    modules = modules_lib.stack(self.layout, params)
    return modules, self.specs.first_outer_state(modules), self.specs.zeros(modules)


def usual(outer_state) -> dict[str, Any]:
  """Returns {level: h of screening.py} from outer states, as `accumulate` takes it."""
  return {level: state.usual for level, state in outer_state.items()}
