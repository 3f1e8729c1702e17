"""A role at work: the next task is claimed and fetched meanwhile, and both are given back when it ends."""

import collections
import contextlib
import errno
import itertools
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator

import pytest
import repository
import sqlalchemy
import tiny_run

from dipaco_jax.config import settings
from dipaco_jax.core import errors
from dipaco_jax.islands import claims, role_loop
from dipaco_jax.islands.claims import Claims
from dipaco_jax.islands.island import Island, Later
from dipaco_jax.processes import time_use
from dipaco_jax.registry import database_errors, registry as registry_lib
from dipaco_jax.registry.registry import Fact, NewTask
from dipaco_jax.storage import object_store as storage_lib

TASKS = [NewTask('train', str(path), 0) for path in range(4)]


def make(folder: pathlib.Path, name: str = 'worker-0', lease_s: float = 20) -> Island:
  registry = registry_lib.Registry(f'sqlite:///{folder}/registry.db', lease_s)
  registry.add_tasks(TASKS)
  run = types.SimpleNamespace(settings=settings.Settings(grid=(('path', 4),)))
  return Island(run, registry, storage_lib.open_storage(str(folder)), name)


@pytest.fixture
def island(tmp_path):
  made = make(tmp_path)
  yield made
  made.registry.close()


def owned(island) -> list[str]:
  return [task['key'] for task in island.registry.tasks('running')]


def wait_for(what):
  until = time.monotonic() + tiny_run.PATIENCE_S  # another process may have to import first, beside other tests
  while not what():
    assert time.monotonic() < until
    time.sleep(0.005)


class Work:
  """Tasks that do not end before the next is fetched; with the last of them the run is finished."""

  def __init__(self, fails: str = ''):
    self.fails, self.last = fails, fails or '3'  # a task that fails once comes back behind the others
    self.fetched: list[str] = []
    self.held: list[list[str]] = []

  def fetch(self, island, task):
    assert threading.current_thread() != threading.main_thread()
    self.fetched.append(task.key)
    if self.fetched.count(self.fails) == 1:
      self.fails = ''
      raise Later('not yet')
    return f'fetched {task.key}'

  def perform(self, island, task, lease):
    assert lease.fetched() == f'fetched {task.key}'
    next_key = str(int(task.key) + 1)
    lease.ahead(0.0)
    wait_for(lambda: task.key == '3' or next_key in self.fetched)
    lease.ahead(0.0)
    time.sleep(0.1)
    self.held.append([key for key in owned(island) if key >= task.key])
    return lambda: (
      [Fact('evaluation', task.key, 0, '', '', {})] + [Fact('finished', '', 0, '', '', {})] * (task.key == self.last)
    )


@pytest.mark.parametrize('fails', ['', '2'])
def test_the_next_task_is_fetched_while_one_is_at_work_and_no_other(fails, island, monkeypatch):
  monkeypatch.setattr(claims, 'LONGEST_ASK_AGAIN_S', 0.0)
  work = Work(fails)
  role_loop.Role(Claims(island, 'worker', ['train'], fetches={'train': work.fetch}), work.perform).serve()
  assert work.fetched == ['0', '1', '2', '3', *fails]
  assert work.held == [['0', '1'], ['1', '2'], *([['3'], ['2']] if fails else [['2', '3'], ['3']])]
  assert [(task['state'], task['attempts']) for task in island.registry.tasks()] == [
    ('done', 2 if key == fails else 1) for key in '0123'
  ]


def test_the_steps_of_a_task_that_is_taken_away_are_lost_time(island):
  seconds = []

  def perform(island, task, lease):
    with time_use.doing(time_use.INNER):
      time.sleep(0.05)
    if task.key == '1':
      raise registry_lib.Lost('it was late')
    seconds.append(role.costs.clock.read())
    made = Fact('evaluation', task.key, 0, '', '', {})
    return lambda: [made, *[made._replace(kind='finished', key='')] * (task.key == '3')]

  role = role_loop.Role(Claims(island, 'worker', ['train']), perform)
  role.serve()
  first, second, third = ((each[time_use.INNER], each[time_use.LOST]) for each in seconds)
  assert first[1] == 0 and second[1] == third[1] >= 0.05
  assert first[0] >= 0.05 and second[0] - first[0] >= 0.05 and third[0] - second[0] >= 0.05


def test_a_role_tells_what_it_did_last(island, capsys):
  def perform(island, task, lease):
    lease.about |= {'loss': 3.25, 'tokens_per_s': 12_345.6}
    made = Fact('evaluation', task.key, 0, '', '', {})
    return lambda: [made, *[made._replace(kind='finished', key='')] * (task.key == '3')]

  role_loop.Role(Claims(island, 'worker', ['train']), perform).serve()
  words, first, *_, last = capsys.readouterr().err.splitlines()
  assert words.startswith('tasks: train PATH PHASE')
  assert first == 'worker 1 tasks done  last train 0 0  loss 3.250  12,346 tokens/s'
  assert last == first.replace('1 tasks', '4 tasks').replace('train 0 0', 'train 3 0')


