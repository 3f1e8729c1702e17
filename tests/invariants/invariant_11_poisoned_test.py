"""Invariant 11: one path poisoned is named and left out; the rest is finite, and is what the twin makes without it."""

import dataclasses
import functools

import numpy as np
import optax
import pytest
import slow
import small
import twin
from poison import poisoned

from dipaco_jax.algorithm import inner as inner_lib, outer
from dipaco_jax.config import choices
from dipaco_jax.core.errors import Diverged
from dipaco_jax.storage import module_store
from dipaco_jax.telemetry import metrics_log

AB, PATH, PHASE, TAU = {'a': 2, 'b': 2}, 2, 1, 4
FLAT = (('all', '.*', ('a', 'b')),)


def make_job(paths, step, kind='nan', devices=1, levels=small.MIXED_LEVELS, grid=AB, **changes):
  """A job in which the parameters of some paths go bad after a global step; None: in none."""
  s = small.settings(grid, levels, **{'train': dict(phases=4)} | changes)
  made = small.make_programs(s, devices)
  if paths:
    made.__dict__['steps'] = poisoned(made, made.steps, paths, step, kind)
  return small.make_job(made, publish=True)


def phases(workdir):
  return [row for row in metrics_log.read_rows(workdir) if row['kind'] == 'phase']


def by_twin(job, excluded):
  """Modules of the naive twin, without these paths in these phases."""
  made, s = job.programs, job.programs.settings

  layout, paths = made.layout, made.layout.grid.num_paths
  lost = lambda phase: np.flatnonzero(outer.lost_paths(s.outer.lost, (paths,), s.seed, phase)).tolist()  # noqa: E731
  return twin.train(
    job.base, None, small.batch, [range(paths)] * s.train.phases, [1.0 + path for path in range(paths)], layout.grid,
    layout.levels, layout.owner, small.mean_loss(made.model, s.routing.prefix_tokens), s, 16, lost, excluded,
  )[0]  # fmt: skip


def assert_is(found, modules, job):
  """To the tolerance of invariant 3."""
  s, paths = job.programs.settings, job.programs.layout.grid.num_paths
  steps = s.train.phases * s.train.steps_per_phase
  tolerance = 1.33 * paths**0.5 * steps * small.EPS * (2 + s.inner.learning_rate * small.ROWS * small.LENGTH)
  for (level, module), params in modules.items():
    for name, expected in params.items():
      np.testing.assert_allclose(
        found[level][name][module], expected, rtol=0, atol=tolerance, err_msg=f'{level} {module} {name}'
      )


CASES = [('nan', 1, 1), ('noise', 1, 4), ('huge', 1, 1), ('nan', 3, 4)]  # kind, step within the phase, devices


@pytest.mark.slow
@pytest.mark.parametrize('kind, step, devices', CASES)
def test_a_poisoned_path_is_named_and_left_out_and_starts_again(kind, step, devices, tmp_path, caplog):
  job = make_job([PATH], PHASE * TAU + step, kind, devices)
  found = small.fetched(small.train(job, tmp_path).modules)
  assert_is(found, by_twin(job, lambda phase: [PATH] * (phase == PHASE)), job)
  named = [row.get('excluded', {}) for row in phases(tmp_path)]
  assert [list(row) for row in named] == [[str(PATH)] if phase == PHASE else [] for phase in range(4)]
  [words] = [record.getMessage() for record in caplog.records if 'takes no part' in record.getMessage()]
  assert f'phase {PHASE + 1}, step {(PHASE + 1) * TAU}: path {PATH} (a1 b0)' in words
  rows = [loss for row in phases(tmp_path) for loss in row['loss_by_path']]
  assert all(loss is not None and np.isfinite(loss) for loss in rows)


@pytest.mark.slow
def test_a_lost_path_that_is_poisoned_does_not_continue_from_its_own_parameters(tmp_path):
  changes = {'outer': dict(lost=0.5), 'train': dict(phases=4)}
  lost = [np.flatnonzero(outer.lost_paths(0.5, (4,), 0, phase)) for phase in range(3)]
  phase, path = next((t, int(paths[0])) for t, paths in enumerate(lost) if len(paths) and len(paths) < 3)
  job = make_job([path], phase * TAU + 1, **changes)
  found = small.fetched(small.train(job, tmp_path).modules)
  assert_is(found, by_twin(job, lambda t: [path] * (t == phase)), job)


