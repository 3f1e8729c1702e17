"""Turns of the processes that write to one SQLite file: one at a time, roughly first come, first served.

SQLite's own waiting favours the last process to arrive: with 8 processes, one waits for seconds. The system grants the
lock of a file in order, but a process that has just released it and returns may be faster than the one that is woken.
So there are two locks: the next process waits for the first lock while it holds the second, for which all others wait.
"""

import contextlib
import os
from collections.abc import Iterator

from dipaco_jax.storage import lock

TURN_S = 10.0  # a turn takes milliseconds


@contextlib.contextmanager
def writer_turn(file: str) -> Iterator[None]:
  """Lets one process at a time into the block, of all that write into `file`. Raises lock.Held after TURN_S."""
  flags = os.O_WRONLY | os.O_CREAT
  with contextlib.ExitStack() as stack:
    with lock.locked(f'{file}.next', flags, TURN_S):
      stack.enter_context(lock.locked(f'{file}.lock', flags, TURN_S))
    yield
