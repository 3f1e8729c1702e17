"""A run in its workdir: its settings, its artefacts, its programs, and the records of its stages."""

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from dipaco_jax.core import modules
from dipaco_jax.core import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import sequences as sequences_lib
from dipaco_jax.data import tokenizer as tokenizer_lib
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import stage_records
from dipaco_jax.storage import files, publishing, seals, tensors
from dipaco_jax.training import mesh, metrics_log, performance, processes
from dipaco_jax.training import programs as programs_lib

CONTROL = 'control'  # in the workdir: the modules, pointers and checkpoints of the dense control


@dataclasses.dataclass(frozen=True)
class Run:
  """A run in a workdir, and how it is asked to stop."""

  workdir: pathlib.Path
  settings: settings_lib.Settings
  metrics: metrics_log.Metrics
  compilations: collections.Counter[str]
  stop_requested: Callable[[], bool]
  # Inside it, a signal only sets stop_requested, where there is something to save.
  graceful: Callable[[Callable[[], bool]], contextlib.AbstractContextManager]
  num_devices: int = 0  # that are used, the first ones; 0: all

  def record(self, name: str) -> dict[str, Any] | None:
    """What a finished stage left, None where it isn't finished."""
    file = record_file(self.workdir, name)
    return seals.read_json(file, 'digest', 'wall_s', 'result') if file.exists() else None

  def result(self, name: str) -> dict[str, Any]:
    """What a finished stage found."""
    return seals.read_json(record_file(self.workdir, name), 'result')['result']

  @functools.cached_property
  def tokenizer(self) -> tokenizer_lib.Tokenizer:
    with seals.reading(self.workdir / 'tokenizer.model') as file:
      return tokenizer_lib.Tokenizer(file)

  @functools.cached_property
  def model(self) -> transformer.Transformer:
    return transformer.make(self.settings.model, self.result('tokenize')['vocab_size'])

  @property
  def layout(self) -> modules.Layout:
    return self.programs.layout

  @functools.cached_property
  def programs(self) -> programs_lib.Programs:
    """Of the grid of paths."""
    return self._programs(self.settings, 'train')

  @functools.cached_property
  def base_programs(self) -> programs_lib.Programs:
    """Of the base model: the empty grid, and an outer step that only takes over what AdamW did."""
    return self._programs(self._dense, 'pretrain')

  @functools.cached_property
  def control_programs(self) -> programs_lib.Programs:
    """Of the dense control: those of the base model, unless the batches of a path are for other devices."""
    made = self._programs(self._dense, 'train')
    return self.base_programs if made.placement == self.base_programs.placement else made

  @property
  def _dense(self) -> settings_lib.Settings:
    s, takes_over = self.settings, settings_lib.Outer('sgd', 1.0, rescale=False, reweigh=False, exclude_above=0.0)
    return dataclasses.replace(
      s,
      grid=(),
      levels=(('all', '.*', ()),),
      outer=takes_over,
      train=dataclasses.replace(s.train, schedule=(), paths_per_phase=0, learning_rate=0.0),
    )

  def _programs(self, settings: settings_lib.Settings, stage: str) -> programs_lib.Programs:
    layout = modules.make_layout(settings.grid, settings.levels, transformer.shapes(self.model))
    devices = jax.devices()[: self.num_devices or None]
    placement = mesh.place(layout.grid, settings.mesh, settings.batch_sizes(stage), devices)
    return programs_lib.make(settings, placement, layout, self.model)

  def sequences(self, split: str, open_parts: int | None = None) -> sequences_lib.Sequences:
    """Tokenized and not yet routed."""
    return sequences_lib.Sequences(self.workdir / 'sequences', split, open_parts)

  def base(self) -> dict[str, np.ndarray]:
    """Parameters of the base model."""
    return dict(sorted(tensors.read_arrays(self.workdir / 'base' / 'params.safetensors').items()))

  def routed(self, split: str, number: int) -> np.ndarray:
    """Paths of the split's sequences, as the router of a round left them."""
    return tensors.read_array(self.workdir / 'routing' / str(number) / f'{split}.npy')

  def shards_meta(self, number: int | str) -> dict[str, Any]:
    """What `shards.merge` tells of the shards of a round, or of the 'base'."""
    return seals.read_json(self.workdir / 'shards' / str(number) / 'meta.json', 'shard_tokens', 'holdout_rows')

  @property
  def eval_len(self) -> int:
    return self.settings.evaluate.seq_len or self.settings.model.seq_len

  @property
  def eval_batch(self) -> int:
    return self.settings.evaluate.batch_size or self.settings.train.batch_size


