"""Backup workers: the tasks that they claim or leave, and copies that end before or after the straggler."""

import hashlib
import math
import time
import types

import pytest

from dipaco_jax.config import settings
from dipaco_jax.islands import claims, island, status_table
from dipaco_jax.islands.claims import Backup, running_s
from dipaco_jax.islands.lease import Lease
from dipaco_jax.registry import registry as registry_lib
from dipaco_jax.registry.registry import Fact, NewTask, Task
from dipaco_jax.storage import object_store as storage_lib

KINDS = ('prepare', 'train', 'reroute')
RUN = types.SimpleNamespace(settings=settings.Settings(grid=(('a', 10),)))


@pytest.fixture
def connect(tmp_path, monkeypatch):
  """Connects an island by the name of its process. Leases are long, and backups look for tasks without pauses."""
  monkeypatch.setattr(claims, 'LOOK_S', 0.0)
  registries = []

  def connect(name: str, lease_s: float = 600) -> island.Island:
    registry = registry_lib.Registry(f'sqlite:///{tmp_path}/registry.db', lease_s)
    registries.append(registry)
    return island.Island(RUN, registry, storage_lib.open_storage(str(tmp_path)), name)

  yield connect
  for registry in registries:
    registry.close()


def fact(task: Task, content: str = 'x') -> Fact:
  return Fact('checkpoint', task.key, task.number, '', hashlib.sha256(content.encode()).hexdigest(), {})


def straggling(worker: island.Island) -> Task:
  """Completes three tasks at once, and returns a fourth that runs for more than twice as long."""
  worker.registry.add_tasks([NewTask('train', str(path), 0) for path in range(4)])
  for _ in range(3):
    task = worker.registry.claim(worker.name, ['train'])
    worker.registry.complete(task, [fact(task)])
  slow = worker.registry.claim('slow', ['train'])
  usual_s = max(worker.registry.durations('train', 32))
  while True:
    row = next(row for row in worker.registry.tasks('running') if row['owner'] == 'slow')
    if running_s(row) > 2 * usual_s:
      return slow


def test_a_backup_claims_tasks_of_the_states_that_it_holds(connect):
  """A backup that has completed a copy holds the state; others may claim the path's next task only after a lease."""
  spare = connect('backup-0')
  pool = Backup(spare, KINDS, 'holder of backup-0')
  spare.registry.add_tasks([NewTask('train', '0', 1, holder='another'), NewTask('train', '1', 1, holder=pool.holder)])
  assert pool.next() is None
  assert pool.next()[1:4] == ('train', '1', 1) and pool.next() is None


def test_an_abandoned_task_is_claimed_at_the_second_look(connect):
  spare = connect('backup-0')
  pool = Backup(spare, KINDS)
  spare.registry.add_tasks([NewTask('train', '0', 0), NewTask('outer', 'm', 1)])
  assert pool.next() is None
  spare.registry.add_tasks([NewTask('train', '1', 0)])
  assert pool.next()[1:4] == ('train', '0', 0)
  assert pool.next()[1:4] == ('train', '1', 0) and pool.next() is None
  assert [task['kind'] for task in spare.registry.tasks('ready')] == ['outer']


def test_an_abandoned_task_is_found_among_many_of_other_kinds(connect):
  spare = connect('backup-0')
  pool = Backup(spare, KINDS)
  spare.registry.add_tasks([*(NewTask('evaluate', str(i), 1) for i in range(1000)), NewTask('train', '0', 1)])
  assert pool.next() is None and pool.next()[1:4] == ('train', '0', 1)


def test_tasks_that_others_claim_in_time_are_left_to_them(connect):
  spare = connect('backup-0')
  pool = Backup(spare, KINDS)
  spare.registry.add_tasks([NewTask('train', '0', 0)])
  for _ in range(3):
    assert pool.next() is None
    spare.registry.release(spare.registry.claim('worker-0', ['train']))  # claimed by another process, and ready again


def test_a_task_whose_lease_has_run_out_is_abandoned(connect):
  spare, dead = connect('backup-0'), connect('worker-0', lease_s=0)
  pool = Backup(spare, KINDS)
  dead.registry.add_tasks([NewTask('train', '0', 0)])
  dead.registry.claim('worker-0', ['train'])
  assert pool.next() is None
  assert pool.next().owner == 'backup-0'


def test_a_backup_looks_no_more_often_than_every_LOOK_S(connect, monkeypatch):
  monkeypatch.setattr(claims, 'LOOK_S', 60.0)
  spare = connect('backup-0')
  pool = Backup(spare, KINDS)
  spare.registry.add_tasks([NewTask('train', '0', 0)])
  assert pool.next() is None and pool.next() is None
  pool.look.last -= 60
  assert pool.next()


def test_a_straggler_is_copied_by_one_backup(connect, monkeypatch):
  spare, other = connect('backup-0'), connect('backup-1')
  slow = straggling(spare)
  spare.registry.add_tasks([NewTask('train', '4', 0)])
  next_slow = spare.registry.claim('slow', ['train'])
  copy = Backup(spare, KINDS).next()
  assert copy == slow and spare.registry.tasks('running')[0]['owner'] == 'slow'
  time.sleep(2.1 * max(spare.registry.durations('train', 32)))
  assert Backup(other, KINDS).next() == next_slow
  assert Backup(connect('backup-2'), KINDS).next() is None
  assert any(line.startswith('backup-0  copy of train 3 0') for line in status_table.lines(spare.registry))
  later = connect('backup-2')
  roles = later.registry.roles
  monkeypatch.setattr(later.registry, 'roles', lambda: [role | {'silent_s': 1e6} for role in roles()])
  assert Backup(later, KINDS).next() == slow


def test_a_task_that_is_in_time_is_not_copied(connect, monkeypatch):
  spare = connect('backup-0')
  spare.registry.add_tasks([NewTask('train', '9', 0)])
  spare.registry.claim('worker-0', ['train'])
  assert Backup(spare, KINDS).next() is None  # no task is done to compare it with
  straggling(spare)
  monkeypatch.setattr(claims, 'STRAGGLES', math.inf)
  assert Backup(spare, KINDS).next() is None


@pytest.mark.parametrize('content', ['x', 'of other hardware'])
def test_the_first_to_complete_a_task_counts(content, connect):
  spare = connect('backup-0')
  slow = straggling(spare)
  copy = Backup(spare, KINDS).next()
  spare.registry.complete(copy, [fact(copy)])
  with pytest.raises(registry_lib.Lost):
    spare.registry.heartbeat(slow)
  spare.registry.release(slow)
  if content == 'x':
    spare.registry.complete(slow, [fact(slow, content)])
  else:
    with pytest.raises(registry_lib.Lost):
      spare.registry.complete(slow, [fact(slow, content)])
  assert spare.registry.counts() == {'train': {'done': 4}}
  assert spare.registry.facts('checkpoint', ['3']) == [fact(slow)]


def test_a_copy_does_not_hold_the_lease(connect):
  spare = connect('backup-0')
  slow = straggling(spare)
  lease = Lease(spare, 'worker', Backup(spare, KINDS).next())
  (before,) = spare.registry.tasks('running')
  lease.renew()
  lease.release('failed')
  (after,) = spare.registry.tasks('running')
  assert after | {'lease_left_s': 0} == before | {'lease_left_s': 0}
  spare.registry.complete(slow, [fact(slow)])
  with pytest.raises(registry_lib.Lost):
    lease.renew()
  lease.close()
