"""What follows from facts: which tasks a schedule inserts, and which it leaves for later."""

import dataclasses

import excluded_path
import one_process
import pytest
from one_process import with_settings

from dipaco_jax.islands import island, schedule
from dipaco_jax.registry import registry
from dipaco_jax.registry.registry import Fact, NewTask

made = one_process.made
LEVELS_OF_PATH_1 = ('ends/shared', 'low/0', 'high/1')


def modules(of: island.Island, version: int, *keys: str, **about) -> list[Fact]:
  facts = [Fact('module', key, version, 'x', 'y', about) for key in keys]
  of.registry.put(facts)
  return facts


def tasks(of: island.Island, *kinds: str) -> set[tuple]:
  return {(t['kind'], t['key'], t['number'], t['state']) for t in of.registry.tasks() if t['kind'] in kinds}


def test_a_path_trains_on_when_its_own_modules_are_there(made):
  first, *others = modules(made, 0, *LEVELS_OF_PATH_1)
  schedule.schedule(made, [first, *others])
  assert tasks(made, 'train', 'evaluate') == {('train', '1', 0, 'ready')}
  schedule.schedule(made, modules(made, 0, 'low/1'))
  assert tasks(made, 'train') == {('train', '1', 0, 'ready'), ('train', '3', 0, 'ready')}
  assert [fact.kind for fact in made.registry.unscheduled()] == ['config']


def test_a_task_names_who_holds_the_state_that_it_continues_from(made):
  of = with_settings(made, train=dict(phases=4, schedule=((0, (0, 1, 2, 3)), (1, (0, 1)), (2, (0, 1, 2, 3)))))
  facts = [schedule.checkpoint_fact(path, 0, {}, {'holder': f'of-{path}'}) for path in range(3)]  # 3: of before
  facts += [schedule.checkpoint_fact(3, 0, {}, {}), schedule.checkpoint_fact(0, 1, {}, {'holder': 'other'})]
  told = excluded_path.exclusion(of, 1, 1, 'w')
  of.registry.put([*facts, schedule.checkpoint_fact(1, 1, {}, {'holder': 'of-1'}), told])
  for version in (0, 1, 2):
    schedule.schedule(of, modules(of, version, *of.all_modules()))
  found = {(row['number'], row['key']): row['holder'] for row in of.registry.tasks(kind='train')}
  expected = {'0': ['', 'of-0', 'other'], '1': ['', 'of-1', ''], '2': ['', None, 'of-2'], '3': ['', None, '']}
  assert found == {(v, path): h for path, of_path in expected.items() for v, h in enumerate(of_path) if h is not None}


@pytest.mark.parametrize('early_stopping', [False, True])
def test_a_version_is_evaluated_for_early_stopping_and_the_last_is_not_trained(early_stopping, made):
  of = with_settings(made, train=dict(early_stopping=early_stopping))
  for version in (1, 2):
    schedule.schedule(of, modules(of, version, *LEVELS_OF_PATH_1))
  evaluated = {('evaluate', '1', version, 'ready') for version in (1, 2)} if early_stopping else set()
  assert tasks(of, 'train', 'evaluate') == {('train', '1', 1, 'ready')} | evaluated


def test_a_checkpoint_wakes_the_outer_steps_of_its_modules(made):
  made.registry.add_tasks([NewTask('outer', 'low/0', 1, 'waiting')])
  fact = schedule.checkpoint_fact(1, 0, {}, {})
  made.registry.put([fact])
  schedule.schedule(made, [fact])
  assert tasks(made, 'outer') == {('outer', key, 1, 'ready') for key in LEVELS_OF_PATH_1}


def test_a_module_that_nobody_trains_is_its_next_version(made):
  of = with_settings(made, train=dict(schedule=((0, (1,)),)))
  schedule.schedule(of, modules(of, 0, *of.all_modules(), usual=3.0, executor='outer-0'))
  assert tasks(of, 'train') == {('train', '1', 0, 'ready')}
  carried = of.registry.facts('module', number=1)
  assert {fact.key: fact.meta for fact in carried} == {'low/1': {'usual': 3.0}, 'high/0': {'usual': 3.0}}
  assert {fact[3:5] for fact in carried} == {('x', 'y')}