def unattended(workdir: pathlib.Path, settings: settings_lib.Settings, num_devices: int = 0) -> Run:
  """A run that writes no metrics, and is not asked to stop: for one of many processes."""
  silent = metrics_log.Metrics(workdir, writes=False)
  return Run(
    workdir, settings, silent, performance.count_compilations(), lambda: False, contextlib.nullcontext, num_devices
  )


def record_file(workdir: pathlib.Path, name: str) -> pathlib.Path:
  """Where a finished stage's record is."""
  return workdir / 'stages' / f'{name}.json'


def digest(settings: settings_lib.Settings, name: str) -> str:
  """Of everything that a stage's artefact depends on."""
  stages = settings_lib.STAGES[: settings_lib.STAGES.index(name) + 1]
  upto = [prefix for stage in stages for prefix in settings_lib.DEPENDS[stage]]
  return settings_lib.digest(settings, *upto)


def is_done(run: Run, name: str) -> bool:
  """Whether a stage's record is that of this config; those of training and of evaluation may ask for more.

  Raises:
    InputError: an artefact that others were made from is of another config.
  """
  record = run.record(name)
  if record is None:
    return False
  same = record['digest'] == digest(run.settings, name)
  if not same and name != 'evaluate':
    raise InputError(f'--workdir={run.workdir}: stage {name} was made by another version or config; use another one')
  return same and record['result'].get('phases', run.settings.train.phases) == run.settings.train.phases


def write_record(run: Run, name: str, wall_s: float, result: dict[str, Any]):
  """Marks a stage as done; its artefacts are there already."""
  about = {'digest': digest(run.settings, name), 'wall_s': wall_s, 'ended': time.time()}
  record = about | {'result': metrics_log.plain(result)}
  publishing.write_json(record_file(run.workdir, name), record)
  seconds_file(run.workdir, name).unlink(missing_ok=True)


def reopen(run: Run, name: str):
  """Takes back the records of a stage that is to do more and of those after it; the seconds that it took count on."""
  if record := run.record(name):
    files.write_file(seconds_file(run.workdir, name), str(record['wall_s']))
  for later in reversed(settings_lib.STAGES[settings_lib.STAGES.index(name) :]):
    record_file(run.workdir, later).unlink(missing_ok=True)


def seconds_file(workdir: pathlib.Path, name: str) -> pathlib.Path:
  """Where an unfinished stage notes the seconds that it has taken."""
  return workdir / 'stages' / f'{name}.seconds'


def _seconds(file: pathlib.Path) -> float:
  """What the file says; 0 where it says nothing of the kind, which is not worth an end."""
  try:
    found = float(file.read_text())
  except FileNotFoundError:
    return 0.0
  except ValueError:
    found = math.nan
  if not (math.isfinite(found) and found >= 0):
    logging.warning('%s is no number of seconds: time counts from here', file)
    return 0.0
  return found


@contextlib.contextmanager
def stopwatch(workdir: pathlib.Path, name: str) -> Iterator[Callable[[], float]]:
  """Seconds that a stage has taken, those of interrupted runs of it too (noted every few seconds)."""
  file = seconds_file(workdir, name)
  before = _seconds(file)
  started, done = time.monotonic(), threading.Event()

  def elapsed() -> float:
    return before + time.monotonic() - started

  def note():
    while jax.process_index() == 0 and not done.wait(5):
      with contextlib.suppress(OSError):
        files.write_file(file, f'{elapsed():.1f}')

  thread = threading.Thread(target=note, daemon=True)
  thread.start()
  try:
    yield elapsed
  finally:
    done.set()
    thread.join(5)  # or later would be noted what has come to its end; a place that is away holds nobody up


def only_first_process(function: Callable[[], None], name: str):
  """Process 0 does it, the others wait."""
  if jax.process_index() == 0:
    function()
  processes.barrier(name)


def note_environment(run: Run):
  """Records what the digest of the modules depends on beside the config, and warns where a resumed run differs."""
  now = {
    'device': jax.devices()[0].device_kind,
    'devices': jax.device_count(),
    'processes': jax.process_count(),
    'cpus': len(os.sched_getaffinity(0)),
    'jax': jax.__version__,
  }
  file = run.workdir / 'environment.json'
  then = stage_records.read_environment(run.workdir)
  if not then and file.exists():
    logging.warning('%s is not as it was written: nobody knows whether this run began on the same devices', file)
  then = then or now
  changed = [f'{name} {then.get(name)} -> {value}' for name, value in now.items() if then.get(name) != value]
  if changed:
    logging.warning('this run began elsewhere (%s): it goes on, but its last bits will differ', ', '.join(changed))
  if jax.process_index() == 0:
    files.write_file(file, json.dumps(now, indent=1) + '\n')
