"""How every role of an islands run works: take a task, hold its lease, record what it made, take the next.

Roles meet in the database and in storage only. One may be killed at any point: its task goes to another when the lease
runs out, at once where it could still say so (SIGTERM).
"""

import contextlib
import itertools
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dipaco_jax import islands as islands_lib
from dipaco_jax import registry as registry_lib
from dipaco_jax.islands import Islands
from dipaco_jax.registry import Fact, Task

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.5  # of a role that finds nothing to do
FAILURES = 3  # one after another: this role is not fit to go on

# (islands, task, lease) -> its facts; None: it was released, or waits for others
Perform = Callable[[Islands, Task, 'Lease'], Sequence[Fact] | None]


class Lease:
  """A task that is ours for as long as we are alive and heard; renewed by a thread."""

  def __init__(self, islands: Islands, task: Task):
    self.islands, self.task = islands, task
    self.about: dict[str, Any] = {'task': f'{task.kind} {task.key} {task.number}'.replace('  ', ' ')}
    self.started = time.time()
    self._lost: BaseException | None = None
    self._progress: dict[str, Any] | None = None
    self._over, self._news = threading.Event(), threading.Event()
    self._thread = threading.Thread(target=self._renew, daemon=True)
    self._thread.start()

  def keep(self, progress: dict[str, Any]):
    """What another owner goes on from, if we die after this."""
    self._progress = progress
    self._news.set()

  def check(self):
    """Raises registry.Lost where the task is another's by now."""
    if self._lost:
      raise self._lost

  def close(self):
    self._over.set()
    self._news.set()
    self._thread.join()

  def _renew(self):
    registry = self.islands.registry
    while not self._over.is_set():
      self._news.wait(registry.lease_s / 4)
      self._news.clear()
      if not self._over.is_set():
        try:
          registry.heartbeat(self.task, self._progress)
        except Exception as e:  # also a database that is away for longer than we wait
          self._lost = e
          return


@contextlib.contextmanager
def held(islands: Islands, task: Task) -> Iterator[Lease]:
  """A task's lease. SIGTERM and SIGINT give it back at once, and end the process."""
  lease = Lease(islands, task)

  def stop(number, frame):
    # From another thread: this one may be inside a transaction.
    thread = threading.Thread(target=islands.registry.release, args=(task,))
    thread.start()
    thread.join(2)
    os._exit(128 + number)

  before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield lease
  finally:
    lease.close()
    for number, handler in before.items():
      signal.signal(number, handler)


def serve(islands: Islands, role: str, kinds: Sequence[str], perform: Perform, keys: Sequence[str] | None = None):
  """Does tasks until the run is finished."""
  idle, attempts, failures = 0, 0, 0
  for count in itertools.count():
    islands.registry.beat(islands.name, role, {'task': '', 'tasks_done': count - idle, **moved(islands)})
    task = islands.registry.claim(islands.name, kinds, keys)
    if task is None:
      if islands_lib.is_finished(islands):
        return
      islands_lib.advance(islands)
      idle += 1
      attempts += 1
      wait_s = min(LONGEST_WAIT_S, SHORTEST_WAIT_S * 1.5**attempts)
      time.sleep(wait_s * random.uniform(0.7, 1.3))
      continue
    attempts = 0
    with held(islands, task) as lease:
      error = once(islands, role, task, lease, perform)
    failures = failures + 1 if error else 0
    if error and (failures == FAILURES or isinstance(error, ValueError)):
      raise error


def once(islands: Islands, role: str, task: Task, lease: Lease, perform: Perform) -> Exception | None:
  """One task: its facts are committed, and what they make possible is scheduled. Returns what went wrong."""
  registry = islands.registry
  registry.beat(islands.name, role, lease.about)
  try:
    facts = perform(islands, task, lease)
    if facts is None:
      return None
    registry.complete(task, facts)
  except registry_lib.Lost:
    logging.warning('%s went to another while we were at it', lease.about['task'])
    return None
  except Exception as e:
    words = f'{type(e).__name__}: {e}'.split('\n')[0]
    logging.warning('%s failed: %s', lease.about['task'], words)
    traceback.print_exc(file=sys.stderr)
    registry.release(task, error=words)  # for others, with what went wrong
    time.sleep(random.uniform(0.5, 1.5))
    return e
  islands_lib.schedule(islands, facts)
  return None


def moved(islands: Islands) -> dict[str, int]:
  """Bytes that this process has read from and written to storage."""
  return {'bytes_in': islands.storage.bytes_in, 'bytes_out': islands.storage.bytes_out}
