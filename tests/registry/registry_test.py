"""The registry, on SQLite and on PostgreSQL: claims, leases, fences, wakes, facts."""

import contextlib
import errno
import time

import pytest
import registries
import sqlalchemy as sa
from registries import train

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError, Unavailable
from dipaco_jax.islands import status_table
from dipaco_jax.registry import database, database_errors, registry_schema
from dipaco_jax.registry.registry import Fact, Lost, NewTask, Registry
from dipaco_jax.registry.tasks import Claim

LEASE_S = 0.3  # of tests that let it run out

server, url, connect, db = registries.server, registries.url, registries.connect, registries.db


def fact(key='0', number=0, uri='x', kind='checkpoint', **meta) -> Fact:
  return Fact(kind, key, number, uri, 'f' * 64, meta)


def names(tasks) -> list[tuple]:
  return [(task.kind, task.key, task.number) for task in tasks]


def test_claims_go_by_age_across_kinds(db):
  for tasks in train(('9', 1), ('10', 0)), [NewTask('reroute', '', 3)], train(('3', 0)), [NewTask('evaluate', '', 0)]:
    db.add_tasks(tasks)
    time.sleep(0.005)
  db.add_tasks([NewTask('train', '4', 0, 'waiting')])
  claims = [db.claim('a', ['reroute', 'train']) for _ in range(4)]
  assert [task.key for task in claims[2:]] == ['', '3'] and {task.key for task in claims[:2]} == {'9', '10'}
  assert db.claim('a', ['reroute', 'train']) is None
  assert claims[0].fence == 1 and claims[0].owner == 'a'


def test_a_claim_of_some_keys_leaves_the_others(db):
  db.add_tasks(train(*((str(path), 0) for path in range(300))))
  assert db.claim('a', ['train'], ['no', '277', '250']).key == '250'
  assert db.claim('a', ['train'], ['277']).key == '277'
  assert db.claim('a', ['train'], ['277']) is None and db.claim('a', ['train'], []) is None


def test_a_task_is_settled_without_its_owner_unless_it_is_done(connect):
  db, other = connect(), connect()
  db.add_tasks(train(('0', 0), ('1', 0)))
  running, done = db.claim('a', ['train'], ['0']), db.claim('a', ['train'], ['1'])
  db.complete(done, [fact('1')])
  assert not other.settle(NewTask('train', '1', 0), [fact('1', late=True)])
  for key in ('0', '2'):  # one that runs, and one that does not exist
    assert other.settle(NewTask('train', key, 0), [fact(key, late=True)])
  other.add_tasks(train(('0', 0), ('2', 0)))
  with pytest.raises(Lost):
    db.heartbeat(running)
  with pytest.raises(Lost):
    db.complete(running, [fact('0', uri='y')])
  assert db.is_idle() is False and db.claim('a', ['train']) is None  # facts are not scheduled yet
  assert [(each.key, 'late' in each.meta) for each in db.facts('checkpoint')] == [('0', 1), ('1', 0), ('2', 1)]


def test_seconds_since_tasks_ended_are_those_of_the_database(db):
  db.add_tasks(train(('0', 0), ('1', 0), ('2', 0), ('0', 1)))
  for key in ('0', '1'):
    db.complete(db.claim('a', ['train'], [key]), [fact(key)])
  time.sleep(0.05)
  waited = db.seconds_since_end('train', ['0', '1', '2', '3'], 0)
  assert len(waited) == 2 and all(0.04 < seconds < 5 for seconds in waited)
  assert db.seconds_since_end('train', [], 0) == db.seconds_since_end('train', ['2'], 0) == []


def test_seconds_since_claims_are_those_of_tasks_that_are_held_or_done(connect):
  db = connect(lease_s=LEASE_S)
  db.add_tasks(train(('0', 0), ('1', 0), ('2', 0)))
  db.complete(db.claim('a', ['train'], ['0']), [fact('0')])
  assert db.claim('a', ['train'], ['1'])
  assert len(db.seconds_since_claim('train', ['0', '1', '2'], 0)) == 2
  time.sleep(2 * LEASE_S)
  [waited] = db.seconds_since_claim('train', ['0', '1', '2'], 0)
  assert 2 * LEASE_S < waited < 10


