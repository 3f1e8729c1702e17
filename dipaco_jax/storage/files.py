"""Files and directories that are published whole or not at all: written aside, synced, renamed."""

import os
import re
import secrets
import shutil
from pathlib import Path

import numpy as np

ASIDE = re.compile(r'\.(.+)\.\d+')  # as checkpoint.beside names them

Data = bytes | memoryview


def read_file(path: Path) -> memoryview:
  """A file's bytes, which may be written to; in NumPy's huge pages, twice as fast as into `bytes`."""
  with open(path, 'rb') as f:
    data = np.empty(os.fstat(f.fileno()).st_size, np.uint8).data
    return data[: f.readinto(data)]


def write_file(path: Path, *parts: Data | str):
  """Whole or not at all, on the disk before it is seen: written aside, synced, renamed."""
  path.parent.mkdir(parents=True, exist_ok=True)
  aside = beside(path)
  try:
    with open(aside, 'wb') as f:
      f.writelines(part.encode() if isinstance(part, str) else part for part in parts)
      f.flush()
      os.fsync(f.fileno())
    os.replace(aside, path)
  finally:
    aside.unlink(missing_ok=True)
  sync(path.parent)


def beside(path: Path) -> Path:
  """Where a file is written before it has its name. Two containers that share a folder have processes of one number."""
  return path.with_name(f'.{path.name}.{secrets.randbits(63)}')


def sync(path: Path):
  """Makes a file's bytes, or the names in a directory, survive a power cut."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def put_in_place(aside: Path, path: Path):
  """Renames a directory that is complete; one that has its name goes. What has the name is whole at every moment."""
  old = path.with_name(f'.{path.name}.old')
  shutil.rmtree(old, ignore_errors=True)  # of a run that was killed
  if path.exists():
    os.replace(path, old)
  os.replace(aside, path)
  sync(path.parent)
  shutil.rmtree(old, ignore_errors=True)


def written_as(file: Path) -> Path:
  """The name under which a file will be seen: its own, unless it is one that is being written aside."""
  aside = ASIDE.fullmatch(file.name)
  return file.with_name(aside[1]) if aside else file


def files(folder: Path) -> list[Path]:
  """All that are complete, sorted."""
  return sorted(file for file in folder.rglob('*') if file.is_file() and written_as(file) == file)


def tidy(folder: Path):
  """Removes what killed processes left aside, anywhere in it; nobody may be writing there whose work still counts."""
  for file in [file for file in folder.rglob('*') if written_as(file) != file and file.is_file()]:
    file.unlink(missing_ok=True)
