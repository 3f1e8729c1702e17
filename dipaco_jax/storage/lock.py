"""File locks: one run per workdir, and one process of a machine at a time in a directory, a slot or a database.

The system grants a lock in order and frees it when its holder dies. A holder that is stopped (SIGSTOP, a debugger)
keeps it, so waits are limited, and errors name the holder.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, TextIO

from dipaco_jax.core import json_text
from dipaco_jax.core.errors import InputError

HOLD_ATTEMPTS = 10
SAY_S = 10.0  # `in_directory` logs for whom it waits after so long
PATIENCE_S = 3600.0  # and gives up after so long: a download takes minutes


@contextlib.contextmanager
def hold(workdir: Path) -> Iterator[None]:
  """Holds the lock of a workdir; raises InputError that names its holder."""
  with open(workdir / 'lock', 'a+') as f:
    for attempt in range(HOLD_ATTEMPTS):  # `status` holds it for a moment, a killed process for another
      with contextlib.suppress(BlockingIOError):
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      if attempt + 1 < HOLD_ATTEMPTS:
        time.sleep(0.2)
    else:
      f.seek(0)
      pid, host, started = map(_read_record(f).get, ('pid', 'host', 'started'))
      raise InputError(
        f'--workdir={workdir} is in use by process {pid} on {host} since {started}: wait for it, stop it, or choose '
        'another; if that host is gone for good and a file server still holds its lock, remove the file `lock` there'
      )
    f.truncate(0)
    started = time.strftime('%Y-%m-%d %H:%M:%S')
    f.write(json.dumps({'pid': os.getpid(), 'host': socket.gethostname(), 'started': started}))
    f.flush()
    yield


@contextlib.contextmanager
def held_as(copy: Path, holder: Mapping[str, Any]) -> Iterator[None]:
  """Makes the copy of a workdir appear to be held by the holder of the original."""
  with open(copy / 'lock', 'w') as f:
    fcntl.flock(f, fcntl.LOCK_EX)
    f.write(json.dumps(holder))
    f.flush()
    yield


def owner(workdir: Path) -> dict[str, Any] | None:
  """Returns {pid, host, started} of a workdir lock's holder, {} while it is being written, None if nobody holds it."""
  with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(workdir / 'lock') as f:
    try:
      fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
      return _read_record(f)
  return None


def _read_record(file: TextIO) -> dict[str, Any]:
  """Reads the record of a lock's holder; {} while it is being written."""
  try:
    record = json_text.parse(file.read())
  except ValueError:
    return {}
  return record if isinstance(record, dict) else {}


class Held(OSError):
  """Another process holds a lock for too long; the message names it."""


@contextlib.contextmanager
def locked(path: str | os.PathLike, flags: int, patience_s: float, say_s: float | None = None) -> Iterator[int]:
  """Opens a file or directory with `flags` and holds its lock during the block, which gets the open file.

  Raises Held after `patience_s` seconds; 0 does not wait. Logs once who holds the lock, after `say_s`, if given.
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
    yield handle
  finally:
    if not granted.cancelled():
      os.close(handle)


def _wait(handle: int, granted: futures.Future):
  """Waits for the lock, and grants it, or closes the file if no caller waits any more."""
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


def in_directory(directory: Path) -> contextlib.AbstractContextManager[int]:
  """Lets one process of this machine at a time into the block; leaves no file. Raises Held after PATIENCE_S."""
  return locked(directory, os.O_RDONLY, PATIENCE_S, SAY_S)


def describe_holder(path: str | os.PathLike) -> str:
  """Returns 'process 12 holds the lock of FILE', and what to do where that process is stopped."""
  pid = find_holder(path)
  if not pid:
    return f'another process holds the lock of {path}'
  with contextlib.suppress(OSError):
    state = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
    if state in 'Tt':
      fix = f'continue it: kill -CONT {pid}, or end it: kill -KILL {pid}'
      return f'process {pid} is stopped ({fix}) and holds the lock of {path}'
  return f'process {pid} holds the lock of {path}'


def find_holder(path: str | os.PathLike) -> int:
  """Returns the process of this machine that holds a file's lock; 0 if that is not known."""
  with contextlib.suppress(OSError):
    inode = os.stat(path).st_ino
    for line in Path('/proc/locks').read_text().splitlines():
      fields = line.split()  # 7: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF; -> after the number: it waits
      if fields[1] == 'FLOCK' and fields[5].endswith(f':{inode}'):
        return max(0, int(fields[4]))
  return 0