def test_a_role_that_finds_nothing_to_do_says_that_it_waits_and_for_what(island, capsys, monkeypatch):
  monkeypatch.setattr(role_loop.display, 'pause_s', lambda elapsed_s: 0.5)
  told = ''

  def tells(words: str) -> bool:
    nonlocal told
    told += capsys.readouterr().err
    return words in told

  role = role_loop.Role(Claims(island, 'outer', ['outer']), lambda *_: pytest.fail('there is none'))
  registry = registry_lib.Registry(f'sqlite:///{island.storage.local_path("registry.db")}', 20)
  thread = threading.Thread(target=other, args=(registry, tells))
  thread.start()
  role.serve()
  thread.join()
  registry.close()
  assert tells('waiting for tasks') and told.index('before training') < told.index('waiting for tasks')


def other(registry: registry_lib.Registry, tells: Callable[[str], bool]):
  """Prepares the run, and finishes it, as soon as each has been waited for."""
  finished = Fact('finished', '', 0, '', '', {})
  try:
    wait_for(lambda: tells('waiting for the stages before training'))
    registry.put([finished._replace(kind='prepared')])
    wait_for(lambda: tells('waiting for tasks'))
  finally:
    registry.put([finished])


ENV = repository.environment(__file__)
HOLDS = """
import pathlib, sys, time
import role_loop_test
from dipaco_jax.islands import role_loop
from dipaco_jax.islands.claims import Claims

def perform(island, task, lease):
  lease.fetched()
  lease.ahead(0.0)
  time.sleep(60)

island = role_loop_test.make(pathlib.Path(sys.argv[1]), lease_s=float(sys.argv[2]))
claims = Claims(island, 'worker', ['train'], fetches={'train': lambda island, task: time.sleep(0.01)})
role_loop.Role(claims, perform).serve()
"""


@contextlib.contextmanager
def another_role(folder: pathlib.Path, lease_s: int) -> Iterator[subprocess.Popen]:
  """A process that holds tasks, which ends with the block."""
  with subprocess.Popen([sys.executable, '-c', HOLDS, str(folder), str(lease_s)], env=ENV) as process:
    try:
      yield process
    finally:
      process.kill()


@pytest.mark.slow
def test_both_tasks_are_given_back_at_once(island, tmp_path):
  with another_role(tmp_path, lease_s=20) as process:
    wait_for(lambda: owned(island) == ['0', '1'])
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    wait_for(lambda: island.registry.counts() == {'train': {'ready': 4}})
    assert time.monotonic() - began < 1
    assert process.wait(5) == 128 + signal.SIGTERM
  assert [role['about'].get('stopped') for role in island.registry.roles()] == [True]


@pytest.mark.slow
def test_tasks_of_a_killed_process_run_elsewhere_within_two_leases(tmp_path):
  island, began = make(tmp_path, 'worker-1', lease_s=4), []
  with another_role(tmp_path, lease_s=4) as process:
    wait_for(lambda: owned(island) == ['0', '1'])
    time.sleep(2)  # it is late in its lease, or has renewed it
    process.kill()
    killed = time.monotonic()

  def perform(island, task, lease):
    began.append((task.key, time.monotonic() - killed))
    return lambda: [Fact('finished' if len(began) == 4 else 'evaluation', task.key, 0, '', '', {})]

  role_loop.Role(Claims(island, 'worker', ['train']), perform).serve()
  island.registry.close()
  print('begun elsewhere after', {key: f'{seconds:.1f} s' for key, seconds in began})
  assert {key for key, seconds in began if seconds > 1} == {'0', '1'} and max(began, key=lambda b: b[1])[1] < 2 * 4


ENDS_AMID = """
import os, pathlib, signal, sys, time
import role_loop_test
from dipaco_jax.islands import role_loop
from dipaco_jax.islands.claims import Claims

island = role_loop_test.make(pathlib.Path(sys.argv[1]))
claim = island.registry.claim

def slowly(*args):
  task = claim(*args)
  os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(0.2)  # much less than GIVE_BACK_S, which has to suffice for the rest on a busy machine
  return task

island.registry.claim = slowly
role_loop.Role(Claims(island, 'worker', ['train']), lambda *_: time.sleep(60)).serve()
"""


@pytest.mark.slow
def test_a_task_is_given_back_that_was_just_claimed(island, tmp_path):
  done = subprocess.run([sys.executable, '-c', ENDS_AMID, str(tmp_path)], env=ENV)
  assert done.returncode == 128 + signal.SIGTERM
  assert island.registry.counts() == {'train': {'ready': 4}}
  assert island.registry.tasks()[0]['attempts'] == 1


