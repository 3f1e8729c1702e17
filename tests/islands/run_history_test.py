"""An islands run's history from its facts."""

import dataclasses

import one_process
from one_process import Machine, close

from dipaco_jax.islands import run_history
from dipaco_jax.pipeline import jobs, stages
from dipaco_jax.registry.registry import Fact


def test_replicas_of_a_model_point_at_one_version(tmp_path):
  """As `main` does; what each measured is told apart."""
  config = one_process.two_phases(tmp_path)
  levels = tuple((name, pattern, tuple(axis for axis in axes if axis == 'a')) for name, pattern, axes in config.levels)
  made = Machine(dataclasses.replace(config, levels=levels), {}).island(tmp_path)
  targets = [10.0, 30.0, 20.0, 5.0]
  pointers = run_history.Pointers(made)
  for version, losses in ((1, [3.0, 2.0, 5.0, 5.0]), (2, [1.0, 2.5, 6.0, 4.5])):
    found = (
      Fact('evaluation', str(path), version, '', '', {'loss': loss, 'targets': targets[path]})
      for path, loss in enumerate(losses)
    )
    made.registry.put(list(found))
    assert pointers.add(version) == losses
  assert (pointers.version, pointers.loss) == ([2, 2, 1, 1], [2.125, 2.125, 5.0, 5.0])
  close(made)


def test_outer_steps_are_a_share_of_the_work_not_of_the_wall_clock(tmp_path, monkeypatch):
  made = Machine(one_process.two_phases(tmp_path), {}).island(tmp_path)
  monkeypatch.setattr(jobs, 'paths_job', lambda run, number: None)
  monkeypatch.setattr(stages, 'figures', lambda run, job, record: {})
  about = {'worker': 'a', 'timed_steps': 1, 'timed_s': 1.0}
  checkpoints = [Fact('checkpoint', '0', 0, '', '', about | {'started': 0.0, 'ended': 6.0})]
  modules = [Fact('module', 'low/0', 1, '', '', {'started': 6.0, 'ended': 8.0})]
  phase = run_history.Phase(checkpoints, modules, [], [None], [1])
  found = run_history.figures(made, made.run, run_history.History([phase], [1], [None], wall_s=10.0))
  assert found['outer_fraction'] == 0.25
  close(made)
