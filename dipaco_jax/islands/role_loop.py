"""The loop of every role: claims a task, holds its lease, and publishes the result while it performs the next task.

Roles communicate only through the database and storage. A role may be killed at any point: other processes get its
tasks when the leases expire, or immediately if it could still release them (SIGTERM).
"""

import collections
import contextlib
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

from dipaco_jax.core.errors import Diverged, Unavailable
from dipaco_jax.islands import members, quorum, schedule, screening_facts, suspensions, withdrawals
from dipaco_jax.islands.claims import Claims, Interval
from dipaco_jax.islands.island import Gone, Island, Later, maker
from dipaco_jax.islands.lease import SIGN_OF_LIFE_S, Lease, tell
from dipaco_jax.islands.role_costs import RoleCosts
from dipaco_jax.processes import display, stopping, time_use
from dipaco_jax.registry.database_errors import Unusable
from dipaco_jax.registry.registry import STOPPED, TASK_NAMES, Fact, Lost, Task
from dipaco_jax.storage import seals
from dipaco_jax.storage.gateway_link import TokenRejected
from dipaco_jax.telemetry import metrics_server

# A role that finds nothing to do asks again after this share of what its last task took, or of its idle time.
OF_LAST_TASK, OF_IDLE_TIME = 0.05, 0.1
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.05, 10.0
ASKED_PER_S = 100  # by all roles together that have nothing to do, if there are as many as paths
LOOK_AROUND_S = 10.0  # time after which a role without tasks looks for abandoned ones
LATE_S = 0.5  # between looks of an executor without tasks for paths that are late
GIVE_BACK_S = 2.0  # after a signal
CLOSE_S = 30.0  # after an error
WAITING = 2  # maximum number of publications of a role; one of them is running
FAILURES = 3  # in a row, after which this role ends

Publish = Callable[[], Sequence[Fact]]
# (island, task, lease) -> what publishes its facts, in another thread; None: it was released to wait for others
Perform = Callable[[Island, Task, Lease], Publish | None]


