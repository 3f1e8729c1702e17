"""The records of a run in its workdir: its config, its machine, its finished stages and their times. Loads no JAX."""

import contextlib
import logging
import math
import pathlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.pipeline import input_records, stage
from dipaco_jax.processes import processes
from dipaco_jax.storage import files, publishing, retry, seals
from dipaco_jax.telemetry import metrics_log

COMMAND = 'command.txt'
REFUSED = 'refused.txt'  # the message that ended a run whose config proved wrong before training
MAX_S = 1e11  # of a time: later than the year 5000
MAX_NAMED = 4  # paths named in a message


def read_settings(workdir: pathlib.Path) -> settings.Settings:
  """Raises InputError if there is no run, or one of another program or version."""
  file = workdir / 'config.json'
  if not file.exists():
    raise InputError(f'--workdir={workdir}: there is no run here (no config.json); name the directory of one')
  try:
    return settings.of_run(seals.loads(file.read_bytes()))
  except InputError as e:
    raise InputError(f'--workdir={workdir}: {e}') from e


def read_record(workdir: pathlib.Path, name: str) -> dict[str, Any] | None:
  """Reads a stage's record, {'digest', 'inputs', 'wall_s', 'ended', 'result'}; None if it is not complete."""
  file = record_file(workdir, name)
  if not file.exists():
    return None
  record = seals.read_json(file, 'digest', 'wall_s', 'result')
  times = record['wall_s'], record.get('ended', 0)
  if not isinstance(record['result'], dict) or not all(isinstance(s, int | float) and 0 <= s < MAX_S for s in times):
    raise seals.Damaged(file)
  return record


