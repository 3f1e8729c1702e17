"""Which paths are late in a phase, the facts that say so, and that the run goes on without a sign of divergence."""

import numpy as np
import one_process
import pytest

from dipaco_jax.core.errors import Diverged
from dipaco_jax.islands import audit_facts, outer_weights, pieces, quorum, schedule, screening_facts
from dipaco_jax.islands.island import Island
from dipaco_jax.registry.registry import Fact, Lost, NewTask, Withdrawal

made = one_process.made
EVEN = np.ones(4, np.float32)


@pytest.fixture(autouse=True)
def even(monkeypatch):
  monkeypatch.setattr(outer_weights, 'path_weights', lambda island, phase: EVEN)


def with_quorum(made: Island, share: float, grace_s: float = 0.0) -> Island:
  of = one_process.with_settings(made, outer=dict(quorum=share, grace_s=grace_s))
  of.registry.put([Fact('module', module, 0, f'{module}.x', module, {'usual': 2.0}) for module in of.all_modules()])
  of.registry.add_tasks(NewTask('train', str(path), 0) for path in range(3))  # path 3 waits for another module
  return of


def train(of: Island, *paths: int, **about):
  for path in paths:
    task = of.registry.claim(f'worker-{path}', ['train'], [str(path)])
    fact = schedule.checkpoint_fact(path, 0, {}, {'worker': task.owner} | about)
    of.registry.complete(task, [fact])
    schedule.schedule(of, [fact])


def close(of: Island):
  """As a role that finds nothing to do, after executors have released all tasks of theirs."""
  while task := of.registry.claim('outer', ['outer']):
    of.registry.release(task, waiting=True)
  quorum.close(of)


@pytest.mark.parametrize(
  'share, paths, expected', [(0.75, 4, 3), (0.75, 2, 2), (0.5, 3, 2), (0.28, 25, 7), (0.1, 4, 1), (1.0, 4, 4)]
)
def test_a_quorum_is_the_smallest_number_that_is_as_large_a_share(share, paths, expected):
  assert quorum.quorum_size(share, paths) == expected


def test_paths_are_late_when_a_module_has_its_quorum_and_the_grace_is_over(made):
  of = with_quorum(made, 0.5)
  assert quorum.find_late(of, 'ends/shared', 0) == ([], '')
  train(of, 0)
  assert quorum.find_late(of, 'ends/shared', 0) == ([], '')
  assert quorum.find_late(of, 'low/0', 0) == ([1], 'late: 1 of 2 paths of low/0 were done more than 0 s before')
  train(of, 2)
  assert quorum.find_late(of, 'ends/shared', 0)[0] == [1, 3]
  assert quorum.find_late(one_process.with_settings(of, outer=dict(grace_s=60.0)), 'ends/shared', 0) == ([], '')


def test_a_path_that_a_module_may_contain_is_awaited(made):
  of = with_quorum(made, 0.5)
  train(of, 0, 1, 2)
  [sent] = of.registry.facts('checkpoint', ['1'])
  assert of.registry.revoke(Withdrawal([sent], 'malformed', 'outer'), [NewTask('train', '1', 0)])
  assert quorum.find_late(of, 'ends/shared', 0)[0] == [3]


def test_a_path_that_its_worker_has_excluded_is_not_part_of_a_quorum(made):
  of = with_quorum(made, 0.5)
  train(of, 0, 1, excluded='bad')
  train(of, 2)
  assert quorum.find_late(of, 'ends/shared', 0) == ([], '')


def test_late_paths_lose_their_task_and_take_part_in_no_module(made):
  of = with_quorum(made, 0.5)
  task = of.registry.claim('slow', ['train'], ['1'])
  train(of, 0, 2)
  close(of)
  with pytest.raises(Lost):
    of.registry.heartbeat(task)
  late = [fact for fact in of.registry.facts('checkpoint') if pieces.LATE in fact.meta]
  assert [fact.key for fact in late] == ['1', '3'] and all(not fact.meta['objects'] for fact in late)
  assert {fact.key for fact in of.registry.facts('excluded') if pieces.LATE in fact.meta} == {'1', '3'}
  schedule.schedule(of, of.registry.facts('module', number=0))  # what path 3 has waited for
  assert of.registry.claim('slow', ['train']) is None
  assert not quorum.close_module(of, 'ends/shared', 1), 'nobody is left'


def test_with_a_quorum_of_all_nobody_is_late(made):
  of = with_quorum(made, 1.0)
  train(of, 0, 1, 2)
  close(of)
  assert len(of.registry.facts('checkpoint')) == 3


def test_a_path_that_is_late_is_no_sign_of_divergence(made):
  of = with_quorum(made, 0.75)
  train(of, 0, 1, 2)
  close(of)
  screening_facts.check(of, 'ends/shared', 0, EVEN, {'1', '2'})
  with pytest.raises(Diverged, match='no path of module ends has'):  # of those that were in time
    screening_facts.check(of, 'ends/shared', 0, EVEN, {'0', '1', '2'})
  assert screening_facts.excluded_before(of, 3, 1) == 0
  facts = quorum.late_facts(of, 3, 1, 'late')
  of.registry.put(facts)
  assert screening_facts.excluded_before(of, 3, 2) == 0


def test_what_a_late_path_has_not_trained_is_not_audited(made):
  of = one_process.with_settings(with_quorum(made, 0.5), audit=dict(fraction=1.0))
  train(of, 0, 2)
  close(of)
  audit_facts.draw(of, {})
  assert {row['key'] for row in audit_facts.open_tasks(of)} == {'0', '2'}