def test_a_chosen_task_is_claimed_unless_another_process_holds_it(connect):
  one, other = connect(lease_s=LEASE_S), connect(lease_s=LEASE_S)
  one.add_tasks(train(('0', 0), ('1', 0)))
  chosen = one.tasks('ready')[1]
  task = one.claim_chosen('a', chosen)
  assert (task.key, task.fence, task.owner) == ('1', 1, 'a') and other.claim_chosen('b', chosen) is None
  time.sleep(2 * LEASE_S)
  again = other.claim_chosen('b', chosen)
  assert (again.key, again.fence, again.owner) == ('1', 2, 'b')
  other.complete(again, [])
  assert one.claim_chosen('a', chosen) is None


def test_claims_and_heartbeats_tell_how_many_suspensions_there_were(db):
  db.add_tasks(train(('0', 0)))
  task = db.claim('a', ['train'])
  assert db.suspended == 0
  db.put([fact('a', kind='suspended')])
  db.heartbeat(task)
  assert db.suspended == 1


def test_leases_are_renewed_together_each_by_the_fence_and_the_name_of_its_claim(db):
  owners = ['a', 'a/gpu-1', 'ab', 'a%', 'a_b/x']
  db.add_tasks(train(*((str(i), 0) for i in range(6))))
  tasks = [db.claim(owner, ['train']) for owner in owners]
  done = db.claim('a', ['train'])
  db.complete(done, [])
  db._db.change(sa.update(registry_schema.TASKS).where(registry_schema.RUNS).values(lease=1.0), {})
  db.put([fact('', kind='diverged'), fact('a', kind='suspended')])

  def claims(name: str, fence: int = 1) -> list[Claim]:
    return [Claim(task.id, fence, name) for task in (*reversed(tasks), done)]

  assert db.heartbeats(claims('a', 2)) == [None] * 6
  assert db.heartbeats(claims('a')) == [None, None, None, 1, 1, None] and db.suspended == 1
  left = {row['owner']: row['lease_left_s'] > 0 for row in db.tasks('running')}
  assert left == {'a': True, 'a/gpu-1': True, 'ab': False, 'a%': False, 'a_b/x': False}
  assert db.heartbeats(claims('a%')) == [None, 1, None, None, None, None]
  assert db.heartbeats(claims('a_b') * 2) == [1, *[None] * 5] * 2
  assert db.heartbeats([]) == []


def test_tasks_are_added_once(db):
  db.add_tasks(train(('0', 0)))
  task = db.claim('a', ['train'])
  db.add_tasks(train(('0', 0), ('1', 0)))
  assert db.claim('b', ['train']).key == '1' and db.claim('b', ['train']) is None
  db.complete(task, [])
  db.add_tasks(train(('0', 0)))
  assert db.counts() == {'train': {'done': 1, 'running': 1}}
  assert db.ready_kinds() == set()


def test_a_lease_that_runs_out_goes_to_another_and_the_old_owner_is_refused(connect):
  db = connect(lease_s=LEASE_S)
  db.add_tasks(train(('0', 0)))
  zombie = db.claim('a', ['train'])
  db.heartbeat(zombie)
  assert db.claim('b', ['train']) is None
  time.sleep(LEASE_S + 0.05)
  assert db.tasks('running')[0]['lease_left_s'] < 0
  task = db.claim('b', ['train'])
  assert task.fence == 2
  with pytest.raises(Lost):
    db.heartbeat(zombie)
  with pytest.raises(Lost):
    db.complete(zombie, [fact(uri='zombie')])
  with pytest.raises(Lost):
    db.complete(zombie, [])
  db.release(zombie)
  assert db.tasks()[0]['owner'] == 'b' and db.tasks()[0]['state'] == 'running' and not db.facts('checkpoint')
  db.complete(task, [fact()])
  db.complete(zombie, [fact()])  # it made the same
  with pytest.raises(Lost):
    db.complete(zombie, [fact(), fact('1')])
  with pytest.raises(Lost):
    db.complete(zombie, [fact(uri='zombie')])
  assert db.facts('checkpoint') == [fact()] and db.tasks()[0]['attempts'] == 2


def test_a_heartbeat_keeps_the_lease(connect):
  db = connect(lease_s=1)
  db.add_tasks(train(('0', 0)))
  task = db.claim('a', ['train'])
  for _ in range(4):
    time.sleep(0.3)
    db.heartbeat(task)
    assert db.claim('b', ['train']) is None


