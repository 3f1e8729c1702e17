"""The turns of the processes that write into one SQLite file: one at a time, roughly first come, first served.

SQLite's own wait favours the last to come: of 8 processes, one waits for seconds. The system grants a file's lock in
order, but a process that has just released it and returns may be faster than the one that is woken. So there are two
locks: whoever is next waits for the first while it holds the second, where all others wait.
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
