"""Connections to PostgreSQL: few while leases are held, none that is not needed, and waiting where it has none left."""

import threading
import time
import types

import psycopg
import pytest
import registries
import slow
import sqlalchemy as sa
from registries import train

from dipaco_jax.config import settings
from dipaco_jax.islands import claims, role_loop
from dipaco_jax.islands.claims import Claims
from dipaco_jax.islands.island import Island
from dipaco_jax.registry import conversations
from dipaco_jax.registry.registry import NewTask, Registry
from dipaco_jax.storage import object_store

server = registries.server
OURS = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"


class Watcher:
  """A connection of its own, which counts the others."""

  def __init__(self, server):
    self._connection = psycopg.connect(server.url('postgres'), autocommit=True)

  def count(self) -> int:
    return self._connection.execute(OURS).fetchone()[0]

  def none_is_left(self, within_s: float):
    end = time.monotonic() + within_s
    while self.count():
      assert time.monotonic() < end, f'{self.count()} connections'
      time.sleep(0.01)

  def most(self, seconds: float) -> list[int]:
    found, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
      found.append(self.count())
      time.sleep(0.01)
    return found


@pytest.fixture
def watcher(server):
  made = Watcher(server)
  made.none_is_left(5)
  yield made
  made._connection.close()


def island(url: str, folder, name: str, lease_s: float) -> Island:
  run = types.SimpleNamespace(settings=settings.Settings())
  return Island(run, Registry(url, lease_s), object_store.open_storage(str(folder)), name)


