"""The registry under many processes at once, some of which die, and with many rows."""

import collections
import json
import signal
import subprocess
import sys
import time

import pytest
import registries
import sqlalchemy as sa
from registries import train
from repository import HELPERS

from dipaco_jax.registry import database, registry_schema
from dipaco_jax.registry.registry import Registry

server, url, connect, db = registries.server, registries.url, registries.connect, registries.db


def claimants(url: str, num: int) -> list[subprocess.Popen]:
  """Processes that have just begun to claim."""
  command = [sys.executable, str(HELPERS / 'claimant.py'), url]
  made = [
    subprocess.Popen([*command, f'claimant {i}'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for i in range(num)
  ]
  for each in made:
    assert each.stdout.readline() == 'here\n'
  for each in made:
    each.stdin.write('\n')
    each.stdin.flush()
  return made


def what_they_did(made: list[subprocess.Popen]) -> list[list[str]]:
  """The keys of the tasks that each has completed."""
  done = [json.loads(each.communicate(timeout=60)[0]) for each in made]
  assert not any(each.returncode for each in made)
  return done


def test_3_processes_claim_100_tasks_each_once(url, db):
  db.add_tasks(train(*((str(i), 0) for i in range(100))))
  done = what_they_did(claimants(url, 3))
  counts = collections.Counter(key for keys in done for key in keys)
  assert len(counts) == 100 and set(counts.values()) == {1}
  assert all(done)  # nobody starves
  assert {row['attempts'] for row in db.tasks()} == {1} and len(db.facts('checkpoint')) == 100


@pytest.mark.slow
def test_claims_survive_a_postgresql_that_is_killed(server):
  url = server.new_database()
  db = Registry(url)
  db.add_tasks(train(*((str(i), 0) for i in range(1000))))
  made = claimants(url, 2)
  for _ in range(2):
    time.sleep(0.3)
    server.kill()
    server.start()
  assert 0 < db.counts()['train']['done'] < 1000  # it was killed amid them; and this registry is connected again
  what_they_did(made)
  assert db.counts() == {'train': {'done': 1000}} and len(db.facts('checkpoint')) == 1000
  db.close()


HOLD = """
import sys, time, sqlalchemy as sa
from dipaco_jax.registry import database, registry_schema
with database.connect(sys.argv[1]).begin() as connection:
  connection.execute(sa.update(registry_schema.TASKS).values(owner='dead'))
  print('held', flush=True)
  time.sleep(60)
"""


@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_dies_or_stops_in_a_transaction_holds_nobody_up(url, db, how):
  if how == signal.SIGSTOP and url.startswith('sqlite'):
    pytest.skip('whoever is stopped in a SQLite transaction stops all who write')
  db.add_tasks(train(('0', 0)))
  holder = subprocess.Popen([sys.executable, '-c', HOLD, url], stdout=subprocess.PIPE)
  assert holder.stdout.readline() == b'held\n'
  holder.send_signal(how)
  started = time.monotonic()
  while not (task := db.claim('a', ['train'])) and time.monotonic() < started + 20:
    time.sleep(0.05)
  assert task and time.monotonic() - started < (2 if how == signal.SIGKILL else database.IDLE_S + 3)
  holder.kill()
  holder.communicate()


@pytest.mark.slow
def test_a_claim_costs_the_same_however_much_is_done(url, db):
  def cost(first: int, last: int) -> float:
    db.add_tasks(train(*((str(i), 0) for i in range(first, last))))
    times = []
    for _ in range(40):
      before = time.perf_counter()
      task = db.claim('a', ['train', 'reroute'])
      times.append(time.perf_counter() - before)
      db.complete(task, [])
    engine = database.connect(url)
    with engine.begin() as connection:
      connection.execute(sa.update(registry_schema.TASKS).values(state='done', lease=None))
    engine.dispose()
    return min(times)  # of what else the machine does, the least

  few = cost(0, 64)
  cost(64, 20_000)
  assert cost(20_000, 20_064) < 4 * few + 0.001
