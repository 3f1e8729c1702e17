"""Who trains what, and when, with workers of unequal speed: a simulation, event by event, on a virtual clock. Pure.

A path trains for tau steps (or until `phase_s` have passed) from the newest versions of its modules, and contributes to
the open version of each of them. It trains again at the next outer step after which each module has a newer version
than the one that it began from; a late path thus begins from a version that its contribution is in. What follows is
what islands do today; a `Rule` changes it:

    a task      belongs to the worker that has claimed it, until it is done: a slow worker keeps it
    a worker    that is free prefers paths that it trained last; it takes another's path that has waited for `lease_s`
    a spare     (`--backup`) takes a path that has waited for `look_s`, or trains a copy of a task that has taken
                more than twice as long as usual, from the beginning; what ends first counts, and the other stops
    a failure   loses the steps since the last checkpoint, and `restart_s`; the worker then continues its task

`Simulation.run` yields what a trainer has to do, in order, and never ends. Nothing here depends on the parameters.
"""

import collections
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from unequal_rules import DROP, Attempt, Begin, Close, End, Module, Path, Rule, Task, Work, Workers

STRAGGLES = 2.0  # as in islands: a task straggles after this multiple of the median of the RECENT tasks
RECENT = 32
CAUSES = 'counted', 'dropped', 'repeated', 'moved', 'restarting', 'under way', 'waiting'
MARGIN = 1e-9


