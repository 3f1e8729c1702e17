"""Seals: what a stage has left is read as it was written, or refused in a line that says how to have it made again.

A file's sha256 is where it fits: JSON has it inside, as `seal`, over the rest; a directory that is published whole has
`SHA256SUMS` beside its files; a file of its own has `NAME.sha256`. The last two are as `sha256sum --check` takes them.
What has no seal, of a run from before there were any, is read as it is.

A process checks what it reads itself, once for each file. Files of records, which are large, are not read for it:
ArrayRecord keeps a checksum of every record, and looks at it.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import trees

SUMS, SEAL = 'SHA256SUMS', 'seal'
UNKNOWN = 'unknown'  # of a file that a seal should name and does not
LINE = re.compile(r'([0-9a-f]{64}) [ *](.+)')
ISLANDS = 'registry.id'  # a file that a run of islands has
WHAT = {  # by its name's first part: the stage that makes it
  'tokenizer.model': 'tokenize', 'sequences': 'tokenize', 'base': 'pretrain', 'routing': 'route', 'shards': 'route',
  'features': 'route', 'modules': 'train', 'paths': 'train', 'evaluation': 'evaluate', 'control': 'evaluate',
}  # fmt: skip

_checked: dict[tuple[str, str], tuple[int, ...]] = {}  # files that this process has found to be as they were written


class Damaged(OSError, InputError):
  """A file of a run is missing, or is not as it was written; `file` is its name."""

  def __init__(self, words: str, file: str | os.PathLike):
    super().__init__(words)
    self.file = os.fspath(file)


# -- writing


def dumps(value: Any) -> str:
  """JSON, with its seal if it is an object; keys in the order given."""
  if isinstance(value, dict):
    value = {name: x for name, x in value.items() if name != SEAL}
    value |= {SEAL: _seal(value)}
  return json.dumps(value, indent=1) + '\n'


def _seal(value: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def line(name: str, sha256: str) -> str:
  """As `sha256sum` writes it."""
  return f'{sha256}  {name}\n'


def sums(folder: Path) -> str:
  """What SHA256SUMS is to hold of the files of a directory; not of those in directories in it."""
  names = sorted(p.name for p in folder.iterdir() if p.is_file() and p.name != SUMS)
  return ''.join(line(name, sha256) for name, sha256 in trees.digests(folder, names).items())


# -- reading


def read(file: Path) -> bytes:
  """A file's bytes. Raises Damaged."""
  check(file)
  return file.read_bytes()


def read_json(file: Path, *needed: str) -> dict[str, Any]:
  """An object that has these names, without its seal. Raises Damaged."""
  if (found := loads(read(file), *needed)) is None:
    raise Damaged(fault(file), file)
  return found


def loads(data: bytes, *needed: str) -> dict[str, Any] | None:
  """As `read_json`, of bytes; None where they are not as they were written."""
  try:
    found = json.loads(data)
  except (ValueError, RecursionError):
    return None
  is_whole = isinstance(found, dict) and (SEAL not in found or found.pop(SEAL) == _seal(found))
  return found if is_whole and found.keys() >= {*needed} else None


@contextlib.contextmanager
def reading(file: Path) -> Iterator[Path]:
  """Checks a file; what goes wrong inside is its fault. Raises Damaged."""
  check(file)
  try:
    yield file
  except MemoryError:
    raise
  except Exception as e:  # each format has errors of its own
    raise Damaged(fault(file), file) from e


def check(file: Path, sha256: str = ''):
  """Raises Damaged where a file is not as it was written; `sha256`: what it should have, where no seal says so."""
  try:
    found = os.stat(file)
    state, key = (found.st_ino, found.st_size, found.st_mtime_ns), (os.path.abspath(file), sha256)
    if _checked.get(key) == state:
      return
    expected = sha256 or recorded(file.name, lambda name: _text(file.with_name(name)))
    if expected and trees.digests(file.parent, [file.name])[file.name] != expected:
      raise Damaged(fault(file), file)
  except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as e:
    raise Damaged(fault(file), file) from e
  _checked[key] = state


def is_whole(file: Path) -> bool:
  """Whether a file is there as it was written. If not, it is taken away: for what is made again at once."""
  try:
    check(file)
  except Damaged:
    if file.exists():
      logging.warning('%s is not as it was written: it is made again', file)
      file.unlink(missing_ok=True)
    return False
  return True


