"""Repeated calls: while a disk, bucket or database is unavailable for a while, or as long as something else runs."""

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar('T')

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 20.0


def call(
  name: str, action: Callable[[], T], is_transient: Callable[[Exception], bool], patience_s: float,
  longest_wait_s: float = LONGEST_WAIT_S,
) -> T:  # fmt: skip
  """Calls `action` until it returns, with waits that double from one attempt to the next, up to `longest_wait_s`.

  The waits are random, or all processes that lost the same server would return to it at the same moments. The last call
  begins `patience_s` after the first. Raises an error that is not transient, or the last one; `name` is for the log.
  """
  deadline, longest_s = time.monotonic() + patience_s, FIRST_WAIT_S
  while True:
    try:
      return action()
    except Exception as e:
      left_s = deadline - time.monotonic()
      if not is_transient(e) or left_s <= 0:
        raise
      wait_s = min(left_s, random.uniform(0.5, 1) * longest_s)
      logging.warning('%s: %s; the next attempt is in %.1f s', name, first_line(e), wait_s)
    time.sleep(wait_s)
    longest_s = min(longest_wait_s, 2 * longest_s)


@contextlib.contextmanager
def every(seconds: float, name: str, action: Callable[[], object]) -> Iterator[None]:
  """Calls `action` in a thread at regular intervals while the block runs; errors are logged and do not end it."""
  over = threading.Event()

  def repeat():
    while not over.wait(seconds):
      try:
        action()
      except Exception as e:
        logging.warning('%s: %s: %s; retrying in %g s', name, type(e).__name__, first_line(e), seconds)

  thread = threading.Thread(target=repeat, daemon=True)
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join(5)  # or its last call might end later than the block; at most 5 s, as a file server may not answer


def first_line(error: Exception) -> str:
  """Returns the first line of an error's message."""
  return str(error).split('\n', 1)[0]