class Role:
  """One process in one role: performs the tasks that `claims` finds, one at a time, and publishes their results."""

  def __init__(self, claims: Claims, perform: Perform):
    self.island = claims.island
    self.claims = claims
    self.perform = perform
    self.publisher = futures.ThreadPoolExecutor(1)
    self.publications = collections.deque[futures.Future]()
    self.failures = 0  # in a row
    self.done = 0
    self.idle_since: float | None = None  # None: the last attempt found a task
    self.beat_interval, self.divergence_interval = Interval(SIGN_OF_LIFE_S), Interval(SIGN_OF_LIFE_S)
    self.idle_check_interval, self.quorum_interval = Interval(LOOK_AROUND_S), Interval(LATE_S)
    self.costs = RoleCosts(self.island, claims.role)
    self.progress = display.Progress(claims.role, 0, 'tasks done')
    self.waiting: display.Activity | None = None  # shown while it finds no task
    self.began = time.monotonic()
    self.lease: Lease | None = None  # running
    self.idle_cause = time_use.STAGES  # reason for waiting until the run is prepared

  def serve(self):
    """Does tasks until the run is finished; raises Diverged, Suspended, or members.Changed if it has to grow."""
    self.costs.clock.switch(time_use.OTHER)
    display.STDERR.note(TASK_NAMES)
    with self.handing_over():
      while True:
        asking = self.idle_cause if self.idle_since else time_use.DATABASE
        with time_use.doing(asking), self.island.registry.conversation():
          if self.divergence_interval.is_due():
            screening_facts.heed(self.island)
            suspensions.heed(self.island)
          lease = self.claims.next()
          if not lease and not self.publications and self.is_finished_when_idle():
            with contextlib.suppress(Unavailable):
              self.say_stopped()
            return
        if lease:
          self.idle_since = None
          self.stop_showing()
          self.work(lease)
        else:
          self.wait()

  def work(self, lease: Lease):
    """Performs a task. Another thread publishes the results, one task at a time, while one more may wait."""
    lease.is_at_work = True
    self.lease = lease
    publish, before = None, self.costs.clock.read()
    with self.failing(lease):
      try:
        publish = self.perform(self.island, lease.task, lease)
      except Lost:  # of a path that was late, or that another worker trains
        self.costs.clock.lose(before)
        raise
      if lease.began:
        self.claims.work_s = time.monotonic() - lease.began
      if not publish:
        self.claims.drop(lease)
    if publish:
      self.publications.append(self.publisher.submit(self.conclude, lease, publish))
    self.settle(WAITING)  # after this: it raises errors of tasks before
    self.lease = None

  def read_metrics(self) -> metrics_server.Reading:
    """Returns what this role tells of itself now."""
    about = self.lease.describe() if self.lease else {}
    numbers = {name: about.get(name) for name in ('step', 'loss', 'tokens_per_s')} | {'tasks_done': self.done}
    numbers['compilations'] = self.island.run.compilations.total()
    return metrics_server.Reading(about.get('task', ''), numbers, {'train': self.costs.clock.read()})

  def conclude(self, lease: Lease, publish: Publish):
    """Commits a task's facts, and schedules the tasks that depend on them."""
    with self.failing(lease):
      facts = self.costs.note(publish())
      standing = withdrawals.complete(self.island, lease.task, facts)
      self.costs.settle()
      self.claims.drop(lease)
      schedule.schedule(self.island, standing)
      self.failures, self.done = 0, self.done + 1
      measured = {name: lease.about[name] for name in ('loss', 'tokens_per_s') if lease.about.get(name) is not None}
      self.progress.update(self.done, last=self.island.words(lease.task), **measured)

  def settle(self, but: int):
    """Takes what has ended of the publications, and waits for all `but` the last ones; raises an error of theirs."""
    while len(self.publications) > but or (self.publications and self.publications[0].done()):
      with time_use.doing(time_use.STORAGE):
        self.publications.popleft().result()

  @contextlib.contextmanager
  def failing(self, lease: Lease) -> Iterator[None]:
    """Gives a task back with its error, for others to try; after FAILURES in a row, or a ValueError, raises it.

    Raises Unavailable, Unusable and TokenRejected at once: no task is to blame.
    """
    try:
      yield
    except Lost:
      logging.warning('%s was taken by another process meanwhile', lease.about['task'])
      self.claims.drop(lease)
    except (Later, seals.Damaged) as e:
      logging.warning('%s has to wait: %s', lease.about['task'], e)
      if isinstance(e, seals.Damaged):
        self.island.distrust(e)
      self.send_back(lease, e)
      with time_use.doing(time_use.WAIT):
        time.sleep(random.uniform(0.5, 1.5))
    except Diverged as e:
      screening_facts.tell(self.island, str(e))
      lease.release()
      self.claims.drop(lease)
      raise
    except Unavailable as e:
      if isinstance(e, OSError):  # an error of storage, which the registry can record
        lease.release()
        self.claims.drop(lease)
      raise
    except suspensions.Suspended:
      lease.release()
      self.claims.drop(lease)
      raise
    except (Unusable, TokenRejected):  # nor can the task be released
      self.claims.drop(lease)
      raise
    except Exception as e:
      message = f'{type(e).__name__}: {e}'.split('\n')[0]
      logging.warning('%s failed: %s', lease.about['task'], message, exc_info=not is_of_storage(e))
      lease.release(self.island.error_text(e, message))
      self.claims.drop(lease)
      self.failures += 1
      if self.failures >= FAILURES or isinstance(e, ValueError):
        raise
      time.sleep(random.uniform(0.5, 1.5))

  def send_back(self, lease: Lease, error: OSError):
    """Releases a task that has to wait. The task that made the missing object makes it again."""
    if isinstance(error, Gone):
      self.island.registry.reopen(lease.task, *maker(error.name, self.island))
    lease.release(self.island.error_text(error))
    self.claims.postponed = lease.task.kind
    self.claims.drop(lease)

  def is_finished_when_idle(self) -> bool:
    """Gives a sign of life and looks around; returns whether the run is finished."""
    if self.beat_interval.is_due():
      about = {'task': '', 'tasks_done': self.done, **tell(self.island)}
      self.island.registry.beat(self.island.name, self.claims.role, about)
    if schedule.is_finished(self.island):
      return True
    members.heed(self.island)
    if self.idle_cause == time_use.STAGES and self.island.registry.facts('prepared'):
      self.idle_cause = time_use.WAIT
      self.stop_showing()
    if 'outer' in self.claims.kinds and self.quorum_interval.is_due():
      quorum.close(self.island)
    if self.idle_check_interval.is_due():
      schedule.advance(self.island)
    return False

  def wait(self):
    """Waits before it asks again: what comes now is begun late by a share of the time between tasks, at most.

    Less where a publication ends meanwhile: what it makes possible may be for us.
    """
    now = time.monotonic()
    self.idle_since = self.idle_since or now
    if not self.waiting and now - self.idle_since >= display.pause_s(now - self.began):
      what = 'the stages before training' if self.idle_cause == time_use.STAGES else 'tasks'
      self.waiting = display.begin(f'waiting for {what}', tells=False)
    task_s = self.claims.work_s if math.isfinite(self.claims.work_s) else 0.0
    fair_s = self.island.run.settings.num_paths / ASKED_PER_S
    wait_s = max(SHORTEST_WAIT_S, fair_s, OF_LAST_TASK * task_s, OF_IDLE_TIME * (now - self.idle_since))
    wait_s = min(LONGEST_WAIT_S, self.island.registry.lease_s / 3, wait_s) * random.uniform(0.7, 1.3)
    if self.publications:
      with time_use.doing(time_use.STORAGE):
        futures.wait([self.publications[0]], wait_s)
      self.settle(WAITING)
    else:
      with time_use.doing(self.idle_cause):
        time.sleep(wait_s)

  def say_stopped(self):
    """Notes for people that this role ends."""
    about = {'task': '', 'tasks_done': self.done, STOPPED: True}
    self.island.registry.beat(self.island.name, self.claims.role, about | tell(self.island))

  def stop_showing(self):
    """Shows no longer that it waits."""
    if self.waiting:
      display.end(self.waiting)
      self.waiting = None

  @contextlib.contextmanager
  def handing_over(self) -> Iterator[None]:
    """Gives back, at SIGTERM, SIGINT or an error, every task that is held, and ends the process."""

    def give_back(number: int) -> bool:
      stopping.call_later(GIVE_BACK_S, os._exit, 128 + number)
      with self.claims.claiming:  # not between a claim and its lease
        self.claims.release_all()
      self.say_stopped()
      return False

    with stopping.listening() as signals, stopping.closing(CLOSE_S) as opened:
      opened.enter_context(signals.answered(give_back))
      opened.callback(time_use.end)
      opened.callback(self.progress.close)
      opened.callback(self.stop_showing)
      opened.callback(self.claims.release_all)  # the next task, where this one has failed
      opened.callback(self.claims.fetcher.shutdown, cancel_futures=True)
      opened.callback(self.publisher.shutdown)
      yield


def is_of_storage(error: Exception) -> bool:
  """Returns whether an error is of storage, and its message says all."""
  return isinstance(error, OSError) and '://' in (error.strerror or '')
