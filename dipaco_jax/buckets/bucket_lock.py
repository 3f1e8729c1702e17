"""The lock of a run in a bucket: an object that its holder rewrites every few seconds.

A bucket keeps the lock of a killed process. A new process therefore watches whether the object changes: a holder that
does not write for SILENCE_S is considered dead. If it was only suspended for that long, it notices the new holder, and
ends.
"""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import object_store, retry, seals
from dipaco_jax.storage.object_store import Storage

NAME = 'lock'
BEAT_S, SILENCE_S = 5.0, 20.0


@contextlib.contextmanager
def hold(storage: Storage, scratch: str, lost: Callable[[InputError], object]) -> Iterator[None]:
  """Holds the lock of a run while the block runs.

  A holder with the same id of a `scratch` is gone, as one process of a machine works there at a time. `lost` is called,
  by another thread, when another process has taken the lock away. Raises InputError that names who holds it.
  """
  while (current := read(storage)) and current.get('scratch') != scratch:
    if not _changes(storage, current):
      break
  mine = {'pid': os.getpid(), 'host': socket.gethostname(), 'started': time.strftime('%Y-%m-%d %H:%M:%S')}
  mine |= {'scratch': scratch, 'process': secrets.token_hex(8)}

  def beat():
    storage.write(NAME, seals.dumps(mine | {'time': time.time()}).encode())

  def is_ours(record: dict[str, Any] | None) -> bool:
    return record is None or record.get('process') == mine['process']

  def beat_if_ours():
    with contextlib.suppress(OSError):  # publishing fails with the same error
      if is_ours(record := read(storage)):
        beat()
      else:
        lost(_in_use(storage, record or {}))

  beat()
  try:
    with retry.every(BEAT_S, 'a sign of life', beat_if_ours):
      yield
  finally:
    with contextlib.suppress(OSError):
      if is_ours(read(storage)):
        storage.delete(NAME)


def _changes(storage: Storage, record: dict[str, Any]) -> bool:
  """Watches a lock until it is released (returns True) or silent. Raises InputError if its holder is running."""
  deadline = time.monotonic() + SILENCE_S
  while time.monotonic() < deadline:
    time.sleep(1)
    if (now := read(storage)) is None:
      return True
    if now != record:
      raise _in_use(storage, now)
  return False


def _in_use(storage: Storage, holder: dict[str, Any]) -> InputError:
  pid, host, started = map(holder.get, ('pid', 'host', 'started'))
  problem = f'is in use by process {pid} on {host} since {started}: wait for it, stop it, or choose another'
  return InputError(f'--workdir={storage.url} {problem}')


def holder(storage: Storage) -> dict[str, Any] | None:
  """Returns {pid, host, started} of who holds the lock of a run, by the clocks of both machines."""
  record = read(storage)
  return record if record and time.time() - record.get('time', 0) < 3 * SILENCE_S else None


def read(storage: Storage) -> dict[str, Any] | None:
  """Returns {pid, host, started, scratch, process, time} of the lock's last holder; None if it has given it back."""
  try:
    return seals.loads(bytes(storage.fetch(NAME))) or {}
  except object_store.Missing:
    return None