def test_a_late_owner_whom_nobody_replaced_continues(connect):
  db = connect(lease_s=0.01)
  db.add_tasks(train(('0', 0)))
  task = db.claim('a', ['train'])
  time.sleep(0.05)
  db.heartbeat(task)
  db.complete(task, [fact()])
  assert db.facts('checkpoint') == [fact()]


def test_released_tasks_are_ready_with_what_went_wrong(db):
  db.add_tasks(train(('0', 0)))
  task = db.claim('a', ['train'])
  db.release(task, error='bad \0 name \udc80')
  db.release(task)  # again: its acknowledgement was lost
  [row] = db.tasks('ready')
  assert row['error'] == 'bad  name \\udc80' and db.claim('b', ['train']).fence == 2


def outer(db) -> None:
  db.add_tasks([NewTask('outer', key, 1, 'waiting') for key in ('left/0', 'left/1')])
  assert db.claim('a', ['outer']) is None
  db.wake('outer', ['left/0', 'not there'], 1)
  db.wake('outer', ['left/0', 'left/1'], 2)


def test_a_waiting_task_is_woken(db):
  outer(db)
  task = db.claim('a', ['outer'])
  assert task.key == 'left/0' and task.wakes == 1 and db.claim('a', ['outer']) is None
  db.release(task, waiting=True)
  assert db.claim('a', ['outer']) is None and db.counts() == {'outer': {'waiting': 2}}
  db.wake('outer', ['left/0'], 1)
  assert db.claim('a', ['outer']).wakes == 2


def test_a_wake_while_it_runs_is_not_lost(db):
  outer(db)
  task = db.claim('a', ['outer'])
  db.wake('outer', ['left/0'], 1)
  assert db.claim('b', ['outer']) is None  # it runs still
  db.release(task, waiting=True)
  assert db.claim('b', ['outer']).key == 'left/0'


def test_a_wake_leaves_a_task_that_is_done_as_it_is(db):
  outer(db)
  db.complete(db.claim('a', ['outer']), [])
  db.wake('outer', ['left/0'], 1)
  assert db.claim('a', ['outer']) is None and db.counts() == {'outer': {'done': 1, 'waiting': 1}}


def test_who_misses_something_has_it_made_again_but_no_zombie(connect):
  db = connect(lease_s=LEASE_S)
  db.add_tasks([*train(('0', 0)), NewTask('evaluate', '0', 1)])
  made = db.claim('a', ['train'])
  db.complete(made, [fact()])
  zombie = db.claim('a', ['evaluate'])
  time.sleep(LEASE_S + 0.05)
  task = db.claim('b', ['evaluate'])
  db.reopen(zombie, 'train', '0', 0)
  assert db.claim('a', ['train']) is None
  db.reopen(task, 'train', '0', 0)
  again = db.claim('a', ['train'])
  db.reopen(task, 'train', '0', 0)  # it is being made
  assert again.fence == 2 and db.counts()['train'] == {'running': 1}
  db.complete(again, [fact()])
  db.release(task)
  db.reopen(task, 'train', '0', 0)
  assert db.counts() == {'train': {'done': 1}, 'evaluate': {'ready': 1}}
  assert db.ready_kinds() == {'evaluate'}


def test_no_task_is_open_when_the_run_is_finished(db):
  """One that was opened again, because something was missing, would stay open for ever."""
  db.add_tasks([*train(('0', 0), ('1', 0)), NewTask('evaluate', '0', 1), NewTask('finish', '', 0)])
  db.complete(db.claim('a', ['train']), [fact()])
  db.reopen(db.claim('b', ['evaluate']), 'train', '0', 0)
  late = db.claim('a', ['train'])
  db.complete(db.claim('b', ['finish']), [fact('', kind='finished')])
  assert {state for states in db.counts().values() for state in states} == {'done'}
  with pytest.raises(Lost):
    db.heartbeat(late)


def test_completing_again_is_the_same(db):
  db.add_tasks(train(('0', 0), ('1', 0)))
  task, other = db.claim('a', ['train']), db.claim('a', ['train'])
  for _ in range(2):
    db.complete(task, [fact(), fact('0', kind='private')])
    db.complete(other, [])
  assert db.facts('checkpoint') == [fact()] and db.counts() == {'train': {'done': 2}}
  with pytest.raises(Lost):
    db.complete(task, [fact(uri='another')])


