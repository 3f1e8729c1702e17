"""Sinks: other destinations of the rows of metrics.jsonl. Each has its own thread, for which training never waits.

A thread reads rows from metrics.jsonl, passes them to its sink, and notes its progress in the workdir. So even if a
sink is slow, nothing waits, no row is lost, and memory holds only one row. A resumed run makes the rows after its last
checkpoint again; rows that a sink already has are skipped. A sink that is new in a run gets all rows from the first.
"""

import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from dipaco_jax.config import extension, settings as settings_lib
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import display
from dipaco_jax.storage import files, object_store
from dipaco_jax.telemetry import curves, metrics_log, sink_mlflow, sink_wandb

POLL_S = 0.5  # between looks at the rows
CLOSE_S, STOP_S = 10.0, 3.0  # for the last rows, at the end of a run; and where it was stopped, or failed
SHARED_S = 5.0  # between notes in a place that other machines share
FOLDER = 'sinks'  # file in the workdir with the data that sinks keep
BUILT_IN = {'wandb': sink_wandb, 'mlflow': sink_mlflow}

Row = dict[str, Any]
Rows = Generator[Row | None, None, None]  # None: no more for now; of one stage by rising updates


class Sink(Protocol):
  """What `make(config.metrics)` returns; one thread calls it."""

  def write(self, row: Row) -> Any:
    """Takes a row; an error leaves the sink out, until the command is started again."""

  def close(self) -> Any:
    """Is called after the last row, or after an error."""


class Taker(NamedTuple):
  """A sink in use."""

  write: Callable[[Row], Any]
  skip: Callable[[Row], Any]  # a row that it has had, when the run began before
  close: Callable[[], Any]


class ReadySink(NamedTuple):
  """A sink that is ready to begin."""

  name: str
  begin: Callable[[dict[str, Any]], Taker]  # with the data that it keeps in this run, and may extend
  settles_s: float = 0.0  # after which rows that it has taken survive the process


class Memory(NamedTuple):
  """What sinks keep in the run: JSON objects, by their names."""

  load: Callable[[str], dict[str, Any]]
  save: Callable[[str, str], object]
  every_s: float = 0.0


def make(settings: settings_lib.Settings, run: str) -> list[ReadySink]:
  """Makes the sinks that the settings name, for a run of this name; TensorBoard's events are metrics_log's.

  Raises InputError if a library is not there, or a user's function does not return a sink.
  """
  config = dataclasses.replace(settings.metrics, run=settings.metrics.run or run)
  named = dataclasses.replace(settings, metrics=config)
  return [_make(name, named) for name in config.sinks if name != 'tensorboard']


def _make(name: str, settings: settings_lib.Settings) -> ReadySink:
  if built_in := BUILT_IN.get(name):
    if importlib.util.find_spec(name) is None:
      raise InputError(f"config.metrics.sinks={name!r} needs a library: pip install 'dipaco_jax[{name}]'")
    with display.doing(f'loading {name}', tells=False):
      built_in.check()

    def begin(kept: dict[str, Any]) -> Taker:
      sink, seen = built_in.Sink(settings, kept), curves.CurvesOfStages()

      def write(row: Row):
        sink.write(row['time'], seen.points(row))

      return Taker(write, lambda row: list(seen.points(row)), sink.close)  # means that later rows complete

    return ReadySink(name, begin, built_in.SETTLES_S)
  own_sink: Sink = extension.make('metrics.sinks', name, settings.metrics)
  if not all(callable(getattr(own_sink, method, None)) for method in ('write', 'close')):
    raise InputError(f'config.metrics.sinks={name!r} should return an object with write(row) and close()')
  return ReadySink(name, lambda _: Taker(own_sink.write, lambda row: None, own_sink.close))


@contextlib.contextmanager
def fed(
  metric_sinks: Sequence[ReadySink], rows: Callable[[], Rows], memory: Memory, poll_s: float = POLL_S
) -> Iterator[None]:
  """Feeds sinks while the block runs, and the remaining rows for some seconds after it. Polls rows every `poll_s`.

  Each sink has its own `rows()`. Errors are only logged as warnings.
  """
  feeders = [Feeder(one, rows(), memory, poll_s) for one in metric_sinks]
  for feeder in feeders:
    feeder.start()
  limit_s = STOP_S
  try:
    yield
    limit_s = CLOSE_S
  finally:
    _end(feeders, limit_s)


def _end(feeders: Iterable['Feeder'], limit_s: float):
  deadline = time.monotonic() + limit_s
  for feeder in feeders:
    feeder.ending.set()
  for feeder in feeders:
    with display.doing(f'handing the last metrics to {feeder.sink}', tells=False):
      feeder.join(max(0.0, deadline - time.monotonic()))
    if feeder.is_alive():
      feeder.abandoned = True
      message = (
        'config.metrics.sinks: %s has not accepted all rows within %g s; the rest is sent when the run is started again'
      )
      logging.warning(message, feeder.sink, limit_s)


