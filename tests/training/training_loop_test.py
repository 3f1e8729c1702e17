"""The training loop: early stopping, publication, and evaluation before an outer step."""

import contextlib
import functools
import itertools

import jax
import numpy as np
import pytest
import slow
import small
from holdout_rows import COUNTS, ROWS, load

from dipaco_jax.algorithm import averaging_gap
from dipaco_jax.config import settings
from dipaco_jax.models import loss
from dipaco_jax.storage import module_store
from dipaco_jax.telemetry import metrics_log
from dipaco_jax.training import evaluation, training_loop


def mean(made, params, path):
  """The mean loss of parameters on a path's hold-out."""
  nll, count = jax.jit(functools.partial(loss.path_loss, made.model, 8))(params, *load(path, 0, COUNTS[path]))
  return float(nll / count)


# Means of sums over targets, of values near 4 nats.
CLOSE = 4 * small.ROWS * small.LENGTH * small.EPS


@pytest.mark.slow
def test_early_stopping_points_at_the_best_version(tmp_path):
  """Ever larger steps: the loss falls, then rises, and versions that nobody points at go."""
  s = small.settings(
    {'a': 2, 'b': 2},
    small.MIXED_LEVELS,
    train=dict(phases=6, steps_per_phase=2),
    inner=dict(learning_rate=0.3, warmup_steps=12, decay_steps=1000, weight_decay=0.0),
    outer=dict(optimizer='sgd', learning_rate=1.0),
  )
  made = small.make_programs(s, 2)
  state = small.train(small.make_job(made, holdout=ROWS, publish=True), tmp_path)
  rows = [row for row in small.metrics_log.read_rows(tmp_path) if row['kind'] == 'phase']
  losses = np.array([row['holdout_loss_by_path'] for row in rows], float)
  measured = [0, 2, 3]
  best = losses[:, measured].argmin(0) + 1
  assert (best < 6).any() and (losses[-1, measured] > losses.min(0)[measured]).any()
  found = module_store.best_versions(tmp_path)
  assert [found[path] for path in measured] == best.tolist()
  assert found[1] == 6  # nothing to choose by: the last
  assert found == state.record.best_version == rows[-1]['best_version_by_path']
  assert module_store.versions(tmp_path) == sorted({*found, 6})
  for path in measured:  # a pointer is to what was measured
    params = module_store.load_path(tmp_path, made.layout, path)
    assert mean(made, params, path) == pytest.approx(losses[:, path].min(), abs=CLOSE)


@pytest.mark.slow
def test_replicas_of_a_model_point_at_one_version(tmp_path):
  """Which is best by the mean over the targets of all their hold-outs, where their own would tell them apart."""
  made = small.make_programs(small.settings({'a': 2, 'b': 2}, (('all', '.*', ('a',)),)), 2)
  assert made.layout.models() == [[0, 1], [2, 3]]
  own, of_models, versions = [], [], range(1, 7)
  with metrics_log.Metrics(tmp_path) as rows:
    job, config = small.make_job(made, holdout=ROWS), settings.Checkpoint(100, 2)
    trainer = training_loop.Trainer(job, tmp_path, config, rows, lambda: False)
    for version in versions:

      def params_of(path, version=version):
        return small.base(made.model, 2 * version + path // 2)

      def params_of_turn(turn):
        return evaluation.in_flight(made, turn, params_of)

      own.append(trainer._early_stopping(version, params_of_turn))
      found = evaluation.losses(made, params_of_turn, ROWS)
      nats, targets = (np.array([x.sum() for x in of_path]) for of_path in found)
      of_models.append(nats.reshape(2, 2).sum(1) / targets.reshape(2, 2).sum(1))
  best = np.argmin(of_models, axis=0) + 1
  assert trainer.state.record.best_version == [best[0], best[0], best[1], best[1]]
  apart = np.argmin(np.array(own, float)[:, [2, 3]], axis=0) + 1
  assert apart[0] != apart[1] and (apart != best[1]).any(), 'draw other models: these are told apart by nothing'
  np.testing.assert_allclose(trainer.state.record.best_loss, np.repeat(np.min(of_models, axis=0), 2), rtol=1e-12)


FLAT = (('all', '.*', ('a', 'b')),)


SGD = {'outer': dict(optimizer='sgd', learning_rate=1.0, rescale=False)}


def phases(levels, devices: int, folder, stop=lambda: False) -> list[dict]:
  """Rows of a run's phases, every path measured on rows of its own."""
  made = small.make_programs(small.settings({'a': 2, 'b': 2}, levels, train=dict(phases=2), **SGD), devices)
  with contextlib.suppress(training_loop.Stopped):
    small.train(small.make_job(made, holdout=ROWS), folder, stop)
  return [row for row in metrics_log.read_rows(folder) if row['kind'] == 'phase']


@pytest.mark.parametrize('devices', slow.but([1, 4], 1, 4))
def test_the_loss_before_is_that_of_paths_that_share_nothing(devices, tmp_path):
  """Until the first outer step paths of a grid are what they are alone, where SGD with a rate of 1 takes them over."""
  grid, alone = (phases(levels, devices, tmp_path / name) for name, levels in (('g', small.MIXED_LEVELS), ('f', FLAT)))
  assert grid[0]['holdout_loss_before_by_path'] == pytest.approx(alone[0]['holdout_loss_by_path'], abs=1e-5)
  gaps = averaging_gap.gaps(grid[0]['holdout_loss_before_by_path'], grid[0]['holdout_loss_by_path'])
  known = [gap for gap in gaps if gap is not None]
  assert grid[0]['averaging_gap'] == pytest.approx(sum(known) / 3, abs=1e-12) and max(map(abs, known)) > 1e-3
  assert [row['averaging_gap'] for row in alone] == [None, None]  # nothing is averaged, and nothing measured twice


@pytest.mark.slow
def test_a_run_that_stops_between_turns_keeps_what_it_has_measured(tmp_path):
  expected = phases(small.MIXED_LEVELS, 1, tmp_path / 'whole')
  asked = itertools.count(1)
  for _ in range(3):
    found = phases(small.MIXED_LEVELS, 1, tmp_path / 'stopped', lambda: next(asked) in (3, 8))
  for name in ('holdout_loss_before_by_path', 'averaging_gap'):
    assert [row[name] for row in found] == [row[name] for row in expected]
