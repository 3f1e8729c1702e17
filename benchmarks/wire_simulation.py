"""How busy the workers of islands are behind lines of a given bandwidth: a simulation, event by event. Pure.

Each worker trains its paths, one at a time, piece by piece (algorithm/streaming.py), and has a line to the storage, as
fast up as down, both at once. What it follows:

    a piece       begins when the versions that it takes over are on the worker's machine, and the worker is free;
                  of several paths the one that has been ready longest is first
    up            objects go one after another in the order in which they are made, beside training. A fact follows the
                  last object of a piece, and with it all of the piece's messages count; a worker begins a piece while
                  at most one is on its way to its fact, as islands/role_loop.py has it (`Conditions.publications`)
    outer step    of a module, begins with the fact of the last path that shares it, beside the storage
    down          a version goes to each path of the module from the moment that it is there, one after another

A path's state goes up after every k-th phase, whenever the line is free (`Conditions.state`). Rounds, evaluation,
replays, paths that are sampled, and workers that come and go are not simulated; nor is the time that roles take to ask
the database again, beyond its latency.
"""

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from wire_link import Link

from dipaco_jax.algorithm import streaming
from dipaco_jax.planning.wire_traffic import Traffic

WITH, AFTER, BEHIND = STATES = ('with', 'after', 'behind')
PHASES = 8  # that are measured, at least
RATIO = 1.005  # between a line that does and one that does not
LARGEST = 1e16  # bytes per second of a line that is tried


class Conditions(NamedTuple):
  """Workers and their lines."""

  step_s: tuple[float, ...]  # of an inner step: of each worker; where there are more workers, from the first again
  bytes_per_s: float = math.inf  # of each worker's line, each way
  latency_s: float = 0.0  # of each call to the database or the storage
  outer_bytes_per_s: float = math.inf  # at which an outer step reads and writes
  paths_per_worker: int = 1
  state: str = BEHIND  # all else, whenever the line is free; or its object comes WITH the piece's fact, or AFTER it
  by_level: bool = False  # a fact follows each message
  publications: float = 1  # of a worker, that may be on their way when it begins a piece


class Step(NamedTuple):
  """A piece of a phase."""

  steps: int
  needed: tuple[tuple[str, int], ...]  # levels and the versions of them that are there before it
  sent: tuple[str, ...]  # levels
  phase: int
  is_first: bool  # of its phase
  has_state: bool  # whether the path's state is published after it


