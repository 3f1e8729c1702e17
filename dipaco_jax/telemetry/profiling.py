"""A profile of some inner steps: the trace that `jax.profiler` writes, and a short table of it.

The loop waits for the devices before and after the steps, so that the trace has these alone; nothing that is computed
changes. If the trace cannot be written or read, training continues.
"""

import contextlib
import logging
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import display, processes, time_use
from dipaco_jax.storage import files
from dipaco_jax.telemetry import profile_table

FOLDER = 'profile'  # in the workdir


class Steps(NamedTuple):
  """Global steps that are asked for."""

  start: int
  number: int

  @property
  def stop(self) -> int:
    return self.start + self.number


def parse(text: str | None) -> Steps | None:
  """Parses --profile=START:STEPS; raises InputError if it is something else."""
  if text is None:
    return None
  start, _, number = text.partition(':')
  if not (start.isdecimal() and number.isdecimal() and int(number)):
    raise InputError(f'--profile={text}: write START:STEPS, a global step from 0 and how many, as --profile=100:8')
  return Steps(int(start), int(number))


def check(steps: Steps | None, s: settings_lib.Settings):
  """Raises InputError if the run has no such steps."""
  total = s.pretrain.steps + s.train.phases * s.train.steps_per_phase
  if steps and steps.start >= total:
    raise InputError(
      f'--profile={steps.start}:{steps.number}: the steps of this run are 0 to {total - 1}, those of the base model '
      f'first ({s.pretrain.steps}); name an earlier one'
    )


class Profiler:
  """Traces the dispatches of one turn that cover the steps that are asked for, once."""

  def __init__(self, workdir: pathlib.Path, steps: Steps | None):
    self._steps = steps if steps and processes.is_first() else None  # None: nothing is left to do
    self._folder = workdir / FOLDER
    self._first: int | None = None  # while it traces
    self._began = 0.0

  def begin(self, first: int, after: int, settle: Callable[[], None]):
    """Begins before the dispatch of steps `first` up to `after`, if any is asked for; `settle` awaits those before."""
    if self._steps and self._first is None and first < self._steps.stop and after > self._steps.start:
      settle()
      self._start(first)

  def end(self, after: int, is_last: bool, settle: Callable[[], None]) -> bool:
    """Ends after the dispatch up to step `after`, if no more are asked for or it is the last of its turn.

    Returns whether it ended.
    """
    if not self._steps or self._first is None or (after < self._steps.stop and not is_last):
      return False
    settle()
    self._stop(self._steps, after)
    return True

  @time_use.doing(time_use.OTHER)
  def _start(self, first: int):
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow the host down
    try:
      jax.profiler.start_trace(self._folder, profiler_options=options)
      self._first, self._began = first, time.monotonic()
    except Exception as e:  # another profiler is running, a full disk
      self._give_up(e)

  @time_use.doing(time_use.OTHER)
  def _stop(self, steps: Steps, after: int):
    import jax

    seconds, name = time.monotonic() - self._began, f'{self._first}-{after - 1}'
    title = f'profile of steps {self._first} to {after - 1}, the dispatches of one turn that cover '
    title += f'{steps.start} to {steps.stop - 1}: {seconds:.3f} s'
    self._steps, self._first = None, None
    try:
      with display.doing('writing the profile'):
        jax.profiler.stop_trace()
        newest = max(self._folder.rglob('*.xplane.pb'), key=lambda file: file.stat().st_mtime)
        lines = [title, *profile_table.lines(newest), f'the trace: {newest}']
        files.write_file(self._folder / f'{name}.txt', '\n'.join(lines) + '\n')
      show(lines)
    except Exception as e:
      self._give_up(e)

  def close(self):
    """Ends a trace that an error or a signal has left open, and says where no step was reached."""
    if self._first is not None:
      import jax

      with contextlib.suppress(Exception):  # it may be what has failed
        jax.profiler.stop_trace()
    elif self._steps:
      logging.warning('--profile=%d:%d: the run has not made these steps', *self._steps)

  def _give_up(self, error: Exception):
    logging.warning('--profile: %s; training continues without a profile', str(error).split('\n')[0] or repr(error))
    self._steps, self._first = None, None


NONE = Profiler(pathlib.Path(), None)  # that traces nothing


def show(lines: Iterable[str]):
  """Shows lines on stderr, which stay."""
  for line in lines:
    display.STDERR.show(line)
    display.STDERR.leave()
