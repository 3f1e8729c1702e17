"""The tasks that a role holds: which it claims next, and when; and the backup pool, another source of tasks [3].

What a task reads is fetched in a thread. Near the end of a task that reports its progress, the next one is claimed and
fetched.

Backup workers have low priority: they claim abandoned tasks, and copy the tasks of stragglers. A copy is trained with
the straggler's own fence, and holds no lease. The first to complete the task counts; the other finds the same facts in
the registry, or is rejected.
"""

import dataclasses
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

from dipaco_jax.islands import audit_facts, members, screening_facts, suspensions
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.lease import COPY, Lease
from dipaco_jax.registry.registry import Row, Task
from dipaco_jax.registry.registry_schema import LONGEST_LEASES

# For a next task, where there was none, after this share of a task's time; and where there was none for long.
ASK_AGAIN = 0.1
LONGEST_ASK_AGAIN_S = 1.0
ASK_LATER_S = 10.0
MARGIN = 1.5  # claim the next task when the rest of this one takes this multiple of the time to fetch
LOOK_S = 10.0  # between looks of a backup; a task that is ready at two in a row counts as abandoned
LOOKED_AT = 1000  # ready tasks of a kind
STRAGGLES = 2.0  # a straggler has run for more than this multiple of the median of RECENT tasks
RECENT = 32

Fetch = Callable[[Island, Task], Any]  # what a task reads, on the host; also while the task before is running


class Interval:
  """Says when something is due: at once, and again `seconds` after it was last due."""

  def __init__(self, seconds: float):
    self.seconds, self.last = seconds, -math.inf

  def is_due(self) -> bool:
    """Returns whether it is due now; if so, the interval begins again."""
    now = time.monotonic()
    if now - self.last < self.seconds:
      return False
    self.last = now
    return True


class Backup:
  """The source of one backup worker's tasks."""

  def __init__(self, island: Island, kinds: tuple[str, ...], holder: str = ''):
    self.island = island
    self.kinds = kinds
    self.holder = holder
    self.look = Interval(LOOK_S)
    self.ready: set[tuple[int, int]] = set()  # ids and fences, at the last look

  def next(self) -> Task | None:
    """Claims an abandoned task, or returns a copy of a straggler's task, or None."""
    if not self.look.is_due():
      return None
    before = self.ready
    running, ready = self.tasks('running'), self.tasks('ready', LOOKED_AT)
    ready += [row for row in running if self.is_abandoned(row)]
    self.ready = {(row['id'], row['fence']) for row in ready}
    for kind in self.kinds:
      keys = [row['key'] for row in ready if row['kind'] == kind and (row['id'], row['fence']) in before]
      if keys and (task := self.island.registry.claim(self.island.name, [kind], keys, self.holder)):
        return task
    others = [row for row in running if row['owner'] != self.island.name and not self.is_abandoned(row)]
    return self.straggler([row for row in others if row['kind'] == 'train'])

  def is_abandoned(self, row: Row) -> bool:
    """Returns whether a lease has run out, or was taken while the clock was ahead."""
    return not 0 <= row['lease_left_s'] <= LONGEST_LEASES * self.island.registry.lease_s

  def tasks(self, state: str, limit: int | None = None) -> list[Row]:
    """Returns tasks of each of its kinds."""
    return [row for kind in self.kinds for row in self.island.registry.tasks(state, kind, limit)]

  def straggler(self, running: list[Row]) -> Task | None:
    """Returns a copy of the longest running straggler that no other backup copies, or None."""
    registry = self.island.registry
    usual_s = registry.durations('train', RECENT) if running else []
    late = [row for row in running if usual_s and running_s(row) > STRAGGLES * statistics.median(usual_s)]
    taken = {role['about'].get('task') for role in registry.roles() if role['silent_s'] < registry.lease_s}
    for row in sorted(late, key=running_s, reverse=True):
      task = Task(*(row[name] for name in Task._fields))
      if (copied := COPY + self.island.words(task)) not in taken:
        registry.beat(self.island.name, 'worker', {'task': copied})  # at once, for other backups
        return task
    return None


def running_s(row: Row) -> float:
  """Returns the seconds since a task was claimed."""
  # lease - lease_left_s is the database's present time
  return row['lease'] - row['lease_left_s'] - row['claimed']