ROUNDS = {'routing': dict(method='discriminative', rounds=1, phases_per_round=1)}


def test_a_round_is_a_barrier(made):
  of = with_settings(made, **ROUNDS)
  schedule.schedule(of, modules(of, 1, *of.all_modules()))
  assert tasks(of, 'train') == set()
  done = Fact('round', '', 1, '', '', {})
  of.registry.put([done])
  schedule.schedule(of, [done])
  assert tasks(of, 'train') == {('train', str(path), 1, 'ready') for path in range(4)}


def finish_all(of: island.Island):
  while task := of.registry.claim('w', ['prepare', 'train', 'evaluate', 'outer', 'reroute']):
    of.registry.complete(task, [])


def test_facts_that_a_killed_process_left_are_scheduled_before_anything_else(made):
  finish_all(made)
  modules(made, 0, *LEVELS_OF_PATH_1)
  schedule.advance(made)
  assert made.registry.counts().keys() == {'prepare', 'train'} and not made.registry.unscheduled()


def test_the_end_comes_when_all_is_done(made):
  made.registry.put([Fact('prepared', '', 0, '', '', {})])
  made.registry.mark_scheduled(made.registry.unscheduled())
  schedule.advance(made)
  assert made.registry.counts() == {'prepare': {'ready': 1}}
  finish_all(made)
  schedule.advance(made)
  assert made.registry.counts()['finish'] == {'ready': 1}


def test_no_end_before_its_time(made, tmp_path):
  """A process that was stopped inside `advance` while others made a round goes on with what it had read."""

  class Stopped(registry.Registry):
    asked = 0

    def is_idle(self, optional=None):
      self.asked += 1
      if self.asked == 2:  # the first time, to see whether there is anything to decide
        self.put([Fact('round', '', 1, '', '', {})])
      return True

  made.registry.put([Fact('prepared', '', 0, '', '', {})])
  made.registry.mark_scheduled(made.registry.unscheduled())
  stopped = Stopped(f'sqlite:///{tmp_path}/registry.db')
  schedule.advance(dataclasses.replace(with_settings(made, **ROUNDS), registry=stopped))
  assert 'finish' not in stopped.counts() and stopped.counts()['reroute'] == {'ready': 1}
  stopped.close()


def test_what_a_path_without_a_task_waits_for_is_reported(made):
  of = with_settings(made, train=dict(schedule=((0, (0, 1, 2, 3)), (1, (0, 1)))), routing=ROUNDS['routing'])
  assert schedule.waits(of) == {'prepare': [0, 1, 2, 3]}
  of.registry.put([Fact('prepared', '', 0, '', '', {})])
  facts = modules(of, 0, *of.all_modules())
  assert schedule.waits(of) == {'a monitor, or an idle role, to add its task': [0, 1, 2, 3]}
  schedule.schedule(of, facts)
  assert schedule.waits(of) == {}
  while task := of.registry.claim('w', ['train']):
    of.registry.complete(task, [schedule.checkpoint_fact(int(task.key), 0, {}, {})])
  modules(of, 1, 'ends/shared', 'low/0', 'high/0')
  assert schedule.waits(of) == {'round 1 of re-sharding': [0], 'high/1 of version 1': [1]}  # 2 and 3 are done


def test_a_path_whose_task_is_one_of_many_waits_for_nothing(made):
  made.registry.put([Fact('prepared', '', 0, '', '', {})])
  made.registry.add_tasks(NewTask('train', f'another {i}', 0) for i in range(1000))
  schedule.schedule(made, modules(made, 0, *made.all_modules()))
  assert schedule.waits(made) == {}


def test_a_path_that_is_not_drawn_waits_for_its_next_phase(made):
  of = with_settings(made, train=dict(schedule=((0, (1,)), (1, (0, 1)))))
  of.registry.put([Fact('prepared', '', 0, '', '', {})])
  schedule.schedule(of, modules(of, 0, *of.all_modules()))
  missing = 'ends/shared, low/0 of version 1, as it is not drawn before phase 1'
  assert schedule.waits(of) == {missing: [0]}  # high/0 is carried, as no path trains it
