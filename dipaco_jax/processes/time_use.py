"""Time of a process: seconds by cause, of the threads that are measured.

A thread has one cause at a time, so that the seconds of all causes add up to its time. Where blocks are nested, the
inner one counts, except within the causes of WHOLE, to which all that happens in them belongs. Training is
asynchronous, and nothing here waits for a device: INNER is the time of the loop, in which the host waits for steps.
"""

import collections
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

INNER, OUTER = 'inner', 'outer'  # steps, the purpose of a run
INPUT = 'input'  # waiting for batches, where the devices had nothing left to do
EVALUATE, CHECKPOINT = 'evaluate', 'checkpoint'  # hold-outs and validation; what survives: checkpoints and modules
COMPILE, START = 'compile', 'start'  # START: of the process, up to its first work
STAGES = 'stages'  # text, router and shards; in islands, the base model too
STORAGE, DATABASE = 'storage', 'database'  # of islands
WAIT = 'wait'  # for other processes: in islands, for modules of theirs
LOST = 'lost'  # lost to restarts: repeated work, and the time until the next start
OTHER = 'other'
CAUSES = INNER, OUTER, INPUT, EVALUATE, CHECKPOINT, COMPILE, START, STAGES, STORAGE, DATABASE, WAIT, LOST, OTHER
STEPS = INNER, OUTER
WHOLE = WAIT, LOST, START, STAGES
STAYS = STAGES, LOST  # work that is not repeated when training continues from an earlier checkpoint

LONGEST_START_S = 600.0  # up to the first line of a command; a sandbox may count from another moment

Seconds = Mapping[str, float]  # by cause

T = TypeVar('T')

_here = threading.local()


class Clock:
  """The seconds of one thread, by cause, at one place at a time, as a stage of the run; others may read them."""

  def __init__(self, cause: str, age_s: float = 0.0):
    """`age_s`: seconds that have passed already."""
    self.cause = cause
    self.place = ''
    self.has_places = False
    self._since, self._seconds = time.monotonic() - age_s, {'': dict.fromkeys(CAUSES, 0.0)}
    self._former: dict[str, Seconds] = {}  # of processes before, by place
    self.entered: Callable[[], None] = lambda: None  # called at every new place
    self._lock = threading.RLock()  # a signal handler may read at any time
    self._passed = set[str]()  # names of first calls that have been counted
    self._compiled = collections.deque[tuple[float, float]](maxlen=1000)  # when each compilation began, and its seconds

  def switch(self, cause: str):
    """Counts from now on for a cause."""
    with self._lock:
      self._count()
      self.cause = cause

  def enter(self, place: str, cause: str):
    """Counts for a cause at a place from now on. Time without a place counts for this place, too."""
    with self._lock:
      self._count()
      self.place, self.cause = place, cause
      self._add(place, self._seconds.pop('', {}))
      self._seconds.setdefault(place, dict.fromkeys(CAUSES, 0.0))
    self.entered()

  def take(self, former: Mapping[str, Seconds]):
    """Adds the seconds of processes before, by place."""
    with self._lock:
      self._former = {place: dict(seconds) for place, seconds in former.items()}
      for place, seconds in former.items():
        self._add(place, seconds)

  def lose_since(self, kept: Seconds):
    """Counts what processes before have done here since `kept` was all as lost; `kept` is what a checkpoint notes.

    Only once: what this process has done since is no loss. If a checkpoint knows of more than was taken over, as on
    a new machine, no more than that was lost of the time until this process began.
    """
    with self._lock:
      here = self._seconds[self.place]
      if (former := self._former.pop(self.place, None)) is None:
        return
      for cause in CAUSES:
        if cause not in STAYS:
          lost = max(former.get(cause, 0.0) - kept.get(cause, 0.0), -here[LOST])
          here[cause] -= lost
          here[LOST] += lost

  def lose(self, before: Seconds):
    """Counts the steps that this process has made since `before`, a result of `read`, as lost."""
    with self._lock:
      self._count()
      here = self._seconds[self.place]
      for cause in STEPS:
        lost = here[cause] - before[cause]
        here[cause] -= lost
        here[LOST] += lost

  def read(self) -> dict[str, float]:
    """Returns the seconds up to now, by cause, of this place."""
    return self.read_all()[self.place]

  def read_all(self) -> dict[str, dict[str, float]]:
    """Returns the seconds up to now, by place and cause."""
    with self._lock:
      self._count()
      return {place: dict(seconds) for place, seconds in self._seconds.items()}

  def move(self, seconds: float, cause: str):
    """Counts the last seconds for a cause instead of the present one."""
    with self._lock:
      self._count()
      here = self._seconds[self.place]
      moved = min(seconds, here[self.cause])
      here[self.cause] -= moved
      here[cause] += moved

  def has_compiled(self, seconds: float):
    """Counts a compilation that ends now; those within it, which ended before, are counted already."""
    began, inside = time.monotonic() - seconds, 0.0
    while self._compiled and self._compiled[-1][0] >= began:
      inside += self._compiled.pop()[1]
    self._compiled.append((began, seconds))
    if self.cause not in WHOLE:
      self.move(max(0.0, seconds - inside), COMPILE)

  def is_first(self, name: str) -> bool:
    """Returns whether this was not asked before of the name."""
    is_first = name not in self._passed
    self._passed.add(name)
    return is_first

  def _count(self):
    now = time.monotonic()
    self._seconds[self.place][self.cause] += now - self._since
    self._since = now

  def _add(self, place: str, seconds: Seconds):
    at = self._seconds.setdefault(place, dict.fromkeys(CAUSES, 0.0))
    for cause, more in seconds.items():
      at[cause] = at.get(cause, 0.0) + more