@dataclasses.dataclass(eq=False)
class Claims:
  """The claims of a role, each with a lease: the running task, the next one, and the last until it is published."""

  island: Island
  role: str
  kinds: Sequence[str]  # of tasks that the role does
  keys: Sequence[str] | None = None  # of tasks that it takes before all others, if any
  only_keys: bool = False  # whether it takes no others
  fetches: Mapping[str, Fetch] = dataclasses.field(default_factory=dict)  # how to fetch what a task reads, by its kind
  pool: Backup | None = None  # where a backup finds its tasks instead
  holder: str = ''  # tasks of this holder come first, because their states are on this machine; '' means none
  audits: audit_facts.Queue | None = None  # of a worker, in a run that is audited

  def __post_init__(self):
    self.leases: dict[int, Lease] = {}  # by task
    self.claiming = threading.Lock()  # held from a claim until its lease is in `leases`
    self.fetcher = futures.ThreadPoolExecutor(1)
    self.ahead: futures.Future[Lease | None] | None = None  # the claim of the next task
    self.asking = Interval(LONGEST_ASK_AGAIN_S)
    # How long the last task that is fetched took: to fetch, and then; unknown at first: nothing is claimed ahead.
    self.fetch_s, self.work_s = 0.0, math.inf
    self.is_outdated = False  # whether a claim has told that owners have joined or left
    self.last_busy = time.monotonic()
    self.postponed = ''  # a kind of task that has to wait, maybe for a later one that only this role can do

  def next(self) -> Lease | None:
    """Returns the task that was claimed ahead, or claims one. Returns None if there is no task."""
    ahead, self.ahead = self.ahead, None
    lease = (ahead.result() if ahead else None) or self.claim()
    if self.is_outdated and not lease:
      raise members.Changed
    if lease:
      self.last_busy = time.monotonic()
      self.asking.seconds = self.first_ask_s
    return lease

  def claim(self) -> Lease | None:
    """Claims a task of our own keys; of others' after a lease without any of ours, as their owner may be gone."""
    if self.audits and self.audits.is_due and (lease := self.hold(self.audits.next)):
      return lease
    if self.pool:
      return self.hold(self.pool.next) or self.claim_audit()
    is_patient = time.monotonic() - self.last_busy < self.island.registry.lease_s
    kinds = [kind for kind in self.kinds if kind != self.postponed] or self.kinds
    lease = self.claim_of(kinds, self.keys if is_patient else self.allowed_keys)
    if not lease:
      self.postponed = ''
    return lease or self.claim_audit()

  def claim_audit(self) -> Lease | None:
    """Claims an audit, where there is no other task."""
    return self.hold(self.audits.next) if self.audits else None

  @property
  def allowed_keys(self) -> Sequence[str] | None:
    """Keys of the tasks that this process may do; None for all."""
    return self.keys if self.only_keys else None

  def claim_of(self, kinds: Sequence[str], keys: Sequence[str] | None) -> Lease | None:
    """Claims a task of these kinds and keys."""
    return self.hold(lambda: self.island.registry.claim(self.island.name, kinds, keys, self.holder))

  def hold(self, claim: Callable[[], Task | None]) -> Lease | None:
    """Claims a task, takes its lease, and begins to fetch what it reads."""
    with self.claiming:
      task = claim()
      if not task:
        return None
      if self.island.registry.members != self.island.members.num_facts:
        self.island.registry.release(task)
        self.is_outdated = True
        return None
      lease = self.leases[task.id] = Lease(self.island, self.role, task)
    if self.audits:
      self.audits.note(task)
    if self.island.registry.suspended:
      suspensions.heed(self.island)
    if self.island.registry.diverged > self.island.resumed:  # facts that are known here may have been withdrawn
      screening_facts.heed(self.island)
    if task.kind in self.fetches:
      lease.fetch, lease.ahead = self.fetcher.submit(self.fetch, task), self.claim_ahead
    return lease

  def fetch(self, task: Task) -> Any:
    """Fetches what a task reads, and notes how long that took."""
    began = time.monotonic()
    inputs = self.fetches[task.kind](self.island, task)
    self.fetch_s = time.monotonic() - began
    return inputs

  def claim_ahead(self, share: float):
    """Claims the next task if the remaining `share` of this one lasts no longer than fetching the next."""
    if self.pool or share * self.work_s > MARGIN * self.fetch_s:
      return  # an idle worker could begin it sooner
    if self.audits and self.audits.is_due:
      return  # it comes before the next task
    was_none = self.ahead is not None and self.ahead.done() and self.ahead.result() is None
    if (self.ahead is None or was_none) and self.asking.is_due():
      self.asking.seconds = min(ASK_LATER_S, 1.5 * self.asking.seconds) if was_none else self.first_ask_s
      self.ahead = self.fetcher.submit(self.claim_of, [*self.fetches], self.allowed_keys)

  @property
  def first_ask_s(self) -> float:
    """Seconds after which it is asked for a next task again."""
    return min(LONGEST_ASK_AGAIN_S, ASK_AGAIN * self.work_s)

  def drop(self, lease: Lease):
    """Ends a lease; the task is done, released or lost."""
    lease.close()
    if self.leases.get(lease.task.id) is lease:  # else it was lost, and this process has claimed the task again
      del self.leases[lease.task.id]

  def release_all(self):
    """Gives back all tasks, at once."""
    for lease in list(self.leases.values()):
      lease.release()
