"""The state of training: arrays on the devices, a record on the host, and the format of both in a checkpoint."""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.algorithm.grid import Coordinates
from dipaco_jax.core.errors import InputError
from dipaco_jax.training import resharding, run_checkpoints, specs as specs_lib
from dipaco_jax.training.programs import Programs

OTHER_VERSION = (
  'the checkpoints of this run are of another version: resume it with that version, or use another --workdir'
)


@dataclasses.dataclass
class Record:
  """Host side of the state: position, early stopping, and the sums that the report is made from."""

  phase: int = 0  # complete phases
  turn: int = 0  # complete turns of the phase
  step: int = 0  # complete inner steps of the turn
  round: int = 0  # of sharding, that the losses below are of
  best_loss: list[float | None] = dataclasses.field(default_factory=list)  # on the hold-outs of its model, by path
  best_version: list[int] = dataclasses.field(default_factory=list)  # of the modules, by path
  excluded: list[int] = dataclasses.field(default_factory=list)  # phases in a row, up to its last, by path
  skipped: list[int] = dataclasses.field(default_factory=list)  # steps of the phase that were not finite, by path
  loss_sum: list[float] = dataclasses.field(default_factory=list)  # of the phase's steps, by path
  loss_steps: list[int] = dataclasses.field(default_factory=list)
  own_loss: list[float | None] = dataclasses.field(default_factory=list)  # on hold-outs, before the outer step, by path
  phase_s: float = 0.0  # of the phase's steps
  tokens: int = 0
  inner_s: float = 0.0  # of `timed_steps` steps with `timed_tokens`, those that compiled left out
  timed_steps: int = 0
  timed_tokens: int = 0
  outer_s: float = 0.0
  piece: int = 0  # complete pieces of the phase
  sent: dict[str, Any] = dataclasses.field(default_factory=dict)  # statistics of the levels that have left, as lists
  seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # of the stage up to here, by cause
  path_s: list[float] = dataclasses.field(default_factory=list)  # in inner steps, by path

  def move_to(self, phase: int, piece: int = 0, turn: int = 0, step: int = 0):
    """Notes how many phases are complete, and how much of the next one."""
    self.phase = phase
    self.piece = piece
    self.turn = turn
    self.step = step


def new_record(num_paths: int) -> Record:
  """Returns the record before the first update."""
  return Record(
    best_loss=[None] * num_paths, best_version=[0] * num_paths, excluded=[0] * num_paths, skipped=[0] * num_paths,
    loss_sum=[0.0] * num_paths, loss_steps=[0] * num_paths, own_loss=[None] * num_paths,
    path_s=[0.0] * num_paths,
  )  # fmt: skip


@dataclasses.dataclass
class State:
  """The state of training: all modules, and what paths have of their own. `Specs` has shapes and shardings."""

  modules: Any  # [K_a, ..., shape] by level and parameter
  masters: Any  # M of compression.py, as the modules; {} without
  outer: Any  # outer states by level, [K_a, ..., shape] and [K_a, ...]
  gathered: Any  # `Gathered`; zeros between phases
  inner: dict[int, Any]  # inner states by turn, [m_a, ..., shape], of the paths that have one
  params: Any  # of the paths in flight, [m_a, ..., shape]; None between turns
  record: Record
  # Parameters by turn, [m_a, ..., shape]: where outer gradients were lost, and between pieces of a phase.
  own: dict[int, Any] = dataclasses.field(default_factory=dict)
  residuals: dict[int, Any] = dataclasses.field(default_factory=dict)  # by turn, where compressed
  # theta_o of streaming.py by turn, of messages under way.
  left: dict[int, Any] = dataclasses.field(default_factory=dict)

  def arrays(self) -> dict[str, Any]:
    """Returns the arrays of a checkpoint: nothing that `gather_path` and zeros make again."""
    kept = {'modules': self.modules, 'outer': self.outer, 'inner': {str(t): s for t, s in sorted(self.inner.items())}}
    gathered = self.gathered if self.gathered.masses else Plain(*self.gathered[:4])
    kept |= {'gathered': gathered} if self.record.turn or self.record.piece else {}
    kept |= {'own': {str(t): params for t, params in sorted(self.own.items())}} if self.own else {}
    kept |= {'residuals': {str(t): e for t, e in sorted(self.residuals.items())}} if self.residuals else {}
    kept |= {'masters': self.masters} if self.masters else {}
    left = {str(t): params for t, params in sorted(self.left.items()) if params}
    kept |= {'left': left} if left else {}
    return kept | ({'params': self.params} if self.params is not None else {})


