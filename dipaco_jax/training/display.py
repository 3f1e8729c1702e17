"""Activities shown on stderr.

On a terminal one line changes; elsewhere lines follow each other, the rarer the longer the work takes. Nothing here
raises: the reader may go, and the work goes on.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator

QUICK_S = 1.0  # shorter activities are not shown
TOLD_S = 2.5  # longer ones get a line when they end
TICK_S = 0.2
LATE = 1.1  # a progress line may be late by this factor of its pause before the activity is shown instead


def pause_s(elapsed_s: float) -> float:
  """Returns the seconds between lines of a log (no terminal), by how long the work has taken."""
  return 2.5 if elapsed_s < 60 else 10 if elapsed_s < 600 else 30


class Display:
  """A stream, by default what stderr is at the time."""

  def __init__(self, stream=None):
    self._given, self._lock, self._open = stream, threading.RLock(), False
    self.stands = False  # on a terminal, a line that says how far the work is
    self.silent = self.only_terminal = False
    self.written = time.monotonic()  # when something last was

  @property
  def stream(self):
    return sys.stderr if self._given is None else self._given

  @property
  def is_terminal(self) -> bool:
    try:
      return self.stream.isatty() and os.environ.get('TERM') != 'dumb'
    except (AttributeError, ValueError):  # there is none, or it is closed
      return False

  def show(self, line: str, stands: bool = False):
    """Shows a line in one write; on a terminal it replaces the line before and is cut to the width."""
    self.stands = stands
    if self.is_terminal:
      self._write(f'\r{line[: max(self._width() - 1, 1)]}\x1b[K', True)
    elif not self.only_terminal:
      self._write(f'{line}\n', False)

  def leave(self):
    """Ends the line that is shown, so that it stays."""
    self.stands = False
    if self._open:
      self._write('\n', False)

  def clear(self):
    """Erases the line that is shown."""
    if self._open:
      self._write(self.cleared, False)

  @property
  def cleared(self) -> str:
    """The characters that clear a terminal's line."""
    return '\r\x1b[K' if self.is_terminal else ''

  def _write(self, words: str, is_open: bool):
    with self._lock, contextlib.suppress(OSError, ValueError, AttributeError):
      self._open, self.written = is_open, time.monotonic()
      if not self.silent:
        self.stream.write(words)
        self.stream.flush()

  def _width(self) -> int:
    with contextlib.suppress(OSError, ValueError):  # this stream's terminal, where it has one of its own
      if width := os.get_terminal_size(self.stream.fileno()).columns:
        return width
    return shutil.get_terminal_size().columns


STDERR = Display()


class Activity:
  """Something that takes time, from `begin` to `end`."""

  def __init__(self, words: str, tells: bool):
    self.words, self.tells, self.started, self.told = words, tells, time.monotonic(), False

  def tick(self, display: Display):
    """Shows the activity after a second in which nothing was shown, and then from time to time."""
    now = time.monotonic()
    elapsed, silence = now - self.started, now - display.written
    is_covered = display.stands and not self.tells  # a line says more than we could
    is_quick = min(elapsed, silence) >= QUICK_S and not is_covered and (display.is_terminal or not self.told)
    if is_quick or (silence >= LATE * pause_s(elapsed) and not (is_covered and display.is_terminal)):
      self.say(display)

  def say(self, display: Display):
    words = f'{self.words} {duration(time.monotonic() - self.started)}' if self.told else f'{self.words} ...'
    self.told = True
    display.show(words)

  def end(self, display: Display):
    elapsed = time.monotonic() - self.started
    if self.tells and self.told and elapsed >= TOLD_S:
      display.show(f'{self.words}: {duration(elapsed)}')
      display.leave()
    elif self.told:
      display.clear()


class Activities:
  """The activities of a process, the innermost last, which a thread shows while there is any."""

  def __init__(self, display: Display):
    self._display, self._all, self._some = display, list[Activity](), threading.Event()
    self._lock = threading.Lock()
    self._thread = threading.Thread(target=self._tick, name='says what is done', daemon=True)

  def begin(self, words: str, tells: bool = True, at_once: bool = False) -> Activity:
    made = Activity(words, tells)
    with self._lock:
      if at_once:
        made.say(self._display)
      self._all.append(made)
      self._some.set()
      if self._thread.ident is None:
        self._thread.start()
    return made

  def end(self, activity: Activity):
    with self._lock:
      self._all.remove(activity)
      if not self._all:
        self._some.clear()
      activity.end(self._display)

  def _tick(self):
    while self._some.wait():
      with self._lock:
        if self._all:
          self._all[-1].tick(self._display)
      time.sleep(TICK_S)


_activities = Activities(STDERR)
begin, end = _activities.begin, _activities.end


@contextlib.contextmanager
def doing(words: str, tells: bool = True, at_once: bool = False) -> Iterator[None]:
  """Shows an activity while the block runs.

  Args:
    words: the activity.
    tells: whether its end is shown too, if it was long.
    at_once: shows it now, not only after a second.
  """
  activity = begin(words, tells, at_once)
  try:
    yield
  finally:
    end(activity)


def duration(seconds: float) -> str:
  """Formats seconds: '7 s', '3:12' minutes, '2:03:12' hours, '3 d 4 h'."""
  s = round(seconds)
  if s < 60:
    return f'{s} s'
  if s < 3600:
    return f'{s // 60}:{s % 60:02d}'
  if s < 86_400:
    return f'{s // 3600}:{s // 60 % 60:02d}:{s % 60:02d}'
  return f'{s // 86_400} d {s // 3600 % 24} h'
