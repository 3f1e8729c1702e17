"""How far long work is: one line that overwrites itself on a terminal, an occasional plain line elsewhere."""

import collections
import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any


class Progress:
  """Of one stage."""

  silent = False  # all of them: in all processes of a job but one

  def __init__(self, stage: str, total: int, unit: str, stream=None, clock=time.monotonic):
    """total: of units; 0 where it is not known."""
    self._stage, self._total, self._unit, self._clock = stage, total, unit, clock
    self._stream = sys.stderr if stream is None else stream
    self._terminal = self._stream.isatty() and os.environ.get('TERM') != 'dumb'
    self._started, self._next_time = clock(), -math.inf
    self._recent: collections.deque[tuple[float, int]] = collections.deque()
    self._line, self._printed = '', ''

  def update(self, done: int, **shown):
    """Shows done of total and values: `loss=3.2` as 'loss 3.200', `tokens_per_s=8e3` as '8,000 tokens/s'."""
    if self.silent:
      return
    now = self._clock()
    self._recent.append((now, done))
    while len(self._recent) > 2 and now - self._recent[1][0] > 30:  # seconds that the rate looks back
      self._recent.popleft()
    self._line = '  '.join([self._position(done), *(_show(k, v) for k, v in shown.items()), *self._eta(done)])
    if now >= self._next_time:
      self._next_time = now + (0.2 if self._terminal else 10 if now - self._started < 120 else 30)
      self._print()

  def close(self):
    """Shows the last update, and leaves the line."""
    if self._line != self._printed:
      self._print()
    if self._terminal and self._printed:
      self._stream.write('\n')
      self._stream.flush()
    self._line = self._printed = ''

  def _position(self, done: int) -> str:
    if not self._total:
      return f'{self._stage} {done:,} {self._unit}'
    return f'{self._stage} {done:,}/{self._total:,} {self._unit} {100 * done // self._total}%'

  def _eta(self, done: int) -> list[str]:
    """From the recent rate: a resumed run starts in the middle, and the first step compiles."""
    (first_time, first), (last_time, last) = self._recent[0], self._recent[-1]
    if not self._total or done >= self._total or last <= first or last_time <= first_time:
      return []
    return [f'ETA {duration((self._total - done) * (last_time - first_time) / (last - first))}']

  def _print(self):
    # One write, and the rest of the line is erased after the text: nothing blinks, and no long line wraps.
    if self._terminal:
      width = shutil.get_terminal_size().columns
      with contextlib.suppress(OSError, ValueError):  # this stream's terminal, where it has one of its own
        width = os.get_terminal_size(self._stream.fileno()).columns or width
      self._stream.write(f'\r{self._line[: max(width - 1, 1)]}\x1b[K')
    else:
      self._stream.write(self._line + '\n')
    self._stream.flush()
    self._printed = self._line


def whose_loss(paths: Sequence[int], num_paths: int) -> str:
  """Names the mean loss of these of so many paths, for `Progress.update`."""
  if num_paths == 1:
    return 'loss'
  return f'path_{paths[0]}_loss' if len(paths) == 1 else f'mean_loss_of_{len(paths)}_paths'


def _show(name: str, value: Any) -> str:
  words = name.replace('_per_', '/').replace('_', ' ')
  if isinstance(value, float):
    value = f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3f}'
  elif isinstance(value, int):
    value = f'{value:,}'
  return f'{value} {words}' if '_per_' in name else f'{words} {value}'


def duration(seconds: float) -> str:
  """'7 s', '3:12' minutes, '2:03:12' hours, '3 d 4 h'."""
  s = round(seconds)
  if s < 60:
    return f'{s} s'
  if s < 3600:
    return f'{s // 60}:{s % 60:02d}'
  if s < 86_400:
    return f'{s // 3600}:{s // 60 % 60:02d}:{s % 60:02d}'
  return f'{s // 86_400} d {s // 3600 % 24} h'
