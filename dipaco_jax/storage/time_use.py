"""What a process spends its time on: seconds by cause, of the threads that are measured.

A thread has one cause at a time, so that the seconds of all causes add up to its time. Where blocks are nested, the
inner one counts, except within the causes of WHOLE, to which all that happens in them belongs.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

INNER, WAITING, STORAGE, DATABASE = 'inner', 'waiting', 'storage', 'database'
REPLAY, START, STAGES, OTHER = 'replay', 'start', 'stages', 'other'
CAUSES = INNER, WAITING, STORAGE, DATABASE, REPLAY, START, STAGES, OTHER
WHOLE = WAITING, REPLAY, START, STAGES

_here = threading.local()


class Clock:
  """The seconds of one thread, by cause; others may read them."""

  def __init__(self, cause: str):
    self.cause = cause
    self._since, self._seconds = time.monotonic(), dict.fromkeys(CAUSES, 0.0)
    self._lock = threading.Lock()
    self._passed = set[str]()  # what is done for the first time only

  def switch(self, cause: str):
    """Counts from now on for a cause."""
    with self._lock:
      self._count()
      self.cause = cause

  def read(self) -> dict[str, float]:
    """Returns the seconds up to now, by cause."""
    with self._lock:
      self._count()
      return dict(self._seconds)

  def is_first(self, name: str) -> bool:
    """Returns whether this was not asked before of the name."""
    is_first = name not in self._passed
    self._passed.add(name)
    return is_first

  def _count(self):
    now = time.monotonic()
    self._seconds[self.cause] += now - self._since
    self._since = now


def begin() -> Clock:
  """Measures this thread from now on, as START, unless it is measured already; returns its clock."""
  _here.clock = getattr(_here, 'clock', None) or Clock(START)
  return _here.clock


def end():
  """Measures this thread no longer."""
  _here.clock = None


@contextlib.contextmanager
def doing(cause: str, first: str = '') -> Iterator[None]:
  """Counts the block for a cause, if this thread is measured; START, the first time that it passes what is `first`."""
  clock: Clock | None = getattr(_here, 'clock', None)
  if clock is None or clock.cause in WHOLE:
    yield
    return
  before = clock.cause
  clock.switch(START if first and clock.is_first(first) else cause)
  try:
    yield
  finally:
    clock.switch(before)


class Busy:
  """The seconds in which at least one thread is in the block."""

  def __init__(self):
    self._lock, self._threads, self._since, self._seconds = threading.Lock(), 0, 0.0, 0.0

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