class Plain(NamedTuple):
  """What is gathered, as checkpoints have it where paths weigh alike in all rows."""

  sums: Any
  squares: Any
  moved: Any
  excluded: Any


def new_state(programs: Programs, base: dict[str, np.ndarray]) -> State:
  """Makes the state before the first update, in which every path is the base model."""
  modules, masters, outer, gathered = programs.start(base)
  return State(modules, masters, outer, gathered, {}, None, new_record(programs.layout.grid.num_paths))


@functools.partial(jax.jit, donate_argnums=1)
def choose(these, others, where):
  """Takes in-flight arrays from `these` at positions where `where` [m..] is true, else from `others`."""

  def one(x, y):
    return jnp.where(where.reshape(*where.shape, *(1,) * (y.ndim - where.ndim)), x, y)

  return jax.tree.map(one, these, others)


def save(checkpoints: run_checkpoints.RunCheckpoints, updates: int, state: State, positions: Coordinates):
  """Copies the arrays from the devices, on a mesh with these positions, and writes in the background."""
  held = {'turns': sorted(state.inner), 'own': sorted(state.own), 'in_turn': state.params is not None}
  held |= {'residuals': sorted(state.residuals)} if state.residuals else {}
  left = {str(turn): sorted(params) for turn, params in state.left.items() if params}
  held |= {'left': left} if left else {}
  held |= {'positions': list(positions), 'shapes': _shapes(state.arrays())}
  meta = {'record': dataclasses.asdict(state.record), **held}
  checkpoints.save(updates, state.arrays(), meta)


def restore(
  checkpoints: run_checkpoints.RunCheckpoints, programs: Programs, first_state: Callable[[Any], Any]
) -> State | None:
  """Restores the newest checkpoint that can be read; with other positions, the last at the end of a phase.

  `first_state`: in-flight parameters -> the inner state of paths that have none of their own. Raises InputError if it
  is of another version, or there is none at the end of a phase where one is needed.
  """
  restored = checkpoints.restore(functools.partial(_abstract, programs))
  if restored is None:
    return None
  arrays, meta = restored
  gathered = arrays['gathered'] if 'gathered' in arrays else _zeros(programs)
  gathered = specs_lib.Gathered(**{'masses': {}, **gathered._asdict()})
  inner = {int(turn): inner for turn, inner in arrays['inner'].items()}
  own = {int(turn): params for turn, params in arrays.get('own', {}).items()}
  residuals = {int(turn): e for turn, e in arrays.get('residuals', {}).items()}
  left = {int(turn): params for turn, params in arrays.get('left', {}).items()}
  if (positions := tuple(meta['positions'])) != programs.placement.positions:

    def gather(turn: Coordinates) -> Any:
      return programs.gather_path(arrays['modules'], np.array(turn, np.int32))

    moved = functools.partial(resharding.move_turns, programs.placement, positions)
    inner = moved(inner, programs.specs.waiting, lambda turn: first_state(gather(turn)))
    own = moved(own, programs.specs.shardings(programs.specs.params), gather)
    if left:  # the same levels of all turns
      place, names = programs.specs.shardings(programs.specs.params), sorted(next(iter(left.values())))
      of_left = {name: place[name] for name in names}
      left = moved(left, of_left, lambda turn: {name: gather(turn)[name] for name in names})
    residuals = moved(
      residuals, programs.specs.shardings(programs.specs.residuals), lambda _: programs.fresh_residuals()
    )
  record, masters = Record(**meta['record']), arrays.get('masters', {})
  return State(
    arrays['modules'], masters, arrays['outer'], gathered, inner, arrays.get('params'), record, own, residuals, left
  )


