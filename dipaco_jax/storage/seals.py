"""Seals: checksums that are verified when a file of a stage is read; damage is an error with advice (`remedies`).

A seal is a sha256, in one of three places: a JSON object has it inside, as `seal`, over the rest; a directory that is
published whole has `SHA256SUMS` beside its files; a file of its own has `NAME.sha256`. `sha256sum --check` takes the
last two. A file without a seal, of a run from before there were any, is read as it is.

A process checks what it reads itself, once for each file. Files of records, which are large, are not read for it:
ArrayRecord keeps a checksum of every record and verifies it.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dipaco_jax.core import json_text, printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import files, remedies

SUMS, SEAL = 'SHA256SUMS', 'seal'
UNKNOWN = 'unknown'  # stands for the sha256 of a file that a seal should name and does not
LINE = re.compile(r'([0-9a-f]{64}) [ *](.+)')

_checked: dict[tuple[str, str], tuple[int, ...]] = {}  # files that this process has found to be as they were written


class Damaged(OSError, InputError):
  """Error: a file of a run is missing or damaged; `file` is its name."""

  def __init__(self, file: str | os.PathLike, message: str = ''):
    super().__init__(message or remedies.explain(file))
    self.file = os.fspath(file)


def dumps(value: Any) -> str:
  """Returns JSON, with its seal if it is an object; keys stay in the order given."""
  if isinstance(value, dict):
    value = {name: x for name, x in value.items() if name != SEAL}
    value |= {SEAL: _seal(value)}
  return json.dumps(value, indent=1) + '\n'


def _seal(value: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def line(name: str, sha256: str) -> str:
  """Returns a line of the format of `sha256sum`."""
  return f'{sha256}  {name}\n'


def sums(folder: Path) -> str:
  """Returns the content of SHA256SUMS for the files of a directory, without those in directories below it."""
  names = sorted(p.name for p in folder.iterdir() if p.is_file() and p.name != SUMS)
  return ''.join(line(name, sha256) for name, sha256 in files.digests(folder, names).items())


def read(file: Path) -> bytes:
  """Returns a file's bytes. Raises Damaged."""
  check(file)
  return file.read_bytes()


def read_json(file: Path, *needed: str) -> dict[str, Any]:
  """Returns a JSON object that has the names `needed`, without its seal. Raises Damaged."""
  if (content := loads(read(file), *needed)) is None:
    raise Damaged(file)
  return content


def loads(data: bytes, *needed: str) -> dict[str, Any] | None:
  """Parses the output of `dumps`; None if it is damaged or lacks a name of `needed`."""
  try:
    content = json_text.parse(data)
  except ValueError:
    return None
  is_whole = isinstance(content, dict) and (SEAL not in content or content.pop(SEAL) == _seal(content))
  return content if is_whole and content.keys() >= {*needed} else None


@contextlib.contextmanager
def reading(file: Path) -> Iterator[Path]:
  """Checks a file, and turns any error inside the block into Damaged."""
  check(file)
  try:
    yield file
  except MemoryError:
    raise
  except Exception as e:  # each format has errors of its own
    raise Damaged(file) from e


@contextlib.contextmanager
def parsing(*names: str | os.PathLike) -> Iterator[None]:
  """Raises Damaged, which names the files, if the block finds in them what no run writes, though they are sealed.

  Whoever made a workdir has its seals fit.
  """
  try:
    yield
  except (OSError, InputError, MemoryError):
    raise
  except Exception as e:  # an error of any kind: the values may be anything
    at = traceback.extract_tb(e.__traceback__)[-1]
    where = f'{type(e).__name__}: {printable.name(str(e))}, in {os.path.basename(at.filename)}, line {at.lineno}'
    raise Damaged(
      names[0], f'{" or ".join(os.fspath(name) for name in names)} holds what no run writes there ({where})'
    ) from e


def check(file: Path, sha256: str = ''):
  """Raises Damaged if a file does not match `sha256` or, if that is not given, the seal next to it, if any."""
  try:
    stat = os.stat(file)
    state, key = (stat.st_ino, stat.st_size, stat.st_mtime_ns), (os.path.abspath(file), sha256)
    if _checked.get(key) == state:
      return
    expected = sha256 or _recorded_beside(file)
    if expected and files.digests(file.parent, [file.name])[file.name] != expected:
      raise Damaged(file)
  except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as e:
    raise Damaged(file) from e
  _checked[key] = state


def keep_if_whole(file: Path) -> bool:
  """Returns whether a file exists undamaged; removes a damaged one, as the caller makes it again at once."""
  try:
    check(file)
  except Damaged:
    if file.exists():
      logging.warning('%s is damaged: it is made again', file)
      file.unlink(missing_ok=True)
    return False
  return True


def is_expected(file: Path) -> bool:
  """Returns whether an optional file exists, or should exist according to a seal."""
  return file.exists() or _recorded_beside(file) not in ('', UNKNOWN)


def recorded(name: str, text: Callable[[str], str | None]) -> str:
  """Returns the sha256 that a file's seal records, UNKNOWN where the seal does not name it, '' if there is no seal.

  `text` maps the name of a file in the same folder to its text, None if it is not there.
  """
  for beside in (SUMS, f'{name}.sha256') if name != SUMS else ():
    if (lines_text := text(beside)) is not None:
      lines = map(LINE.fullmatch, lines_text.splitlines())
      return next((match[1] for match in lines if match and match[2] == name), UNKNOWN)
  return ''


def _recorded_beside(file: Path) -> str:
  def text(name: str) -> str | None:
    with contextlib.suppress(FileNotFoundError):
      return file.with_name(name).read_text(errors='replace')
    return None

  return recorded(file.name, text)