@pytest.mark.slow
def test_a_module_of_one_path_rests_while_that_is_left_out(tmp_path):
  job = make_job([PATH], 1, levels=FLAT, train=dict(phases=1))
  small.train(job, tmp_path)
  for path in range(4):
    params = module_store.load_path(tmp_path, job.programs.layout, path, 1)
    assert all(np.array_equal(x, job.base[name]) for name, x in params.items()) == (path == PATH)
  assert [list(row['excluded']) for row in phases(tmp_path)] == [[str(PATH)]]


GONE = [((0, 1), 'no path of module low/0'), ((0, 1, 2, 3), 'no path has an outer gradient')]


@pytest.mark.parametrize('paths, words', slow.but(GONE, *GONE))
def test_without_paths_for_a_module_the_run_ends_and_continues_from_the_last_good_checkpoint(paths, words, tmp_path):
  often = {'checkpoint': dict(every_steps=4)}
  small.train(make_job([], 0, **often), tmp_path / 'undisturbed')
  with pytest.raises(Diverged, match=f'train diverged in phase 3: {words}'):
    small.train(make_job(paths, 2 * TAU + 1, **often), tmp_path / 'run')
  assert max(module_store.versions(tmp_path / 'run')) == 2, 'nothing of it is published'
  small.train(make_job([], 0, **often), tmp_path / 'run')
  same = [module_store.modules_sha256(tmp_path / name, 4) for name in ('undisturbed', 'run')]
  assert same[0] == same[1]


@pytest.mark.slow
def test_a_path_that_is_left_out_too_often_in_a_row_ends_the_run(tmp_path):
  job = make_job([], 0, outer=dict(max_excluded=1))
  steps = job.programs.steps
  for phase in range(4):
    steps = poisoned(job.programs, steps, [PATH], phase * TAU + 1, 'nan')
  job.programs.__dict__['steps'] = steps
  with pytest.raises(Diverged, match=f'phase 2: path {PATH} was excluded in 2 phases in a row'):
    small.train(job, tmp_path)


@pytest.mark.slow
def test_an_outer_step_without_end_ends_the_run_before_anything_is_published(tmp_path, monkeypatch):
  job = make_job([], 0)
  monkeypatch.setattr(choices, 'make_outer_optimizer', lambda config: optax.sgd(1e30, 0.9))
  with pytest.raises(Diverged, match='phase 1: after the outer step the parameters or the momentum of module'):
    small.train(job, tmp_path)
  assert not module_store.versions(tmp_path)


@pytest.mark.slow
def test_one_path_alone_stops_as_soon_as_it_makes_no_step_and_continues_from_before(tmp_path):
  long = {'train': dict(phases=1, steps_per_phase=32), 'checkpoint': dict(every_steps=4), 'inner': dict(max_skipped=6)}
  alone = functools.partial(make_job, levels=small.ONE_LEVEL, grid=(), **long)
  small.train(alone([], 0), tmp_path / 'undisturbed')
  with pytest.raises(Diverged, match=r'train diverged by step 18: .* not finite in 8 steps in a row'):
    small.train(alone([0], 9, 'nan'), tmp_path / 'run')
  small.train(alone([], 0), tmp_path / 'run')
  same = [module_store.modules_sha256(tmp_path / name, 1) for name in ('undisturbed', 'run')]
  assert same[0] == same[1]


def test_a_step_that_is_not_finite_is_skipped_up_to_so_many_in_a_row():
  config = dataclasses.replace(small.settings().inner, max_skipped=2)
  made, params = choices.make_inner(config, 10, 0, 0.0), {'w': np.ones((2, 2), 'f')}
  state = made.init(params)
  for norm, skipped in ((1.0, 0), (np.nan, 1), (np.inf, 2), (1.0, 0), (np.nan, 1)):
    compute = lambda p, norm=norm: (np.float32(1), {'w': np.full((2, 2), norm, 'f')}, np.float32(norm))  # noqa: E731
    after, now, found = inner_lib.step(made, compute, params, state, (), np.int32(3))
    stays = not np.isfinite(norm)
    assert np.array_equal(after['w'], params['w']) == stays and found['skipped'] == stays and now.skipped == skipped
    assert int(now.optimizer[0].count) == int(state.optimizer[0].count) + (not stays)
    params, state = after, now
  state = state._replace(skipped=np.int32(2))
  after, now, found = inner_lib.step(made, compute, params, state, (), np.int32(3))
  assert np.isnan(after['w']).all() and not found['skipped'], 'one more than may be skipped is made'