def _zeros(programs: Programs) -> specs_lib.Gathered:
  """Makes the zeros of between phases, without the modules and outer states that `new_state` makes too."""

  def one(struct, sharding):
    part = np.zeros(sharding.shard_shape(struct.shape), struct.dtype)
    return jax.make_array_from_callback(struct.shape, sharding, lambda _: part)

  structs = jax.eval_shape(programs.start, programs.shapes)[3]
  return jax.tree.map(one, structs, programs.specs.shardings(programs.specs.gathered))


def _abstract(programs: Programs, meta: dict[str, Any]) -> dict[str, Any] | None:
  """ShapeDtypeStructs with shardings of the arrays in such a checkpoint; None: within a phase, with other positions."""
  fields = {field.name for field in dataclasses.fields(Record)}
  known = {'record', 'turns', 'own', 'in_turn', 'positions', 'shapes'}
  if meta.keys() - {'residuals', 'left'} != known or meta['record'].keys() != fields:
    raise InputError(OTHER_VERSION)
  positions, record = tuple(meta['positions']), Record(**meta['record'])
  if positions != programs.placement.positions and (meta['in_turn'] or record.turn or record.piece):
    logging.warning('this run began with another layout of devices: it resumes from the end of a phase')
    return None
  modules, masters, outer, gathered = jax.eval_shape(programs.start, programs.shapes)
  params = jax.eval_shape(programs.gather_path, modules, np.zeros(programs.specs.num_axes, np.int32))
  inner = jax.eval_shape(programs.fresh_state, params)
  residual = jax.eval_shape(programs.fresh_residuals)
  params, inner, residual = (
    jax.tree.map(lambda x: jax.ShapeDtypeStruct((*positions, *x.shape[programs.specs.num_axes :]), x.dtype), tree)
    for tree in (params, inner, residual)
  )
  by_turn, own = dict.fromkeys(meta['turns'], inner), dict.fromkeys(meta['own'], params)
  residuals = dict.fromkeys(meta.get('residuals', ()), residual)
  left = _left(meta, params)
  structs = State(
    modules, masters, outer, gathered, by_turn, params if meta['in_turn'] else None, record, own, residuals, left
  ).arrays()
  shardings = _shardings(programs, meta, record).arrays()
  arrays = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), structs, shardings)
  if meta['shapes'] != _shapes(arrays):
    raise InputError(OTHER_VERSION)
  return arrays


def _shardings(programs: Programs, meta: dict[str, Any], record: Record) -> State:
  """Shardings of the arrays of a checkpoint with this meta; with other positions, close to their new ones."""
  specs, place = programs.specs, programs.specs.shardings
  modules, masters, outer, gathered = place((specs.modules, specs.masters, specs.outer, specs.gathered))
  waiting, (params, inner, residual) = specs.waiting, place((specs.params, specs.state, specs.residuals))
  if (positions := tuple(meta['positions'])) != programs.placement.positions:
    elsewhere = functools.partial(resharding.sharding_elsewhere, programs.placement, positions)
    waiting, params, residual = jax.tree.map(elsewhere, (waiting, params, residual))
  by_turn = {turn: inner if meta['in_turn'] and turn == record.turn else waiting for turn in meta['turns']}
  own, residuals = dict.fromkeys(meta['own'], params), dict.fromkeys(meta.get('residuals', ()), residual)
  flying = params if meta['in_turn'] else None
  return State(modules, masters, outer, gathered, by_turn, flying, record, own, residuals, _left(meta, params))


def _left(meta: dict[str, Any], params: dict[str, Any]) -> dict[int, Any]:
  """Selects the entries of parameters with messages under way, by turn."""
  return {int(turn): {name: params[name] for name in names} for turn, names in meta.get('left', {}).items()}


def _shapes(arrays) -> str:
  """Digest of the arrays' names, shapes and dtypes, not of their values."""
  shapes = [(jax.tree_util.keystr(p), x.shape, str(x.dtype)) for p, x in jax.tree_util.tree_leaves_with_path(arrays)]
  return hashlib.sha256(repr(shapes).encode()).hexdigest()
