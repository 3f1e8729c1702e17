"""Progress and activities shown on stderr.

On a terminal, one line is updated; elsewhere, new lines are printed, less often the longer the work takes. Nothing here
raises: if the output is closed, the work continues.
"""

import collections
import contextlib
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

QUICK_S = 1.0  # shorter activities are not shown
TOLD_S = 2.5  # longer ones get a line when they end
TICK_S = 0.2
LATE = 1.1  # a progress line may be late by this factor of its pause before the activity is shown instead
SLACK_S = 0.5  # print a progress line at least this often


def pause_s(elapsed_s: float) -> float:
  """Returns the seconds between lines of a log (no terminal), by how long the work has taken."""
  return 2.5 if elapsed_s < 60 else 10 if elapsed_s < 600 else 30


class Display:
  """A stream, by default what stderr is at the time."""

  def __init__(self, stream=None):
    self._given = stream
    self._lock = threading.RLock()
    self._open = False
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

  def note(self, line: str):
    """Shows a whole line that stays, however wide the terminal is."""
    if self.is_terminal or not self.only_terminal:
      self._write(f'{self.cleared}{line}\n', False)

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

  def fits(self, line: str) -> bool:
    """Returns whether a line is shown whole."""
    return not self.is_terminal or len(line) < self._width()

  def _write(self, text: str, is_open: bool):
    with self._lock, contextlib.suppress(OSError, ValueError, AttributeError):
      self._open, self.written = is_open, time.monotonic()
      if not self.silent:
        self.stream.write(text)
        self.stream.flush()

  def _width(self) -> int:
    width = 0
    with contextlib.suppress(OSError, ValueError):  # this stream's terminal, where it has one of its own
      width = os.get_terminal_size(self.stream.fileno()).columns
    return width or shutil.get_terminal_size().columns


STDERR = Display()


class Activity:
  """Something that takes time, from `begin` to `end`."""

  def __init__(self, label: str, tells: bool):
    self.label = label
    self.tells = tells
    self.started = time.monotonic()
    self.was_shown = False

  def tick(self, display: Display):
    """Shows the activity after a second in which nothing was shown, and then from time to time."""
    now = time.monotonic()
    elapsed, silence = now - self.started, now - display.written
    is_covered = display.stands and not self.tells  # a line says more than we could
    is_quick = min(elapsed, silence) >= QUICK_S and not is_covered and (display.is_terminal or not self.was_shown)
    if is_quick or (silence >= LATE * pause_s(elapsed) and not (is_covered and display.is_terminal)):
      self.say(display)

  def say(self, display: Display):
    line = f'{self.label} {duration(time.monotonic() - self.started)}' if self.was_shown else f'{self.label} ...'
    self.was_shown = True
    display.show(line)

  def end(self, display: Display):
    elapsed = time.monotonic() - self.started
    if self.tells and self.was_shown and elapsed >= TOLD_S:
      display.show(f'{self.label}: {duration(elapsed)}')
      display.leave()
    elif self.was_shown:
      display.clear()


_all, _lock = list[Activity](), threading.Lock()  # of this process, the innermost last
_thread: threading.Thread | None = None  # shows the innermost, while there are any


def _show_innermost():
  global _thread
  while True:
    with _lock:
      if not _all:
        _thread = None
        return
      _all[-1].tick(STDERR)
    time.sleep(TICK_S)


def begin(label: str, tells: bool = True, at_once: bool = False) -> Activity:
  """Begins an activity, which a thread shows while it is the innermost; for the arguments see `doing`."""
  global _thread
  activity = Activity(label, tells)
  with _lock:
    if at_once:
      activity.say(STDERR)
    _all.append(activity)
    if _thread is None:
      thread = threading.Thread(target=_show_innermost, name='says what is done', daemon=True)
      thread.start()
      _thread = thread
  return activity


def end(activity: Activity):
  """Ends an activity."""
  with _lock:
    _all.remove(activity)
    activity.end(STDERR)


@contextlib.contextmanager
def doing(label: str, tells: bool = True, at_once: bool = False) -> Iterator[None]:
  """Shows an activity while the block runs: `at_once`, or only after a second; `tells`: its end too, if it was long."""
  activity = begin(label, tells, at_once)
  try:
    yield
  finally:
    end(activity)


