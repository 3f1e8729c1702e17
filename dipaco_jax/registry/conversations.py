"""Closing of a process's connections to the database, so that a thousand processes need only a few.

A single call leaves its connection open for LINGER_S, because a claim, a completion and the scheduling after it are
several calls in a row. A conversation is a group of calls at intervals, such as the renewal of a lease. It closes the
connection when it ends, unless another thread is using it or has just used it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from dipaco_jax.storage import retry

LINGER_S = 0.5  # connecting takes seven answers of the database with TLS and a password


class Conversations:
  """Counts who speaks; calls `hang_up` when nobody does, and nobody has just spoken."""

  def __init__(self, hang_up: Callable[[], object]):
    self._hang_up, self._lock = hang_up, threading.Lock()
    self._speakers = 0
    self._until = 0.0  # when the last call has lingered
    self._timer: threading.Timer | None = None
    self._here = threading.local()  # this thread's conversation: its longest wait between attempts

  @contextlib.contextmanager
  def speaking(self, lingers: bool = True) -> Iterator[None]:
    """Keeps connections open during the block, and, unless this is in a conversation, for LINGER_S after it."""
    with self._lock:
      self._speakers += 1
    try:
      yield
    finally:
      with self._lock:
        self._speakers -= 1
        if lingers and not hasattr(self._here, 'longest_wait_s'):
          self._until = time.monotonic() + LINGER_S
        self._settle()

  @contextlib.contextmanager
  def conversation(self, longest_wait_s: float) -> Iterator[None]:
    """Makes this thread's calls one conversation; in it, attempts are at most `longest_wait_s` apart."""
    if hasattr(self._here, 'longest_wait_s'):
      yield
      return
    with self.speaking(lingers=False):
      self._here.longest_wait_s = longest_wait_s
      try:
        yield
      finally:
        del self._here.longest_wait_s

  def longest_wait_s(self) -> float:
    """Returns how far apart this thread's attempts may be while the database is away."""
    return getattr(self._here, 'longest_wait_s', retry.LONGEST_WAIT_S)

  def linger(self):
    """Keeps the connection for LINGER_S after this conversation, since its answer makes more calls likely."""
    with self._lock:
      self._until = time.monotonic() + LINGER_S

  def close(self):
    """Forgets what lingers."""
    with self._lock:
      self._until = 0.0
      if self._timer:
        self._timer.cancel()
        self._timer = None

  def _settle(self):
    """Hangs up, now or when the last call has lingered; called with the lock, so that nobody begins to speak."""
    if self._speakers or self._timer:
      return
    left_s = self._until - time.monotonic()
    if left_s <= 0:
      self._hang_up()
    else:
      self._timer = threading.Timer(left_s, self._time_out)
      self._timer.daemon = True
      self._timer.start()

  def _time_out(self):
    with self._lock:
      self._timer = None
      self._settle()