class Clock:
  """Time that passes while somebody sleeps, up to an end."""

  def __init__(self, seconds: float):
    self.now, self.end = 0.0, seconds

  def monotonic(self) -> float:
    return self.now

  def sleep(self, seconds: float):
    self.now += seconds
    if self.now > self.end:
      raise StopIteration


@pytest.mark.parametrize('keys', [None, ['0', '1']])
def test_an_idle_role_asks_less_than_once_a_second(keys, island, monkeypatch):
  while island.registry.claim('worker-1', ['train']):  # which is at work on all there is
    pass
  clock, asked = Clock(600), []
  for module in (role_loop, claims):
    monkeypatch.setattr(module, 'time', clock)
  monkeypatch.setattr(role_loop, 'random', random.Random(0))  # waits are random: 0.96 to 1.01 queries a second

  def count(connection, cursor, statement, *_):
    if not statement.startswith('BEGIN'):
      asked.append(statement)

  sqlalchemy.event.listen(sqlalchemy.Engine, 'before_cursor_execute', count)
  try:
    island.registry.put([Fact('prepared', '', 0, '', '', {})])
    island.registry.mark_scheduled(island.registry.unscheduled())
    asked.clear()
    with pytest.raises(StopIteration):
      role_loop.Role(Claims(island, 'worker', ['train'], keys), lambda *_: None).serve()
  finally:
    sqlalchemy.event.remove(sqlalchemy.Engine, 'before_cursor_execute', count)
  print(f'{len(asked) / clock.now:.2f} queries a second')
  assert 0.2 < len(asked) / clock.now < 1


@pytest.mark.parametrize(('task_s', 'paths', 'late_s'), [(1.0, 4, 0.05), (100.0, 4, 5.0), (1.0, 600, 6.0)])
@pytest.mark.parametrize('idle_s', [0.2, 2, 20, 200])
def test_what_comes_is_begun_late_by_a_share_of_the_time_between_tasks(
  island, monkeypatch, task_s, paths, idle_s, late_s
):  # fmt: skip
  """Or, where many may ask, by as long as they take; and a role that is idle for hours asks every ten seconds."""
  monkeypatch.setattr(island.run, 'settings', settings.Settings(grid=(('a', paths),)))
  now, asked = [1000.0], [1000.0]
  clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
  monkeypatch.setattr(role_loop, 'time', clock)
  monkeypatch.setattr(island.registry, 'lease_s', 300)
  role = role_loop.Role(Claims(island, 'outer', ['outer']), lambda *_: None)
  role.claims.work_s = task_s
  while now[0] - asked[0] < idle_s:
    role.wait()
    asked.append(now[0])
  waits = [b - a for a, b in itertools.pairwise(asked)]
  assert max(waits) <= 1.3 * min(10, max(late_s, 0.1 * idle_s)) and len(waits) < 90
  assert idle_s < 150 or min(waits[-2:]) > 6


def test_a_task_that_comes_during_a_publication_is_begun_during_it(tmp_path):
  """Its path may train on while what it has made travels."""
  made, begun, waited = make(tmp_path), threading.Event(), []
  for task in TASKS[1:]:
    made.registry.complete(made.registry.claim('other', ['train'], [task.key]), [])

  def perform(island, task, lease):
    if task.number:
      begun.set()
      return lambda: [Fact('finished', '', 0, '', '', {})]

    def publish():
      made.registry.add_tasks([NewTask('train', '0', 1)])
      waited.append(begun.wait(10))
      return [Fact('checkpoint', '0', 0, '', '', {'objects': {}})]

    return publish

  role_loop.Role(Claims(made, 'worker', ['train']), perform).serve()
  assert waited == [True]
  made.registry.close()


def test_what_fails_to_be_published_is_not_blamed_on_the_task_at_work(island):
  def perform(island, task, lease):
    def publish():
      if task.key == '0':
        raise ValueError('no such module')
      return [Fact('evaluation', task.key, 0, '', '', {})]

    return publish

  with pytest.raises(ValueError, match='no such module'):
    role_loop.Role(Claims(island, 'worker', ['train']), perform).serve()
  told = {task['key']: task['error'] for task in island.registry.tasks() if task['error']}
  assert told == {'0': 'ValueError: no such module'} and not owned(island)


