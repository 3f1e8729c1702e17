"""How many tasks a second a registry hands out and takes back, and how many workers' leases it holds.

    python benchmarks/registry.py [--url=postgresql://user@host/database --claimants=64 --tasks=2000 --paths=32768]
    python benchmarks/registry.py --url=postgresql://user@host/database --workers=1000 [--minutes=4]

A phase of every path is done and the next is ready; some tasks of it are claimed and completed, each step a transaction
that is on the disk before it ends. Without `--url`, in a SQLite file in a temporary folder. With `--workers`, so many
workers at once do tasks that take so long and train nothing (held_leases.py). Prints a table and, as the last line, one
JSON object.
"""

import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time

import held_leases
import sqlalchemy as sa
from absl import app, flags

from dipaco_jax.registry import database, registry, registry_schema

URL = flags.DEFINE_string('url', '', 'of an empty SQLite or PostgreSQL database')
CLAIMANTS = flags.DEFINE_integer('claimants', 8, 'processes')
TASKS = flags.DEFINE_integer('tasks', 2000, 'claimed and completed by all of them together')
WORKERS = flags.DEFINE_integer('workers', 0, 'that hold leases; 0: measure claims and completions alone')
MINUTES = flags.DEFINE_float('minutes', 4, 'for which the workers hold leases, once each has one')
TASK_S = flags.DEFINE_float('task_s', 60, "of the workers' tasks, on average")
LEASE_S = flags.DEFINE_float('lease_s', 30, 'of the workers')
PATHS = flags.DEFINE_integer('paths', 4096, 'P, with a task of a phase each')


def checkpoint(path: str, phase: int) -> registry.Fact:
  """What a worker publishes of a phase: an object per level, and the inner state."""
  folder, sha256 = f'checkpoints/{phase}/{path}', f'{hash((path, phase)):064x}'
  meta = {name: [f'{folder}/{name}', sha256] for name in ('left', 'right', 'ends', 'inner')}
  return registry.Fact('checkpoint', path, phase, folder, sha256, meta)


def fill(url: str):
  """Phase 0 of all paths is done, phase 1 ready."""
  db = registry.Registry(url)
  db.add_tasks(registry.NewTask('train', str(path), phase) for phase in (0, 1) for path in range(PATHS.value))
  db.close()
  engine = database.connect(url)
  with engine.begin() as connection:
    tasks = registry_schema.TASKS
    connection.execute(sa.update(tasks).where(tasks.c.number == 0).values(state='done', lease=None))
    rows = [checkpoint(str(path), 0)._asdict() | {'scheduled': True} for path in range(PATHS.value)]
    connection.execute(sa.insert(registry_schema.FACTS), [row | {'meta': json.dumps(row['meta'])} for row in rows])
  engine.dispose()


def work(url: str, index: int, tasks: int, start, results):
  """Claims and completes `tasks`; sends when it began and ended, and the seconds of every claim and completion."""
  db = registry.Registry(url)
  claims: list[float] = []
  completions: list[float] = []

  def one():
    times = [time.perf_counter()]
    task = db.claim(f'claimant {index}', ['train'])
    times.append(time.perf_counter())
    assert task
    db.complete(task, [checkpoint(task.key, task.number)])
    return times[1] - times[0], time.perf_counter() - times[1]

  one()  # connects, and compiles the statements
  start.wait()
  began = time.monotonic()
  for _ in range(tasks):
    for seconds, found in zip(one(), (claims, completions), strict=True):
      found.append(seconds)
  results.put((began, time.monotonic(), claims, completions))
  db.close()


def measure(url: str) -> dict:
  fill(url)
  spawn = multiprocessing.get_context('spawn')
  start, results, each = spawn.Barrier(CLAIMANTS.value), spawn.Queue(), TASKS.value // CLAIMANTS.value
  processes = [
    spawn.Process(target=work, args=(url, i, each, start, results), daemon=True) for i in range(CLAIMANTS.value)
  ]
  for process in processes:
    process.start()
  began, ended, claims, completions = zip(*(results.get() for _ in processes), strict=True)
  for process in processes:
    process.join()
  claim_s, completion_s = (list(itertools.chain(*each)) for each in (claims, completions))
  return {
    'tasks_per_s': len(claim_s) / (max(ended) - min(began)),
    'claim_median_s': statistics.median(claim_s),
    'claim_p99_s': statistics.quantiles(claim_s, n=100)[98],
    'claim_max_s': max(claim_s),
    'complete_p99_s': statistics.quantiles(completion_s, n=100)[98],
    'complete_max_s': max(completion_s),
    'tasks': len(claim_s),
    'claimants': CLAIMANTS.value,
    'paths': PATHS.value,
    'cores': len(os.sched_getaffinity(0)),
    'load': os.getloadavg()[0],
  }


def main(_):
  with tempfile.TemporaryDirectory() as folder:
    url = URL.value or f'sqlite:///{folder}/registry.db'
    if WORKERS.value:
      fill(url)
      what, results = 'leases', held_leases.measure(url, WORKERS.value, MINUTES.value * 60, TASK_S.value, LEASE_S.value)
    else:
      what, results = 'claim and completion, each on the disk before it ends', measure(url)
  print(f'{URL.value or "SQLite"}: {what}')
  for name, value in results.items():
    print(f'{name:20}{value:>14,.4g}')
  print(json.dumps(results))


if __name__ == '__main__':
  app.run(main)
