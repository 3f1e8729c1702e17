"""States of paths move to a mesh with other positions without changing a bit, and the run continues."""

import contextlib
import functools
import itertools

import jax
import numpy as np
import pytest
import small
from jax.sharding import NamedSharding, PartitionSpec as P

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.config import settings
from dipaco_jax.telemetry import metrics_log
from dipaco_jax.training import mesh, resharding, training_loop

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
      old[number] = {'x': jax.device_put(whole, resharding.sharding_elsewhere(placement, positions, new))}
  lost = set(range(placement.grid.num_paths)) - {int(path) for tree in old.values() for path in np.unique(tree['x'])}

  def fill(turn):
    return {'x': jax.device_put(np.full((*placement.positions, 3, placement.data), -1), new)}

  found = resharding.move_turns(placement, positions, old, {'x': new}, fill)
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
    found = resharding.sharding_elsewhere(placement, positions, NamedSharding(placement.mesh, P('a')))
    assert found.shard_shape((*positions, 5)) == (positions[0] // share, 5)


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


def leg(job, workdir, check=lambda trainer: None, stop_at=0):
  """(placement, state) of a run that goes on in a workdir, to its end or until so many dispatches are made."""
  workdir.mkdir(exist_ok=True)
  with metrics_log.Metrics(workdir) as rows:
    asked = itertools.count(1)
    trainer = training_loop.Trainer(job, workdir, settings.Checkpoint(8, 2), rows, lambda: next(asked) == stop_at)
    check(trainer)
    with contextlib.suppress(training_loop.Stopped):
      trainer.train()
    return job.programs.placement, trainer.state


def tolerance(job):
  """As in invariant 4."""
  steps = job.schedule.phases * job.schedule.steps_per_phase
  return 1.33 * 8**0.5 * steps * small.EPS * (2 + 0.01 * small.ROWS * small.LENGTH)


@pytest.mark.slow
def test_a_run_continues_with_other_devices(tmp_path):
  # As in invariant 4, so that the two compile each program once.
  two, eight = (small.make_job(small.make_programs(small.settings(GRID, small.MIXED_LEVELS), n)) for n in (2, 8))
  undisturbed = small.train(eight, tmp_path / 'undisturbed')

  def begins_at(phase, trainer):
    record = trainer.state.record
    assert (record.phase, record.turn, record.step, trainer.state.params) == (phase, 0, 0, None)

  workdir = tmp_path / 'run'
  leg(two, workdir, stop_at=8 + 5)  # in the middle of the second phase, which then begins anew
  stopped = leg(eight, workdir, functools.partial(begins_at, 1), stop_at=2)  # at its end

  def goes_on(trainer):
    begins_at(2, trainer)
    before, now = by_path(*stopped), by_path(two.programs.placement, trainer.state)
    assert before.keys() == now.keys() == set(range(8))
    jax.tree.map(np.testing.assert_array_equal, before, now)

  _, state = leg(two, workdir, goes_on)
  small.assert_close(small.fetched(state.modules), small.fetched(undisturbed.modules), tolerance(two))
  kept = [(row['kind'], row['updates'], tuple(row.get('paths', ()))) for row in metrics_log.read_rows(workdir)]
  assert len(kept) == len(set(kept)) and {row[1] for row in kept if row[0] == 'phase'} == {32, 64, 96}


@pytest.mark.slow
@pytest.mark.parametrize('changes', [
  dict(train=dict(offload=True)), dict(outer=dict(lost=0.6)), dict(train=dict(paths_per_phase=1)),
], ids=['waiting on the host', 'outer gradients are lost', 'paths are sampled'])  # fmt: skip
def test_what_else_paths_keep(tmp_path, changes):
  s = small.settings({'a': 3}, (('all', '.*', ('a',)),), **changes)
  one, three = (small.make_job(small.make_programs(s, n)) for n in (1, 3))
  undisturbed = small.train(one, tmp_path / 'undisturbed')
  turns = 1 if s.train.paths_per_phase else 3
  leg(one, tmp_path / 'run', stop_at=2 * turns)
  leg(three, tmp_path / 'run', stop_at=2)

  def goes_on(trainer):
    assert trainer.state.record.phase == 2

  _, state = leg(one, tmp_path / 'run', goes_on)
  assert all(
    x.sharding.memory_kind == ('pinned_host' if s.train.offload else 'device') for x in jax.tree.leaves(state.inner)
  )
  small.assert_close(small.fetched(state.modules), small.fetched(undisturbed.modules), tolerance(one))
