"""Locks: one run per workdir, and one process of a machine at a time in a directory."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import lock_waits

HOLD_ATTEMPTS = 10
SAY_S, PATIENCE_S = 10.0, 3600.0  # who waits for a lock in order logs for whom, and gives up: a download takes minutes


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
        'another; where that host is gone for good and a file server still keeps its lock, remove the file `lock` there'
      )
    f.truncate(0)
    started = time.strftime('%Y-%m-%d %H:%M:%S')
    f.write(json.dumps({'pid': os.getpid(), 'host': socket.gethostname(), 'started': started}))
    f.flush()
    yield


@contextlib.contextmanager
def held_as(copy: Path, holder: Mapping[str, Any]) -> Iterator[None]:
  """Has the copy of a workdir look as held by who holds the original."""
  with open(copy / 'lock', 'w') as f:
    fcntl.flock(f, fcntl.LOCK_EX)
    f.write(json.dumps(holder))
    f.flush()
    yield


@contextlib.contextmanager
def locked(directory: Path, wait: bool = True) -> Iterator[bool]:
  """Lets one process of this machine at a time into the block; the lock ends with its process and leaves no file.

  Raises Held after PATIENCE_S. Without `wait` others come in too, told False.
  """
  with contextlib.ExitStack() as stack:
    try:
      patience_s, say_s = (PATIENCE_S, SAY_S) if wait else (0.0, None)
      stack.enter_context(lock_waits.locked(directory, os.O_RDONLY, patience_s, say_s))
      locks = True
    except lock_waits.Held:
      if wait:
        raise
      locks = False
    yield locks


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
    found = json.loads(file.read())
  except ValueError:
    return {}
  return found if isinstance(found, dict) else {}
