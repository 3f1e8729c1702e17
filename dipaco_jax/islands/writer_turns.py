"""The turns of the processes that write into one SQLite file: one at a time, roughly first come, first served.

SQLite's own wait favours the last to come: of 8 processes, one waits for seconds. The system grants a file's lock in
order and frees it when its holder dies, but a process that has just released it and returns may be faster than the one
that is woken. So there are two locks: whoever is next waits for the first while it holds the second, where all others
wait.

A holder that is stopped (SIGSTOP, a debugger) keeps its lock. A wait is therefore limited, and its error names the
holder.
"""

import contextlib
import fcntl
import os
import pathlib
import threading
from collections.abc import Iterator
from concurrent import futures

TURN_S = 10.0  # a turn takes milliseconds


class Held(OSError):
  """Another process has held a lock for longer than TURN_S; the message names it."""


@contextlib.contextmanager
def writer_turn(file: str) -> Iterator[None]:
  """Lets one process at a time into the block, of all that write into `file`. Raises Held."""
  with contextlib.ExitStack() as stack:
    with _locked(f'{file}.next'):
      stack.enter_context(_locked(f'{file}.lock'))
    yield


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
  handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
  granted = futures.Future[None]()
  try:
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      # In a thread, because nothing else can end a wait in order; an abandoned one waits on, and closes the file.
      threading.Thread(target=_wait, args=(handle, granted), daemon=True).start()
      _await_grant(path, granted)
    yield
  finally:
    if not granted.cancelled():
      os.close(handle)


def _wait(handle: int, granted: futures.Future):
  """Waits for the lock, and grants it, or closes the file where nobody waits for it any more."""
  try:
    fcntl.flock(handle, fcntl.LOCK_EX)
    error = None
  except OSError as e:
    error = e
  if not granted.set_running_or_notify_cancel():
    os.close(handle)
  elif error:
    granted.set_exception(error)
  else:
    granted.set_result(None)


def _await_grant(path: str, granted: futures.Future):
  """Returns when the lock is granted; raises Held after TURN_S."""
  try:
    granted.result(TURN_S)
  except BaseException as e:  # including a signal's exception
    if not granted.cancel():
      granted.result()  # granted at this moment, or its error
    if not isinstance(e, TimeoutError):
      raise
    if granted.cancelled():
      raise Held(f'{_describe_holder(path)} the lock {path} for more than {TURN_S:g} s') from None


def _describe_holder(path: str) -> str:
  """Returns 'process 12 holds', and how to mend it where that process is stopped."""
  pid = _find_holder(path)
  if not pid:
    return 'another process holds'
  with contextlib.suppress(OSError):
    state = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
    if state in 'Tt':
      return f'process {pid} is stopped (continue it: kill -CONT {pid}, or end it: kill -KILL {pid}) and holds'
  return f'process {pid} holds'


def _find_holder(path: str) -> int:
  """Returns the process of this machine that holds a file's lock; 0 if that is not known."""
  with contextlib.suppress(OSError):
    inode = os.stat(path).st_ino
    for line in pathlib.Path('/proc/locks').read_text().splitlines():
      fields = line.split()  # 7: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF; -> after the number: it waits
      if fields[1] == 'FLOCK' and fields[5].endswith(f':{inode}'):
        return max(0, int(fields[4]))
  return 0
