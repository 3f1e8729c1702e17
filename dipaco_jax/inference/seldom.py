"""A log that nobody can fill: of one place in the program, so many lines a minute."""

import logging
import time

BURST, PERIOD_S = 10, 60.0


class Seldom(logging.Filter):
  """For a handler. The first line of the next period says how many there were that are not shown.

  Lines that were asked for, below WARNING, all pass.
  """

  def __init__(self, clock=time.monotonic):
    super().__init__()
    self.clock = clock
    self.seen: dict[tuple[str, int], tuple[float, int]] = {}  # when a place's period began, and its lines since

  def filter(self, record: logging.LogRecord) -> bool:
    if record.levelno < logging.WARNING:
      return True
    now, place = self.clock(), (record.pathname, record.lineno)
    began, count = self.seen.get(place, (now, 0))
    if now - began > PERIOD_S:
      if count > BURST:
        record.msg, record.args = f'{record.getMessage()} (and {count - BURST} times more before)', ()
      began, count = now, 0
    self.seen[place] = began, count + 1
    return count < BURST


def install():
  """On all that the root logger writes to."""
  for handler in logging.getLogger().handlers:
    handler.addFilter(Seldom())
