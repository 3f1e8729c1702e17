"""The compiled programs of a run. One path is the unit of computation: every program runs one path per mesh position.

    start        the base model's parameters -> modules, outer states, sums
    gather_path  modules -> parameters of the paths in flight           (Algorithm 1, 2.: copy the path's modules)
    fresh_state                                                      (of AdamW, before the first update)
    steps        k inner steps                                          (a scan; no collective crosses the grid's axes)
    fresh_residuals                                                  (compression.py)
    mix          the paths in flight take new modules over              (streaming.py; without it `gather_path` does)
    leave        what leaves the paths in flight, for `mix`
    accumulate   sums += w (old - new), of a path that is not excluded  (screening.py)
    outer        sums over the axes a level lacks, then OuterOpt        (Algorithm 1, 3.: the collectives are here)
    zero_sums    sums <- 0
    evaluate     nll per row
    unshard      modules as they are published, where states are sharded inside a path's slice

`mix`, `leave`, `accumulate`, `outer` and `zero_sums` are compiled once for each set of levels that leave together.

Those of the paths in flight are shard_maps over the whole mesh; the collectives of the others follow from the
shardings. Inside a path's slice, parameters and AdamW state are replicated over `data`, or sharded: then gathered for
each step, gradients scattered.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from dipaco_jax.algorithm import (
  compression,
  inner as inner_lib,
  modules as modules_lib,
  outer as outer_lib,
  screening,
  streaming,
)
from dipaco_jax.config import choices, settings as settings_lib
from dipaco_jax.models import loss as loss_lib, transformer as model_lib
from dipaco_jax.training import specs as specs_lib
from dipaco_jax.training.mesh import Placement

# Names of the programs, as XLA reports compilations.
NAMES = (
  'start', 'gather_path', 'fresh_state', 'fresh_residuals', 'steps', 'mix', 'leave', 'accumulate', 'outer', 'zero_sums',
  'evaluate', 'unshard',
)  # fmt: skip


class Sender(NamedTuple):
  """A path at the end of its steps, and what decides whether its outer gradient counts; arguments of `accumulate`."""

  modules: modules_lib.Modules  # from which it began
  usual: dict[str, Any]  # h of screening.py by level, shaped like its modules
  params: dict[str, Any]  # in flight, as is `state`
  state: Any
  weights: Any  # w_i of all paths, shaped like the grid
  limits: Any  # f of screening.py of all paths
  last: Any  # global step
  num_steps: dict[str, Any]  # by level, since its last exchange
  turn: Any  # [n]


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

  @functools.cached_property
  def timetable(self) -> streaming.Timetable:
    """When the paths' levels exchange."""
    return choices.make_timetable(self.settings, self.layout.shared_sizes(self.shapes))

  @property
  def levels(self) -> tuple[str, ...]:
    """Names of all levels."""
    return tuple(level.name for level in self.layout.levels)

  def program(self, name: str) -> Any:
    """Returns the program of a name; of those for some levels, the one for all."""
    found = getattr(self, name)
    return found(self.levels) if name in ('mix', 'leave', 'accumulate', 'outer', 'zero_sums') else found

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

  @functools.cache  # noqa: B019 - by identity, of which a process has few
  def mix(self, levels: tuple[str, ...]):
    """`mix(params, left, modules, turn) -> params`, donated: new modules of some levels are taken over [streaming.py].

    `left`: theta_o, where it is kept.
    """

    def mix(params, left, modules, turn):
      params, left, new = self.squeeze(params), self.squeeze(left), modules_lib.take(self.layout, modules, tuple(turn))
      alphas = {n: self.timetable.mix(self.layout.owner[n].name) for n in self._of(levels)}
      taken = {n: streaming.taken(alpha, params[n], left.get(n), new[n]) for n, alpha in alphas.items()}
      return self.expand(params | taken)

    specs = self.specs
    left = {name: specs.params[name] for name in self.left_names(levels)}
    return self.shard_map(mix, (specs.params, left, specs.modules, P()), specs.params, donate_argnums=0)

  @functools.cache  # noqa: B019
  def leave(self, levels: tuple[str, ...]):
    """`leave(params) -> left`, copies of what leaves and is kept: theta_o of streaming.py, of some levels."""

    def leave(params):
      return {name: jnp.copy(params[name]) for name in names}

    specs, names = self.specs, self.left_names(levels)
    return self.shard_map(leave, (specs.params,), {name: specs.params[name] for name in names})

  def left_names(self, levels: tuple[str, ...]) -> list[str]:
    """Returns the parameters of some levels of which a path keeps what left."""
    return self._of(self.timetable.kept(levels))

  @functools.cache  # noqa: B019
  def accumulate(self, levels: tuple[str, ...]):
    """`accumulate(gathered, residuals, modules, usual, params, state, weights, limits, last, num_steps, turn)`.

    Returns (gathered, residuals), donated, after the paths in flight have sent their outer gradients of some levels.
    Their inner state is looked at with `outer.row_weights` only. `usual` is {level: h}, `limits` f of each path, where
    0 excludes only what is not finite; the gradients are of {level: `num_steps`} steps up to the global step `last`.
    """

    def accumulate(gathered, residuals, *sender):
      return self._accumulate(levels, gathered, residuals, Sender(*sender))

    s, host = self.specs, P()
    steps = dict.fromkeys(levels, host)
    sender = Sender(s.modules, s.usual, s.params, s.state, s.weights, s.weights, host, steps, host)
    specs = (s.gathered, s.residuals, *sender)
    return self.shard_map(accumulate, specs, (s.gathered, s.residuals), donate_argnums=(0, 1))

  def _accumulate(self, levels: tuple[str, ...], gathered: specs_lib.Gathered, residuals, sender: Sender):
    turn = tuple(sender.turn)
    module = {level.name: self.layout.grid.module(level, turn) for level in self.layout.levels if level.name in levels}
    residuals = self.squeeze(residuals)
    deltas, kept = self._message(self._outer_gradients(levels, sender), residuals)
    squares = {level: self._square(delta) for level, delta in deltas.items()}
    moved = self._moved(squares, sender)
    plausible = [
      screening.is_plausible(moved[level], sender.usual[level][at], sender.limits[turn]) for level, at in module.items()
    ]
    ok = jnp.all(jnp.stack(plausible)) & ~gathered.excluded[turn]
    weight, counts = sender.weights[turn], ok & (sender.weights[turn] > 0)
    rows = self._row_weights(self.squeeze(sender.state)) if self.settings.outer.row_weights else {}
    sums, squares_of_sums, masses = dict(gathered.sums), dict(gathered.squares), dict(gathered.masses)
    for level, at in module.items():
      term = outer_lib.term(deltas[level], weight, counts, rows)
      square = self._square(term.moves) if rows else squares[level]
      add = functools.partial(jax.tree.map, lambda total, x, at=at: total.at[0, *at].add(x))
      sums[level] = add(gathered.sums[level], term.delta)
      squares_of_sums[level] = add(gathered.squares[level], jnp.where(counts, weight * weight * square, 0))
      if rows:
        masses[level] = add(gathered.masses[level], term.mass)
    of_path = gathered.moved | {level: gathered.moved[level].at[turn].set(r) for level, r in moved.items()}
    excluded = gathered.excluded.at[turn].set(~ok)
    # What was lost, or sent by a path that does not train, has left nothing behind; a path left out begins anew, with
    # what levels that left earlier in the phase have kept too.
    residuals = {n: jnp.where(ok, e, 0) for n, e in residuals.items()}
    residuals |= {n: jnp.where(counts, e, residuals[n]) for n, e in kept.items()}
    return specs_lib.Gathered(sums, squares_of_sums, of_path, excluded, masses), self.expand(residuals)

  def _outer_gradients(self, levels: tuple[str, ...], sender: Sender) -> modules_lib.Modules:
    """Returns old - new of the path in flight, by level and parameter."""
    old, new = modules_lib.take(self.layout, sender.modules, tuple(sender.turn)), self.squeeze(sender.params)
    return {
      level.name: {name: old[name] - new[name] for name in self.layout.names(level)}
      for level in self.layout.levels
      if level.name in levels
    }

  def _moved(self, squares: dict[str, jax.Array], sender: Sender) -> dict[str, jax.Array]:
    """Returns r of screening.py by level, from the squares of the outer gradients' norms."""
    rate, last, count = self.specs.inner.learning_rate, sender.last, sender.num_steps
    rates = {level: screening.sum_of_rates(rate, last - count[level], count[level]) for level in squares}
    return {level: jnp.sqrt(square) / rates[level] for level, square in squares.items()}

  def _message(self, deltas: modules_lib.Modules, residuals: dict[str, jax.Array]) -> tuple[modules_lib.Modules, dict]:
    """Returns what is sent of outer gradients, and the new residuals of those that are compressed."""
    delta = {name: d for of_level in deltas.values() for name, d in of_level.items()}
    wanted = {name: compression.total(d, residuals[name]) for name, d in delta.items() if name in residuals}
    whole = inner_lib.gather(wanted, self.specs.dims)  # blocks do not depend on how a path's slice is laid out
    sent = {name: compression.rounded(x, self.specs.compress) for name, x in whole.items()}
    sent = {name: self._own_part(name, x) for name, x in sent.items()}
    messages = {level: {name: sent.get(name, d) for name, d in of_level.items()} for level, of_level in deltas.items()}
    return messages, {name: compression.next_residual(wanted[name], x) for name, x in sent.items()}

  def _own_part(self, name: str, x: jax.Array) -> jax.Array:
    """Returns the part of a path's parameter that is on this device of its slice."""
    if (dim := self.specs.dims[name]) is None:
      return x
    size = x.shape[dim] // self.placement.data
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index('data') * size, size, dim)

  def _of(self, levels: tuple[str, ...]) -> list[str]:
    """Returns the names of the levels' parameters."""
    return [name for name, level in self.layout.owner.items() if level.name in levels]

  def _row_weights(self, state) -> dict[str, jax.Array]:
    """Row weights of one path; for a row that is split over the devices of its slice, their mean."""
    adam, dims = state.optimizer[0], self.specs.dims
    config = self.settings.inner
    return outer_lib.row_weights(
      adam.nu, adam.count, config.b2, config.epsilon,
      lambda name, x: x if dims[name] in (None, 0) else jax.lax.pmean(x, 'data'),
    )  # fmt: skip

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

  @functools.cache  # noqa: B019
  def outer(self, levels: tuple[str, ...]):
    """`outer(modules, masters, state, gathered, weights)`: the outer step of some levels; donates the first three.

    Returns (modules, masters, state, statistics). Statistics are, per level and module, the norm of Delta,
    `outer.cosine`, h of screening.py before the step, and whether the new module and its state are sound; per path, who
    is excluded, and r by level.
    """

    def outer(*args):
      return self._outer(levels, *args)

    s, host = self.specs, P()  # every process has the weights on its host
    inputs = (s.modules, s.masters, s.outer, s.gathered, host)
    return self.jit(outer, inputs, (s.modules, s.masters, s.outer, host), donate_argnums=(0, 1, 2))

  def _outer(self, sent, modules, masters, state, gathered, weights):
    levels = [level for level in self.layout.levels if level.name in sent]
    totals, cosines = {}, {}
    weights = jnp.where(gathered.excluded, 0, weights)
    for level in levels:
      totals[level.name] = {name: x.sum(0) for name, x in gathered.sums[level.name].items()}
      square = gathered.squares[level.name].sum(0)
      of_sum = outer_lib.vmap_modules(lambda t: optax.tree.norm(t, squared=True), len(level.axes))(totals[level.name])
      paths = outer_lib.num_active(self.layout, level, weights)
      cosines[level.name] = outer_lib.cosine(paths, of_sum, square)
    before, masses = usual(state), jax.tree.map(lambda x: x.sum(0), gathered.masses)
    inner, outer = self.settings.inner.optimizer, choices.make_outer(self.settings.outer, self.specs.compress)
    sums = outer_lib.Sums(totals, weights, masses)
    modules, masters, state, norms = outer_lib.update(self.layout, outer, modules, state, sums, masters)
    moved = {level.name: gathered.moved[level.name] for level in levels}
    state = outer_lib.update_usual(self.layout, modules, state, weights, moved, inner)
    sound = {
      l.name: outer_lib.vmap_modules(screening.is_sound, len(l.axes))(
        (modules[l.name], masters.get(l.name, {}), state[l.name].optimizer)
      )
      for l in levels
    }
    before = {level: before[level] for level in moved}
    of_modules = {'norm': norms, 'cosine': cosines, 'usual': before, 'sound': sound}
    return modules, masters, state, of_modules | {'excluded': gathered.excluded, 'moved': moved}

  @functools.cache  # noqa: B019
  def zero_sums(self, levels: tuple[str, ...], ends_phase: bool = True):
    """`zero_sums(gathered) -> gathered`, donated, with zeros for some levels; at a phase's end no path is excluded.

    Apart from `outer`, where XLA would copy the sums before it writes zeros over what others still read.
    """

    def zero_sums(gathered):
      parts = {
        name: {level: jax.tree.map(jnp.zeros_like, x) if level in levels else x for level, x in part.items()}
        for name, part in gathered._asdict().items()
        if name != 'excluded'
      }
      excluded = jnp.zeros_like(gathered.excluded) if ends_phase else gathered.excluded
      return specs_lib.Gathered(excluded=excluded, **parts)

    at = (self.specs.gathered,)
    return self.jit(zero_sums, at, self.specs.gathered, donate_argnums=0, keep_unused=True)

  @functools.cached_property
  def unshard(self):
    """`unshard(modules) -> modules`, each in one piece on every device of its slice."""
    if all(dim is None for dim in self.specs.dims.values()):
      return lambda modules: modules

    def unshard(modules):
      return modules

    return jax.jit(unshard, out_shardings=self.specs.shardings(self.specs.whole))

  @of_all(lambda s: (None,), lambda s: (s.modules, s.masters, s.outer, s.gathered))
  def start(self, params):
    """Returns (modules, masters, outer state, gathered) with every module a copy of the base's part."""
    modules = modules_lib.stack(self.layout, params)
    masters = {level: modules[level] for level in self.specs.compressed}
    return modules, masters, self.specs.first_outer_state(modules), self.specs.zeros(modules)

  @in_flight(lambda s: (), lambda s: s.residuals)
  def fresh_residuals(self):
    """Returns the in-flight residuals of paths that have sent nothing yet."""
    return self.expand(self.specs.zero_residuals())


def usual(outer_state) -> dict[str, Any]:
  """Returns {level: h of screening.py} from outer states, as `accumulate` takes it."""
  return {level: state.usual for level, state in outer_state.items()}
