"""Paths that sit phases out go on in their shards from where they were, wherever a run is taken up."""

import itertools

import numpy as np
import pytest
import small

from dipaco_jax.config import choices
from dipaco_jax.data import loader
from dipaco_jax.islands import inner_phase
from dipaco_jax.training import job as job_lib

GRID, FIRST = {'a': 2, 'b': 2}, 5  # paths; steps of pretraining
SAMPLED = {
  'drawn': dict(paths_per_phase=2, phases=8),
  'schedule': dict(schedule=((0, (0,)), (2, (0, 1)), (5, (2, 3))), phases=8),
}


def make(**train) -> job_lib.Job:
  s = small.settings(GRID, small.MIXED_LEVELS, pretrain=dict(steps=FIRST), train=train)
  return small.make_job(small.make_programs(s))


def loaded(job: job_lib.Job, dispatches) -> dict[int, list[int]]:
  """Steps whose batches were trained on, by path, in their order."""
  read, found = [], {}

  def batch(path, step):
    read.append((path, step))
    return small.batch(path, step)

  for dispatch in dispatches:
    read.clear()
    job_lib.load_batch(small.change_job(job, batch=batch), dispatch)
    active = job.weights(dispatch.phase).reshape(-1) > 0
    for path, step in read:
      if active[path]:
        found.setdefault(path, []).append(step)
  return found


@pytest.mark.parametrize('how', SAMPLED)
def test_no_batch_is_passed_over(how):
  job = make(**SAMPLED[how])
  train, tau = job.programs.settings.train, job.schedule.steps_per_phase
  active = [choices.active_paths(train, 4, 0, phase) for phase in range(train.phases)]
  assert min(map(sum, active)) > 0 and max(map(sum, active)) < 4
  whole = loaded(job, job_lib.dispatches(job, 0, 0, 0))
  for path in range(4):
    assert whole[path] == list(range(FIRST, FIRST + tau * sum(of_phase[path] for of_phase in active)))

  taken_up = loaded(job, job_lib.dispatches(job, 4, 0, 0))  # by the phase alone
  assert taken_up == {path: read[-len(taken_up[path]) :] for path, read in whole.items() if path in taken_up}
  assert len(taken_up[2]) < len(whole[2]) or how == 'schedule'

  for path in range(4):  # a path that is alone on the devices of an island
    phases = [phase for phase, of_phase in enumerate(active) if of_phase[path]]
    alone = (
      loaded(job, inner_phase.remaining(job, path, phase, 0, job.schedule.steps_per_phase))[path] for phase in phases
    )
    assert [*itertools.chain.from_iterable(alone)] == whole[path]


def test_where_all_train_an_own_step_is_the_global_step():
  job = make(phases=3)
  for phase in range(3):
    assert {job.own_step(path, phase, 3) for path in range(4)} == {job.schedule.global_step(phase, 3)}


def test_every_row_is_seen_once_before_any_is_seen_twice():
  job = small.change_job(make(**SAMPLED['drawn']), first_step=0)
  for path, steps in loaded(job, job_lib.dispatches(job, 0, 0, 0)).items():
    num_rows = len(steps)  # of its shard, in batches of one
    rows = loader.shuffled(np.array(steps), num_rows, 0, path)
    assert sorted(rows) == list(range(num_rows))
