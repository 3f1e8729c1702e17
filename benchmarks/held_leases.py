"""Many workers that hold leases: the real loop of a role, claims, leases and registry, and tasks that only last.

Each worker is a thread with a registry of its own, and so with connections of its own, as the process that it stands
for. They begin within RAMP_S. Tasks last for 0.5 to 1.5 times `task_s`.
"""

import contextlib
import logging
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from dipaco_jax.config import settings
from dipaco_jax.islands import role_loop
from dipaco_jax.islands.claims import Claims
from dipaco_jax.islands.island import Island
from dipaco_jax.registry import database, registry_schema
from dipaco_jax.registry.registry import Fact, Registry
from dipaco_jax.storage import object_store

PROCESSES = 4  # that share the workers
RAMP_S = 60
MEASURED = 'claim', 'heartbeat', 'complete'


class ThreadRole(role_loop.Role):
  """A role in a thread, which gets no signals."""

  @contextlib.contextmanager
  def handing_over(self) -> Iterator[None]:
    yield


class Worker:
  """One worker: a thread that works until `over`, and notes the seconds of each call of its registry."""

  def __init__(
    self, url: str, lease_s: float, folder: str, name: str, workers: int, task_s: float, over: threading.Event, holds
  ):  # fmt: skip
    self.url, self.lease_s, self.folder, self.name, self.workers = url, lease_s, folder, name, workers
    self.task_s, self.over, self.holds = task_s, over, holds
    self.seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in MEASURED}
    self.error = ''
    self.thread = threading.Thread(target=self.work, daemon=True)
    self.thread.start()

  def work(self):
    """Serves as a worker; what ends it before its time is an error."""
    try:
      self.over.wait(random.uniform(0, RAMP_S))
      registry = Registry(self.url, self.lease_s)
      for name in MEASURED:
        setattr(registry, name, self.timed(name, getattr(registry, name)))
      run: Any = types.SimpleNamespace(settings=settings.Settings(grid=(('a', self.workers),)))
      island = Island(run, registry, object_store.open_storage(self.folder), self.name)
      claims = Claims(island, 'worker', ['train'], holder=self.name)
      with contextlib.closing(registry):
        ThreadRole(claims, self.perform).serve()
    except Exception as e:
      self.error = f'{type(e).__name__}: {e}'.split('\n')[0]

  def timed(self, name: str, call):
    def measured(*args):
      began = time.monotonic()
      found = call(*args)
      self.seconds[name].append((began, time.monotonic() - began))
      return found

    return measured

  def perform(self, island, task, lease):
    """Holds the lease for as long as the task lasts."""
    if len(self.seconds['claim']) == 1:
      self.holds.release()
    if self.over.wait(self.task_s * random.uniform(0.5, 1.5)):
      raise SystemExit  # the measurement is over, and the thread with it
    lease.check()
    return lambda: [Fact('evaluation', task.key, task.number, '', '', {})]


class Repeated(logging.Filter):
  """Counts, instead of showing, the warnings that a call is tried again."""

  calls = 0

  def filter(self, record: logging.LogRecord) -> bool:
    is_repeated = 'the registry does not answer' in record.getMessage()
    self.calls += is_repeated
    return not is_repeated


def share(url: str, lease_s: float, first: int, count: int, workers: int, task_s: float, holds, over, results):
  """Runs `count` of all workers in this process until `over`; sends what they have measured."""
  ended, repeated = threading.Event(), Repeated()
  logging.getLogger().addFilter(repeated)
  with tempfile.TemporaryDirectory() as folder:
    mine = [Worker(url, lease_s, folder, f'worker-{first + i}', workers, task_s, ended, holds) for i in range(count)]
    over.wait()
    errors = [worker.error for worker in mine if worker.error]
    seconds = {name: [found for worker in mine for found in worker.seconds[name]] for name in MEASURED}
    results.put((seconds, errors, repeated.calls))
    ended.set()
    for worker in mine:
      worker.thread.join()


def connections(url: str, over: threading.Event, found: list[int]):
  """Notes how many connections PostgreSQL has, our own not counted, several times a second."""
  engine = database.connect(url)
  query = sa.text("SELECT count(*) - 1 FROM pg_stat_activity WHERE backend_type = 'client backend'")
  with engine.connect() as connection:
    while not over.wait(0.2):
      found.append(connection.scalar(query))
      connection.rollback()
  engine.dispose()


def measure(url: str, workers: int, seconds: float, task_s: float, lease_s: float) -> dict:
  """Runs the workers, for `seconds` after each had its first task; tells what the registry has done meanwhile."""
  spawn = multiprocessing.get_context('spawn')
  holds, over, results, sampled = spawn.Semaphore(0), spawn.Event(), spawn.Queue(), threading.Event()
  shares = [range(workers)[i::PROCESSES] for i in range(PROCESSES)]
  processes = [
    spawn.Process(
      target=share, args=(url, lease_s, i * workers, len(of), workers, task_s, holds, over, results), daemon=True
    )
    for i, of in enumerate(shares)
  ]
  peak: list[int] = [0]
  if url.startswith('postgresql'):
    threading.Thread(target=connections, args=(url, sampled, peak), daemon=True).start()
  for process in processes:
    process.start()
  began, loads = time.monotonic(), []
  for _ in range(workers):
    holds.acquire()
  all_hold, end = time.monotonic(), time.monotonic() + seconds
  while time.monotonic() < end:
    time.sleep(5)
    loads.append(os.getloadavg()[0])
  measured_s = time.monotonic() - all_hold
  over.set()
  told = [results.get(timeout=120) for _ in processes]
  sampled.set()
  settings_of_run = {'workers': workers, 'lease_s': lease_s, 'task_s': task_s}
  times = {'seconds': measured_s, 'until_all_hold_s': all_hold - began}
  found = {'connections_peak': max(peak), 'connections_median': statistics.median(peak)}
  machine = {'cores': len(os.sched_getaffinity(0)), 'load': statistics.mean(loads)}
  return settings_of_run | times | summary(url, told, all_hold, measured_s) | found | machine


def summary(url: str, told: list[tuple], since: float, measured_s: float) -> dict:
  """Returns rates and 99th percentiles of calls that began after `since`, and what was lost from the very beginning."""
  found = {}
  for name in MEASURED:
    seconds = [s for calls, _, _ in told for began, s in calls[name] if began >= since]
    found[f'{name}s_per_s'] = len(seconds) / measured_s
    found |= {f'{name}_p99_s': statistics.quantiles(seconds, n=100)[98], f'{name}_max_s': max(seconds)}
  errors = [error for _, of_workers, _ in told for error in of_workers]
  for error in errors[:5]:
    logging.error('%s', error)
  return found | {
    'leases_lost': claimed_twice(url),
    'workers_ended': len(errors),
    'repeated_calls': sum(repeated for _, _, repeated in told),
  }


def claimed_twice(url: str) -> int:
  """Counts claims of tasks that another had claimed before."""
  tasks, db = registry_schema.TASKS, database.Database(url, patience_s=60)
  [row] = db.rows(sa.select(sa.func.sum(tasks.c.attempts - 1).label('lost')).where(tasks.c.attempts > 1))
  db.close()
  return row['lost'] or 0
