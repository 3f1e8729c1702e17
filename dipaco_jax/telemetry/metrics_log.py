"""The metrics of a run: rows of metrics.jsonl, mirrored to TensorBoard.

A row of metrics.jsonl is one JSON object with kind, stage, updates (made so far within the stage), time (unix seconds)
and values. `rewind` removes rows of updates that a resumed run repeats, so that every update has one row.
"""

import errno
import json
import logging
import math
import mmap
import os
import pathlib
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dipaco_jax.telemetry import curves, tensorboard

SEALED = re.compile(rb'(.*), "seal": "([0-9a-f]{8})"}\n?', re.DOTALL)


class Metrics:
  """Appends rows to metrics.jsonl in the workdir and mirrors their numbers to events/<stage>/ for TensorBoard."""

  def __init__(
    self, workdir: str | os.PathLike, writes: bool = True, evaluated: Callable[[], None] = lambda: None,
    events: bool = True,
  ):  # fmt: skip
    """Opens metrics.jsonl. Only one process of a job `writes`; rows of the others are dropped.

    `evaluated` is called after each evaluation; `events`: whether there are events for TensorBoard.
    """
    self._workdir = pathlib.Path(workdir)
    self._evaluated = evaluated
    self._has_events = events
    self._file = _open_whole(self._workdir / 'metrics.jsonl') if writes else None
    self._events: dict[str, tensorboard.Events] = {}  # by stage
    self.last_step: dict[str, Any] = {}  # the newest row of that kind, for who watches this process
    self.tokens = 0  # of the stage up to then

  def write(self, kind: str, stage: str, updates: int, **values):
    """Appends a row, in one write; NaN and infinities become null.

    Raises OSError if the disk is full. What was written of the row is dropped when the file is next opened.
    """
    if self._file is None and kind != 'step':
      return
    row = {'kind': kind, 'stage': stage, 'updates': int(updates), 'time': round(time.time(), 3), **plain(values)}
    if kind == 'step':
      self.last_step = row
    if self._file is None:
      return
    line = to_line(row)
    if self._file.write(line) != len(line):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file.name))
    if self._has_events:
      if stage not in self._events:
        self._events[stage] = tensorboard.Events(self._workdir / 'events' / stage)
      self._events[stage].write(row)
    if kind == 'evaluation':
      self._evaluated()

  def sync(self):
    """Makes the rows so far survive a power cut, before a checkpoint after them does."""
    if self._file is not None:
      os.fsync(self._file.fileno())

  def rewind(self, stage: str, updates: int):
    """Drops the stage's rows after a number of updates, here and in TensorBoard; call it when a stage resumes."""
    if self._file is None:
      return
    path, aside = self._workdir / 'metrics.jsonl', self._workdir / 'metrics.jsonl.partial'
    ended, since = -1, list[dict[str, Any]]()  # the global step at the last phase's end, and rows of steps after it
    with open(aside, 'wb') as f:
      for row in read_rows(self._workdir):
        if row['stage'] == stage and row['updates'] > updates:
          continue
        f.write(to_line(row))
        if row['stage'] == stage and row['kind'] == 'phase':
          ended, since = curves.position(row), []
        elif row['stage'] == stage and curves.position(row) > ended:
          since.append(row)
      f.flush()
      os.fsync(f.fileno())
    self._file.close()
    os.replace(aside, path)
    self._file = _open_whole(path)
    if self._has_events:
      self._show_again(stage, ended, since)

  def _show_again(self, stage: str, ended: int, since: list[dict[str, Any]]):
    """Hides the stage's events after the step `ended`, and writes those of the rows `since` then."""
    if stage in self._events:
      self._events.pop(stage).close()
    # What is shown of the phase goes, and comes again as far as it is kept: where paths take turns, the one that is
    # ahead in updates is behind in steps.
    self._events[stage] = tensorboard.Events(self._workdir / 'events' / stage, purge_step=ended + 1)
    for row in since:
      self._events[stage].write(row)

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.close()

  def close(self):
    if self._file is not None:
      self._file.close()
    while self._events:
      self._events.popitem()[1].close()


def read_rows(workdir: str | os.PathLike, *marks: bytes) -> Iterator[dict[str, Any]]:
  """Yields the rows of metrics.jsonl, oldest first; none if there is no file; damaged or torn lines are skipped.

  With `marks` only the rows whose lines contain one of them; others are not parsed, since the file may be long. Only
  a call that reads all rows logs the number of damaged lines; otherwise, a report would log it several times.
  """
  path, damaged = pathlib.Path(workdir) / 'metrics.jsonl', 0
  if not path.exists():
    return
  with open(path, 'rb') as f:
    for line in f:
      if marks and not any(mark in line for mark in marks):
        continue
      if row := from_line(line):
        yield row
      elif line.endswith(b'\n'):  # else it is being written
        damaged += 1
  if damaged and not marks:
    logging.warning('%s: %d lines are damaged and are skipped', path, damaged)


def rows_backwards(workdir: str | os.PathLike) -> Iterator[dict[str, Any]]:
  """Yields rows of metrics.jsonl, newest first: the file may be long, and its last line half written."""
  file = pathlib.Path(workdir) / 'metrics.jsonl'
  if not file.exists() or not file.stat().st_size:
    return
  with open(file, 'rb') as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as text:
    end = len(text)
    while end > 0:
      start = text.rfind(b'\n', 0, end) + 1
      if row := from_line(text[start:end]):  # else the line is empty, torn or damaged
        yield row
      end = start - 1


def to_line(row: Mapping[str, Any]) -> bytes:
  """Returns a line of metrics.jsonl; `seal` is the CRC-32 of the row without it."""
  text = json.dumps(row, allow_nan=False)
  return f'{text[:-1]}, "seal": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def from_line(line: bytes) -> dict[str, Any] | None:
  """Parses a line of metrics.jsonl, or None if it is damaged."""
  sealed = SEALED.fullmatch(line)
  if not sealed or int(sealed[2], 16) != zlib.crc32(sealed[1] + b'}'):
    return None
  try:
    row = json.loads(sealed[1] + b'}')
  except ValueError:
    return None
  return row if isinstance(row, dict) and {'kind', 'stage', 'updates', 'time'} <= row.keys() else None


def plain(value: Any) -> Any:
  """Converts arrays and NumPy scalars to values that JSON has; NaN and infinities to None."""
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(v) for v in value]
  if hasattr(value, 'tolist'):
    return plain(value.tolist())
  return None if isinstance(value, float) and not math.isfinite(value) else value


def _open_whole(path: pathlib.Path):
  """Opens to append, without buffer; cuts off a last line that has no end."""
  path.parent.mkdir(parents=True, exist_ok=True)
  file = open(path, 'ab+', buffering=0)  # noqa: SIM115
  size, keep = file.seek(0, os.SEEK_END), 0
  while size:  # backwards, block by block, to the last line's end
    start = max(0, size - 65_536)
    file.seek(start)
    line_end = file.read(size - start).rfind(b'\n')
    if line_end >= 0:
      keep = start + line_end + 1
      break
    size = start
  file.truncate(keep)
  return file
