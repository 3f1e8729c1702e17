"""Placement, compared with brute force over paths: positions, turns and data of each path."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.config import settings
from dipaco_jax.training import mesh


def place(grid, devices, data=0, rows=4, shard_states=False):
  config = settings.Mesh(data, shard_states)
  return mesh.place(Grid(grid), config, {'train.batch_size': rows}, jax.devices()[:devices])


@pytest.mark.parametrize('grid, devices, data, expected', [
  ({}, 1, 0, (1,)), ({}, 8, 0, (4,)), ({}, 3, 0, (2,)), ({'a': 4, 'b': 2}, 8, 0, (4, 2, 1)),
  ({'a': 4, 'b': 2}, 1, 0, (1, 1, 1)), ({'a': 2, 'b': 2}, 8, 0, (2, 2, 2)), ({'a': 3}, 8, 0, (3, 2)),
  ({'a': 6, 'b': 6}, 8, 0, (6, 1, 1)), ({'a': 4, 'b': 2}, 8, 4, (2, 1, 4)), ({'a': 5}, 4, 0, (1, 1)),
])  # fmt: skip
def test_devices_are_used(grid, devices, data, expected):
  placement = place(grid, devices, data)
  assert (*placement.positions, placement.data) == expected
  assert placement.mesh.axis_names == (*sorted(grid), 'data')


@pytest.mark.parametrize('devices', [1, 2, 4, 6, 8])
@pytest.mark.parametrize('grid', [{}, {'a': 3}, {'a': 4, 'b': 2}, {'a': 2, 'b': 3, 'c': 2}])
def test_every_path_has_one_turn_at_one_position(grid, devices):
  placement = place(grid, devices)
  shape, block = placement.grid.shape, placement.block
  seen = {}
  for turn in placement.turns():
    places = list(itertools.product(*map(range, placement.positions)))
    assert placement.paths(turn) == [placement.path(turn, position) for position in places]
    for position in places:
      path = placement.path(turn, position)
      assert path not in seen
      seen[path] = position
  assert sorted(seen) == list(range(placement.grid.num_paths))
  # Positions hold the blocks that a stacked module's shards hold.
  for path, position in seen.items():
    coordinates = np.unravel_index(path, shape) if shape else ()
    assert position == tuple(c // b for c, b in zip(coordinates, block, strict=True))


@dataclasses.dataclass(frozen=True)
class Device:
  """As far as placement looks at one."""

  id: int
  slice_index: int
  platform: str = 'cpu'
  device_kind: str = 'cpu'

  @property
  def process_index(self):
    return self.slice_index


@pytest.mark.parametrize('grid, slices, data, expected, spanned', [
  # grid, devices of each slice, asked for; positions and devices inside a path; slices that a path spans
  ({'a': 4, 'b': 2}, (8, 8), 0, (4, 2, 2), 1), ({'a': 2, 'b': 2}, (2, 2, 2, 2), 0, (2, 2, 2), 1),
  ({'a': 3}, (8, 8), 0, (3, 4), 1), ({'a': 5}, (8, 8), 0, (5, 2), 1), ({'a': 6}, (6, 6), 4, (2, 4), 1),
  ({'a': 4, 'b': 4}, (6, 5), 0, (4, 2, 1), 1), ({'a': 2}, (2, 2, 2, 2), 0, (2, 4), 2), ({}, (8, 8), 0, (16,), 2),
])  # fmt: skip
def test_a_path_is_in_one_slice_if_it_fits(grid, slices, data, expected, spanned):
  index = [i for i, size in enumerate(slices) for _ in range(size)]
  devices = [Device(number, i) for number, i in enumerate(index)][::-1]
  placement = mesh.place(Grid(grid), settings.Mesh(data), {'train.batch_size': 16}, devices)
  assert (*placement.positions, placement.data) == expected
  rows = placement.mesh.devices.reshape(-1, placement.data)
  assert {len({device.slice_index for device in row}) for row in rows} == {spanned}
  assert len({device.id for row in rows for device in row}) == rows.size
  first = [min(device.slice_index for device in row) for row in rows]
  assert first == sorted(first)  # the first axes go from slice to slice


def test_assemble_asks_for_the_positions_it_has_and_puts_them_there():
  placement = place({'a': 2, 'b': 2}, 8)
  asked = []

  def load(position):
    asked.append(position)
    return np.arange(3 * 4 * 5).reshape(3, 4, 5) + 1000 * np.ravel_multi_index(position, (2, 2))

  found = placement.assemble((3, 4, 5), P(None, 'a', 'b', 'data'), load, lead=1)
  assert found.shape == (3, 2, 2, 4, 5) and len(asked) == 8 and set(asked) == set(np.ndindex(2, 2))
  for position in np.ndindex(2, 2):
    np.testing.assert_array_equal(found[:, *position], load(position))
  assert {shard.data.shape for shard in found.addressable_shards} == {(3, 1, 1, 2, 5)}


def test_assemble_of_scalars():
  for axes in ({}, {'a': 2}):
    placement = place(axes, 2, data=1)
    found = placement.assemble((), placement.in_flight_spec(()), lambda position: np.array(sum(position), np.int32))
    assert found.tolist() == ([0, 1] if axes else 0)


@pytest.mark.parametrize('shape, expected', [((4, 6), 1), ((6, 4), 0), ((3, 2), 1), ((3, 5), None), ((), None)])
def test_the_largest_dimension_that_divides_is_sharded(shape, expected):
  assert place({'a': 4}, 8, shard_states=True).data_dim(shape) == expected
  assert place({'a': 4}, 8).data_dim(shape) is None
  assert place({'a': 4}, 4, shard_states=True).data_dim(shape) is None


@pytest.mark.parametrize(
  'data, rows, words',
  [
    (9, 4, 'config.mesh.data=9 is more than the 8 devices'),
    (3, 4, 'config.train.batch_size=4 is not divided by'),
  ],
)
def test_what_cannot_be_is_said(data, rows, words):
  with pytest.raises(ValueError, match=words):
    place({'a': 2}, 8, data, rows)


def test_devices_that_are_no_box_are_taken_in_order(monkeypatch):
  def refuse(*args, **options):
    raise AssertionError('no box')

  monkeypatch.setattr(mesh.mesh_utils, 'create_device_mesh', refuse)
  assert place({'a': 5}, 8).mesh.devices.reshape(-1).tolist() == jax.devices()[:5]


def test_fetch_is_whole():
  placement = place({'a': 4}, 8)
  x = jax.device_put(np.arange(8.0).reshape(4, 2), NamedSharding(placement.mesh, P('a', 'data')))
  np.testing.assert_array_equal(mesh.fetch(x), np.arange(8.0).reshape(4, 2))
