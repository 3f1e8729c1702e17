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

HOLD_ATTEMPTS = 10


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

  Without `wait` others come in too, told False.
  """
  handle = os.open(directory, os.O_RDONLY)
  try:
    locks = True
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
      locks = False
    yield locks
  finally:
    os.close(handle)


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