def begin(age_s: float = 0.0) -> Clock:
  """Measures this thread from now on, or from `age_s` ago, as START; returns its clock, which it may have already."""
  _here.clock = getattr(_here, 'clock', None) or Clock(START, age_s)
  return _here.clock


def end():
  """Stops measuring this thread."""
  _here.clock = None


def present() -> Clock | None:
  """Returns the clock of this thread; None if it is not measured."""
  return getattr(_here, 'clock', None)


def read() -> dict[str, float]:
  """Returns the seconds of this thread up to now, by cause, at the present place; {} if it is not measured."""
  clock = present()
  return clock.read() if clock else {}


def lose_since(kept: Seconds):
  """Counts the time of earlier processes at this place since `kept` as lost; see `Clock`."""
  if clock := present():
    clock.lose_since(kept)


@contextlib.contextmanager
def doing(cause: str, first: str = '') -> Iterator[None]:
  """Counts the block for a cause if this thread is measured; the first time for each name `first`, counts START."""
  clock = present()
  if clock is None or clock.cause in WHOLE:
    yield
    return
  before = clock.cause
  clock.switch(START if first and clock.is_first(first) else cause)
  try:
    yield
  finally:
    clock.switch(before)


def enter(place: str, cause: str):
  """Counts time from now on for a cause at a place, such as a stage, if this thread is measured by place."""
  if (clock := present()) and clock.has_places:
    clock.enter(place, cause)


@contextlib.contextmanager
def within(place: str, cause: str) -> Iterator[None]:
  """Counts the block for a place and a cause, and then as before, if this thread is measured by place."""
  clock = present()
  before = (clock.place, clock.cause) if clock else ('', '')
  enter(place, cause)
  try:
    yield
  finally:
    enter(*before)


def fed(items: Iterable[T], is_busy: Callable[[], bool]) -> Iterator[T]:
  """Yields the items; waiting for one is INPUT, unless the devices were busy until it came: that costs nothing."""
  waiting = iter(items)
  while True:
    began = time.monotonic()
    try:
      item = next(waiting)
    except StopIteration:
      return
    if (clock := present()) and clock.cause not in WHOLE and not is_busy():
      clock.move(time.monotonic() - began, INPUT)
    yield item


def goodput(seconds: Seconds) -> float | None:
  """Returns the share of the time of training that was spent in inner and outer steps; what STAGES took is no part."""
  total_s = math.fsum(seconds.values()) - seconds.get(STAGES, 0.0)
  return math.fsum(seconds.get(cause, 0.0) for cause in STEPS) / total_s if total_s > 0 else None


def process_age_s() -> float:
  """Returns the seconds since the system started this process; 0.0 if it does not tell."""
  with contextlib.suppress(OSError, ValueError, IndexError):
    with open('/proc/self/stat') as file:
      ticks = int(file.read().rpartition(')')[2].split()[19])  # since the machine was started
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf('SC_CLK_TCK')
    return age_s if 0 < age_s < LONGEST_START_S else 0.0
  return 0.0


class Busy:
  """The seconds in which at least one thread is in the block."""

  def __init__(self):
    self._lock = threading.Lock()
    self._threads = 0
    self._since = 0.0
    self._seconds = 0.0

  def __enter__(self):
    with self._lock:
      self._since = self._since if self._threads else time.monotonic()
      self._threads += 1

  def __exit__(self, *_):
    with self._lock:
      self._threads -= 1
      self._seconds += 0.0 if self._threads else time.monotonic() - self._since

  def read(self) -> float:
    """Returns the seconds up to now."""
    with self._lock:
      return self._seconds + (time.monotonic() - self._since if self._threads else 0.0)
