"""Arrays of modules that a process keeps in memory and on its machine's disk, by the names of their objects [3].

    <place on this machine>/weights/<run>/OBJECT     for all processes of the machine, behind the sha256 of the bytes

A process that is restarted reads from storage only what its machine does not have. The newest versions of each module
are kept. A thread writes the files, which may be lost at any time: a damaged file counts as absent, and a disk that
fails or is full does not stop the process. If the place is the workdir itself, nothing is written, because the objects
are already on that disk.
"""

import collections
import contextlib
import logging
import os
import pathlib
import re
import shutil
import threading
import urllib.parse
from collections.abc import Iterable
from concurrent import futures

from dipaco_jax.islands.messages import Arrays
from dipaco_jax.storage import files, tensors
from dipaco_jax.storage.object_store import Storage

WEIGHTS = 'weights'  # the folder on this machine
MEMORY_BYTES = 2**31  # that a process keeps, and at least the last arrays, unless its role says otherwise
DISK_SHARE = 0.25  # share of the disk space that is free or used by these files
VERSIONS = 2  # of a module: that from which its paths continue, and the next
NAME = re.compile(r'objects/(\w+)/(\d+)/(.+)-[0-9a-f]+\.safetensors')


class KeptArrays:
  """Read-only arrays by their objects' names. Threads may share them."""

  def __init__(self, folder: pathlib.Path | None = None, memory_bytes: int = MEMORY_BYTES):
    self.folder, self.memory_bytes = folder, memory_bytes
    self.versions = VERSIONS  # of a module, in memory
    self.memory: collections.OrderedDict[str, Arrays] = collections.OrderedDict()  # the least recently used first
    self.unwritten = set[str]()  # of those in memory, which they do not leave until they are on disk
    self.lock = threading.Lock()
    self.writer = futures.ThreadPoolExecutor(1)

  def get(self, name: str) -> Arrays | None:
    """Returns the arrays of an object, or None if they are not kept."""
    with self.lock:
      if name in self.memory:
        self.memory.move_to_end(name)
        return self.memory[name]
    if (arrays := self._read(name)) is not None:
      with self.lock:
        self._remember(name, arrays)
    return arrays

  def put(self, name: str, arrays: Arrays):
    """Keeps arrays. Forgets arrays of earlier versions of the module, and the least recently used ones."""
    with self.lock:
      if self.folder and name not in self.memory:
        self.unwritten.add(name)
        self.writer.submit(self._write, name)
      self._remember(name, arrays)

  def close(self):
    """Ends the thread that writes, when all is written."""
    self.writer.shutdown()

  def _remember(self, name: str, arrays: Arrays):
    self.memory[name] = arrays
    self.memory.move_to_end(name)
    for stale in superseded(name, self.memory, self.versions):
      del self.memory[stale]
    self._shrink()

  def _shrink(self):
    *others, _ = self.memory or ['']
    useless = [name for name in others if name not in self.unwritten]
    while useless and sum(map(tensors.num_bytes, self.memory.values())) > self.memory_bytes:
      del self.memory[useless.pop(0)]

  def _write(self, name: str):
    """Writes arrays that are still in memory, unless another process has."""
    with self.lock:
      arrays = self.memory.get(name)
    try:
      if arrays is not None and not (file := self._file(name)).exists():
        tensors.write_with_digest(file, arrays)
        self._tidy(name)
    except OSError as e:
      logging.warning('%s is not on disk, and would have to be read again after this process: %s', name, e)
    finally:
      with self.lock:
        self.unwritten.discard(name)
        self._shrink()

  def _read(self, name: str) -> Arrays | None:
    if not self.folder or not name:
      return None
    with contextlib.suppress(OSError):
      if (arrays := tensors.read_with_digest(self._file(name))) is not None:
        os.utime(self._file(name))  # it is of use
        return arrays
      self._file(name).unlink()  # to be written again
    return None

  def _file(self, name: str) -> pathlib.Path:
    assert self.folder
    return self.folder / urllib.parse.quote(name, safe='')

  def _tidy(self, name: str):
    """Removes earlier versions of a module, incomplete files included, and files beyond the limit."""
    assert self.folder
    names_by_file = {file: urllib.parse.unquote(files.written_as(file).name) for file in self.folder.iterdir()}
    for stale in superseded(name, names_by_file.values(), VERSIONS):
      for file in [file for file, of in names_by_file.items() if of == stale]:
        del names_by_file[file]
        file.unlink(missing_ok=True)
    used = {file: status for file in names_by_file if (status := _stat(file))}
    most = DISK_SHARE * (shutil.disk_usage(self.folder).free + sum(status.st_size for status in used.values()))
    for file in sorted(used, key=lambda file: used[file].st_mtime):
      if sum(status.st_size for status in used.values()) > most:
        del used[file]
        file.unlink(missing_ok=True)


def superseded(name: str, names: Iterable[str], versions: int) -> list[str]:
  """Returns those names of the same module that are of `versions` versions before, or more."""
  if not (match := NAME.fullmatch(name)):
    return []
  matches = [(other, NAME.fullmatch(other)) for other in {*names}]
  last = int(match[2]) - versions
  return [other for other, of in matches if of and _subject(of) == _subject(match) and int(of[2]) <= last]


def _subject(match: re.Match[str]) -> tuple[bool, str]:
  """Returns whether a name is of an outer state, or else of weights, which are in two kinds of objects; and whose."""
  return match[1] == 'outer', match[3]


def _stat(file: pathlib.Path) -> os.stat_result | None:
  with contextlib.suppress(FileNotFoundError):  # another process was quicker
    return file.stat()
  return None


def begin(storage: Storage, place: pathlib.Path, run: str) -> KeptArrays:
  """Returns the arrays that this machine keeps of a run, and deletes those of other runs."""
  here = storage.local_path('here')
  if here is not None and here.parent == place:
    return KeptArrays()
  for other in (place / WEIGHTS).glob('*'):
    if other.name != run:
      shutil.rmtree(other, ignore_errors=True)
  return KeptArrays(place / WEIGHTS / run)


def end(place: pathlib.Path):
  """Removes all that is kept on this machine's disk, when the run is finished."""
  shutil.rmtree(place / WEIGHTS, ignore_errors=True)
