"""Files and directories that are published atomically: written under a temporary name, synced, renamed."""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from dipaco_jax.core.errors import InputError

ASIDE = re.compile(r'\.(.+)\.\d+')  # the names that `beside` gives
WRITES = 5  # of a file, where another process tidies

Data = bytes | memoryview


def read_file(path: Path) -> memoryview:
  """Returns a file's bytes as a writable buffer; in NumPy's huge pages, twice as fast as into `bytes`."""
  import numpy as np  # which `main --help` does without

  with open(path, 'rb') as f:
    data = np.empty(os.fstat(f.fileno()).st_size, np.uint8).data
    return data[: f.readinto(data)]


def write_file(path: Path, *parts: Data | str, publish: Callable[[Path, Path], None] | None = None):
  """Writes a file of these parts, text in UTF-8, atomically: under a temporary name, synced, then renamed.

  The folder is made if it is absent. `publish` gives the file its name (from, to); None: `os.replace`. What another
  process has tidied away before it had its name is written again.
  """
  for attempts_left in reversed(range(WRITES)):
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = beside(path)
    try:
      with open(aside, 'wb') as f:
        f.writelines(part.encode() if isinstance(part, str) else part for part in parts)
        f.flush()
        os.fsync(f.fileno())
      (publish or os.replace)(aside, path)
      break
    except FileNotFoundError:
      if not attempts_left:
        raise
    finally:
      aside.unlink(missing_ok=True)
  sync(path.parent)


def beside(path: Path) -> Path:
  """Returns a fresh name in the same folder; random, as process ids repeat among containers that share a folder."""
  return path.with_name(f'.{path.name}.{secrets.randbits(63)}')


def sync(path: Path):
  """Makes a file's bytes, or the names in a directory, survive a power cut."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def put_in_place(aside: Path, path: Path):
  """Renames a complete directory to `path`. One of that name is moved aside first: for a moment there is none."""
  old = path.with_name(f'.{path.name}.old')
  shutil.rmtree(old, ignore_errors=True)  # of a run that was killed
  if path.exists():
    os.replace(path, old)
  os.replace(aside, path)
  sync(path.parent)
  shutil.rmtree(old, ignore_errors=True)


def written_as(file: Path) -> Path:
  """Returns the name under which a file will be seen: its own, unless it is being written aside."""
  return file.with_name(aside[1]) if (aside := ASIDE.fullmatch(file.name)) else file


def complete_files(folder: Path) -> list[Path]:
  """Lists all files below a directory, sorted, without temporary ones that are being written."""
  return sorted(file for file in folder.rglob('*') if file.is_file() and written_as(file) == file)


def tidy(folder: Path):
  """Removes temporary files that killed processes left below a directory; concurrent `write_file` calls write again."""
  for file in list(folder.rglob('*')):
    if written_as(file) != file and file.is_file():
      file.unlink(missing_ok=True)


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
  """Returns {name: sha256} of files below a directory."""
  digest_by_name = {}
  for name in names:
    with open(folder / name, 'rb') as f:
      digest_by_name[name] = hashlib.file_digest(f, 'sha256').hexdigest()
  return digest_by_name


def check_inside(file: Path, folder: Path):
  """Raises InputError if a file, whose text is shown or copied, is a symbolic link out of its run's folder."""
  if file.is_symlink() and not file.resolve().is_relative_to(folder.resolve()):
    raise InputError(f'{file} is a symbolic link to a file outside of the run: put a copy of that file in its place')


def link(source: Path, target: Path) -> bool:
  """Links a file or a tree to another name, or copies it if there are no hard links; returns False if it goes."""
  try:
    for file in complete_files(source) if source.is_dir() else [source]:
      link = target / file.relative_to(source)
      link.parent.mkdir(parents=True, exist_ok=True)
      try:
        os.link(file, link)
      except FileNotFoundError:
        raise
      except OSError:
        shutil.copy2(file, link)
  except FileNotFoundError:
    shutil.rmtree(target, ignore_errors=True)
    return False
  return target.exists()


def state(file: Path) -> tuple[int, ...]:
  """Returns the identity of a file's content; () if it no longer exists."""
  try:
    stat = file.stat()
  except FileNotFoundError:
    return ()
  return stat.st_ino, stat.st_size, stat.st_mtime_ns


def user_cache() -> Path:
  """Returns the folder of this program in the user's cache: in XDG_CACHE_HOME, or ~/.cache."""
  cache = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
  return Path(cache).absolute() / 'dipaco_jax'


def make_private_folder(folder: Path, option: str):
  """Makes a folder that only this user can write. Raises InputError if others can write, or may have written, into it.

  The name of the folder can be guessed, and its contents are trusted. `option` is the option for another place.
  """
  folder.parent.mkdir(parents=True, exist_ok=True)
  with contextlib.suppress(FileExistsError):
    folder.mkdir(mode=0o700)
  folder_stat = folder.lstat()
  if not stat.S_ISDIR(folder_stat.st_mode) or folder_stat.st_uid != os.geteuid() or folder_stat.st_mode & 0o077:
    raise InputError(f'{folder} is not a folder of this user alone (mode 700): remove it, or name another in {option}')
