"""A limit of time for a script that starts one run after another."""

import math
import os
import signal
import threading
import time

SLACK = 1.2  # a run is allowed if this many times its expected duration is left


class Deadline:
  """Ends a script after `minutes`; 0: never. A run that is under way by then is stopped, and saves a checkpoint."""

  def __init__(self, minutes: float):
    self.end = time.monotonic() + 60 * minutes if minutes else math.inf
    if minutes:
      timer = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))  # passed on to the run's process
      timer.daemon = True
      timer.start()

  def allows(self, seconds: float | None) -> bool:
    """Returns whether a run with these expected seconds would end in time; None means that they are unknown."""
    return time.monotonic() + SLACK * (seconds or 0) < self.end
