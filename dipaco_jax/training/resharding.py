"""Arrays of paths between phases, moved to a mesh with other positions, so that a run can continue on other devices.

Rounds that shard the text again are in `pipeline.resharding_round`.

In-flight arrays are `[m_a, ..., shape]`, one for each turn (see mesh.py). With other m_a the path with coordinates c is
at another position and has another turn, but positions are in blocks: those of both meshes lie completely in
the g_a = gcd(m_a, m'_a) parts into which both cut an axis. So a device needs and reads only its parts.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from dipaco_jax.algorithm.grid import Coordinates
from dipaco_jax.training.mesh import Placement


def sharding_elsewhere(placement: Placement, positions: Coordinates, new: NamedSharding) -> NamedSharding:
  """Returns the sharding, on this mesh's devices, of an in-flight array that has a mesh with `positions`.

  `new` is the sharding that the array will get on this mesh, that of `placement`.
  """
  names, sizes = [], []
  for name, old, here in zip(placement.grid.names, positions, placement.positions, strict=True):
    common = math.gcd(old, here)
    names += [name, f'{name} within']
    sizes += [common, here // common]
  devices = placement.mesh.devices.reshape(*sizes, placement.data)
  mesh = Mesh(devices, (*names, 'data'), axis_types=(AxisType.Auto,) * devices.ndim)
  return NamedSharding(mesh, new.spec, memory_kind=new.memory_kind)


def move_turns(
  placement: Placement, positions: Coordinates, old: Mapping[int, Any], shardings, fill: Callable[[Coordinates], Any]
) -> dict[int, Any]:
  """Moves trees of in-flight arrays by turn, from a mesh with those positions, to trees by turn on this one.

  Args:
    old: by turn, as `sharding_elsewhere` places them; turns may be missing.
    shardings: of a new tree's arrays.
    fill: turn -> a new tree, for the paths whose old turn is missing; a turn that has no others is left out.
  """
  leaves, structure = jax.tree.flatten(shardings)
  columns = {number: jax.tree.leaves(tree) for number, tree in old.items()}
  moved = {}
  for number, turn in enumerate(placement.turns()):
    sources = _sources(placement, positions, turn)
    missing = {n for n, _ in sources.values() if n not in old}
    if missing >= {n for n, _ in sources.values()}:
      continue
    filler = jax.tree.leaves(fill(turn)) if missing else []
    arrays = []
    for i, leaf in enumerate(leaves):
      parts = {p: (columns[n][i], q) if n in old else (filler[i], p) for p, (n, q) in sources.items()}
      arrays.append(_gather(leaf, parts))
    moved[number] = jax.tree.unflatten(structure, arrays)
  return moved


def _sources(
  placement: Placement, positions: Coordinates, turn: Coordinates
) -> dict[Coordinates, tuple[int, Coordinates]]:
  """Returns {position: (number of the turn, position)} of the turn's paths, here and on a mesh with those positions."""
  block = tuple(k // m for k, m in zip(placement.grid.shape, positions, strict=True))
  numbers = {turn: i for i, turn in enumerate(itertools.product(*map(range, block)))}
  sources = {}
  for position in itertools.product(*map(range, placement.positions)):
    path = (p * b + t for p, b, t in zip(position, placement.block, turn, strict=True))
    at = [divmod(c, b) for c, b in zip(path, block, strict=True)]
    sources[position] = numbers[tuple(t for _, t in at)], tuple(p for p, _ in at)
  return sources


def _gather(sharding: NamedSharding, parts: Mapping[Coordinates, tuple[jax.Array, Coordinates]]) -> jax.Array:
  """Makes an in-flight array, from the array and the position there that each position's part is taken from."""
  (array, at), *_ = parts.values()
  n, sizes = len(at), [max(p) + 1 for p in zip(*parts, strict=True)]

  def piece(index):
    source, position = parts[tuple(s.start or 0 for s in index[:n])]
    return _part(source, position, index[n:])[(None,) * n]

  return jax.make_array_from_callback((*sizes, *array.shape[n:]), sharding, piece)


def _part(array: jax.Array, position: Coordinates, rest: tuple[slice, ...]) -> np.ndarray:
  """Returns the part `rest` of the arrays at a position, from the devices of this process."""
  n = len(position)
  for shard in array.addressable_shards:
    first = [s.start or 0 for s in shard.index[:n]]
    local = tuple(p - f for p, f in zip(position, first, strict=True))
    inside = all(0 <= i < size for i, size in zip(local, shard.data.shape, strict=False))
    slices = zip(shard.index[n:], rest, array.shape[n:], strict=True)
    if inside and all(a.indices(size) == b.indices(size) for a, b, size in slices):
      return np.asarray(shard.data)[local]
  raise AssertionError(f'position {position} is not on the devices of this process')
