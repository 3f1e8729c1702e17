"""Files and directories with a seal: what a stage leaves, which `seals` reads as it was written or refuses."""

import contextlib
import hashlib
import io
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dipaco_jax.storage import files, seals


def write_sealed(path: Path, data: files.Data):
  """As `write_file`, after a seal beside it: where nothing but the seal is new, the file is made again."""
  files.write_file(path.with_name(f'{path.name}.sha256'), seals.line(path.name, hashlib.sha256(data).hexdigest()))
  files.write_file(path, data)


def write_array(path: Path, array: np.ndarray):
  """As `write_sealed`: an .npy file."""
  data = io.BytesIO()
  np.save(data, array)
  write_sealed(path, data.getbuffer())


def write_json(path: Path, value: Any):
  """As `write_file`, with the seal inside; keys in the order given."""
  files.write_file(path, seals.dumps(value))


@contextlib.contextmanager
def publish_directory(path: Path, sealed: bool = True) -> Iterator[Path]:
  """Yields a directory aside, and renames it to `path` if the block ends well. Leftovers of killed runs are removed.

  `sealed`: a seal of its files is written; else it is a copy, which has that of the original.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  for leftover in path.parent.iterdir():
    if leftover != path and files.written_as(leftover) == path and leftover.is_dir():
      shutil.rmtree(leftover)
  aside = files.beside(path)
  aside.mkdir()
  try:
    yield aside
  except BaseException:
    shutil.rmtree(aside, ignore_errors=True)
    raise
  if sealed and (sums := seals.sums(aside)):
    (aside / seals.SUMS).write_text(sums)
  for written in (*aside.rglob('*'), aside):
    files.sync(written)
  files.put_in_place(aside, path)


def missing(paths: Sequence[Path], share: tuple[int, int]) -> list[int]:
  """Of the parts of share (k, n), which are k, k + n, k + 2n..., those that are not there as they were written."""
  return [i for i in range(len(paths))[share[0] :: share[1]] if not (paths[i].is_dir() or seals.is_whole(paths[i]))]