def utilization(traffic: Traffic, conditions: Conditions) -> float:
  """Returns the share of the workers' time that is spent in inner steps.

  It is that of the phases between two publications of states, PHASES at least, once a run does the same in all of them.
  """
  table = traffic.table
  every = math.lcm(traffic.state_every or 1, (table.stream and table.closed_every) or 1)
  period = -(-PHASES // every) * every
  first = period if conditions.state == WITH else 3 * period  # objects may be left from one period to the next
  begun = Simulation(traffic, conditions, make_steps(traffic, first + period)).run()
  per, found = conditions.paths_per_worker, []
  for worker, path in enumerate(range(0, len(begun), per)):
    paths = begun[path : path + per]
    wall_s = min(times[first + period] for times in paths) - min(times[first] for times in paths)
    found.append(len(paths) * period * traffic.table.tau * _step_s(conditions, worker) / wall_s)
  return math.fsum(found) / len(found)


def find_lines(traffic: Traffic, conditions: Conditions, targets: Iterable[float]) -> dict[float, float]:
  """Returns the slowest line for each utilization, bytes per second each way, up to RATIO; infinity where none does."""
  all_s = traffic.table.tau * conditions.paths_per_worker * max(conditions.step_s)
  least = max(traffic.bytes_per_phase) * conditions.paths_per_worker / all_s  # a line that is full while all train
  lines = _Lines(lambda line: utilization(traffic, conditions._replace(bytes_per_s=line)))
  return {target: lines.find(target, max(1.0, target * least)) for target in sorted(targets)}


class _Lines:
  """The utilization behind the lines that were tried; the faster, the higher."""

  def __init__(self, measure: Callable[[float], float]):
    self.measure = measure
    self.tried: dict[float, float] = {}

  def find(self, target: float, least: float) -> float:
    """Returns the slowest line with a utilization, which is not below `least`, up to RATIO; infinity if none has it."""
    line = least
    while line <= LARGEST:
      self.tried[line] = self.measure(line)
      high = min((line for line, share in self.tried.items() if share >= target), default=math.inf)
      low = max((line for line, share in self.tried.items() if share < target), default=high)
      if high <= low * RATIO:
        return high
      line = 2 * low if math.isinf(high) else self.between(low, high, target)
    return math.inf

  def between(self, low: float, high: float, target: float) -> float:
    """Returns the next line to try: by turns the middle, and where the time of a phase is linear in 1 / line."""
    if len(self.tried) % 2:
      return math.sqrt(low * high)
    times = [1 / self.tried[line] for line in (low, high)]
    share = (times[0] - 1 / target) / (times[0] - times[1])
    found = 1 / ((1 - share) / low + share / high)
    margin = RATIO**0.4  # so that it is likely to do, and that one below `high` may not
    return min(max(found * margin, low * margin), high / margin)


def make_steps(traffic: Traffic, phases: int) -> list[Step]:
  """Returns the pieces of so many phases of a path, and the first one after them; no phase of theirs is the last."""
  table = dataclasses.replace(traffic.table, phases=phases + 2, closed=frozenset())
  steps = [step for phase in range(phases + 1) for step in _phase(traffic, table, phase)]
  return steps[: 1 + max(i for i, step in enumerate(steps) if step.is_first)]


def _phase(traffic: Traffic, table: streaming.Timetable, phase: int) -> Iterator[Step]:
  """Yields the pieces of a phase."""
  every = traffic.state_every or math.inf
  is_due = table.is_closed(phase) and (phase + 1) // every > table.last_whole(phase) // every
  for piece in table.pieces(phase):
    is_whole = piece.begin == 0 and table.begins_whole(phase)
    levels = [level for level in (traffic.groups if is_whole else piece.mixed) if level in traffic.groups]
    needed = tuple((level, table.version(level, phase, piece.begin)) for level in levels)
    sent = tuple(level for level in piece.sent if level in traffic.groups)
    has_state = is_due and traffic.state > 0 and piece.end == table.tau
    yield Step(piece.end - piece.begin, needed, sent, phase, piece.begin == 0, has_state)


class Simulation:
  """All workers, from the first piece of each path until it is at the last of `steps`."""

  def __init__(self, traffic: Traffic, conditions: Conditions, steps: Sequence[Step]):
    self.traffic = traffic
    self.conditions = conditions
    self.steps = steps
    paths = range(traffic.num_paths)
    workers = range(-(-traffic.num_paths // conditions.paths_per_worker))
    self.worker = [path // conditions.paths_per_worker for path in paths]
    self.step_s = [_step_s(conditions, worker) for worker in workers]
    self.up, self.down = ([Link(conditions.bytes_per_s, conditions.latency_s) for _ in workers] for _ in range(2))
    self.busy = [False for _ in workers]
    self.ready = [collections.deque[int]() for _ in workers]  # paths
    self.behind = [collections.deque[int]() for _ in workers]  # the paths whose states are behind
    self.publications = [0 for _ in workers]  # on their way
    self.states = [0 for _ in paths]  # on their way, but for those in publications
    self.next = [0 for _ in paths]  # step
    self.waiting = set(paths)
    self.versions = [dict.fromkeys(traffic.groups, 0) for _ in paths]  # that are on the worker's machine
    self.begun: list[list[float]] = [[] for _ in paths]  # when, by phase
    self.arrived = collections.Counter[tuple[str, int, int]]()  # messages by level, module and version
    self.modules = {
      level: {path: i for i, group in enumerate(groups) for path in group} for level, groups in traffic.groups.items()
    }
    self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
    self.order = itertools.count()  # of events at the same time

  def run(self) -> list[list[float]]:
    """Returns when each path began each phase, in seconds."""
    for path in range(self.traffic.num_paths):
      self.offer(0.0, path)
    while self.events:
      now, _, function, arguments = heapq.heappop(self.events)
      function(now, *arguments)
    return self.begun

  def at(self, time: float, function: Callable[..., None], *arguments: Any):
    """Calls a function with the time and arguments, at that time."""
    heapq.heappush(self.events, (time, next(self.order), function, arguments))

  # -- training

  def offer(self, now: float, path: int):
    """Puts a path among those that are ready, if it waits for nothing more, and has its worker begin."""
    worker, there = self.worker[path], self.versions[path]
    if path in self.waiting:
      is_ready = all(there[level] >= version for level, version in self.steps[self.next[path]].needed)
      if is_ready and self.states[path] < 2:  # a state is out before there is the next but one
        self.waiting.remove(path)
        self.ready[worker].append(path)
    self.begin(now, worker)

  def begin(self, now: float, worker: int):
    """Has a worker that is free train the path that has been ready longest."""
    while self.ready[worker] and not self.busy[worker] and self.publications[worker] <= self.conditions.publications:
      path = self.ready[worker].popleft()
      step = self.steps[self.next[path]]
      if step.is_first:
        self.begun[path].append(now)
      if self.next[path] + 1 < len(self.steps):
        self.busy[worker] = True
        self.at(now + step.steps * self.step_s[worker], self.end, path)

  def end(self, now: float, path: int):
    """Ends a piece: its objects go up."""
    step = self.steps[self.next[path]]
    self.next[path] += 1
    self.busy[self.worker[path]] = False
    self.waiting.add(path)
    self.publish(now, path, step)
    self.offer(now, path)

  # -- up

  def publish(self, now: float, path: int, step: Step):
    """Sends a piece's objects, and facts that name them."""
    c, worker = self.conditions, self.worker[path]
    link, version = self.up[worker], step.phase + 1
    self.publications[worker] += 1
    for level in step.sent:
      link.send(now, self.traffic.message[level])
      if c.by_level:
        self.at(link.send(now, 0), self.count, path, (level,), version)
    if step.has_state and c.state == WITH:
      link.send(now, self.traffic.state)
    there = link.send(now, 0)
    if step.sent and not c.by_level:
      self.at(there, self.count, path, step.sent, version)
    self.at(there, self.published, worker)
    if step.has_state and c.state != WITH:
      self.send_state(now, path)

  def published(self, now: float, worker: int):
    """Notes that the fact of a piece is there."""
    self.publications[worker] -= 1
    self.begin(now, worker)

  def send_state(self, now: float, path: int):
    """Sends a path's state, after its publication or behind all else."""
    self.states[path] += 1
    worker = self.worker[path]
    if self.conditions.state == AFTER:
      self.at(self.up[worker].send(now, self.traffic.state), self.sent_state, path)
      return
    self.behind[worker].append(path)
    self.up[worker].send_behind(now, self.traffic.state)
    if len(self.behind[worker]) == 1:
      self.send_behind(now, worker)

  def send_behind(self, now: float, worker: int):
    """Goes on with the states that are behind, once the first of them may be there."""
    while self.behind[worker]:
      if (there := self.up[worker].first_behind(now)) is not None:
        self.at(there, self.send_behind, worker)
        return
      self.sent_state(now, self.behind[worker].popleft())

  def sent_state(self, now: float, path: int):
    """Notes that a path's state is there."""
    self.states[path] -= 1
    self.offer(now, path)

  # -- outer steps, and down

  def count(self, now: float, path: int, levels: Sequence[str], version: int):
    """Counts a path's messages; the last one of a module has its outer step begin."""
    c = self.conditions
    for level in levels:
      module = level, self.modules[level][path], version
      self.arrived[module] += 1
      if self.arrived[module] == len(self.traffic.groups[level][module[1]]):
        made = now + self.traffic.outer[level] / c.outer_bytes_per_s
        self.at(made + c.latency_s, self.read, *module)

  def read(self, now: float, level: str, module: int, version: int):
    """Sends a version down to all paths through the module."""
    for path in self.traffic.groups[level][module]:
      there = self.down[self.worker[path]].send(now, self.traffic.version[level])
      self.at(there, self.take, path, level, version)

  def take(self, now: float, path: int, level: str, version: int):
    """Notes that a version is on the machine of a path's worker."""
    self.versions[path][level] = version
    self.offer(now, path)


def _step_s(conditions: Conditions, worker: int) -> float:
  """Returns the seconds of a worker's inner step."""
  return conditions.step_s[worker % len(conditions.step_s)]
