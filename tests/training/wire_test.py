"""Compression and streaming in one job: stopped anywhere, on slices that share a path's states, and with a bad path."""

import functools

import jax
import numpy as np
import pytest
import slow
import small
from poison import poisoned

from dipaco_jax.telemetry import metrics_log
from dipaco_jax.training import programs, training_loop

AB = {'a': 2, 'b': 2}
THIN = dict(wire='thin', overlap_steps=2, closed_every=2)


def make_job(devices=1, outer=THIN, levels=small.MIXED_LEVELS, **changes):
  sections = {'train': dict(phases=3, steps_per_phase=8), 'checkpoint': dict(every_steps=2)}
  s = small.settings(AB, levels, outer=outer, **sections | changes)
  return small.make_job(small.make_programs(s, devices))


def assert_same(found, expected):
  jax.tree.map(np.testing.assert_array_equal, small.fetched(found.modules), small.fetched(expected.modules))
  jax.tree.map(np.testing.assert_array_equal, small.fetched(found.masters), small.fetched(expected.masters))
  jax.tree.map(np.testing.assert_array_equal, small.fetched(found.residuals), small.fetched(expected.residuals))


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """By devices: a job, the state at its end, and its workdir."""

  @functools.cache
  def of(devices):
    job, workdir = make_job(devices), tmp_path_factory.mktemp('whole')
    return job, small.train(job, workdir), workdir

  return of


@pytest.mark.slow
@pytest.mark.parametrize('devices, every', slow.but([(1, 13), (4, 3)], (4, 3)))
def test_stopped_again_and_again(devices, every, undisturbed, tmp_path):
  """After some dispatches; what is logged is that of the undisturbed run, once."""
  job, expected, whole = undisturbed(devices)
  state, stops = None, 0
  while state is None:
    left = iter(range(every))
    try:
      state = small.train(job, tmp_path / 'stopped', stop=lambda left=left: next(left, 0) == every - 1)
    except training_loop.Stopped:
      stops += 1
  assert stops >= 3
  assert_same(state, expected)
  names = 'kind', 'step', 'loss', 'loss_by_path', 'outer_gradient_norm'
  told = [
    [[row.get(name) for name in names] for row in metrics_log.read_rows(workdir)]
    for workdir in (whole, tmp_path / 'stopped')
  ]
  assert told[0] == told[1] and any(row[0] == 'phase' for row in told[0])


@pytest.mark.slow
def test_other_positions_after_a_closed_phase(undisturbed, tmp_path, caplog):
  """From 4 devices to one: it goes on from the end of the last phase, residuals included."""
  job, expected, _ = undisturbed(4)
  count = iter(range(100))
  with pytest.raises(training_loop.Stopped):
    small.train(job, tmp_path / 'moved', stop=lambda: next(count) == 9)
  state = small.train(make_job(1), tmp_path / 'moved')
  assert 'it resumes from the end of a phase' in caplog.text
  for level, params in small.fetched(expected.modules).items():
    for name, x in params.items():
      errors = np.abs(small.fetched(state.modules)[level][name] - x)
      assert np.quantile(errors, 0.95) < 1e-4 and errors.max() < 0.05, (level, name)


@pytest.mark.slow
def test_blocks_do_not_depend_on_how_a_slice_shares_a_path():
  """Equal moves give equal messages and residuals, whole on one device or in parts on two."""
  rng, shapes, found = np.random.default_rng(0), make_job().programs.shapes, []
  moves = {name: rng.normal(0, 0.01, x.shape).astype('f') for name, x in sorted(shapes.items())}
  for devices, mesh in ((1, {}), (8, dict(data=2, shard_states=True))):
    s = small.settings({'a': 2, 'b': 2}, small.MIXED_LEVELS, outer=dict(compress='int4'), mesh=mesh)
    made = small.make_programs(s, devices)
    assert any(dim is not None for dim in made.specs.dims.values()) == bool(mesh)
    modules, _, state, gathered = made.start(small.base(made.model))
    params = {
      name: made.placement.assemble(x.shape, made.specs.params[name], lambda _, x=x, name=name: x + moves[name])
      for name, x in small.base(made.model).items()
    }
    weights, steps = np.ones((2, 2), 'f'), dict.fromkeys(made.levels, np.int32(4))
    gathered, residuals = made.accumulate(made.levels)(
      gathered, made.fresh_residuals(), modules, programs.usual(state), params, made.fresh_state(params), weights,
      10 * weights, np.int32(4), steps, np.zeros(2, np.int32),
    )  # fmt: skip
    first = {name: small.fetched(x).astype('f')[0, 0] for name, x in residuals.items()}
    found.append((first, small.fetched(gathered.sums)['low']))
  (one, _), (other, _) = found
  assert one.keys() and all(x.any() for x in one.values())
  jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_path_that_turns_bad_keeps_nothing_of_a_level_that_had_left_before():
  made = make_job(outer=dict(compress='int4')).programs
  modules, _, state, gathered = made.start(base := small.base(made.model))
  late = {*made.layout.names(next(level for level in made.layout.levels if level.name == 'high'))}
  turn, weights = np.zeros(2, np.int32), np.ones((2, 2), 'f')
  kept = {}
  for bad in (0.0, np.nan):
    params = {
      name: made.placement.assemble(
        x.shape, made.specs.params[name], lambda _, x=x, name=name, bad=bad: x + (bad if name in late else 0)
      )
      for name, x in base.items()
    }
    residuals = jax.tree.map(lambda x: x + 0.001, made.fresh_residuals())
    _, residuals = made.accumulate(('high',))(
      gathered, residuals, modules, programs.usual(state), params, made.fresh_state(params), weights, 10 * weights,
      np.int32(4), {'high': np.int32(4)}, turn,
    )  # fmt: skip
    gathered = made.start(base)[3]
    kept[str(bad)] = {name for name, x in small.fetched(residuals).items() if x.any()}
  assert kept['nan'] == set() and kept['0.0'] >= {*made.specs.residuals} - late


@pytest.mark.slow
@pytest.mark.parametrize('outer', [THIN, pytest.param(dict(compress='int8'), marks=pytest.mark.slow)])
def test_a_bad_path_is_left_out_and_begins_again(outer, tmp_path):
  """Path 2 turns bad in phases 1 and 3: it is named, takes no part until the next phase, and is well again then."""
  rarely = dict(every_steps=64)
  job = make_job(outer=outer, train=dict(phases=4, steps_per_phase=8), checkpoint=rarely)
  for step in (11, 27):
    job.programs.__dict__['steps'] = poisoned(job.programs, job.programs.steps, [2], step, 'nan')
  state = small.train(job, tmp_path)
  rows = [row for row in metrics_log.read_rows(tmp_path) if row['kind'] == 'phase']
  assert [[*row.get('excluded', {})] for row in rows] == [[], ['2'], [], ['2']]
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(small.fetched((state.modules, state.residuals))))
  nothing_left = [all(not x.any() for x in jax.tree.leaves(small.fetched(state.residuals[path]))) for path in range(4)]
  assert nothing_left == [False, False, True, False]
