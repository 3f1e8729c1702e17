"""Waits for the lock of a file that are limited, and whose errors name the holder.

The system grants a lock in order and frees it when its holder dies. A holder that is stopped (SIGSTOP, a debugger)
keeps it, and whoever waits without a limit waits as long.
"""

import contextlib
import fcntl
import logging
import os
import pathlib
import threading
from collections.abc import Iterator
from concurrent import futures


class Held(OSError):
  """Another process holds a lock for too long; the message names it."""


@contextlib.contextmanager
def locked(path: str | os.PathLike, flags: int, patience_s: float, say_s: float | None = None) -> Iterator[None]:
  """Opens a file or directory with `flags` and holds its lock during the block. Raises Held after `patience_s`, or 0.

  Logs once who holds it, after `say_s`, if given.
  """
  handle = os.open(path, flags, 0o666)
  granted = futures.Future[None]()
  try:
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      if not patience_s:
        raise Held(describe_holder(path)) from None
      # In a thread, because nothing else can end a wait in order; an abandoned one waits on, and closes the file.
      threading.Thread(target=_wait, args=(handle, granted), daemon=True).start()
      _await_grant(path, granted, patience_s, say_s)
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


def _await_grant(path: str | os.PathLike, granted: futures.Future, patience_s: float, say_s: float | None):
  """Returns when the lock is granted; raises Held after `patience_s`."""
  try:
    if say_s is not None:
      futures.wait([granted], say_s)
      if not granted.done():
        logging.warning('waiting for a lock: %s', describe_holder(path))
    granted.result(patience_s)
  except BaseException as e:  # including a signal's exception
    if not granted.cancel():
      granted.result()  # granted at this moment, or its error
    if not isinstance(e, TimeoutError):
      raise
    if granted.cancelled():
      raise Held(f'{describe_holder(path)}, for more than {patience_s:g} s') from None


def describe_holder(path: str | os.PathLike) -> str:
  """Returns 'process 12 holds the lock of FILE', and how to mend it where that process is stopped."""
  pid = find_holder(path)
  if not pid:
    return f'another process holds the lock of {path}'
  with contextlib.suppress(OSError):
    state = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
    if state in 'Tt':
      fix = f'continue it: kill -CONT {pid}, or end it: kill -KILL {pid}'
      return f'process {pid} is stopped ({fix}) and holds the lock of {path}'
  return f'process {pid} holds the lock of {path}'


def find_holder(path: str | os.PathLike) -> int:
  """Returns the process of this machine that holds a file's lock; 0 if that is not known."""
  with contextlib.suppress(OSError):
    inode = os.stat(path).st_ino
    for line in pathlib.Path('/proc/locks').read_text().splitlines():
      fields = line.split()  # 7: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF; -> after the number: it waits
      if fields[1] == 'FLOCK' and fields[5].endswith(f':{inode}'):
        return max(0, int(fields[4]))
  return 0
