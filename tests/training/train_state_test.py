"""A checkpoint restores to where each array was, and to the same bits."""

import jax
import numpy as np
import pytest
import small

from dipaco_jax.config import settings
from dipaco_jax.storage import files
from dipaco_jax.telemetry import metrics_log
from dipaco_jax.training import run_checkpoints, train_state, training_loop


@pytest.mark.slow
def test_states_of_waiting_paths_are_restored_to_host_memory(tmp_path):
  s = small.settings({'a': 3}, (('all', '.*', ('a',)),), train=dict(offload=True))
  made = small.make_programs(s, 1)
  job = small.make_job(made)
  undisturbed = small.train(job, tmp_path / 'undisturbed')

  stops = iter(
    [False] * (job.schedule.steps_per_phase // job.schedule.dispatch_steps) + [True]
  )  # in the second path's turn
  with pytest.raises(training_loop.Stopped):
    small.train(job, tmp_path / 'run', lambda: next(stops))
  checkpoints = run_checkpoints.RunCheckpoints(tmp_path / 'run' / 'checkpoints' / job.name, 2)
  restored = train_state.restore(checkpoints, made, made.fresh_state)
  checkpoints.close()
  assert restored is not None
  kinds = {turn: {x.sharding.memory_kind for x in jax.tree.leaves(inner)} for turn, inner in restored.inner.items()}
  assert kinds == {0: {'pinned_host'}, 1: {'device'}}

  resumed = small.train(job, tmp_path / 'run')
  jax.tree.map(np.testing.assert_array_equal, small.fetched(resumed.modules), small.fetched(undisturbed.modules))


@pytest.mark.slow
def test_parameters_of_paths_whose_outer_gradient_was_lost_are_kept(tmp_path):
  s = small.settings({'a': 3}, (('all', '.*', ('a',)),), outer=dict(lost=0.6))
  job = small.make_job(small.make_programs(s, 1))
  lost = [job.lost(phase).tolist() for phase in range(3)]
  assert [sum(row) for row in lost] == [3, 2, 1], 'of the first phase all'
  undisturbed = small.train(job, tmp_path / 'undisturbed')

  dispatches = 3 * job.schedule.steps_per_phase // job.schedule.dispatch_steps  # of a phase
  for at in (dispatches, dispatches + 1, 2 * dispatches):
    with pytest.raises(training_loop.Stopped):
      small.train(job, tmp_path / f'run{at}', iter([False] * (at - 1) + [True]).__next__)
    resumed = small.train(job, tmp_path / f'run{at}')
    jax.tree.map(np.testing.assert_array_equal, small.fetched(resumed.modules), small.fetched(undisturbed.modules))


def test_checkpoints_of_another_version_are_rejected(tmp_path):
  made = small.make_programs(small.settings(), 1)
  checkpoints = run_checkpoints.RunCheckpoints(tmp_path / 'state', 2)
  meta = {'record': {}, 'turns': [], 'own': [], 'in_turn': False, 'shapes': ''}  # no word of positions
  checkpoints.save(2, {'x': np.zeros(2)}, meta)
  checkpoints.wait()
  with pytest.raises(ValueError, match='are of another version: resume it with that'):
    train_state.restore(checkpoints, made, made.fresh_state)
  checkpoints.close()


@pytest.mark.slow
def test_turns_that_are_left_out_hide_no_checkpoint_and_a_start_reads_each_once(tmp_path, monkeypatch):
  s = small.settings({'a': 3}, (('all', '.*', ('a',)),), checkpoint=dict(every_steps=6, keep=100))
  weights = np.array([0.5, 0, 0.5], np.float32)  # the second of three turns is left out: 8 of 12 steps are made
  job = small.make_job(small.make_programs(s, 1), weights=lambda phase: weights)
  small.train(job, tmp_path)
  folder = tmp_path / 'checkpoints' / job.name
  assert {int(p.name) for p in folder.iterdir() if p.name.isdigit()} == {10, 12, 22, 24, 34, 36}

  digests, read = files.digests, []
  watched = lambda directory, names: read.extend((directory.name, n) for n in names) or digests(directory, names)  # noqa: E731
  monkeypatch.setattr(files, 'digests', watched)
  with metrics_log.Metrics(tmp_path) as rows:
    trainer = training_loop.Trainer(job, tmp_path, settings.Checkpoint(6, 2), rows, lambda: False)
    trainer.train()
  assert sorted(trainer.pointed) == [34, 36] and len(read) == len(set(read))
  assert {(name, file.split('/')[0]) for name, file in read} == {('34', 'meta'), ('36', 'meta'), ('36', 'arrays')}