class Feeder(threading.Thread):
  """The thread that feeds one sink."""

  def __init__(self, target: ReadySink, rows: Rows, memory: Memory, poll_s: float):
    super().__init__(name=f'metrics to {target.name}', daemon=True)
    self.sink = target.name
    self.ending = threading.Event()
    self.abandoned = False
    self._target = target
    self._rows = rows
    self._memory = memory
    self._poll_s = poll_s
    self._every_s = max(target.settles_s, memory.every_s)
    self._kept: dict[str, Any] = {}
    self._noted = 0.0  # when it was noted how far it is
    self._earlier = ''  # how far it was then
    self._saved = ''

  def run(self):
    try:
      self._feed()
    except Exception as e:
      reason = printable.redacted(' '.join(extension.in_words(e).split()))
      logging.warning('config.metrics.sinks: %s is disabled from now on: %s', self.sink, reason)

  def _feed(self):
    self._kept = self._memory.load(self.sink)
    taken = self._kept.setdefault('rows', {})
    taker = self._target.begin(self._kept)
    try:
      self._note(at_once=True)
      self._hand_over(taker, taken)
    except Exception:
      with contextlib.suppress(Exception):  # the first error is the one to tell
        taker.close()
      raise
    if not self.abandoned:
      taker.close()
    self._note(at_once=True)

  def _hand_over(self, taker: Taker, taken: dict[str, list]):
    """Hands the sink all rows but those that it has taken."""
    with contextlib.closing(self._rows):
      for row in self._new_rows():
        if is_before(row, taken):
          taker.skip(row)
          continue
        try:
          taker.write(row)
          advance(taken, row)
        finally:
          self._note()

  def _new_rows(self) -> Iterator[Row]:
    """Yields each row once, though the record may be rewound; ends after a look that began when it was to end."""
    seen, is_last = dict[str, list](), False
    for row in self._rows:
      if self.abandoned or (row is None and is_last):
        return
      if row is None:
        self._note()
        is_last = self.ending.wait(self._poll_s)
      elif not is_before(row, seen):
        advance(seen, row)
        yield row

  def _note(self, at_once: bool = False):
    """Notes how far the sink has come; where rows need time to settle, how far it had come so long ago."""
    now = time.monotonic()
    if self.abandoned:  # the run may have been started again
      return
    if not at_once and now < self._noted + self._every_s:
      return
    text = json.dumps(self._kept)
    due = self._earlier if self._target.settles_s and not at_once else text
    if due != self._saved:
      self._memory.save(self.sink, due)
    self._noted = now
    self._earlier = text
    self._saved = due


# -- progress of a sink: by stage, the updates of the last row, and the kinds of its rows


def is_before(row: Row, marks: dict[str, list]) -> bool:
  """Returns whether a row is not after those that `marks` stand for."""
  updates, kinds = marks.get(row['stage'], (-1, ()))
  return row['updates'] < updates or (row['updates'] == updates and row['kind'] in kinds)


def advance(marks: dict[str, list], row: Row):
  """Lets `marks` stand for a row, too."""
  updates, kinds = marks.get(row['stage'], (-1, []))
  marks[row['stage']] = [row['updates'], [*(kinds if updates == row['updates'] else []), row['kind']]]


def in_workdir(workdir: pathlib.Path) -> Memory:
  """Returns the memory of a run in one job. Not synced: after a power cut, rows may come once more."""
  folder = workdir / FOLDER

  def load(name: str) -> dict[str, Any]:
    file = folder / f'{name}.json'
    return _parse(file.read_bytes()) if file.exists() else {}

  def save(name: str, text: str):
    folder.mkdir(exist_ok=True)
    file = folder / f'{name}.json'
    aside = files.beside(file)
    aside.write_text(text)
    os.replace(aside, file)

  return Memory(load, save)


def in_storage(storage: object_store.Storage) -> Memory:
  """Returns the memory of a run of islands, where its next monitor finds it."""

  def load(name: str) -> dict[str, Any]:
    try:
      return _parse(bytes(storage.fetch(f'{FOLDER}/{name}.json')))
    except object_store.Missing:
      return {}

  return Memory(load, lambda name, text: storage.write(f'{FOLDER}/{name}.json', text.encode()), SHARED_S)


def _parse(text: bytes) -> dict[str, Any]:
  try:
    return dict(json.loads(text))
  except (ValueError, TypeError):
    return {}


def follow(workdir: pathlib.Path) -> Rows:
  """Yields the rows of metrics.jsonl while it is written; from its beginning once it was rewound."""
  path, file = workdir / 'metrics.jsonl', None
  try:
    while True:
      if path.exists() and not (file and os.path.samestat(os.fstat(file.fileno()), path.stat())):
        if file:
          file.close()
        file = open(path, 'rb')  # noqa: SIM115
      while file and (line := file.readline()).endswith(b'\n'):
        if row := metrics_log.from_line(line):
          yield row
      if file:
        file.seek(-len(line), os.SEEK_CUR)  # of a line that is being written
      yield None
  finally:
    if file:
      file.close()
