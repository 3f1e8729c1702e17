"""A lease on a task, renewed in the background while the task is running [3]."""

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

from dipaco_jax.islands import screening_facts, suspensions
from dipaco_jax.islands.island import Island
from dipaco_jax.processes import time_use
from dipaco_jax.registry.registry import Task

SIGN_OF_LIFE_S = 20.0
AWARE, SHORTEST_S = (
  0.3,
  1.0,
)  # share of outer.grace_s after which a worker of a run with a quorum asks; at least so long
RENEWED = 0.4  # share of a lease after which it is renewed; the rest is for a busy or unreachable database
OWNER = 'owner'  # entry of a sign of life
COPY = 'copy of '  # before a task's words


class Lease:
  """A task that this process owns while its heartbeats arrive; a thread sends them.

  The lease on a copy, a task that another process owns, is only watched: it is lost when that task no longer runs.
  """

  def __init__(self, island: Island, role: str, task: Task):
    self.island = island
    self.role = role
    self.task = task
    self.is_copy = task.owner != island.name
    self.about: dict[str, Any] = {'task': COPY * self.is_copy + island.words(task)}
    self.fetch: futures.Future | None = None
    self.ahead: Callable[[float], None] = lambda share: None  # called with the share of the task that is left
    self.observe: Callable[[], dict[str, Any]] = dict  # returns how far the task is, where it does not note that itself
    self.began: float | None = None  # when the fetch had ended
    self.is_at_work = False  # until then, `beat` still shows the task before
    self._lost: BaseException | None = None
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._renew, daemon=True)
    self._thread.start()

  def check(self):
    """Raises registry.Lost if another process owns the task, Diverged if the run has ended, Suspended."""
    if self._lost:
      raise self._lost

  def fetched(self) -> Any:
    """Returns the result of the task's fetch, once only, to free its memory. Raises the error of the fetch."""
    fetch, self.fetch = self.fetch, None
    assert fetch
    with time_use.doing(time_use.STORAGE, first='fetch'):
      inputs = fetch.result()
    self.began = time.monotonic()
    return inputs

  def release(self, error: str = ''):
    """Gives the task back at once."""
    if not self.is_copy:
      self.island.registry.release(self.task, error=error)

  def renew(self):
    """Renews the lease; raises registry.Lost, Diverged if the run is over, and Suspended."""
    registry = self.island.registry
    diverged = registry.watch(self.task) if self.is_copy else registry.heartbeat(self.task)
    if diverged > self.island.resumed:
      screening_facts.heed(self.island)
    if registry.suspended:
      suspensions.heed(self.island)

  def describe(self) -> dict[str, Any]:
    """Returns what this process tells of the task now."""
    observed: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # files that it looks at may go: no lease is lost for that
      observed = self.observe()
    return self.about | observed

  def close(self):
    """Stops renewing the lease."""
    self._over.set()
    self._thread.join()

  def _renew(self):
    longest_s = min(RENEWED * self.island.registry.lease_s, SIGN_OF_LIFE_S, longest_unaware_s(self.island))
    while not self._over.wait(longest_s * random.uniform(0.7, 1)):  # or processes that began together would come so
      try:
        self._converse()
      except Exception as e:  # including a database that is away for too long
        self._lost = e
        return

  def _converse(self):
    """Renews the lease and gives a sign of life, by one connection."""
    registry = self.island.registry
    with registry.conversation(is_urgent=True):
      self.renew()
      if self.is_at_work:
        registry.beat(self.island.name, self.role, self.describe() | tell(self.island))


def longest_unaware_s(island: Island) -> float:
  """Returns the seconds within which a worker has to learn that its path is late (quorum.py)."""
  outer = island.run.settings.outer
  return max(SHORTEST_S, AWARE * outer.grace_s) if outer.quorum < 1 else math.inf


def tell(island: Island) -> dict[str, Any]:
  """Returns what a process tells with each sign of life: whose worker it is, if text stays with owners; its traffic."""
  return ({OWNER: island.owner} if island.owner else {}) | moved(island)


def moved(island: Island) -> dict[str, float]:
  """Returns the bytes that this process has read from and written to storage, and for how many seconds it did."""
  storage = island.storage
  seconds = {'reading_s': storage.reading.read(), 'writing_s': storage.writing.read()}
  return {'bytes_in': storage.bytes_in, 'bytes_out': storage.bytes_out} | seconds
