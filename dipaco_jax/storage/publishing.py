"""Files and directories published with a seal, which `seals` checks when they are read."""

import contextlib
import hashlib
import io
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dipaco_jax.storage import files, seals

if TYPE_CHECKING:
  import numpy as np

Share = tuple[int, int]  # (k, n): the numbered parts k, k + n, k + 2n, ...


def write_sealed(path: Path, data: files.Data):
  """Writes a file after its seal: if killed in between, the seal does not fit and the file is made again."""
  files.write_file(path.with_name(f'{path.name}.sha256'), seals.line(path.name, hashlib.sha256(data).hexdigest()))
  files.write_file(path, data)


def write_array(path: Path, array: 'np.ndarray'):
  """Writes an .npy file and its seal."""
  import numpy as np  # which `main --help` does without

  data = io.BytesIO()
  np.save(data, array)
  write_sealed(path, data.getbuffer())


def write_json(path: Path, value: Any):
  """Writes JSON with its seal inside; keys stay in the order given."""
  files.write_file(path, seals.dumps(value))


@contextlib.contextmanager
def publish_directory(path: Path, sealed: bool = True) -> Iterator[Path]:
  """Yields a directory aside, and renames it to `path` if the block ends well; removes leftovers of killed runs.

  It gets a seal of its files unless `sealed` is False: a copy comes with that of the original.
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


def missing(paths: Sequence[Path], share: Share) -> list[int]:
  """Removes damaged parts of a share, and lists those that have to be made."""
  return [
    i for i in range(len(paths))[share[0] :: share[1]] if not (paths[i].is_dir() or seals.keep_if_whole(paths[i]))
  ]
