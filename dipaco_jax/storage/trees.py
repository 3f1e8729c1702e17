"""Directories of this machine's that are published whole: which files are complete, whether all are as they were."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from dipaco_jax.storage import files


def is_whole(folder: Path, sha256: str) -> bool:
  """Whether a directory is there, and, unless '' is given, is the tree whose index has that sha256."""
  return folder.exists() and sha256 in ('', hashlib.sha256(index_of(folder)).hexdigest())


def index_of(folder: Path) -> bytes:
  """A tree's index: {name: sha256} of its files."""
  return json.dumps(digests(folder, (str(file.relative_to(folder)) for file in files.files(folder))), indent=1).encode()


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
  """sha256 of files below a directory, by their path there."""
  found = {}
  for name in names:
    with open(folder / name, 'rb') as f:
      found[name] = hashlib.file_digest(f, 'sha256').hexdigest()
  return found
