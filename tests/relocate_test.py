"""What paths keep goes with them to a mesh with other positions, to the bit; and the run goes on from there."""

import functools
import itertools

import jax
import numpy as np
import pytest
import small
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dipaco_jax import mesh, metrics, relocate, settings, spmd
from dipaco_jax.grid import Grid

GRID = {'a': 4, 'b': 2}


def place(grid, devices):
  return mesh.place(Grid(grid), settings.Mesh(), {'train.batch_size': small.ROWS}, jax.devices()[:devices])


@pytest.mark.parametrize('missing', [(), (0,)])
@pytest.mark.parametrize('grid, positions, devices', [
  ({'a': 6}, (2,), 3), ({'a': 6}, (3,), 2), ({'a': 6}, (1,), 6), ({'a': 6}, (6,), 1), ({'a': 4, 'b': 2}, (1, 1), 4),
  ({'a': 4, 'b': 2}, (4, 1), 2), ({'a': 4, 'b': 2}, (2, 2), 8), ({'a': 2, 'b': 6}, (1, 3), 4),
])  # fmt: skip
def test_every_path_has_its_own_again(grid, positions, devices, missing):
  placement = place(grid, devices)
  assert placement.positions != positions
  new = NamedSharding(placement.mesh, P(*placement.grid.names, None, 'data'))
  block = tuple(k // m for k, m in zip(placement.grid.shape, positions, strict=True))
  old = {}
  for number, turn in enumerate(itertools.product(*map(range, block))):
    whole = np.zeros((*positions, 3, placement.data), int)
    for position in np.ndindex(positions):
      whole[position] = placement.grid.path([p * b + t for p, b, t in zip(position, block, turn, strict=True)])
    if number not in missing:
      old[number] = {'x': jax.device_put(whole, relocate.sharding(placement, positions, new))}
  lost = set(range(placement.grid.num_paths)) - {int(path) for tree in old.values() for path in np.unique(tree['x'])}

  def fill(turn):
    return {'x': jax.device_put(np.full((*placement.positions, 3, placement.data), -1), new)}

  found = relocate.turns(placement, positions, old, {'x': new}, fill)
  for number, turn in enumerate(placement.turns()):
    paths = placement.paths(turn)
    assert (number in found) == bool(set(paths) - lost)
    if number in found:
      assert found[number]['x'].sharding == new
      held = np.asarray(found[number]['x']).reshape(len(paths), -1)
      assert [set(row) for row in held] == [{-1 if path in lost else path} for path in paths]


def test_a_device_reads_no_more_than_it_must():
  """On more devices, each one the part of a path; on fewer, its own paths."""
  for grid, positions, devices, share in (({'a': 8}, (2,), 8, 2), ({'a': 8}, (8,), 2, 2), ({'a': 6}, (2,), 3, 1)):
    placement = place(grid, devices)
    found = relocate.sharding(placement, positions, NamedSharding(placement.mesh, P('a')))
    assert found.shard_shape((*positions, 5)) == (positions[0] // share, 5)


@functools.cache
def job(devices):
  """As in invariant 4, so that the two compile each program once."""
  s = small.settings(GRID, small.MIXED_LEVELS, checkpoint=dict(every_steps=8))
  return small.make_job(small.make_programs(s, devices))


def by_path(placement, state):
  """Inner states on the host, of the paths that have one."""
  found = {}
  for number, inner in state.inner.items():
    leaves = jax.tree.leaves(small.fetched(inner))
    for position, path in zip(
      itertools.product(*map(range, placement.positions)), placement.paths(placement.turns()[number]), strict=True
    ):
      found[path] = [x[position] for x in leaves]
  return found


def test_a_run_goes_on_with_other_devices(tmp_path):
  undisturbed, stopped = small.train(job(8), tmp_path / 'undisturbed'), ()
  (tmp_path / 'run').mkdir()
  # Stops in the middle of the second phase, and on other devices, that begin it again, at the end of it.
  for devices, stop_at, begins in ((2, 8 + 5, 0), (8, 2, 1), (2, 100, 2)):
    made = job(devices)
    with metrics.Metrics(tmp_path / 'run') as rows:
      stop = iter(range(1, 100))
      trainer = spmd.Trainer(made, tmp_path / 'run', 8, 2, rows, lambda stop=stop, at=stop_at: next(stop) == at)
      record = trainer.state.record
      assert (record.phase, record.turn, record.step, trainer.state.params) == (begins, 0, 0, None)
      if begins == 2:  # the stopped one's last state is what this one goes on from
        before, now = by_path(*stopped), by_path(made.programs.placement, trainer.state)
        assert before.keys() == now.keys() == set(range(8))
        jax.tree.map(np.testing.assert_array_equal, before, now)
      try:
        state = trainer.train()
      except spmd.Stopped:
        stopped = made.programs.placement, trainer.state
  steps = 3 * 4
  tolerance = 1.33 * 8**0.5 * steps * small.EPS * (2 + 0.01 * small.ROWS * small.LENGTH)  # as in invariant 4
  small.assert_close(small.fetched(state.modules), small.fetched(undisturbed.modules), tolerance)
  kept = [(row['kind'], row['updates'], tuple(row.get('paths', ()))) for row in metrics.read_rows(tmp_path / 'run')]
  assert len(kept) == len(set(kept)) and {row[1] for row in kept if row[0] == 'phase'} == {32, 64, 96}
