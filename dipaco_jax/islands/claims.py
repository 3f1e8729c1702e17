"""The tasks that a role holds: which it claims next, and when.

What a task reads is fetched in a thread. Near the end of a task that reports its progress, the next one is claimed and
fetched.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from types import MappingProxyType
from typing import Any

from dipaco_jax.islands.backup import Backup
from dipaco_jax.islands.interval import Interval
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.registry import Task

ASK_AGAIN_S = 1.0  # for a next task, where there was none
MARGIN = 1.5  # the next task is claimed when the rest of this one will take so many times as long as its fetch

Fetch = Callable[[Island, Task], Any]  # what a task reads, on the host; also while the task before is at work


class Claims:
  """A role's claims, each with its lease: the task at work, the next one, and the last until it is published.

  Args:
    kinds: of tasks that the role does.
    keys: of tasks that it takes before all others, if any.
    fetches: how to fetch what a task reads, by its kind.
    pool: where a backup finds its tasks instead.
  """

  def __init__(
    self,
    island: Island,
    role: str,
    kinds: Sequence[str],
    keys: Sequence[str] | None = None,
    fetches: Mapping[str, Fetch] = MappingProxyType({}),
    pool: Backup | None = None,
  ):
    self.island, self.role, self.kinds, self.keys = island, role, kinds, keys
    self.fetches, self.pool = fetches, pool
    self.leases: dict[int, Lease] = {}  # by task
    self.claiming = threading.Lock()  # held from a claim until its lease is in `leases`
    self.fetcher = futures.ThreadPoolExecutor(1)
    self.ahead: futures.Future[Lease | None] | None = None  # the claim of the next task
    self.asking = Interval(ASK_AGAIN_S)
    # How long the last task that is fetched took: to fetch, and then; unknown at first: nothing is claimed ahead.
    self.fetch_s, self.work_s = 0.0, math.inf
    self.last_busy = time.monotonic()
    self.postponed = ''  # a kind of task that has to wait, maybe for a later one that only this role can do

  def next(self) -> Lease | None:
    """Returns the task that was claimed ahead, or claims one; None where there is none."""
    ahead, self.ahead = self.ahead, None
    lease = (ahead.result() if ahead else None) or self.claim()
    if lease:
      self.last_busy = time.monotonic()
    return lease

  def claim(self) -> Lease | None:
    """Claims a task of our own keys; of others' after a lease without any of ours, as their owner may be gone."""
    if self.pool:
      return self.hold(self.pool.next)
    is_patient = time.monotonic() - self.last_busy < self.island.registry.lease_s
    kinds = [kind for kind in self.kinds if kind != self.postponed] or self.kinds
    lease = self.claim_of(kinds, self.keys if is_patient else None)
    if not lease:
      self.postponed = ''
    return lease

  def claim_of(self, kinds: Sequence[str], keys: Sequence[str] | None = None) -> Lease | None:
    """Claims a task of these kinds and keys."""
    return self.hold(lambda: self.island.registry.claim(self.island.name, kinds, keys))

  def hold(self, claim: Callable[[], Task | None]) -> Lease | None:
    """Claims a task, takes its lease, and begins to fetch what it reads."""
    with self.claiming:
      task = claim()
      if not task:
        return None
      lease = self.leases[task.id] = Lease(self.island, self.role, task)
    if task.kind in self.fetches:
      lease.fetch, lease.ahead = self.fetcher.submit(self.fetch, task), self.claim_ahead
    return lease

  def fetch(self, task: Task) -> Any:
    """Fetches what a task reads, and notes how long that took."""
    began = time.monotonic()
    found = self.fetches[task.kind](self.island, task)
    self.fetch_s = time.monotonic() - began
    return found

  def claim_ahead(self, share: float):
    """Claims the next task where the rest of this one, `share` of it, lasts no longer than what the next waits for.

    No earlier: an idle worker could begin it sooner.
    """
    if self.pool or share * self.work_s > MARGIN * self.fetch_s:
      return
    if (self.ahead is None or (self.ahead.done() and self.ahead.result() is None)) and self.asking.is_due():
      self.ahead = self.fetcher.submit(self.claim_of, [*self.fetches])

  def drop(self, lease: Lease):
    """Ends a lease; the task is done, released or lost."""
    lease.close()
    self.leases.pop(lease.task.id, None)

  def release_all(self):
    """Gives back all tasks, at once."""
    for lease in list(self.leases.values()):
      lease.release()