def read_stages(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Returns the records of the stages that are complete, by name, in the order of the stages."""
  records = {name: read_record(workdir, name) for name in stage.NAMES}
  return {name: record for name, record in records.items() if record}


def read_results(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Returns {stage: its result}. After re-sharding, the result of 'route' is about the newest shards."""
  results = {name: stage['result'] for name, stage in read_stages(workdir).items()}
  for round_result in results.get('train', {}).get('rounds', []):
    results['route'] = results['route'] | round_result
  return results


def read_environment(workdir: pathlib.Path) -> dict[str, Any]:
  """Reads the machine of the run; {} if it is not known."""
  try:
    return seals.read_json(workdir / 'environment.json')
  except seals.Damaged:
    return {}


def read_seconds(workdir: pathlib.Path) -> dict[str, float]:
  """Reads {stage: seconds so far} of the stages that are not complete."""
  seconds = {}
  for name in stage.NAMES:
    with contextlib.suppress(OSError, ValueError):
      seconds[name] = _seconds(seconds_file(workdir, name))
  return seconds


def too_little(tokens_by_path: Sequence[int], floor: int) -> str:
  """Returns a warning that names paths with less than `data.min_validation_tokens`; '' if all have enough."""
  if not (short := [path for path, tokens in enumerate(tokens_by_path) if tokens < floor]):
    return ''
  named = ', '.join(f'path {path} has {tokens_by_path[path]:,}' for path in short[:MAX_NAMED])
  others = len(short) - MAX_NAMED
  more = f', {others} more {"path has" if others == 1 else "paths have"} fewer too' if others > 0 else ''
  return (
    f'validation text is short of config.data.min_validation_tokens={floor:,} tokens for {len(short)} of '
    f'{len(tokens_by_path)} paths ({named}{more}): their results may be noise; give more text, or fewer paths'
  )


def record_file(workdir: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the file of a finished stage's record."""
  return workdir / 'stages' / f'{name}.json'


def is_done(workdir: pathlib.Path, s: settings.Settings, name: str) -> bool:
  """Returns whether a stage is done with these settings; training and evaluation may need more work.

  Raises InputError if an artefact that others were made from is of another config.
  """
  if (record := read_record(workdir, name)) is None:
    return False
  same = record['digest'] == stage.digest(s, name)
  if not same and name != 'evaluate':
    raise InputError(f'--workdir={workdir}: stage {name} was made by another version or config; use another one')
  return same and record['result'].get('phases', s.train.phases) == s.train.phases


def write_record(workdir: pathlib.Path, s: settings.Settings, name: str, wall_s: float, result: dict[str, Any]):
  """Marks a stage as done, after its artefacts have been written."""
  about: dict[str, Any] = {'digest': stage.digest(s, name), 'inputs': input_records.read_inputs(workdir).digests(name)}
  about |= {'wall_s': wall_s, 'ended': time.time()}
  publishing.write_json(record_file(workdir, name), about | {'result': metrics_log.plain(result)})
  seconds_file(workdir, name).unlink(missing_ok=True)


def reopen(workdir: pathlib.Path, name: str):
  """Removes the records of a stage that is to do more and of those after it; their seconds so far are kept."""
  for later in reversed(stage.since(name)):
    if record := read_record(workdir, later.name):
      files.write_file(seconds_file(workdir, later.name), str(record['wall_s']))
    record_file(workdir, later.name).unlink(missing_ok=True)


def seconds_file(workdir: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the file where an unfinished stage notes the seconds that it has taken."""
  return workdir / 'stages' / f'{name}.seconds'


def _seconds(file: pathlib.Path) -> float:
  """Reads the seconds from a file. Raises ValueError if it does not hold a number of them."""
  seconds = float(file.read_text())
  if not (math.isfinite(seconds) and seconds >= 0):
    raise ValueError(f'{seconds} is not a number of seconds')
  return seconds


@contextlib.contextmanager
def stopwatch(workdir: pathlib.Path, name: str) -> Iterator[Callable[[], float]]:
  """Measures the seconds that a stage has taken, including interrupted runs of it (noted every few seconds)."""
  file, before = seconds_file(workdir, name), 0.0
  try:
    before = _seconds(file)
  except FileNotFoundError:
    pass
  except ValueError:
    logging.warning('%s does not hold a number of seconds: time is counted from now on', file)
  started = time.monotonic()

  def elapsed() -> float:
    return before + time.monotonic() - started

  def note():
    with contextlib.suppress(OSError):
      files.write_file(file, f'{elapsed():.1f}')

  with retry.every(5, 'noting the time', note) if processes.is_first() else contextlib.nullcontext():
    yield elapsed


# -- corrections: after a rejected start, fields of config.json may change; artefacts that still fit are kept


def read_refusal(workdir: pathlib.Path) -> str:
  """Reads why the run was rejected; '' if it was not."""
  file = workdir / REFUSED
  return _read_text(file) if file.exists() else ''


def read_command(workdir: pathlib.Path) -> str:
  """Reads the command that began the run; '' if it is not known."""
  file = workdir / COMMAND
  return _read_text(file) if file.exists() else ''


def _read_text(file: pathlib.Path) -> str:
  files.check_inside(file, file.parent)
  return file.read_text(errors='replace').strip()


def write_refusal(workdir: pathlib.Path, why: str):
  """Records why a run was rejected; does nothing once it trains, as its config may then no longer change."""
  begun = any((workdir / name).exists() for name in ('stages/train.json', 'checkpoints/train', 'modules'))
  if (workdir / 'config.json').exists() and not begun:
    files.write_file(workdir / REFUSED, f'{why}\n')


def remove_leftovers(workdir: pathlib.Path, stages: Iterable[stage.Stage]):
  """Removes the leftovers of unfinished stages."""
  for path in (path for one in stages for pattern in one.leftovers for path in workdir.glob(pattern)):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def check_changes(workdir: pathlib.Path, old: settings.Settings, new: settings.Settings):
  """Raises InputError if the config differs from the run's; after a rejected config, removes its unfinished results.

  Raises InputError that names fields that differ and may not, or that a finished stage was made by.
  """
  if not (differ := settings.differences(old, new)):
    return
  changed = [name for name in stage.NAMES if stage.digest(old, name) != stage.digest(new, name)]
  stretched = not new.inner.decay_steps and old.train.steps_per_phase != new.train.steps_per_phase
  held_out = old.train.early_stopping != new.train.early_stopping
  if (stretched or held_out) and changed[:1] != ['tokenize']:
    changed = ['pretrain']  # see stage.same_base; more phases may stretch the cosine
  later = stage.since(changed[0]) if changed else ()
  if not read_refusal(workdir) or any(record_file(workdir, one.name).exists() for one in later):
    changes = settings.in_words(differ)
    raise InputError(f'--workdir={workdir} holds a run with another config ({changes}): use another --workdir')
  remove_leftovers(workdir, later)
