"""The compiled programs of a run. One path is the unit of computation: every program runs one path per mesh position.

    start        the base model's parameters -> modules, outer states, sums
    gather_path  modules -> parameters of the paths in flight           (Algorithm 1, 2.: copy the path's modules)
    fresh_state                                                      (of AdamW, before the first update)
    steps        k inner steps                                          (a scan; no collective crosses the grid's axes)
    fresh_residuals                                                  (compression.py)
    mix          the paths in flight take new modules over              (streaming.py; without it `gather_path` does)
    leave        parameters that the paths in flight send and keep, for `mix`
    accumulate   sums += w (old - new), of a path that is not excluded  (screening.py)
    outer        sums over the axes a level lacks, then OuterOpt        (Algorithm 1, 3.: the collectives are here)
    zero_sums    sums <- 0
    evaluate     nll per row
    unshard      modules in one piece, for publishing, if states are sharded inside a path's slice

`mix`, `leave`, `accumulate`, `outer` and `zero_sums` are compiled once for each set of levels that are sent together.

Programs of the paths in flight are shard_maps over the whole mesh; the collectives of the others follow from their
shardings. Inside a path's slice, parameters and AdamW state are either replicated over `data`, or sharded: each step
then gathers the parameters and scatters the gradients.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from dipaco_jax.algorithm import (
  inner as inner_lib,
  modules as modules_lib,
  outer as outer_lib,
  screening,
  streaming,
)
from dipaco_jax.config import choices, settings as settings_lib
from dipaco_jax.models import loss as loss_lib, transformer as model_lib
from dipaco_jax.training import outer_gradients, specs as specs_lib
from dipaco_jax.training.mesh import Placement
from dipaco_jax.training.outer_gradients import Sender

# Names of the programs, as XLA reports compilations.
NAMES = (
  'start', 'gather_path', 'fresh_state', 'fresh_residuals', 'steps', 'mix', 'leave', 'accumulate', 'outer', 'zero_sums',
  'evaluate', 'unshard',
)  # fmt: skip


def in_flight(inputs: Callable[[specs_lib.Specs], tuple], outputs: Callable[[specs_lib.Specs], Any], **options):
  """Makes a method a property: one program over the whole mesh. `inputs` and `outputs` return its PartitionSpecs."""
  return lambda method: functools.cached_property(
    lambda self: self.shard_map(method.__get__(self), inputs(self.specs), outputs(self.specs), **options)
  )


def of_all(inputs: Callable[[specs_lib.Specs], tuple], outputs: Callable[[specs_lib.Specs], Any], **options):
  """Makes a method a property: one program on all paths, with collectives that follow from the shardings."""
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
    """The steps at which each level is exchanged."""
    return choices.make_timetable(self.settings, self.layout.shared_sizes(self.shapes))

  @property
  def levels(self) -> tuple[str, ...]:
    """Names of all levels."""
    return tuple(level.name for level in self.layout.levels)

  def program(self, name: str) -> Any:
    """Returns the program of this name. If it is compiled for sets of levels, returns the one for all levels."""
    program = getattr(self, name)
    return program(self.levels) if name in ('mix', 'leave', 'accumulate', 'outer', 'zero_sums') else program

  # -- one path per position

  def squeeze(self, tree, at: int = 0):
    """Removes the mesh's axes, of size 1 at a position, after the first `at` axes. `expand` is the inverse."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:at], *x.shape[at + self.specs.num_axes :]), tree)

  def expand(self, tree, at: int = 0):
    """Adds the mesh's axes, of size 1 at a position, after the first `at` axes."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:at], *(1,) * self.specs.num_axes, *x.shape[at:]), tree)

  def jit(self, function, inputs, outputs, **options):
    """Compiles a function of all paths, with these PartitionSpecs."""
    at, to = self.specs.shardings(inputs), self.specs.shardings(outputs)
    return jax.jit(function, in_shardings=at, out_shardings=to, **options)

  def shard_map(self, function, in_specs, out_specs, **jit_options):
    """Compiles a function of the paths in flight as one program over the whole mesh."""
    mapped = jax.shard_map(function, mesh=self.placement.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    # State the shardings, because a sharding has several forms: axes of size 1 may be named or not. Otherwise, arrays
    # from a checkpoint would be compiled for again. Rows and arrays of the host have one form only.
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

    Donates params and state. If paths are sampled, a path of weight 0 is not trained.
    """
    of_all = functools.partial(loss_lib.path_loss, self.model, self.settings.num_untrained_tokens)
    loss = inner_lib.without_gradients(of_all, self.settings.inner.frozen)
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

  @functools.cache  # noqa: B019 - hashed by identity, and a process has few Programs
  def mix(self, levels: tuple[str, ...]):
    """`mix(params, left, modules, turn) -> params`: takes over new modules of some levels [streaming.py].

    Donates params. `left` has theta_o for the parameters that keep it.
    """

    def mix(params, left, modules, turn):
      params = self.squeeze(params)
      left = self.squeeze(left)
      new = modules_lib.take(self.layout, modules, tuple(turn))
      alphas = {n: self.timetable.mix(self.layout.owner[n].name) for n in self._of(levels)}
      taken = {n: streaming.taken(alpha, params[n], left.get(n), new[n]) for n, alpha in alphas.items()}
      return self.expand(params | taken)

    specs = self.specs
    left = {name: specs.params[name] for name in self.left_names(levels)}
    return self.shard_map(mix, (specs.params, left, specs.modules, P()), specs.params, donate_argnums=0)

  @functools.cache  # noqa: B019
  def leave(self, levels: tuple[str, ...]):
    """`leave(params) -> left`: copies the parameters of some levels that `mix` needs, theta_o of streaming.py."""

    def leave(params):
      return {name: jnp.copy(params[name]) for name in names}

    specs, names = self.specs, self.left_names(levels)
    return self.shard_map(leave, (specs.params,), {name: specs.params[name] for name in names})

  def left_names(self, levels: tuple[str, ...]) -> list[str]:
    """Returns the names of the parameters of some levels for which a path keeps theta_o."""
    return self._of(self.timetable.kept(levels))

  @functools.cache  # noqa: B019
  def accumulate(self, levels: tuple[str, ...]):
    """`accumulate(gathered, residuals, modules, usual, params, state, weights, limits, last, num_steps, turn)`.

    Returns (gathered, residuals), donated, after the paths in flight have sent their outer gradients of some levels.
    Their inner state is used only with `outer.row_weights`. `usual` is {level: h}. `limits` has f of each path, where 0
    excludes only gradients that are not finite. `num_steps` is {level: number of steps up to the global step `last`}.
    """

    def accumulate(gathered, residuals, *arguments):
      sender = Sender(*arguments)
      sender = sender._replace(params=self.squeeze(sender.params), state=self.squeeze(sender.state))
      gathered, residuals = outer_gradients.accumulate(self.specs, levels, gathered, self.squeeze(residuals), sender)
      return gathered, self.expand(residuals)

    s, host = self.specs, P()
    steps = dict.fromkeys(levels, host)
    weights = s.weights if s.settings.outer.max_weight >= 1 else dict.fromkeys(self.levels, s.weights)
    sender = Sender(s.modules, s.usual, s.params, s.state, weights, s.weights, host, steps, host)
    specs = (s.gathered, s.residuals, *sender)
    return self.shard_map(accumulate, specs, (s.gathered, s.residuals), donate_argnums=(0, 1))

  def _of(self, levels: tuple[str, ...]) -> list[str]:
    """Returns the names of the levels' parameters."""
    return [name for name, level in self.layout.owner.items() if level.name in levels]

  @in_flight(lambda s: (s.params, s.rows(), s.rows()), lambda s: (s.rows(), s.rows()))
  def evaluate(self, params, tokens, segments):
    """Returns (nll [m.., B], number of targets [m.., B]) of tokens and segments [m.., B, L]."""
    params, rows = inner_lib.gather(self.squeeze(params), self.specs.dims), self.squeeze((tokens, segments))
    losses = functools.partial(loss_lib.row_losses, self.model, self.settings.num_unscored_tokens, params)
    return self.expand(inner_lib.in_parts(losses, self.settings.train.microbatch, *rows))

  # -- all paths

  @functools.cache  # noqa: B019
  def outer(self, levels: tuple[str, ...]):
    """`outer(modules, masters, state, gathered, weights)`: the outer step of some levels; donates the first three.

    Returns (modules, masters, state, statistics). Statistics are, per level and module, the norm of Delta,
    `outer.cosine`, h of screening.py before the step, and whether the new module and its state are sound; per path,
    whether it is excluded, and r by level.
    """

    def outer(*args):
      return self._outer(levels, *args)

    s, host = self.specs, P()  # every process has the weights on its host
    inputs = (s.modules, s.masters, s.outer, s.gathered, host)
    return self.jit(outer, inputs, (s.modules, s.masters, s.outer, host), donate_argnums=(0, 1, 2))

  def _outer(self, sent, modules, masters, state, gathered, weights):
    levels = [level for level in self.layout.levels if level.name in sent]
    totals, cosines = {}, {}
    weights = jax.tree.map(lambda w: jnp.where(gathered.excluded, 0, w), weights)
    capped = weights if isinstance(weights, dict) else {}
    weights = next(iter(capped.values())) if capped else weights
    for level in levels:
      totals[level.name] = {name: x.sum(0) for name, x in gathered.sums[level.name].items()}
      square = gathered.squares[level.name].sum(0)
      of_sum = outer_lib.vmap_modules(lambda t: optax.tree.norm(t, squared=True), len(level.axes))(totals[level.name])
      paths = outer_lib.num_active(self.layout, level, weights)
      cosines[level.name] = outer_lib.cosine(paths, of_sum, square)
    before, masses = usual(state), jax.tree.map(lambda x: x.sum(0), gathered.masses)
    inner, outer = self.settings.inner.optimizer, choices.make_outer(self.settings.outer, self.specs.compress)
    sums = outer_lib.Sums(totals, weights, masses, capped)
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
    """`zero_sums(gathered) -> gathered`: sets the sums of some levels to zero; donates gathered.

    At the end of a phase, it also clears `excluded`. It is not part of `outer`, because XLA would then copy the sums
    before overwriting arrays that other operations still read.
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
    """`unshard(modules) -> modules`, each module in one piece on every device of its slice."""
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
