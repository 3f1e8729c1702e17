"""The progress of long work: one line that overwrites itself on a terminal, an occasional plain line elsewhere."""

import collections
import math
import time
from collections.abc import Sequence
from typing import Any

from dipaco_jax.training.display import STDERR, Display, duration, pause_s

SLACK_S = 0.5  # that a line may come late; nobody is to wait for 3 s without a word


class Progress:
  """The progress line of one stage."""

  def __init__(self, stage: str, total: int, unit: str, stream=None, clock=time.monotonic):
    """`total`: number of units; 0 if unknown."""
    self._stage, self._total, self._unit, self._clock = stage, total, unit, clock
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
    self._line = '  '.join([self._position(done), *(_show(k, v) for k, v in shown.items()), *self._eta(done)])
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
    if not self._total:
      return f'{self._stage} {done:,} {self._unit}'
    return f'{self._stage} {done:,}/{self._total:,} {self._unit} {100 * done // self._total}%'

  def _eta(self, done: int) -> list[str]:
    """Estimates the time left from the recent rate: the first step compiles, and resumed runs start in the middle."""
    (first_time, first), (last_time, last) = self._recent[0], self._recent[-1]
    if not self._total or done >= self._total or last <= first or last_time <= first_time:
      return []
    return [f'ETA {duration((self._total - done) * (last_time - first_time) / (last - first))}']

  def _print(self):
    self._display.show(self._line, stands=True)
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