def test_a_completion_is_whole_or_not_at_all(db):
  db.put([fact('b')])
  db.add_tasks(train(('a', 0)))
  task = db.claim('a', ['train'])
  with pytest.raises(ValueError, match='cannot replace'):
    db.complete(task, [fact('a'), fact('b', uri='another')])
  assert db.facts('checkpoint') == [fact('b')] and db.counts() == {'train': {'running': 1}}
  db.complete(task, [fact('a'), fact('b')])


def test_facts_are_put_once(db):
  db.put([fact(loss=float('inf'), path=[1, 'x']), fact('1')])
  db.put([fact('1')])
  with pytest.raises(ValueError, match='cannot replace'):
    db.put([fact('2'), fact('1', uri='another')])
  assert db.facts('checkpoint') == [fact(loss=float('inf'), path=[1, 'x']), fact('1')]


def test_facts_are_found_by_kind_keys_and_number(db):
  db.put([fact(key, number) for key in ('b', 'a', 'B') for number in (1, 0)] + [fact('a', kind='module')])
  found = [(f.key, f.number) for f in db.facts('checkpoint')]
  assert found == [('B', 0), ('a', 0), ('b', 0), ('B', 1), ('a', 1), ('b', 1)]
  assert [f.key for f in db.facts('checkpoint', number=1)] == ['B', 'a', 'b']
  assert [f.number for f in db.facts('checkpoint', ['a'], at_most=0)] == [0]
  assert [f.number for f in db.facts('checkpoint', ['a'], at_least=1, at_most=1)] == [1]
  many = ['b', 'a', *(f'{i}' for i in range(40_000))]
  assert [f.key for f in db.facts('checkpoint', many, 0)] == ['a', 'b']
  assert [f.number for f in db.facts('checkpoint', ['a'])] == [0, 1] and db.facts('checkpoint', []) == []


def test_the_newest_fact_of_each_key(db):
  db.put([fact('0', 1), fact('0', 2), fact('1', 1), fact('2', 5, kind='module')])
  assert db.newest('checkpoint') == {'0': 2, '1': 1}
  assert db.newest('checkpoint', below=2) == {'0': 1, '1': 1} and db.newest('checkpoint', below=1) == {}
  assert db.newest('checkpoint', keys=['1', '2']) == {'1': 1}


def test_facts_wait_to_be_scheduled(db):
  db.put([fact('a', 1), fact('b', 0)])
  db.add_tasks(train(('c', 2)))
  db.complete(db.claim('a', ['train']), [fact('c', 2)])
  assert [f.key for f in db.unscheduled()] == ['b', 'a', 'c'] and [f.key for f in db.unscheduled(1)] == ['b']
  db.mark_scheduled([fact('a', 1), fact('c', 2)])
  db.mark_scheduled([])
  assert [f.key for f in db.unscheduled()] == ['b'] and not db.is_idle()
  db.put([fact('a', 1)])
  assert [f.key for f in db.unscheduled()] == ['b']  # the same again is no news
  db.mark_scheduled([fact('b', 0)])
  assert db.is_idle()


def test_what_is_open(db):
  db.add_tasks([*train(('0', 0), ('0', 1), ('0', 2)), NewTask('outer', 'x', 3, 'waiting')])
  assert db.lowest_open() == {'train': 0, 'outer': 3} and not db.is_idle()
  db.complete(db.claim('a', ['train']), [])
  db.claim('a', ['train'])
  assert db.lowest_open() == {'train': 1, 'outer': 3}
  rows = db.tasks(kind='train')
  assert [(row['number'], row['state']) for row in rows] == [(0, 'done'), (1, 'running'), (2, 'ready')]
  assert [row['number'] for row in db.tasks('running')] == [1] and len(db.tasks(limit=2)) == 2
  assert 29 < rows[1]['lease_left_s'] <= 30 and rows[0]['lease_left_s'] is None
  assert abs(rows[0]['ended'] - time.time()) < 10 and 0 <= rows[0]['ended'] - rows[0]['claimed'] < 10


def test_roles_give_signs_of_life(db):
  db.beat('w1', 'worker', {'task': 1})
  db.beat('e1', 'evaluator', {})
  time.sleep(0.2)
  db.beat('w1', 'worker', {'task': 2})
  first, second = db.roles()
  assert (first['name'], first['role'], first['about']) == ('e1', 'evaluator', {})
  assert second['about'] == {'task': 2} and second['silent_s'] < first['silent_s'] - 0.15


