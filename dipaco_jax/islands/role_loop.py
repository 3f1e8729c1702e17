"""How every role of an islands run works: take a task, hold its lease, publish what it made while it takes the next.

What a task reads is fetched in a thread; near the end of one that says how far it is, the next is claimed and fetched.

Roles meet in the database and in storage only. One may be killed at any point: its tasks go to others when their leases
run out, at once where it could still say so (SIGTERM).
"""

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from types import MappingProxyType
from typing import Any

from dipaco_jax.core.errors import Diverged
from dipaco_jax.islands import backup, schedule, screening_facts
from dipaco_jax.islands import lease as lease_lib
from dipaco_jax.islands import registry as registry_lib
from dipaco_jax.islands.island import Gone, Island, Later, maker
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.registry import Fact, Task
from dipaco_jax.storage import seals
from dipaco_jax.training import stopping

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.1, 3.0  # of a role that finds nothing to do
ASK_AGAIN_S = 1.0  # for a next task, where there was none
LOOK_AROUND_S = 8.0  # whether something was left lying, or all is done: by those who find nothing to do
GIVE_BACK_S = 2.0  # after a signal
CLOSE_S = 30.0  # after an error
FAILURES = 3  # one after another: this role is not fit to go on
MARGIN = 1.5  # the next task is claimed when what is left of this one takes so many times what its own fetch took

Publish = Callable[[], Sequence[Fact]]
# (islands, task, lease) -> what publishes its facts, in another thread; None: it was released to wait for others
Perform = Callable[[Island, Task, 'Lease'], Publish | None]
Fetch = Callable[[Island, Task], Any]  # what a task reads, on the host; also while the task before is at work