def duration(seconds: float) -> str:
  """Formats seconds in the two largest units: '7 s', '3 min 12 s', '2 h 3 min', '3 d 4 h'; a zero is left out."""
  s = round(seconds)
  if s < 3600:
    parts = (s // 60, 'min'), (s % 60, 's')
  elif s < 86_400:
    parts = (s // 3600, 'h'), (s // 60 % 60, 'min')
  else:
    parts = (s // 86_400, 'd'), (s // 3600 % 24, 'h')
  return ' '.join(f'{number} {unit}' for number, unit in parts if number) or '0 s'


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
  """Formats rows of cells as lines, with the columns below each other."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return ['  '.join(x.ljust(width) for x, width in zip(row, widths, strict=True)).rstrip() for row in rows]


class Progress:
  """The progress line of one stage."""

  def __init__(self, stage: str, total: int, unit: str, stream=None, clock=time.monotonic, later: float | None = None):
    """Begins the line of a stage.

    Args:
      total: number of units; 0 if unknown.
      later: the work of the run's later stages, in units of this one; None: unknown, so no ETA of the run is shown.
    """
    self._stage = stage
    self._total = total
    self._unit = unit
    self._later = later
    self._clock = clock
    self._display = STDERR if stream is None else Display(stream)
    self._started, self._next_time = clock(), -math.inf
    self._recent: collections.deque[tuple[float, int]] = collections.deque()
    self._line, self._printed = '', ''

  def update(self, done: int, **shown):
    """Shows done of total and values: `loss=3.2` as 'loss 3.200', `tokens_per_s=8e3` as '8,000 tokens/s'."""
    now = self._clock()
    since = now - self._recent[-1][0] if self._recent else 0.0
    self._recent.append((now, done))
    while len(self._recent) > 2 and now - self._recent[1][0] > 30:  # seconds that the rate looks back
      self._recent.popleft()
    self._line = self._fit(self._position(done), [_show(k, v) for k, v in shown.items()], self._eta(done))
    if now >= self._next_time or now + since > self._next_time + SLACK_S:  # the next update would come too late
      self._next_time = now + (0.2 if self._display.is_terminal else pause_s(now - self._started))
      self._print()

  def close(self):
    """Shows the last update, and leaves the line."""
    if self._line != self._printed or (self._line and self._display.is_terminal):  # maybe behind something else
      self._print()
    self._display.leave()
    self._line = self._printed = ''

  def _position(self, done: int) -> str:
    of, part = (f'/{self._total:,}', f' {100 * done // self._total}%') if self._total else ('', '')
    return f'{self._stage} {done:,}{of} {self._unit}{part}'

  def _eta(self, done: int) -> list[str]:
    """Estimates the time left from the recent rate: the first step compiles, and resumed runs start in the middle."""
    (first_time, first), (last_time, last) = self._recent[0], self._recent[-1]
    if not self._total or done >= self._total or last <= first or last_time <= first_time:
      return []
    unit_s, left = (last_time - first_time) / (last - first), self._total - done
    of_run = [] if self._later is None else [f'run ETA ~{duration((left + self._later) * unit_s)}']
    return [f'ETA {duration(left * unit_s)}', *of_run]

  def _fit(self, position: str, shown: list[str], eta: list[str]) -> str:
    """Joins the parts of a line; on a terminal that is too narrow, the last of `shown` are left out."""
    line = '  '.join([position, *shown, *eta])
    return line if not shown or self._display.fits(line) else self._fit(position, shown[:-1], eta)

  def _print(self):
    self._display.show(self._line, stands=True)
    self._printed = self._line


def whose_loss(paths: Sequence[int], num_paths: int, path_name: Callable[[int], str] = str) -> str:
  """Names the mean loss of some of the paths, for `Progress.update`."""
  if num_paths == 1:
    return 'loss'
  return f'path_{path_name(paths[0])}_loss' if len(paths) == 1 else f'mean_loss_of_{len(paths)}_paths'


def _show(name: str, value: Any) -> str:
  label = name.replace('_per_', '/').replace('_', ' ')
  if isinstance(value, float):
    value = f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3f}'
  elif isinstance(value, int):
    value = f'{value:,}'
  return f'{value} {label}' if '_per_' in name else f'{label} {value}'
