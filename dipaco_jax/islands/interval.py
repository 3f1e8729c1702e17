"""What a process does from time to time."""

import math
import time


class Interval:
  """Says when something is due: at once, and again `seconds` after it was last due."""

  def __init__(self, seconds: float):
    self.seconds, self.last = seconds, -math.inf

  def is_due(self) -> bool:
    now = time.monotonic()
    if now - self.last < self.seconds:
      return False
    self.last = now
    return True