@pytest.mark.slow
def test_leases_are_held_without_connections(server, watcher, tmp_path):
  """Of 30 workers that each hold a lease and renew it every second."""
  url, lease_s, workers = server.new_database(), 3, 30
  made = [island(url, tmp_path, f'worker-{i}', lease_s) for i in range(workers)]
  made[0].registry.add_tasks(train(*((str(i), 0) for i in range(workers))))
  held = [Claims(each, 'worker', ['train']) for each in made]
  leases = [each.next() for each in held]
  try:
    assert all(leases)
    watcher.none_is_left(3)
    found = sorted(watcher.most(2 * lease_s))
    print(f'{found[-1]} connections at most, {sum(found) / len(found):.1f} on average')
    assert found[-1] > 0, 'nobody has renewed anything'
    # After the machine has stood still for a moment many renew at once, for a moment.
    assert found[len(found) * 9 // 10] <= workers / 10 and sum(found) / len(found) < workers / 10
    for lease in leases:
      lease.check()
  finally:  # or they would ask the server of later tests, and of none
    for each, lease in zip(held, leases, strict=True):
      each.drop(lease)
      each.island.registry.close()
  assert all(row['attempts'] == 1 and row['lease_left_s'] > 0 for row in Registry(url).tasks('running'))


def test_a_lone_call_holds_its_connection_for_a_moment_and_a_claim_of_nothing_not_at_all(server, watcher):
  db = Registry(server.new_database())
  db.counts()
  assert watcher.count() == 1
  watcher.none_is_left(conversations.LINGER_S + 2)
  assert db.claim('a', ['train']) is None
  watcher.none_is_left(conversations.LINGER_S / 2)
  db.add_tasks(train(('0', 0)))
  watcher.none_is_left(conversations.LINGER_S + 2)
  made: list[object] = []
  sa.event.listen(sa.pool.Pool, 'connect', lambda *_: made.append(1))
  task = db.claim('a', ['train'])
  db.heartbeat(task)
  assert len(made) == 1, 'whoever has claimed a task goes on to read what it needs'
  db.close()


@pytest.fixture(params=slow.but(['postgres', 'plain'], 'plain'))
def full(request, server):
  """A URL of a server that has no connection left, and what frees them; a plain user leaves three to superusers."""
  url = server.new_database()
  Registry(url).close()
  if request.param == 'plain':
    schema = url.split('%3D')[-1]
    with psycopg.connect(server.url('postgres'), autocommit=True) as connection:
      connection.execute('DO $$ BEGIN CREATE ROLE plain LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$')
      connection.execute(f'GRANT ALL ON SCHEMA {schema} TO plain; GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO plain')
      connection.execute(f'GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO plain')
    url = url.replace('postgres@', 'plain@')
  taken: list[psycopg.Connection] = []

  def fill() -> str:
    """Takes all connections; returns the server's words."""
    while True:
      try:
        taken.append(psycopg.connect(url))
      except psycopg.OperationalError as e:
        return str(e)

  def free():
    while taken:
      taken.pop().close()

  yield types.SimpleNamespace(url=url, fill=fill, free=free)
  free()


def test_a_full_database_is_waited_for(full, caplog):
  db = Registry(full.url)
  db.add_tasks(train(('0', 0)))
  time.sleep(conversations.LINGER_S + 0.5)
  words = full.fill()
  assert 'too many clients' in words or 'remaining connection slots' in words
  threading.Timer(1.5, full.free).start()
  began = time.monotonic()
  assert db.claim('a', ['train']).key == '0' and time.monotonic() - began > 1
  assert 2 <= sum('the registry does not answer' in line for line in caplog.messages) <= 10
  db.close()


@pytest.mark.slow
def test_a_lease_outlives_a_database_that_is_full(full, tmp_path, caplog):
  """Connections are gone for longer than the time between renewals; attempts are a tenth of a lease apart."""
  made = island(full.url, tmp_path, 'worker-0', lease_s=10)
  made.registry.add_tasks(train(('0', 0)))
  found = Claims(made, 'worker', ['train'])
  lease = found.next()
  time.sleep(conversations.LINGER_S + 0.5)
  full.fill()
  end, waits = time.monotonic() + 9, []
  while len(waits) < 6:
    assert time.monotonic() < end
    time.sleep(0.05)
    waits = [float(line.split()[-2]) for line in caplog.messages if 'the registry does not answer' in line]
  full.free()
  time.sleep(1.5)
  lease.check()
  [row] = made.registry.tasks('running')
  assert max(waits) <= 1 and row['attempts'] == 1 and row['lease_left_s'] > 5, 'it was renewed soon after'
  found.drop(lease)
  made.registry.close()


def test_a_server_that_a_failover_has_made_read_only_is_left_and_waited_for(server):
  db = Registry(server.new_database(), patience_s=20)
  db.add_tasks(train(('0', 0)))
  time.sleep(conversations.LINGER_S + 0.5)
  with psycopg.connect(server.url('postgres'), autocommit=True) as connection:
    connection.execute('ALTER DATABASE postgres SET default_transaction_read_only = on')  # of those who connect now
    timer = threading.Timer(1, connection.execute, ['ALTER DATABASE postgres RESET default_transaction_read_only'])
    timer.start()
    try:
      with db.conversation():  # which would keep its connection
        assert db.claim('a', ['train']).key == '0'
    finally:
      timer.join()
  db.close()


def test_a_process_whose_threads_hold_all_its_connections_waits_for_one(tmp_path):
  db = Registry(f'sqlite:///{tmp_path}/registry.db')
  pool = db._db._engine.pool
  pool._timeout = 0.1
  taken = [pool.connect() for _ in range(9)]
  timer = threading.Timer(1, lambda: [each.close() for each in taken])
  timer.start()
  assert db.counts() == {}
  timer.join()
  db.close()


def test_who_finds_no_next_task_asks_ever_more_rarely(tmp_path, monkeypatch):
  made = island(f'sqlite:///{tmp_path}/registry.db', tmp_path, 'worker-0', 30)
  made.registry.add_tasks([NewTask('train', '0', 0)])
  found = Claims(made, 'worker', ['train'], fetches={'train': lambda *_: None})
  lease = found.claim()
  found.fetch_s, found.work_s, now, asked = 1.0, 1.0, 0.0, []
  monkeypatch.setattr(claims, 'time', types.SimpleNamespace(monotonic=lambda: now))
  for now in range(100):
    before = found.ahead
    lease.ahead(1.0)
    if found.ahead is not before:
      assert found.ahead.result() is None
      asked.append(now)
  assert len(asked) < 20 and asked[-1] - asked[-2] == claims.ASK_LATER_S
  found.drop(lease)
  made.registry.close()


def test_an_idle_role_waits_no_longer_than_a_third_of_a_lease_however_long(tmp_path, monkeypatch):
  made = island(f'sqlite:///{tmp_path}/registry.db', tmp_path, 'worker-0', 6)
  role, slept = role_loop.Role(Claims(made, 'worker', ['train']), lambda *_: None), []
  clock = types.SimpleNamespace(sleep=slept.append, monotonic=lambda: 1 + sum(slept))
  monkeypatch.setattr(role_loop, 'time', clock)
  for _ in range(500):
    role.wait()
  assert slept[0] < 0.2 and 2 < max(slept) < 2.6 and min(slept[-100:]) > 1.4
  made.registry.close()