@pytest.mark.parametrize('where', ['fetch', 'perform', 'publish'])
def test_a_role_whose_storage_is_away_tries_no_task_again(where, island, monkeypatch, caplog):
  """What it holds goes back without an error: no task is to blame."""

  def away(name):
    raise OSError(errno.EIO, 'no answer')

  def reach(at: str):
    if at == where:
      island.storage.fetch('x')

  def perform(island, task, lease):
    began.append(task.key)
    wait_for(lambda: all(each.done() for each in role.publications))
    lease.fetched()
    reach('perform')

    def publish():
      reach('publish')
      return [Fact('evaluation', task.key, 0, '', '', {})]

    return publish

  monkeypatch.setattr(island.storage.backend, 'get', away)
  island.storage.patience_s, began = 0, []
  fetches = {'train': lambda island, task: reach('fetch')}
  role = role_loop.Role(Claims(island, 'worker', ['train'], fetches=fetches), perform)
  with pytest.raises(errors.Unavailable, match='no answer'):
    role.serve()
  assert began == (['0', '1'] if where == 'publish' else ['0'])  # the second, before anybody looks at the first
  assert not owned(island) and not any(task['error'] for task in island.registry.tasks())
  assert 'Traceback' not in caplog.text


LOSES_REGISTRY = """
import pathlib, sys
import role_loop_test
from dipaco_jax.command_line import command
from dipaco_jax.registry import database
from dipaco_jax.islands import role_loop
from dipaco_jax.islands.claims import Claims

folder = sys.argv.pop()

def perform(island, task, lease):
  island.registry._db = away = database.Database(f'postgresql://me@/x?host={folder}', patience_s=0)
  try:
    island.registry.tasks()
  finally:
    away._patience_s = 600

role_loop.CLOSE_S = 0.5
command.run(role_loop.Role(Claims(role_loop_test.make(pathlib.Path(folder)), 'worker', ['train']), perform).serve)
"""


def test_a_role_whose_registry_is_away_ends_at_once_with_its_task(tmp_path):
  """It cannot give that back: nobody waits another ten minutes for it."""
  command = [sys.executable, '-c', LOSES_REGISTRY, str(tmp_path)]
  done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=60)
  *_, last = done.stderr.splitlines()
  assert done.returncode == 75 and last.startswith('dipaco_jax: the registry does not answer ('), done.stderr
  assert last.endswith('; run it again when it is back') and 'Traceback' not in done.stderr


def test_a_lease_that_was_lost_does_not_take_the_next_one_on_its_task_along(island):
  found = Claims(island, 'worker', ['train'])
  first = found.claim()
  island.registry.release(first.task)
  second = found.claim_of(['train'], [first.task.key])
  found.drop(first)
  assert found.leases == {second.task.id: second}
  found.drop(second)


@pytest.mark.parametrize(
  'error, status, has_traceback',
  [
    (database_errors.Damaged('the registry is damaged'), 'running', False),
    (OSError(errno.EROFS, 'file:///run/x: Read-only file system'), 'ready', False),
    (TypeError('a bug'), 'ready', True),
  ],
)
def test_what_somebody_has_to_mend_is_reported_without_a_traceback(error, status, has_traceback, island, caplog):
  def perform(island, task, lease):
    raise error

  role = role_loop.Role(Claims(island, 'worker', ('train',)), perform)
  role.failures = role_loop.FAILURES - 1
  lease = role.claims.next()
  with pytest.raises(type(error)):
    role.work(lease)
  assert island.registry.tasks(kind='train')[0]['state'] == status and not role.claims.leases
  assert ('Traceback' in caplog.text) == has_traceback
  role.publisher.shutdown()
  role.claims.fetcher.shutdown()


def test_how_far_a_task_is_is_observed_and_costs_no_lease(island):
  lease = Claims(island, 'worker', ('train',)).next()
  assert lease.describe() == {'task': 'train 0 0'}
  lease.observe = lambda: {'stage': 'routing'}
  assert lease.describe() == {'task': 'train 0 0', 'stage': 'routing'}
  lease.observe = lambda: 1 // 0
  assert lease.describe() == {'task': 'train 0 0'}
  lease.close()


def test_it_tells_prometheus_what_it_does(island):
  island.run.compilations, told = collections.Counter(steps=2), []

  def perform(island, task, lease):
    lease.about |= {'step': 4, 'of': 8, 'loss': 2.5}
    told.append(role.read_metrics())
    return lambda: [Fact('checkpoint', task.key, 0, '', '', {})]

  role = role_loop.Role(Claims(island, 'worker', ('train',)), perform)
  role.costs.clock.switch(time_use.OTHER)
  lease = role.claims.next()
  role.work(lease)
  role.settle(0)
  told.append(role.read_metrics())
  role.publisher.shutdown()
  role.claims.fetcher.shutdown()
  time_use.end()
  assert [reading.doing for reading in told] == [island.words(lease.task), '']
  numbers = {'step': 4, 'loss': 2.5, 'tokens_per_s': None, 'tasks_done': 0, 'compilations': 2}
  assert told[0].numbers == numbers and told[1].numbers['tasks_done'] == 1
  assert told[1].seconds['train']['other'] > 0
