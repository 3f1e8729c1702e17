"""Where paths live: a device mesh with the grid's axis names, plus `data` for the devices inside one path's slice.

A mesh axis may be shorter than its grid axis: every mesh position then holds a block of paths and takes them in turn.
The path with coordinates c sits at position c_a // b_a of mesh axis a and has its turn at c_a % b_a, b_a = K_a / m_a.
Arrays of the paths in flight have the mesh's axes in front, `[m_a, ..., shape]`, one path per position; stacked modules
have their level's axes in front, `[K_a, ..., shape]`, sharded in the same blocks.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dipaco_jax.algorithm.grid import Coordinates, Grid
from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError

Load = Callable[[Coordinates], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Placement:
  """A grid on a mesh."""

  grid: Grid
  mesh: Mesh
  shard_states: bool  # over `data`

  @property
  def positions(self) -> Coordinates:
    """m_a: the mesh's size along every grid axis."""
    return tuple(self.mesh.shape[name] for name in self.grid.names)

  @property
  def data(self) -> int:
    """Devices inside one path's slice."""
    return self.mesh.shape['data']

  @property
  def block(self) -> Coordinates:
    """b_a: paths per mesh position along every axis."""
    return tuple(k // m for k, m in zip(self.grid.shape, self.positions, strict=True))

  def turns(self) -> list[Coordinates]:
    """Places within the block, in the order in which every position takes them."""
    return list(itertools.product(*map(range, self.block)))

  def path(self, turn: Coordinates, position: Coordinates) -> int:
    """Returns the path in flight at a mesh position during a turn."""
    return self.grid.path(tuple(p * b + t for p, b, t in zip(position, self.block, turn, strict=True)))

  def paths(self, turn: Coordinates) -> list[int]:
    """Lists the paths in flight during a turn, positions in row-major order."""
    return [self.path(turn, position) for position in itertools.product(*map(range, self.positions))]

  def in_flight(self, of_path: np.ndarray, turn: Coordinates) -> np.ndarray:
    """Selects the entries, [P] or shaped like the grid, of the paths in flight during a turn: [m_a, ...]."""
    return of_path.reshape(-1)[self.paths(turn)].reshape(self.positions)

  def data_dim(self, shape: Sequence[int]) -> int | None:
    """Returns the largest dimension of a parameter that `data` divides, over which it is sharded; None if none is."""
    fit = [i for i, size in enumerate(shape) if size % self.data == 0]
    return max(fit, key=lambda i: shape[i]) if self.shard_states and self.data > 1 and fit else None

  def parameter_spec(self, shape: Sequence[int]) -> tuple[str | None, ...]:
    """Returns the PartitionSpec entries of one path's parameter inside its slice."""
    dim = self.data_dim(shape)
    return tuple('data' if i == dim else None for i in range(len(shape)))

  def in_flight_spec(self, shape: Sequence[int]) -> PartitionSpec:
    """Returns the PartitionSpec of an array `[m_a, ..., shape]` that holds one path's parameter per position."""
    return PartitionSpec(*self.grid.names, *self.parameter_spec(shape))

  def assemble(self, shape: Sequence[int], spec: PartitionSpec, load: Load, lead: int = 0) -> jax.Array:
    """Makes an array from each position's part, asking only for the positions of this process's devices.

    Args:
      shape: of a part; `lead` of its dimensions come before the mesh's axes: [shape[:lead], m_a, ..., shape[lead:]].
      spec: of the whole.
      load: position -> its part; called once for every device.
    """
    n = len(self.positions)

    def piece(index):
      position = tuple(s.start or 0 for s in index[lead : lead + n])
      part = load(position)[(*index[:lead], *index[lead + n :])]
      return part.reshape((*part.shape[:lead], *(1,) * n, *part.shape[lead:]))

    full_shape = (*shape[:lead], *self.positions, *shape[lead:])
    return jax.make_array_from_callback(full_shape, NamedSharding(self.mesh, spec), piece)

  def assemble_pair(self, shape: Sequence[int], spec: PartitionSpec, load: Load, lead: int = 0) -> list[jax.Array]:
    """Makes two arrays from each position's pair of parts, loaded once, see `assemble`: tokens and segments."""
    load = functools.cache(load)
    parts: list[Load] = [lambda position: load(position)[0], lambda position: load(position)[1]]
    return [self.assemble(shape, spec, part, lead) for part in parts]


def by_slice(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
  """Groups devices by TPU slice, whose own network is fast; devices without a slice index are one slice."""
  devices_by_slice: dict[int, list[jax.Device]] = {}
  for device in devices:
    devices_by_slice.setdefault(getattr(device, 'slice_index', None) or 0, []).append(device)
  return [devices_by_slice[index] for index in sorted(devices_by_slice)]


def _room(slices: list[list[jax.Device]], data: int) -> int:
  """Counts positions of a given number of devices, each within one slice unless no slice is large enough."""
  return sum(len(devices) // data for devices in slices) or sum(map(len, slices)) // data


def _arrange(shape: Coordinates, slices: list[list[jax.Device]]) -> np.ndarray:
  """Arranges devices `[m_a, ..., data]`: a path's are neighbours in a slice; the first axes go from slice to slice."""
  data, size = shape[-1], math.prod(shape)
  if max(map(len, slices)) < data:
    return np.array([device for devices in slices for device in devices][:size]).reshape(shape)
  if len(slices) == 1:
    return _in_slice(shape, slices[0][:size])
  counts = [len(devices) // data for devices in slices]
  rows = [_in_slice((n, data), devices[: n * data]) for n, devices in zip(counts, slices, strict=True) if n]
  return np.concatenate(rows).reshape(-1)[:size].reshape(shape)


def _in_slice(shape: Coordinates, devices: list[jax.Device]) -> np.ndarray:
  """Arranges neighbours in the mesh as neighbours in the slice; in order where the devices form no box."""
  try:
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
  except AssertionError:
    return np.array(devices).reshape(shape)


def place(
  grid: Grid, config: settings.Mesh, batch_sizes: Mapping[str, int], devices: Sequence[jax.Device]
) -> Placement:
  """Lays a grid out on devices. A path's devices are in one slice, or in as few as hold them.

  Args:
    grid: of paths.
    config: `data` devices inside a path; 0: as many as leave room for all paths and divide every batch.
    batch_sizes: {config field: rows per path and step}; InputError if `data` does not divide them.
    devices: all that may be used; some are left over where sizes don't divide, InputError if all of a process's are.
  """
  if config.data > len(devices):
    raise InputError(f'config.mesh.data={config.data} is more than the {len(devices)} devices')
  for field, rows in batch_sizes.items():
    if config.data and rows % config.data:
      raise InputError(f'config.{field}={rows} is not divided by config.mesh.data={config.data}: change one of them')
  slices = by_slice(devices)
  fit = (d for d in range(1, len(devices) + 1) if all(rows % d == 0 for rows in batch_sizes.values()))
  data = config.data or max((d for d in fit if _room(slices, d) >= grid.num_paths), default=1)
  # Of divisors of the grid's sizes those with the largest product that the devices allow; the first axes longest.
  options = itertools.product(*([d for d in range(k, 0, -1) if k % d == 0] for k in grid.shape))
  shape = (*max((o for o in options if math.prod(o) <= _room(slices, data)), key=math.prod), data)
  arranged = _arrange(shape, slices)
  if idle := {d.process_index for d in devices} - {d.process_index for d in arranged.flat}:
    taken = f'grid {grid} and batches of {sorted(batch_sizes.values())} rows take {math.prod(shape)}'
    raise InputError(
      f'processes {sorted(idle)} would have nothing to do: {taken} of {len(devices)} devices; start fewer processes, '
      f'or change config.grid or the batches'
    )
  mesh = Mesh(arranged, (*grid.names, 'data'), axis_types=(AxisType.Auto,) * len(shape))
  return Placement(grid, mesh, config.shard_states)


def fetch(x: jax.Array) -> np.ndarray:
  """Fetches a whole array to the host; every process calls it, in the same order."""
  return np.asarray(readable(x))


def is_ready(x: Any) -> bool:
  """Returns whether an array, as `jax.Array`, whose type does not tell of this, is computed; waits for nothing."""
  return x.is_ready()


def readable(x: jax.Array) -> jax.Array:
  """Returns the array, replicated if other processes hold parts of it (small arrays only)."""
  if x.is_fully_addressable or x.is_fully_replicated:
    return x
  assert isinstance(x.sharding, NamedSharding)
  return _replicate(x.sharding.mesh)(x)


@functools.cache  # a new function would compile again
def _replicate(mesh: Mesh):
  return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
