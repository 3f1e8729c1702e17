"""Tasks that name a holder, on both databases: the holder comes first, and others when they have waited for a lease."""

import time

import pytest
import registries
from registries import train

from dipaco_jax.registry.registry import Fact, Lost, NewTask

server, url, connect, db = registries.server, registries.url, registries.connect, registries.db

LEASE_S = 0.4  # of tests that let it run out


def held(holder: str, *keys: str) -> list[NewTask]:
  return [task._replace(holder=holder) for task in train(*((key, 0) for key in keys))]


def key(task) -> str | None:
  return task and task.key


def test_a_holder_takes_its_own_then_what_names_nobody(db):
  for tasks in held('', 'free'), held('other', 'theirs'), held('mine', 'a'), held('mine', 'b'), held('', 'late'):
    db.add_tasks(tasks)
    time.sleep(0.005)
  claims = [key(db.claim('w', ['train'], holder='mine')) for _ in range(5)]
  assert claims == ['a', 'b', 'free', 'late', None]
  assert db.claim('anybody', ['train']) is None and key(db.claim('o', ['train'], holder='other')) == 'theirs'


def test_own_tasks_are_found_behind_many_of_others(db):
  db.add_tasks(held('other', *map(str, range(300))) + held('', 'free') + held('mine', 'own'))
  assert [key(db.claim('w', ['train'], holder='mine')) for _ in range(3)] == ['own', 'free', None]


def test_what_has_been_ready_for_a_lease_is_anybodys_and_the_oldest_comes_first(connect):
  db = connect(lease_s=LEASE_S)
  db.add_tasks(held('gone', '0'))
  assert db.claim('w', ['train']) is None and db.claim('w', ['train'], holder='mine') is None
  time.sleep(LEASE_S + 0.05)
  db.add_tasks(held('', 'new') + held('mine', 'own') + held('gone', '1'))
  assert [key(db.claim('w', ['train'], holder='mine')) for _ in range(4)] == ['own', '0', 'new', None]


def test_a_claim_of_some_keys_is_bound_by_the_same_rule(connect):
  db = connect(lease_s=LEASE_S)
  db.add_tasks(held('other', '0', '1') + held('', '2'))
  assert db.claim('w', ['train'], ['0', '1']) is None and key(db.claim('w', ['train'], ['1', '2'])) == '2'
  assert key(db.claim('w', ['train'], ['1'], 'other')) == '1'
  time.sleep(LEASE_S + 0.05)
  assert key(db.claim('w', ['train'], ['0'])) == '0'


def test_a_lease_that_ran_out_is_anybodys_and_the_holder_comes_first(connect):
  db = connect(lease_s=LEASE_S)
  db.add_tasks(held('mine', 'first', 'second'))
  dead = [db.claim('w', ['train'], holder='mine') for _ in range(2)]
  assert db.claim('x', ['train']) is None
  time.sleep(LEASE_S + 0.05)
  db.add_tasks(held('mine', 'own'))
  oldest = key(db.claim('w', ['train'], holder='mine'))
  assert oldest == dead[0].key and key(db.claim('x', ['train'])) == dead[1].key
  with pytest.raises(Lost):
    db.heartbeat(dead[0])


def test_what_comes_back_is_ready_again(connect):
  """Released, woken, reopened and disowned tasks wait for their holder again, and behind what was ready before."""
  db = connect(lease_s=LEASE_S)
  db.add_tasks([*held('mine', '0'), NewTask('outer', 'x', 1, 'waiting', 'mine')])
  time.sleep(LEASE_S + 0.05)
  task = db.claim('w', ['train'])
  db.wake('outer', ['x'], 1)
  assert db.claim('w', ['outer']) is None  # it waited, but was not ready
  db.release(task)
  assert db.claim('w', ['train']) is None and db.claim('w', ['train'], holder='mine')
  db.withdraw(Fact('diverged', 'resumed', 0, '', '', {}), [], train(('0', 0)))
  assert db.claim('w', ['train']) is None
  task = db.claim('w', ['train'], holder='mine')
  db.complete(task, [])
  db.add_tasks([NewTask('evaluate', '', 0)])
  db.reopen(db.claim('e', ['evaluate']), 'train', '0', 0)
  assert db.claim('w', ['train']) is None and db.claim('w', ['train'], holder='mine')
