"""A path's parameters and inner state on the host: as devices take them, and as storage has them."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from dipaco_jax.pipeline import jobs
from dipaco_jax.training import mesh
from dipaco_jax.training.job import Job
from dipaco_jax.training.programs import Programs

INNER = 'inner'  # the AdamW state among a checkpoint's objects, and before its arrays' names
RESIDUALS, EXCLUDED, LEFT, OWN = 'residuals', 'excluded', 'left', 'own'

Arrays = dict[str, np.ndarray]


class PathState(NamedTuple):
  """One path's parameters by name, and its inner state by place in `{INNER: state}`; {} where it has none."""

  params: Arrays
  inner: Arrays
  residuals: Arrays = {}  # by parameter; {} for zeros, or where nothing is compressed
  excluded: bool = False  # in this phase, from which on nothing that it sends counts
  left: Arrays = {}  # theta_o of core/streaming.py, by parameter, of what is on its way
  own: Arrays = {}  # by place in `{OWN: ...}`: what own_levels.py keeps

  def to_arrays(self) -> Arrays:
    """Packs all for one object; `from_arrays` is the inverse."""
    marks = {place(EXCLUDED): np.ones((), bool)} if self.excluded else {}
    parts = {'params': self.params, LEFT: self.left}
    whole = {place(part, name): x for part, arrays in parts.items() for name, x in arrays.items()}
    return whole | self.carried() | marks

  def carried(self) -> Arrays:
    """Packs what a path takes along where it goes on from modules: all but the parameters."""
    return self.inner | {place(RESIDUALS, name): x for name, x in self.residuals.items()} | self.own


def from_arrays(arrays: Arrays, names: Iterable[str]) -> PathState:
  """Unpacks what `PathState.to_arrays` has packed; `names` are those of the parameters."""
  return from_carried(arrays, {name: arrays[place('params', name)] for name in names})


def from_carried(arrays: Arrays, params: Arrays) -> PathState:
  """Unpacks what `PathState.carried` has packed, beside these parameters."""
  residuals = {name: x for name in params if (x := arrays.get(place(RESIDUALS, name))) is not None}
  inner = {at: x for at, x in arrays.items() if at.startswith(place(INNER))}
  left = {name: x for name in params if (x := arrays.get(place(LEFT, name))) is not None}
  return PathState(params, inner, residuals, place(EXCLUDED) in arrays, left, own_alone(arrays))


def own_alone(arrays: Arrays) -> Arrays:
  """Returns, of what a path takes along, the part that stays with a path that begins anew."""
  return {at: x for at, x in arrays.items() if at.startswith(place(OWN))}


def zeros(job: Job, has_inner: bool) -> PathState:
  """Returns a state of zeros, shaped like a path's."""
  shapes = job.programs.shapes
  inner = {INNER: jax.eval_shape(job.programs.specs.inner.init, shapes)} if has_inner else {}
  by_place = {jax.tree_util.keystr(at): x for at, x in jax.tree_util.tree_leaves_with_path(inner)}
  params, state = ({name: np.zeros(x.shape, x.dtype) for name, x in found.items()} for found in (shapes, by_place))
  return PathState(params, state)


def to_devices(job: Job, phase: int, state: PathState, fresh: bool) -> tuple[Any, Any]:
  """Puts a path on the devices; returns its parameters and inner state in flight.

  A path without an inner state gets the base model's or, with `fresh`, a fresh one.
  """
  programs = job.programs

  def put(x: np.ndarray, spec: jax.sharding.PartitionSpec) -> jax.Array:
    return programs.placement.assemble(x.shape, spec, lambda _: x)

  params = {name: put(x, programs.specs.params[name]) for name, x in state.params.items()}
  if not state.inner:
    return params, programs.fresh_state(params) if fresh else job.first_state(phase, params)
  specs = {INNER: programs.specs.state}
  return params, jax.tree.map(put, jobs.from_leaves(state.inner, specs), specs)[INNER]


def to_host(programs: Programs, params: Any, inner: Any) -> PathState:
  """Fetches a path in flight from the devices, without the mesh's axes."""
  first = (0,) * programs.specs.num_axes
  by_place = {at: x[first] for at, x in jobs.named_leaves({INNER: inner}).items()}
  return PathState({name: mesh.fetch(x)[first] for name, x in params.items()}, by_place)


def place(*names: str) -> str:
  """Returns the name that `jax.tree_util.keystr` gives an array in nested dicts."""
  return jax.tree_util.keystr(tuple(map(jax.tree_util.DictKey, names)))
