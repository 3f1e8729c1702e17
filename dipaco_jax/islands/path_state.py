"""A path's parameters and inner state on the host: as devices take them, and as storage has them."""

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from dipaco_jax.islands import messages
from dipaco_jax.pipeline import jobs
from dipaco_jax.training import mesh
from dipaco_jax.training.job import Job
from dipaco_jax.training.programs import Programs

INNER = 'inner'  # the AdamW state: before its arrays' names
RESIDUALS = 'residuals'
EXCLUDED = 'excluded'
LEFT = 'left'
OWN = 'own'
WEIGHTS = 'weights'
OUTER = 'outer'
FACTS = 'facts'
BEST = 'best'
BEST_VERSION = 'best_version'
BEST_LOSS = 'best_loss'

Arrays = dict[str, np.ndarray]


class Own(NamedTuple):
  """What a path keeps of the levels that it has alone (own_levels.py)."""

  weights: Arrays  # m(v), by parameter
  outer: dict[str, Arrays]  # the states of their outer optimizers, by level; none before the first step
  # From the modules' facts, which may not exist yet when a path continues: uri, sha256 and the usual r, by key.
  facts: dict[str, list[Any]]
  best: Arrays  # the weights of the version to which early stopping points, among those that were evaluated here
  best_version: int = 0  # 0: none
  best_loss: float | None = None  # None: not finite, or of no hold-out

  def to_arrays(self) -> Arrays:
    """Packs all for one object, by place in `{OWN: ...}`; `own_from_arrays` is the inverse."""
    by_part = {WEIGHTS: self.weights, BEST: self.best}
    arrays = {place(OWN, part, name): x for part, of_part in by_part.items() for name, x in of_part.items()}
    arrays |= {place(OWN, OUTER, level) + at: x for level, state in self.outer.items() for at, x in state.items()}
    arrays[place(OWN, FACTS)] = np.frombuffer(json.dumps(self.facts, sort_keys=True).encode(), np.uint8)
    arrays[place(OWN, BEST_VERSION)] = np.array(self.best_version)
    if self.best_loss is not None and math.isfinite(self.best_loss):  # any finite loss is better than all else
      arrays[place(OWN, BEST_LOSS)] = np.array(self.best_loss)
    return arrays


class PathState(NamedTuple):
  """One path's parameters by name, and its inner state by place in `{INNER: state}`, or {} if it has none."""

  params: Arrays
  inner: Arrays
  residuals: Arrays = {}  # by parameter; {} for zeros, or where nothing is compressed
  excluded: bool = False  # in this phase, from which on nothing that it sends counts
  left: Arrays = {}  # theta_o of algorithm/streaming.py, by parameter, of messages under way
  own: Own | None = None  # None if levels of a single path do not stay with it

  def to_arrays(self) -> Arrays:
    """Packs all for one object; `from_arrays` is the inverse."""
    marks = {place(EXCLUDED): np.ones((), bool)} if self.excluded else {}
    parts = {'params': self.params, LEFT: self.left}
    packed = {place(part, name): x for part, arrays in parts.items() for name, x in arrays.items()}
    return packed | self.carried() | marks

  def carried(self) -> Arrays:
    """Packs the state of a path that continues from modules: everything but the parameters."""
    return self.inner | {place(RESIDUALS, name): x for name, x in self.residuals.items()} | self.own_arrays()

  def own_arrays(self) -> Arrays:
    """Packs the state of a path that starts with fresh inner state."""
    return self.own.to_arrays() if self.own else {}


def from_arrays(arrays: Arrays, names: Iterable[str]) -> PathState:
  """Unpacks the arrays of `PathState.to_arrays`; `names` are the names of the parameters."""
  return from_carried(arrays, {name: arrays[place('params', name)] for name in names})


def from_carried(arrays: Arrays, params: Arrays) -> PathState:
  """Unpacks what `PathState.carried` has packed, beside these parameters."""
  residuals = {name: x for name in params if (x := arrays.get(place(RESIDUALS, name))) is not None}
  inner = {at: x for at, x in arrays.items() if at.startswith(place(INNER))}
  left = {name: x for name in params if (x := arrays.get(place(LEFT, name))) is not None}
  return PathState(params, inner, residuals, place(EXCLUDED) in arrays, left, own_from_arrays(arrays))


