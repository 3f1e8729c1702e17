"""The floor: what makes a path worse on public text is left out of outer steps, and nothing else is."""

import json
import types

import numpy as np
import one_process
import pytest

from dipaco_jax.islands import floor_facts, outer_executor, outer_weights, schedule, withdrawals
from dipaco_jax.islands.island import Island
from dipaco_jax.registry.registry import Fact, NewTask, Task

made = one_process.made


def checkpoint(of: Island, path: int, by: float = 0.01) -> Fact:
  """Path's message of its module of level 'high', which has moved by `by`."""
  level = of.layout.levels[2]
  new = {name: np.full(of.shapes[name].shape, 1 + by, 'f') for name in of.layout.names(level)}
  objects = {'high': of.write_object(f'paths/0/{path}-high', new)}
  return schedule.checkpoint_fact(path, 0, objects, {'worker': f'worker-{path}'})


class Scene:
  """Checkpoints of paths 0 and 2, which share module high/0, in a run with a floor, and its outer task."""

  def __init__(self, made: Island, folder, monkeypatch):
    monkeypatch.setattr(outer_weights, 'path_weights', lambda island, phase: np.array([1, 1, 1, 1], np.float32))
    self.of, self.folder = one_process.with_settings(made, outer=dict(floor=0.1)), folder
    level = made.layout.levels[2]
    self.old = {name: np.ones(made.shapes[name].shape, 'f') for name in made.layout.names(level)}
    self.first = made.write_object('modules/0/high', self.old)
    made.registry.put([Fact('module', 'high/0', 0, *self.first, {})])
    self.sent = {path: checkpoint(made, path) for path in (0, 2)}
    made.registry.put([*self.sent.values()])
    made.registry.add_tasks([NewTask('outer', 'high/0', 1)])
    self.executor = outer_executor.Executor(folder)

  def judge(self, path: int, without: float, with_it: float):
    self.of.registry.put([floor_facts.judged(self.sent[path], (without, with_it), 'evaluator-0')])

  def perform(self) -> list[Fact] | None:
    task = self.of.registry.claim('all', ['outer']) or Task(0, 'outer', 'high/0', 1, 1, '', 0)
    publish = self.executor.perform(self.of, task, types.SimpleNamespace(about={}, check=lambda: None))
    return publish and publish()


@pytest.fixture
def scene(made, tmp_path, monkeypatch) -> Scene:
  return Scene(made, tmp_path / 'sums', monkeypatch)


def moved(scene: Scene, module: Fact) -> float:
  new = scene.of.read_object(module.uri, module.sha256)
  return float(next(iter(new.values())).flat[0]) - 1


def test_an_outer_step_waits_for_judgements_and_leaves_out_what_is_worse_by_more_than_the_floor(scene, caplog):
  scene.judge(0, 2.0, 2.09)
  assert scene.perform() is None, 'path 2 is not judged'
  scene.judge(2, 2.0, 2.2)
  scene.of.registry.wake('outer', ['high/0'], 1)
  module, told = scene.perform()
  assert module.meta['left_out'] == {'2': 'worse by 0.2 nats on public text'} and module.meta['paths'] == 1
  assert told[:3] == ('excluded', '2', 0) and told.meta['executor'] == 'all' and told.meta['worker'] == 'worker-2'
  assert 'worse by 0.2 nats on public text' in caplog.text
  assert moved(scene, module) == pytest.approx(1.9 * 0.7 * 0.01, rel=1e-4)  # Nesterov, first step: (1 + mu) eta Delta
  scene.of.registry.put([module, told])
  [again] = scene.perform()
  assert again[:5] == module[:5], 'who makes it again leaves out the same'


def test_a_module_of_which_all_is_worse_stays_and_the_run_goes_on(scene):
  scene.judge(0, 2.0, float('inf'))
  scene.judge(2, 2.0, 2.2)
  module, *told = scene.perform()
  assert [module.uri, module.sha256] == scene.first and [fact.key for fact in told] == ['0', '2']
  assert module.meta['left_out']['0'] == 'worse by inf nats on public text'
  json.dumps([fact.meta for fact in scene.of.registry.facts('judged')], allow_nan=False)


def test_a_contribution_that_was_made_again_is_judged_again(scene):
  registry = scene.of.registry
  registry.add_tasks(floor_facts.tasks(scene.of, scene.sent.values()))
  scene.judge(0, 2.0, 2.0)
  scene.judge(2, 2.0, 2.2)
  for _ in range(2):
    registry.complete(registry.claim('evaluator-0', ['judge']), [])
  new = checkpoint(scene.of, 2, by=0.02)
  assert withdrawals.train_again(scene.of, scene.sent[2], OSError('gone'))
  registry.put([new])
  assert scene.perform() is None, 'what was judged is not what is there'
  task = registry.claim('evaluator-0', ['judge'])
  assert task[1:4] == ('judge', '2', 0)
  fact = floor_facts.judged(new, (2.0, 2.0), 'evaluator-0')
  assert withdrawals.complete(scene.of, task, [fact]) == [fact]
  registry.wake('outer', ['high/0'], 1)
  [module] = scene.perform()
  assert module.meta['paths'] == 2 and moved(scene, module) > 0


def test_a_repeated_judgement_of_other_bits_changes_nothing(scene):
  scene.of.registry.add_tasks([NewTask('judge', '2', 0)])
  scene.judge(2, 2.0, 2.2)
  task = scene.of.registry.claim('evaluator-1', ['judge'])
  [standing] = withdrawals.complete(scene.of, task, [floor_facts.judged(scene.sent[2], (2.0, 2.0), 'evaluator-1')])
  assert standing.meta['losses'] == [2.0, 2.2]


def test_checkpoints_are_judged_where_the_floor_is_on_and_wake_the_modules_that_they_were_sent_to(scene, made):
  excluded = schedule.checkpoint_fact(1, 0, {}, {'worker': 'worker-1', 'excluded': 'it was too long'})
  made.registry.put([excluded])
  schedule.schedule(made, [*scene.sent.values(), excluded])
  assert not made.registry.tasks(kind='judge'), 'the floor is off'
  schedule.schedule(scene.of, [*scene.sent.values(), excluded])
  assert [row['key'] for row in made.registry.tasks(kind='judge')] == ['0', '2']
  scene.judge(0, 2.0, 2.0)
  scene.perform()
  assert [row['state'] for row in made.registry.tasks(kind='outer') if row['key'] == 'high/0'] == ['waiting']
  schedule.schedule(scene.of, made.registry.facts('judged'))
  assert [row['state'] for row in made.registry.tasks(kind='outer') if row['key'] == 'high/0'] == ['ready']