class Role:
  """One process in one role."""

  def __init__(
    self, island: Island, role: str, kinds: Sequence[str], perform: Perform, keys: Sequence[str] | None = None,
    fetches: Mapping[str, Fetch] = MappingProxyType({}), pool: backup.Backup | None = None,
  ):  # fmt: skip
    self.island, self.role, self.kinds, self.perform, self.keys = island, role, kinds, perform, keys
    self.fetches, self.pool = fetches, pool
    self.leases: dict[int, Lease] = {}  # by task; that of the task before is held until it is published
    self.claiming = threading.Lock()  # from a claim until its lease is among ours
    self.publisher, self.fetcher = futures.ThreadPoolExecutor(1), futures.ThreadPoolExecutor(1)
    self.publication: futures.Future | None = None
    self.next: futures.Future[Lease | None] | None = None  # the claim of the next task
    self.fetch_s, self.work_s = 0.0, 1e9  # that the last task took that is fetched: to fetch, and then
    self.failures = self.done = self.unlucky = 0
    # When we last gave a sign of life, looked around, claimed ahead, asked whether all are to end.
    self.seen = self.looked = self.asked = self.heeded = -1e9
    self.busy = time.monotonic()  # when we last had a task
    self.put_off = ''  # the kind of task that has to wait, maybe for one that comes after it and that only we can do
    self.told = lease_lib.moved(island)  # bytes, with our last fact

  def serve(self):
    """Does tasks until the run is finished; raises Diverged where it is no use to go on."""
    with self.handing_over():
      while True:
        self.heed()
        lease = self.claimed_ahead() or self.claim()
        if lease:
          self.unlucky, self.busy = 0, time.monotonic()
          self.work(lease)
        elif self.publication:
          self.settle()  # what it makes possible may be for us
        elif self.idle():
          return

  def heed(self):
    if time.monotonic() - self.heeded > lease_lib.SIGN_OF_LIFE_S:
      self.heeded = time.monotonic()
      screening_facts.heed(self.island)

  def claim(self) -> Lease | None:
    """A task of our own keys; of others', where these have nothing for as long as a lease: their owner may be gone."""
    if self.pool:
      return self.hold(self.pool.next)
    patient = time.monotonic() - self.busy < self.island.registry.lease_s
    lease = self.take([k for k in self.kinds if k != self.put_off] or self.kinds, self.keys if patient else None)
    if not lease:
      self.put_off = ''
    return lease

  def take(self, kinds: Sequence[str], keys: Sequence[str] | None = None) -> Lease | None:
    """A task of these, whose fetch begins."""
    return self.hold(lambda: self.island.registry.claim(self.island.name, kinds, keys))

  def hold(self, claim: Callable[[], Task | None]) -> Lease | None:
    with self.claiming:
      task = claim()
      if not task:
        return None
      lease = self.leases[task.id] = Lease(self.island, self.role, task)
    if task.kind in self.fetches:
      lease.fetch, lease.ahead = self.fetcher.submit(self.fetch, task), self.claim_ahead
    return lease

  def fetch(self, task: Task) -> Any:
    began = time.monotonic()
    found = self.fetches[task.kind](self.island, task)
    self.fetch_s = time.monotonic() - began
    return found

  def claim_ahead(self, share: float):
    """Takes the next task where the rest of this one, `share` of it, lasts no longer than what the next waits for.

    No earlier: an idle worker could begin it sooner.
    """
    if self.pool or share * self.work_s > MARGIN * self.fetch_s or time.monotonic() - self.asked < ASK_AGAIN_S:
      return
    if self.next is None or (self.next.done() and self.next.result() is None):
      self.asked = time.monotonic()
      self.next = self.fetcher.submit(self.take, [*self.fetches])

  def claimed_ahead(self) -> Lease | None:
    claim, self.next = self.next, None
    return claim.result() if claim else None

  def work(self, lease: Lease):
    """The task itself; its publication goes on in another thread, one at a time."""
    lease.is_at_work = True
    with self.failing(lease):
      publish = self.perform(self.island, lease.task, lease)
      if lease.began:
        self.work_s = time.monotonic() - lease.began
      self.settle()
      if publish:
        self.publication = self.publisher.submit(self.conclude, lease, publish)
      else:
        self.drop(lease)

  def conclude(self, lease: Lease, publish: Publish):
    """The facts are committed, and what they make possible is scheduled."""
    with self.failing(lease):
      facts = self.counted(publish())
      self.island.registry.complete(lease.task, facts)
      self.drop(lease)
      schedule.schedule(self.island, facts)
      self.failures, self.done = 0, self.done + 1

  def counted(self, facts: Sequence[Fact]) -> list[Fact]:
    """The same facts; the first of them tells of the bytes since our fact before, also those for sums that go on."""
    before, self.told = self.told, lease_lib.moved(self.island)
    since = {name: count - before[name] for name, count in self.told.items()}
    return [facts[0]._replace(meta=facts[0].meta | since | {'role': self.role}), *facts[1:]]

  def settle(self):
    """Waits for the publication before; raises what went wrong with it too often."""
    if self.publication:
      publication, self.publication = self.publication, None
      publication.result()

  @contextlib.contextmanager
  def failing(self, lease: Lease) -> Iterator[None]:
    """Gives a task back with what went wrong, for others to try; after some failures this role ends with the error."""
    try:
      yield
    except registry_lib.Lost:
      logging.warning('%s went to another while we were at it', lease.about['task'])
      self.drop(lease)
    except (Later, seals.Damaged) as e:
      logging.warning('%s has to wait: %s', lease.about['task'], e)
      if isinstance(e, seals.Damaged):
        self.island.distrust(e)
      self.send_back(lease, e)
      time.sleep(random.uniform(0.5, 1.5))
    except Diverged as e:
      screening_facts.tell(self.island, str(e))
      lease.release()
      self.drop(lease)
      raise
    except Exception as e:
      words = f'{type(e).__name__}: {e}'.split('\n')[0]
      logging.warning('%s failed: %s', lease.about['task'], words, exc_info=True)
      lease.release(words)
      self.drop(lease)
      self.failures += 1
      if self.failures >= FAILURES or isinstance(e, ValueError):
        raise
      time.sleep(random.uniform(0.5, 1.5))

  def send_back(self, lease: Lease, error: OSError):
    """What is gone is made again by the task that made it."""
    registry = self.island.registry
    if isinstance(error, Gone):
      registry.reopen(lease.task, *maker(error.name))
    lease.release(str(error))
    self.put_off = lease.task.kind
    self.drop(lease)

  def drop(self, lease: Lease):
    lease.close()
    self.leases.pop(lease.task.id, None)

  def idle(self) -> bool:
    """Nothing to do: says so, looks around, waits; whether the run is finished. Less than a query a second."""
    now = time.monotonic()
    if now - self.seen > lease_lib.SIGN_OF_LIFE_S:
      self.seen = now
      about = {'task': '', 'tasks_done': self.done, **lease_lib.moved(self.island)}
      self.island.registry.beat(self.island.name, self.role, about)
    if now - self.looked > LOOK_AROUND_S:
      self.looked = now
      if schedule.is_finished(self.island):
        return True
      schedule.advance(self.island)
    self.unlucky += 1
    time.sleep(min(LONGEST_WAIT_S, SHORTEST_WAIT_S * 1.5**self.unlucky) * random.uniform(0.7, 1.3))
    return False

  def give_back(self):
    for lease in list(self.leases.values()):
      lease.release()

  @contextlib.contextmanager
  def handing_over(self) -> Iterator[None]:
    """SIGTERM and SIGINT give back what is held, at once, and end the process."""

    def give_back(number: int) -> bool:
      late = threading.Timer(GIVE_BACK_S, os._exit, (128 + number,))
      late.daemon = True
      late.start()
      with self.claiming:  # not between a claim and its lease
        self.give_back()
      return False

    with stopping.listening() as signals, stopping.closing(CLOSE_S) as opened:
      opened.enter_context(signals.answered(give_back))
      opened.callback(self.give_back)  # the next task, where this one has failed
      opened.callback(self.fetcher.shutdown, cancel_futures=True)
      opened.callback(self.publisher.shutdown)
      yield
