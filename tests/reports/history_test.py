"""Curves from the rows of metrics.jsonl."""

import numpy as np

from dipaco_jax.reports import history
from dipaco_jax.telemetry import metrics_log


def test_history_has_paths_that_take_turns(tmp_path):
  with metrics_log.Metrics(tmp_path) as writer:
    for updates, (step, path, loss) in enumerate([(10, 0, 3.0), (20, 0, 2.0), (10, 1, 4.0), (20, 1, None)]):
      writer.write('step', 'train', updates, step=step, paths=[path], loss=[loss])
  found = history.make_curves(metrics_log.read_rows(tmp_path), 3)
  assert found.training.steps.tolist() == [10, 20]
  np.testing.assert_array_equal(found.training.values, [[3, 4, np.nan], [2, np.nan, np.nan]])


def test_long_curves_are_means_of_stretches(tmp_path):
  steps = 4 * history.POINTS
  with metrics_log.Metrics(tmp_path) as writer:
    for step in range(1, steps + 1):
      writer.write('step', 'train', step, step=step, paths=[0], loss=[float(step)])
  curve = history.make_curves(metrics_log.read_rows(tmp_path), 1).training
  assert curve.steps.tolist() == list(range(4, steps + 1, 4))
  np.testing.assert_allclose(curve.values[:, 0], curve.steps - 1.5)


def test_history_has_the_curves_of_the_dense_control(tmp_path):
  with metrics_log.Metrics(tmp_path) as writer:
    writer.write('step', 'control_flops', 8, step=108, paths=[0], loss=[3.0], learning_rate=0.01)
    writer.write('phase', 'control_flops', 8, phase=1, step=108, holdout_loss_by_path=[3.5])
    writer.write('step', 'control', 8, step=108, paths=[0], loss=[9.0])  # of another budget
  found = history.make_curves(metrics_log.read_rows(tmp_path), 4, 'control_flops')
  assert found.control_training.values.tolist() == [3.0] and found.control_holdout.values.tolist() == [3.5]
  assert found.control_learning_rate.values.ravel().tolist() == [0.01] and not len(found.phases)
