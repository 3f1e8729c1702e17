"""A limit on log lines: each place in the program may write so many a minute, so that no client can fill the log."""

import logging
import time

BURST, PERIOD_S = 10, 60.0


class RateLimit(logging.Filter):
  """Passes BURST lines in PERIOD_S from each place in the code; the next period's first line counts those dropped.

  Lines below WARNING all pass.
  """

  def __init__(self, clock=time.monotonic):
    super().__init__()
    self.clock = clock
    self.seen: dict[tuple[str, int], tuple[float, int]] = {}  # (when its period began, lines since) of a place

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
  """Limits all handlers of the root logger."""
  for handler in logging.getLogger().handlers:
    handler.addFilter(RateLimit())