def test_one_name_in_two_roles_is_two(db):
  db.beat('mine', 'worker', {'task': 'train 3 0'})
  db.beat('mine', 'outer', {})
  db.beat('mine', 'worker', {'task': 'train 3 1'})
  assert [(row['role'], row['about']) for row in db.roles()] == [('outer', {}), ('worker', {'task': 'train 3 1'})]
  shown = status_table.lines(db)
  assert any(line.startswith('mine (outer)   idle') for line in shown)
  assert any(line.startswith('mine (worker)  train 3 1') for line in shown)


def test_the_time_left_is_that_of_recent_tasks_and_workers(db, monkeypatch):
  s = settings.from_dict({'grid': {'a': 4}, 'levels': (('all', '.*', ('a',)),), 'train': {'phases': 3}})
  db.add_tasks(train(('0', 0), ('1', 0), ('2', 0), ('3', 0)))
  assert status_table.time_left(db, s) == []
  db.complete(db.claim('a', ['train']), [])
  assert status_table.time_left(db, s) == [], 'nobody is at work'
  db.claim('a', ['train'])
  db.claim('b', ['train'])
  monkeypatch.setattr(db, 'durations', lambda kind, limit: [50.0, 70.0])
  assert status_table.time_left(db, s) == ['about 5 min 30 s of training to go (11 phases of paths, 2 at a time)']


def test_tables_of_another_version_are_rejected(url, connect):
  connect()
  engine = database.connect(url)
  with engine.begin() as connection:
    connection.execute(sa.update(registry_schema.SCHEMA).values(version=99))
  engine.dispose()
  with pytest.raises(ValueError, match=r'version 99.*give --registry a new database'):
    Registry(url)


@pytest.mark.parametrize('wrong', ['sqlite://', 'mysql://a/b', 'nonsense', 'postgresql+psycopg2://a/b'])
def test_other_databases_are_rejected(wrong):
  with pytest.raises(ValueError, match='sqlite:////'):
    Registry(wrong)


def test_an_error_of_this_machine_is_not_waited_out():
  assert database_errors.is_transient(ConnectionResetError(errno.ECONNRESET, 'gone'))
  assert not database_errors.is_transient(PermissionError(errno.EACCES, 'not allowed'))


def test_a_call_raises_when_its_patience_is_over(tmp_path):
  started = time.monotonic()
  with pytest.raises(Unavailable, match=r'the registry does not answer .*No such file') as error:
    Registry(f'postgresql://postgres@/x?host={tmp_path}', patience_s=0.3)
  assert 'again' not in str(error.value)  # which a role that is alive may tell, too
  assert 0.3 <= time.monotonic() - started < 10


def test_a_database_that_is_not_there_is_not_waited_for(server):
  with pytest.raises(
    ValueError, match=r'rejects the connection .*does not exist.*: check its user, password and database'
  ):
    Registry(server.url('nobodys'))


@pytest.mark.parametrize('after', [0, 1])
def test_idle_is_asked_of_one_moment(after, tmp_path):
  """A task is completed before or after the first statement, and its fact scheduled before the next."""
  db = Registry(f'sqlite:///{tmp_path}/registry.db')
  db.add_tasks([NewTask('train', '0', 0)])
  task, fact, asked = db.claim('a', ['train']), Fact('checkpoint', '0', 0, '', '', {}), []
  rows = db._db.rows

  def slowly(*args):
    asked.append(args)
    if len(asked) == 1 + after:
      db.complete(task, [fact])
    found = rows(*args)
    if len(asked) == 1 + after:
      db.add_tasks([NewTask('outer', 'x', 1)])
      db.mark_scheduled([fact])
    return found

  db._db.rows = slowly
  assert not db.is_idle()
  db.close()


@pytest.mark.parametrize('meta', [{'id': 7, 'config': {}}, {'id': 'a1', 'config': []}, ['a1']])
def test_a_config_that_is_none_is_an_error_that_says_what_to_do(meta, tmp_path):
  with contextlib.closing(Registry(f'sqlite:///{tmp_path}/registry.db')) as made:
    made.put([Fact('config', '', 0, '', '', meta)])
    with pytest.raises(InputError, match=r'the registry is damaged: .*rebuild it from its backup'):
      made.facts('config')