def is_expected(file: Path) -> bool:
  """Whether a file that not every run has is there, or a seal says that it should be."""
  return file.exists() or recorded(file.name, lambda name: _text(file.with_name(name))) not in ('', UNKNOWN)


def recorded(name: str, text: Callable[[str], str | None]) -> str:
  """The sha256 that a file should have; '' if nobody has said.

  Args:
    text: what a file beside it holds, None if it is not there.
  """
  for beside in (SUMS, f'{name}.sha256') if name != SUMS else ():
    if (words := text(beside)) is not None:
      lines = map(LINE.fullmatch, words.splitlines())
      return next((found[1] for found in lines if found and found[2] == name), UNKNOWN)
  return ''


def _text(file: Path) -> str | None:
  try:
    return file.read_text(errors='replace')
  except FileNotFoundError:
    return None


# -- what to say


def fault(file: str | os.PathLike) -> str:
  """What is wrong with a file, what made it, and what to remove."""
  workdir, name = place(Path(file))
  state = 'is not as it was written' if os.path.exists(file) else 'is missing'
  if not name:
    return f'{file} {state}'
  stage = maker(name)
  words = f'{file}{f", made by the stage {stage}," if stage else ""} {state}'
  if (workdir / ISLANDS).exists():
    return f'{words}: read a copy of this run, or start it anew in another place'
  doomed = again(workdir, name)
  return f'{words}: {remove(workdir, doomed)}it again' if doomed else f'{words}: the command of the run makes it again'


def remove(workdir: Path, names: list[str]) -> str:
  """The advice to remove these, in words."""
  listed = [str(workdir / name) for name in names]
  words = ' and '.join([', '.join(listed[:-1]), listed[-1]] if listed[1:] else listed)
  return f'remove {words}, and the command of the run makes '


def lost(workdir: Path) -> str:
  """What to say where all checkpoints of training are gone, after others were made from them."""
  words = f'{workdir}/checkpoints/train has no checkpoint that can be read, and later shards were made from one'
  return f'{words}: {remove(workdir, train_again(workdir))}them again'


def place(file: Path) -> tuple[Path, str]:
  """The workdir that a file is in, and its name there; '' where it is in none."""
  for folder in file.parents:
    if (folder / 'stages').is_dir() or (folder / 'config.json').is_file():
      return folder, file.relative_to(folder).as_posix()
  return Path(), ''


def maker(name: str) -> str:
  """The stage that makes a file, or '': none does."""
  first, second, *_ = [*name.split('/'), '']
  if first.startswith('tokenize-'):
    return 'tokenize'  # before it is done
  if first == 'stages':
    return second.partition('.')[0]
  if first == 'shards' and second == 'base':
    return 'pretrain'
  return 'train' if first in ('routing', 'shards') and second[:1] in [*'123456789'] else WHAT.get(first, '')


def again(workdir: Path, name: str) -> list[str]:
  """What is to be removed for the command of the run to make a file again, by names; what is not there is left out."""
  first, second, *_ = [*name.split('/'), '']
  stage = maker(name)
  record = f'stages/{stage}.json'
  if first in ('routing', 'shards', 'modules'):
    found = [f'{first}/{second}', record]
    if first == 'modules' and not _is_last(workdir, second):
      found = train_again(workdir)
  elif first in ('stages', 'paths'):
    found = [name, record]
  else:
    found = [first, record]
  return _there(workdir, found)


def _there(workdir: Path, names: list[str]) -> list[str]:
  return [name for name in dict.fromkeys(names) if (workdir / name).exists()]


def train_again(workdir: Path) -> list[str]:
  """What of a workdir is to be removed for training to begin with the base."""
  rounds = [f'{tree}/{p.name}' for tree in ('routing', 'shards') for p in (workdir / tree).glob('[1-9]*')]
  return _there(workdir, ['checkpoints/train', 'modules', *sorted(rounds), 'stages/train.json'])


def _is_last(workdir: Path, version: str) -> bool:
  """Whether it is the last version of a run that has trained to its end: the last checkpoint has it."""
  versions = [int(p.name) for p in (workdir / 'modules').glob('*') if p.name.isdigit()]
  return (workdir / 'stages' / 'train.json').exists() and int(version) >= max(versions, default=0)
