"""Directories of this machine's that are published whole: which files are complete, whether all are as they were."""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator

Path = pathlib.Path
ASIDE = re.compile(r'\.(.+)\.\d+')  # as checkpoint.beside names them


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


def is_whole(folder: Path, sha256: str) -> bool:
  """Whether a directory is there, and, unless '' is given, is the tree whose index has that sha256."""
  return folder.exists() and sha256 in ('', hashlib.sha256(index_of(folder)).hexdigest())


def index_of(folder: Path) -> bytes:
  """A tree's index: {name: sha256} of its files."""
  return json.dumps(digests(folder, (str(file.relative_to(folder)) for file in files(folder))), indent=1).encode()


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
  """sha256 of files below a directory, by their path there."""
  found = {}
  for name in names:
    with open(folder / name, 'rb') as f:
      found[name] = hashlib.file_digest(f, 'sha256').hexdigest()
  return found


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
  """One process of this machine at a time; the lock goes with its process and leaves no file."""
  handle = os.open(directory, os.O_RDONLY)
  try:
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield
  finally:
    os.close(handle)