def check_carried(arrays: Arrays, shapes: messages.Shapes, inner: messages.Shapes):
  """Raises ValueError if arrays are not what `carried` or `to_arrays` packs.

  `shapes`: of a path's parameters; `inner`: of its inner state, without INNER in front of the places.
  """
  like = {place(INNER) + at: x for at, x in inner.items()}
  has_inner = any(at.startswith(place(INNER)) for at in arrays)
  optional = {place(part, name): x for part in ('params', LEFT) for name, x in shapes.items()}
  optional |= {place(RESIDUALS, name): jax.ShapeDtypeStruct(x.shape, ml_dtypes.bfloat16) for name, x in shapes.items()}
  like = {at: x for at, x in optional.items() if at in arrays} | (like if has_inner else {})
  others = {at for at in arrays if at == place(EXCLUDED) or at.startswith(place(OWN))}
  messages.check_shapes({at: x for at, x in arrays.items() if at not in others}, like)
  if own := own_from_arrays(arrays):
    for weights in (own.weights, own.best):
      messages.check_shapes(weights, {name: shapes[name] for name in weights})


def own_from_arrays(arrays: Arrays) -> Own | None:
  """Unpacks the arrays of `Own.to_arrays`, possibly among others, or returns None if there are none."""
  if place(OWN, FACTS) not in arrays:
    return None

  def part(*names: str) -> Arrays:
    mark = place(OWN, *names)
    return {at.removeprefix(mark): x for at, x in arrays.items() if at.startswith(mark)}

  def named(*names: str) -> Arrays:
    return {at[2:-2]: x for at, x in part(*names).items()}

  facts = json.loads(arrays[place(OWN, FACTS)].tobytes())
  levels = (key.partition('/')[0] for key in facts)
  outer = {level: state for level in levels if (state := part(OUTER, level))}
  loss = arrays.get(place(OWN, BEST_LOSS))
  version = arrays[place(OWN, BEST_VERSION)].item()
  return Own(named(WEIGHTS), outer, facts, named(BEST), version, None if loss is None else loss.item())


def own_alone(arrays: Arrays) -> Arrays:
  """Returns the part of a carried state that a path keeps when it starts with fresh inner state."""
  return {at: x for at, x in arrays.items() if at.startswith(place(OWN))}


def zeros(job: Job, has_inner: bool) -> PathState:
  """Returns a state of zeros, shaped like a path's."""
  shapes = job.programs.shapes
  inner = {INNER: jax.eval_shape(job.programs.specs.inner.init, shapes)} if has_inner else {}
  params, state = (
    {name: np.zeros(x.shape, x.dtype) for name, x in named_shapes.items()}
    for named_shapes in (shapes, jobs.by_place(inner))
  )
  return PathState(params, state)


def to_devices(job: Job, phase: int, state: PathState, fresh: bool, at_rest: bool = False) -> tuple[Any, Any]:
  """Puts a path on the devices; returns its parameters and inner state in flight.

  A path without an inner state gets the base model's, possibly `at_rest`, or, with `fresh`, a fresh one.
  """
  programs = job.programs

  def put(x: np.ndarray, spec: jax.sharding.PartitionSpec) -> jax.Array:
    return programs.placement.assemble(x.shape, spec, lambda _: x)

  params = {name: put(x, programs.specs.params[name]) for name, x in state.params.items()}
  if not state.inner:
    return params, programs.fresh_state(params) if fresh else job.first_state(phase, params, at_rest)
  specs = {INNER: programs.specs.state}
  return params, jax.tree.map(put, jobs.from_leaves(state.inner, specs), specs)[INNER]


def to_host(programs: Programs, params: Any, inner: Any) -> PathState:
  """Fetches a path in flight from the devices, without the mesh's axes."""
  first = (0,) * programs.specs.num_axes
  by_place = {at: x[first] for at, x in jobs.named_leaves({INNER: inner}).items()}
  return PathState({name: mesh.fetch(x)[first] for name, x in params.items()}, by_place)


def second_moments(inner: Arrays, names: Iterable[str]) -> tuple[Arrays, np.ndarray]:
  """Returns AdamW's second moments of some parameters and its count of steps, from an inner state by place."""
  adam = f'{place(INNER)}.optimizer[0]'
  return {name: inner[f'{adam}.nu{place(name)}'] for name in names}, inner[f'{adam}.count']


def place(*names: str) -> str:
  """Returns the name that `jax.tree_util.keystr` gives an array in nested dicts."""
  return jax.tree_util.keystr(tuple(map(jax.tree_util.DictKey, names)))
