"""States of the paths that a worker trained last, which it holds in memory and on its machine's disk [3].

    <place on this machine>/held/<n>/     a slot, locked by one worker process at a time
      holder                              a random id, made with the slot; facts and tasks name it
      PATH-PHASE-DIGEST.state             a path's state after a phase; DIGEST begins the checkpoint's sha256
      PATH-PHASE-stepN-DIGEST.state       a state within a phase, with parameters; DIGEST is of the phase's beginning
      PATH-PHASE-DIGEST.aside             a path's state that waits to be published (state_facts.py)

A holder is a disk, not a process: a worker that is restarted on its machine takes the first free slot and its states;
on another disk, it is a new holder. Each file begins with the SHA-256 of the rest, so a damaged file counts as absent.
Lost states can be computed again (lineage.py), so a disk that fails or is full does not stop the worker.
"""

import collections
import contextlib
import itertools
import logging
import os
import pathlib
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from typing import NamedTuple

from dipaco_jax.islands.path_state import Arrays
from dipaco_jax.storage import files, lock, tensors

HELD = 'held'
LOCK = 'lock'
HOLDER = 'holder'
NOT_FREE = lock.Held, FileNotFoundError, NotADirectoryError  # of a slot
DIGITS = 16  # of a digest, in names
NAME = re.compile(r'(\d+)-(\d+)-(?:step(\d+)-)?([0-9a-f]*)')
STATE, ASIDE = '.state', '.aside'
MEMORY_SHARE = 0.25  # of this machine's memory, for all workers on it together
MEMORY_LIMITS = '/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes'  # of a container


class Key(NamedTuple):
  """Names a path's state after a phase, or, with `step`, within it."""

  path: int
  phase: int
  digest: str  # of the checkpoint's fact, or of the beginning of the phase
  step: int | None = None

  @property
  def file(self) -> str:
    step = '' if self.step is None else f'step{self.step}-'
    return f'{self.path}-{self.phase}-{step}{self.digest[:DIGITS]}{STATE}'


class HeldStates:
  """States of paths in a slot, for any number of threads; without a folder, in memory alone."""

  def __init__(self, folder: pathlib.Path | None = None, holder: str = '', memory_bytes: int = 1 << 62):
    self.folder = folder
    self.holder = holder
    self.memory_bytes = memory_bytes
    self.memory: collections.OrderedDict[Key, Arrays] = collections.OrderedDict()  # the least recently used first
    self.kept_aside: dict[Key, Arrays | None] = dict.fromkeys(self._names(ASIDE))  # None: the disk has it
    self.newest: dict[Key, int] = {}  # see note_newest
    self.lock = threading.Lock()

  def put(self, key: Key, state: Arrays):
    """Keeps a path's state after a phase, synced; the one before stays until this one is asked for."""
    with self.lock:
      self._remember(key, state)
    self._write(key, state)

  def _remember(self, key: Key, state: Arrays):
    self.memory[_short(key)] = state
    self.memory.move_to_end(_short(key))
    while len(self.memory) > 1 and sum(map(tensors.num_bytes, self.memory.values())) > self.memory_bytes:
      self.memory.popitem(last=False)

  def get(self, path: int, phase: int, digest: str) -> Arrays | None:
    """Returns a path's state after a phase, or None if it is not held. Forgets older states, which are not needed."""
    key = Key(path, phase, digest)
    with self.lock:
      arrays = self.memory.get(_short(key))
    arrays = self._read(key.file) if arrays is None else arrays
    if arrays is not None:
      self.forget(path, phase, but=key)
    return arrays

  def set_aside(self, key: Key, state: Arrays):
    """Keeps a path's state until `drop_aside`, even if others are forgotten. It replaces those of earlier phases."""
    on_disk = False
    with contextlib.suppress(OSError):
      if self.folder:
        if not self._link(key):
          tensors.write_with_digest(self.folder / _aside(key), state)
        on_disk = True
    self.kept_aside[_short(key)] = None if on_disk else state
    for older in [k for k in self.aside() if k.path == key.path and k.phase < key.phase]:
      self.drop_aside(older)

  def _link(self, key: Key) -> bool:
    """Renames a state on disk so that it is kept aside; returns whether it exists."""
    assert self.folder
    try:
      os.link(self.folder / key.file, self.folder / _aside(key))
    except FileExistsError:
      return True
    except OSError:
      return False  # it is not there; or the disk has no links
    return True

  def aside(self) -> list[Key]:
    """Returns the states that are kept aside, the oldest first."""
    return sorted(self.kept_aside, key=lambda key: (key.phase, key.path))

  def read_aside(self, key: Key) -> Arrays | None:
    """Returns a state that is kept aside, or None if the disk has lost it."""
    state = self.kept_aside.get(key)
    return self._read(_aside(key)) if state is None else state

  def drop_aside(self, key: Key):
    """Forgets a state that is kept aside."""
    self.kept_aside.pop(key, None)
    with contextlib.suppress(OSError):
      if self.folder:
        (self.folder / _aside(key)).unlink(missing_ok=True)

  def put_piece(self, key: Key, state: Arrays):
    """Keeps a path's state after a piece of a phase, in memory only. It replaces states of earlier steps."""
    with self.lock:
      for older in [k for k in self.memory if k.path == key.path and k.step is not None]:
        del self.memory[older]
      self._remember(key, state)

  def put_within(self, key: Key, state: Arrays):
    """Keeps a path's state within a phase, on disk. It replaces states of earlier steps."""
    if self._write(key, state):
      self._remove(lambda k: k.path == key.path and k.step is not None and k.file != key.file)

  def get_within(
    self, path: int, phase: int, digest: str, at_most: int | None = None, at_least: int = 0
  ) -> tuple[int, Arrays] | None:
    """Returns the last step within a phase with a held state, and that state, or None."""
    named = (path, phase, digest[:DIGITS])
    steps = {k.step: k for k in [*self.names(), *self._in_memory()] if k.step is not None and k[:3] == named}
    for step in sorted((s for s in steps if at_least <= s <= (s if at_most is None else at_most)), reverse=True):
      with self.lock:
        arrays = self.memory.get(steps[step])
      if arrays is None:
        arrays = self._read(steps[step].file)
      if arrays is not None:
        return step, arrays
    return None

  def has_within(self, path: int, phase: int) -> bool:
    """Returns whether there may be a state within a phase; a look at names alone."""
    return any(k[:2] == (path, phase) and k.step is not None for k in [*self.names(), *self._in_memory()])

  def _in_memory(self) -> list[Key]:
    with self.lock:
      return list(self.memory)

  def forget(self, path: int, phase: int, but: Key | None = None):
    """Forgets a path's states up to a phase, `but` this one."""
    kept = but and but.file

    def is_older(key: Key) -> bool:
      return key.path == path and key.phase <= phase and key.file != kept

    with self.lock:
      for key in [key for key in self.memory if is_older(key)]:
        del self.memory[key]
      self.newest = {key: phase for key, phase in self.newest.items() if not is_older(key)}
    self._remove(is_older)

  def note_newest(self, key: Key, phase: int) -> int:
    """Notes the newest phase of a state's path, at the first call for this state; returns the noted phase."""
    with self.lock:
      return self.newest.setdefault(key, phase)

  def names(self) -> list[Key]:
    """Returns the names of all states on disk."""
    return self._names(STATE)

  def _names(self, suffix: str) -> list[Key]:
    try:
      names = os.listdir(self.folder) if self.folder else []
    except OSError:
      return []
    matches = [NAME.fullmatch(name.removesuffix(suffix)) for name in names if name.endswith(suffix)]
    return [Key(int(m[1]), int(m[2]), m[4], int(m[3]) if m[3] else None) for m in matches if m]

  def _write(self, key: Key, state: Arrays) -> bool:
    if not self.folder:
      return False
    try:
      tensors.write_with_digest(self.folder / key.file, state)
    except OSError as e:
      logging.warning(
        'path %d: its state is not on disk, and would have to be trained again after this process: %s', key.path, e
      )
      return False
    return True

  def _read(self, name: str) -> Arrays | None:
    try:
      return tensors.read_with_digest(self.folder / name) if self.folder else None
    except OSError:
      return None

  def _remove(self, is_useless):
    for key in filter(is_useless, self.names()):
      with contextlib.suppress(OSError):
        (self.folder / key.file).unlink(missing_ok=True)


