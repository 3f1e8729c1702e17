"""Intervals at which a process does something."""

import math
import time


class Interval:
  """Says when something is due: at once, and again `seconds` after it was last due."""

  def __init__(self, seconds: float):
    self.seconds, self.last = seconds, -math.inf

  def is_due(self) -> bool:
    """Returns whether it is due now; if so, the interval begins again."""
    now = time.monotonic()
    if now - self.last < self.seconds:
      return False
    self.last = now
    return True
