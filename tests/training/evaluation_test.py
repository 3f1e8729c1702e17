"""Losses by path, the matrix, and early stopping when the loss grows worse on purpose."""

import functools

import jax
import numpy as np
import pytest
import small
from holdout_rows import COUNTS, ROWS, load

from dipaco_jax.models import loss
from dipaco_jax.storage import module_store
from dipaco_jax.training import evaluation, metrics_log, training_loop


@pytest.fixture(scope='module')
def made():
  return small.make_programs(small.settings({'a': 2, 'b': 2}, small.MIXED_LEVELS), 2)


def params_of(made, path):
  return small.base(made.model, path)


def mean(made, params, rows_of):
  """Of a path's parameters on a path's rows, None without rows."""
  if not COUNTS[rows_of]:
    return None
  nll, count = jax.jit(loss.path_loss(made.model, 8))(params, *load(rows_of, 0, COUNTS[rows_of]))
  return float(nll / count)


# Means of sums over targets, of values near 4 nats.
CLOSE = 4 * small.ROWS * small.LENGTH * small.EPS


@pytest.mark.slow
def test_matrix_is_every_path_on_every_hold_out(made):
  table = evaluation.matrix(made, functools.partial(params_of, made), ROWS)
  for path in range(4):
    assert table[path] == [pytest.approx(mean(made, params_of(made, path), rows), abs=CLOSE) for rows in range(4)]
  assert table[0][0] != pytest.approx(table[1][0], abs=100 * CLOSE)


def test_in_flight_asks_for_each_path_once(made):
  asked = []

  def params(path):
    asked.append(path)
    return params_of(made, path)

  for turn in made.placement.turns():
    found = small.fetched(evaluation.in_flight(made, turn, params))
    for i, path in enumerate(made.placement.paths(turn)):
      small.assert_close({n: x.reshape(2, *x.shape[2:])[i] for n, x in found.items()}, params_of(made, path), 0)
  assert sorted(asked) == [0, 1, 2, 3]


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


def test_replicas_of_a_model_point_at_one_version(tmp_path):
  """Which is best by the mean over the targets of all their hold-outs, where their own would tell them apart."""
  made = small.make_programs(small.settings({'a': 2, 'b': 2}, (('all', '.*', ('a',)),)), 2)
  assert made.layout.models() == [[0, 1], [2, 3]]
  own, of_models, versions = [], [], range(1, 7)
  with metrics_log.Metrics(tmp_path) as rows:
    trainer = training_loop.Trainer(small.make_job(made, holdout=ROWS), tmp_path, 100, 2, rows, lambda: False)
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


def test_a_loss_that_is_not_finite_is_never_the_best():
  best_version, best_loss = [0, 0, 2, 2], [None, None, 1.0, None]  # the last: of a round that has just begun
  losses = [evaluation.to_compare(x) for x in (float('nan'), None, -float('inf'), float('nan'))]
  evaluation.point(3, losses, best_version, best_loss)
  assert best_version == [3, 3, 2, 2]  # what points nowhere has no other choice
  evaluation.point(4, [9.0, 9.0, 9.0, 9.0], best_version, best_loss)
  assert (best_version, best_loss) == ([4, 4, 2, 4], [9.0, 9.0, 1.0, 9.0])


def test_a_models_loss_is_weighted_by_targets():
  models, targets = [[0, 2], [1], [3, 4]], [1.0, 5.0, 3.0, 0.0, 0.0]
  assert evaluation.by_model(models, [2.0, 0.1, 4.0, None, None], targets) == [3.5, 0.1, 3.5, None, None]
  inf = float('inf')
  assert evaluation.by_model(models, [2.0, None, inf, None, None], targets) == [inf, None, inf, None, None]


def test_mean_without_targets_is_none():
  found = evaluation.Losses([np.array([3.0, 4.0]), np.zeros(0)], [np.array([2.0, 0.0]), np.zeros(0)])
  assert evaluation.mean_by_path(found) == [3.5, None]