@contextlib.contextmanager
def slot(place: pathlib.Path) -> Iterator[HeldStates]:
  """Takes the first free slot of this machine, and holds it until the end of the block, or of the process."""
  with contextlib.ExitStack() as stack:
    folder = _lock_first(stack, place / HELD)
    files.tidy(folder)
    count = sum(1 for other in (place / HELD).iterdir() if other.name.isdecimal())
    yield HeldStates(folder, _holder(folder / HOLDER), int(MEMORY_SHARE * machine_memory() / count))


def remove_free(place: pathlib.Path):
  """Removes the slots that no process holds, when the run is finished."""
  for folder in (place / HELD).glob('*'):
    with contextlib.suppress(*NOT_FREE), _locked(folder):
      shutil.rmtree(folder, ignore_errors=True)
  with contextlib.suppress(OSError):
    (place / HELD).rmdir()


def _lock_first(stack: contextlib.ExitStack, folder: pathlib.Path) -> pathlib.Path:
  """Locks the first slot that is free, made if all are held, until the stack is closed; returns it."""
  for n in itertools.count():
    (folder / str(n)).mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(*NOT_FREE):
      stack.enter_context(_locked(folder / str(n)))
      return folder / str(n)
  raise AssertionError('there is no end of numbers')


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
  """Locks a slot during the block; raises one of NOT_FREE where another process has it, or it is being removed."""
  with lock.locked(folder / LOCK, os.O_RDWR | os.O_CREAT, patience_s=0) as handle:
    if not os.path.samestat(os.fstat(handle), os.stat(folder / LOCK)):
      raise FileNotFoundError(folder / LOCK)
    yield


def _holder(file: pathlib.Path) -> str:
  """Returns the id in a slot, after creating a random one if there is none."""
  with contextlib.suppress(OSError, UnicodeDecodeError):
    if re.fullmatch('[0-9a-f]{16}', holder := file.read_text()):
      return holder
  new_holder = secrets.token_hex(8)
  files.write_file(file, new_holder)
  return new_holder


def machine_memory() -> int:
  """Returns the bytes of memory of this machine, or container."""
  limits = [os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')]
  for file in MEMORY_LIMITS:
    with contextlib.suppress(OSError, ValueError):
      limits.append(int(pathlib.Path(file).read_text()))
  return min(limits)


def _aside(key: Key) -> str:
  return key.file.removesuffix(STATE) + ASIDE


def _short(key: Key) -> Key:
  return key._replace(digest=key.digest[:DIGITS])
