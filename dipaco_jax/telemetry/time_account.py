"""Wall time of a run by stage and cause, over all its processes: `stages/seconds.json`.

The first process of a job records the time of its main thread by cause, at every stage and every few seconds. A process
that resumes the run adds to it. If the previous process was killed, the time since its last record is lost, as is the
work of its stage since the checkpoint from which training resumes. After an end that the user asked for, no time counts
until the next start.
"""

import contextlib
import math
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

from dipaco_jax.core.errors import Diverged, InputError
from dipaco_jax.processes import stopping, time_use
from dipaco_jax.storage import files, retry, seals

FILE = 'stages/seconds.json'
EVERY_S = 5.0
BY_PROGRAM = (InputError, Diverged, KeyboardInterrupt)  # after them, the user decides when to continue
ASKED_TO_GO = (signal.SIGTERM, signal.SIGHUP)  # by a machine, as far as a process can tell: somebody waits for it


def read(workdir: pathlib.Path) -> dict[str, dict[str, float]]:
  """Returns the seconds of a run so far, by stage and cause; {} if nothing is known."""
  return _read(workdir).get('seconds', {})


def _read(workdir: pathlib.Path) -> dict[str, Any]:
  with contextlib.suppress(OSError):
    account = seals.loads((workdir / FILE).read_bytes(), 'seconds', 'until', 'stage', 'paused')
    return account if account and _is_account(account) else {}
  return {}


def _is_account(account: dict[str, Any]) -> bool:
  """Tells whether a file that is whole has an account: the author of a workdir may have written anything."""
  by_stage = account['seconds'].values() if isinstance(account['seconds'], dict) else [None]
  numbers = [s for seconds in by_stage for s in (seconds.values() if isinstance(seconds, dict) else [None])]
  is_finite = all(isinstance(x, int | float) and 0 <= x < math.inf for x in [*numbers, account['until']])
  return is_finite and isinstance(account['stage'], str)


class Account:
  """The recorded time of a run in this process, which continues that of earlier processes."""

  def __init__(self, workdir: pathlib.Path, clock: time_use.Clock):
    self._file = workdir / FILE
    self._clock = clock
    self._is_over = False
    _go_on(_read(workdir), clock)
    clock.has_places, clock.entered = True, self.note

  def note(self, is_pause: bool = False):
    """Records the seconds up to now; with `is_pause`, no time counts until the next start. Write errors are ignored."""
    seconds = _rounded(self._clock.read_all())
    if self._is_over or not self._clock.place:  # a finished run that is only reported again takes no more time
      return
    about = {'stage': self._clock.place, 'until': time.time(), 'paused': is_pause, 'seconds': seconds}
    with contextlib.suppress(OSError):
      files.write_file(self._file, seals.dumps(about))

  def note_for_report(self, is_last: bool):
    """Notes the seconds that a report is to show; after the last time nothing is noted: it would differ."""
    self.note(is_last)
    self._is_over |= is_last


@contextlib.contextmanager
def kept(workdir: pathlib.Path, signals: stopping.Signals) -> Iterator[Account]:
  """Keeps the account of this run while the block runs, by the clock of this thread."""
  account = Account(workdir, time_use.begin())
  error: BaseException | None = None
  try:
    noting = retry.every(EVERY_S, 'noting the time', account.note)
    with noting, stopping.last_words(lambda n: account.note(n == 128 + signal.SIGINT)):
      yield account
  except BaseException as e:
    error = e
    raise
  finally:
    account.note(error is None or (isinstance(error, BY_PROGRAM) and signals.received not in ASKED_TO_GO))
    time_use.end()


def _go_on(before: dict[str, Any], clock: time_use.Clock):
  """Continues the account of earlier processes; the time between is lost unless the user stopped the run."""
  if not before:
    return
  began = time.time() - sum(clock.read().values())
  former, gap_s = before['seconds'], 0.0 if before['paused'] else max(0.0, began - before['until'])
  stage_seconds = former.setdefault(before['stage'], {})
  stage_seconds[time_use.LOST] = stage_seconds.get(time_use.LOST, 0.0) + gap_s
  clock.take(former)


def _rounded(seconds_by_stage: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
  rounded = {place: {cause: round(s, 4) for cause, s in seconds.items()} for place, seconds in seconds_by_stage.items()}
  return {place: {cause: s for cause, s in seconds.items() if s} for place, seconds in rounded.items() if place}