class Simulation:
  """All workers from the beginning."""

  def __init__(self, work: Work, workers: Workers, rule: Rule, seed: int = 0):
    self.work = work
    self.workers = workers
    self.rule = rule
    self.time = 0.0
    self.random = random.Random(seed)
    self.order = itertools.count()
    self.numbers = itertools.count()
    self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
    self.log: list[Begin | End | Close] = []
    self.modules = {key: Module(paths) for key, paths in work.modules.items()}
    of_path = [[key for key, paths in work.modules.items() if path in paths] for path in range(work.num_paths)]
    self.paths = [Path(index, keys) for index, keys in enumerate(of_path)]
    self.attempts: dict[int, Attempt] = {}  # by worker
    self.down: set[int] = set()
    self.durations: collections.deque[float] = collections.deque(maxlen=RECENT)
    self.spent = [collections.defaultdict[str, float](float) for _ in workers.speeds]
    self.look_at = math.inf
    for worker in range(len(workers.speeds)):
      self.schedule_failure(worker)

  def run(self) -> Iterator[list[Begin | End | Close]]:
    """Yields what is done at each moment, in order, without end; `time` is that moment."""
    self.assign()
    while True:
      yield self.log
      self.log = []
      self.time = self.events[0][0]
      while self.events and self.events[0][0] <= self.time:
        _, _, act, arguments = heapq.heappop(self.events)
        act(*arguments)
      for key in self.modules:
        self.close_if_complete(key)
      self.assign()

  def schedule(self, time: float, act: Callable[..., None], *arguments: Any):
    """Schedules an event."""
    heapq.heappush(self.events, (time, next(self.order), act, arguments))

  # Tasks

  def assign(self):
    """Gives tasks to free workers, until there is none for any of them."""
    while any(self.assign_one(worker) for worker in self.free_workers()):
      pass
    self.schedule_look()

  def free_workers(self) -> list[int]:
    """Returns the workers without a task; the fastest first, if the order matters."""
    free = [w for w in range(len(self.workers.speeds)) if w not in self.attempts and w not in self.down]
    return sorted(free, key=lambda w: -self.workers.speeds[w]) if self.rule.moves else free

  def is_spare(self, worker: int) -> bool:
    """Returns whether a worker is a backup."""
    return worker >= len(self.workers.speeds) - self.rule.spares

  def patience_s(self, worker: int) -> float:
    """Returns for how long a path is ready until a worker that does not hold its state may take it."""
    return self.workers.look_s if self.is_spare(worker) else self.workers.lease_s

  def multiple(self, worker: int) -> float:
    """Returns the multiple of the usual time after which a worker may copy or continue a task."""
    return STRAGGLES if self.is_spare(worker) else self.rule.hand_over

  def assign_one(self, worker: int) -> bool:
    """Gives a worker a task, if there is one for it."""
    if path := self.choose_path(worker):
      self.begin_task(worker, path)
      return True
    task = self.find_straggler(worker)
    if not task:
      return False
    if not self.is_spare(worker):
      self.interrupt(next(x for x in self.attempts.values() if x.task is task))
      task.claimed = self.time
    self.begin_attempt(worker, task)
    return True

  def choose_path(self, worker: int) -> Path | None:
    """Returns the path that a worker trains next, or None."""
    waiting = [(path.ready_at, path) for path in self.paths if path.ready_at is not None]
    if self.rule.moves:
      return min((path for _, path in waiting), key=lambda path: (path.steps, path.index), default=None)
    allowed = [
      (path.holder != worker, ready_at, path.index)
      for ready_at, path in waiting
      if self.time - ready_at >= self.patience_s(worker) - MARGIN
      or (not self.is_spare(worker) and path.holder in (worker, None))
    ]
    return self.paths[min(allowed)[2]] if allowed else None

  def find_straggler(self, worker: int) -> Task | None:
    """Returns the task that has run for longest, of those that a free worker may copy or continue, or None."""
    multiple = self.multiple(worker)
    if math.isinf(multiple) or not self.durations:
      return None
    usual_s = statistics.median(self.durations)
    tasks = [attempt.task for attempt in self.attempts.values()]
    late = [
      attempt
      for attempt in self.attempts.values()
      if self.time - attempt.task.claimed >= multiple * usual_s - MARGIN and tasks.count(attempt.task) == 1
    ]
    if not self.is_spare(worker):
      late = [attempt for attempt in late if self.time_without(attempt, worker) < attempt.end - MARGIN]
    return max(late, key=lambda attempt: self.time - attempt.task.claimed).task if late else None

  def time_without(self, attempt: Attempt, worker: int) -> float:
    """Returns when a worker would end the task of another if it continued it now."""
    steps = self.work.tau - self.checkpoint(attempt)
    return self.time + self.workers.move_s + steps / self.workers.speeds[worker]

  def begin_task(self, worker: int, path: Path):
    """Begins a path's next task."""
    versions = {key: self.modules[key].version for key in path.modules}
    path.ready_at = None
    path.task = Task(next(self.numbers), path, versions, self.time, self.time)
    self.log.append(Begin(self.time, path.task.number, path.index))
    self.begin_attempt(worker, path.task)

  def begin_attempt(self, worker: int, task: Task):
    """Lets a worker begin a task, continue it, or train a copy of it."""
    is_copy = any(attempt.task is task for attempt in self.attempts.values())
    move_s = self.workers.move_s if task.path.holder not in (None, worker) or task.began < self.time else 0.0
    self.spent[worker]['moved'] += move_s
    self.attempts[worker] = Attempt(worker, task, self.time + move_s, 0 if is_copy else task.kept, 0.0, is_copy, move_s)
    self.schedule_end(self.attempts[worker])

  def schedule_end(self, attempt: Attempt):
    """Schedules the end of an attempt that begins at `attempt.begin`."""
    steps = self.work.tau - attempt.first
    attempt.end = attempt.begin + steps / self.workers.speeds[attempt.worker]
    if self.rule.by_time:
      attempt.end = max(attempt.begin, attempt.task.began + self.work.phase_s)
    self.schedule(attempt.end, self.end, attempt)

  def steps_at(self, attempt: Attempt) -> int:
    """Returns the steps of the task that an attempt has made by now."""
    speed = self.workers.speeds[attempt.worker]
    return attempt.first + math.floor(max(0.0, self.time - attempt.begin) * speed + 1e-6)

  def checkpoint(self, attempt: Attempt) -> int:
    """Returns the steps of the task at its last checkpoint."""
    every = self.workers.checkpoint_steps
    return max(attempt.first, self.steps_at(attempt) // every * every)

  def interrupt(self, attempt: Attempt):
    """Ends an attempt at the last checkpoint; what it did since is repeated."""
    worker = attempt.worker
    kept = self.checkpoint(attempt)
    kept_s = (kept - attempt.first) / self.workers.speeds[worker]
    if attempt.is_copy or any(x is not attempt and x.task is attempt.task for x in self.attempts.values()):
      kept_s = 0.0  # another attempt is at the task
    else:
      attempt.task.kept = kept
      attempt.task.parts.append((worker, kept_s))
    self.spent[worker]['repeated'] += max(0.0, self.time - attempt.begin) - kept_s
    self.spent[worker]['moved'] -= self.moving_s(attempt)
    attempt.is_over = True
    del self.attempts[worker]

  def moving_s(self, attempt: Attempt) -> float:
    """Returns the rest of the seconds that an attempt needs to fetch a state."""
    return min(attempt.moved_s, max(0.0, attempt.begin - self.time))

  def end(self, attempt: Attempt):
    """Ends an attempt with the end of its task, unless it has been interrupted."""
    if attempt.is_over:
      return
    task = attempt.task
    steps = self.steps_at(attempt)
    attempt.is_over = True
    del self.attempts[attempt.worker]
    if attempt.is_copy:  # from the beginning
      for worker, kept_s in task.parts:
        self.spent[worker]['repeated'] += kept_s
      task.parts.clear()
    task.parts.append((attempt.worker, (steps - attempt.first) / self.workers.speeds[attempt.worker]))
    for other in [x for x in self.attempts.values() if x.task is task]:
      self.spent[other.worker]['repeated'] += max(0.0, self.time - other.begin)
      self.spent[other.worker]['moved'] -= self.moving_s(other)
      other.is_over = True
      del self.attempts[other.worker]
    self.complete(task, attempt.worker, steps)

  def complete(self, task: Task, worker: int, steps: int):
    """Contributes what a task has trained to its modules."""
    task.is_done = True
    task.path.holder = worker
    task.path.steps += steps
    self.durations.append(self.time - task.claimed)
    self.log.append(End(self.time, task.number, task.path.index, steps))
    counted = statistics.fmean(self.contribute(key, task, steps) for key in task.path.modules)
    if self.rule.begins_at_once and self.is_ready(task.path):
      task.path.ready_at = self.time
    for of, seconds in task.parts:
      self.spent[of]['counted'] += counted * seconds
      self.spent[of]['dropped'] += (1 - counted) * seconds

  # Modules

  def contribute(self, key: Hashable, task: Task, steps: int) -> bool:
    """Adds a contribution to the open version of a module; returns whether it counts."""
    module = self.modules[key]
    age = module.version - task.versions[key]
    module.on_time += age == 0
    if age and self.rule.late == DROP:
      return False
    module.terms.append((task.number, steps / self.work.tau * self.rule.decay**age))
    return True

  def close_if_complete(self, key: Hashable):
    """Closes a module's version if all contributions are in, or the quorum is and the grace window is over."""
    module = self.modules[key]
    quorum = max(1, math.floor(self.rule.quorum * len(module.paths) + MARGIN))
    if module.on_time < quorum:
      return
    if module.on_time == len(module.paths) or module.is_due or not self.rule.grace:
      self.close(key, module)
    elif not module.has_timer:
      module.has_timer = True
      self.schedule(self.time + self.rule.grace * self.work.phase_s, self.end_grace, module, module.version)

  def end_grace(self, module: Module, version: int):
    """Ends the grace window of a version, if it is still open."""
    module.is_due = module.is_due or module.version == version

  def close(self, key: Hashable, module: Module):
    """Closes a module's version; paths that have waited for nothing else are ready."""
    self.log.append(Close(self.time, key, tuple(module.terms)))
    self.modules[key] = Module(module.paths, module.version + 1)
    for path in (self.paths[index] for index in module.paths):
      if path.ready_at is None and self.is_ready(path):
        path.ready_at = self.time

  def is_ready(self, path: Path) -> bool:
    """Returns whether a path's last task is done and its modules have newer versions than those that it began from."""
    task = path.task
    if not task or not task.is_done:
      return False
    return all(self.modules[key].version > version for key, version in task.versions.items())

  # Time

  def schedule_look(self):
    """Schedules the next moment at which a free worker may find a task without anything else happening."""
    free = self.free_workers()
    usual_s = statistics.median(self.durations) if self.durations else math.inf
    times = []
    for patience_s, multiple in {(self.patience_s(worker), self.multiple(worker)) for worker in free}:
      times += [path.ready_at + patience_s for path in self.paths if path.ready_at is not None]
      times += [attempt.task.claimed + multiple * usual_s for attempt in self.attempts.values()]
    look_at = min((time for time in times if self.time + MARGIN < time < math.inf), default=math.inf)
    if look_at < math.inf and (look_at < self.look_at or self.look_at <= self.time):
      self.look_at = look_at
      self.schedule(look_at, lambda: None)

  def schedule_failure(self, worker: int):
    """Schedules a worker's next failure."""
    if rate := self.workers.failures_per_hour / 3600 / len(self.workers.speeds):
      self.schedule(self.time + self.random.expovariate(rate), self.fail, worker)

  def fail(self, worker: int):
    """Ends a worker, which continues its task after a restart, unless another does so until then."""
    self.down.add(worker)
    attempt = self.attempts.get(worker)
    task = attempt.task if attempt and not attempt.is_copy else None
    if attempt:
      self.interrupt(attempt)
    restart_at = self.time + self.workers.restart_s
    if task:
      waiting = self.attempts[worker] = Attempt(worker, task, restart_at, task.kept, 0.0, False)
      self.schedule_end(waiting)
    self.schedule(restart_at, self.restart, worker)

  def restart(self, worker: int):
    """Ends a worker's restart."""
    self.down.discard(worker)
    self.spent[worker]['restarting'] += self.workers.restart_s
    self.schedule_failure(worker)

  # Results

  def seconds(self) -> list[dict[str, float]]:
    """Returns the seconds of each worker by CAUSES up to now."""
    spent = [collections.defaultdict(float, x) for x in self.spent]
    for attempt in self.attempts.values():
      spent[attempt.worker]['under way'] += max(0.0, self.time - attempt.begin)
      for worker, seconds in attempt.task.parts:
        spent[worker]['under way'] += seconds
    for x in spent:
      x['waiting'] = self.time - sum(x.values())
    return [{cause: x[cause] for cause in CAUSES} for x in spent]

  def shares(self) -> dict[str, float]:
    """Returns the steps that could have been made up to now, by what has become of them; the sum is 1."""
    speeds = self.workers.speeds
    of_cause = {
      cause: sum(speed * x[cause] for speed, x in zip(speeds, self.seconds(), strict=True)) for cause in CAUSES
    }
    return {cause: steps / (self.time * sum(speeds)) for cause, steps in of_cause.items()}
