"""A run in its workdir: its settings, its artefacts, its programs, and the records of its stages."""

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from dipaco_jax import checkpoint, mesh, metrics, model, modules
from dipaco_jax import programs as programs_lib
from dipaco_jax import sequences as sequences_lib
from dipaco_jax import settings as settings_lib
from dipaco_jax import tokenizer as tokenizer_lib

NAMES = ('tokenize', 'pretrain', 'route', 'train', 'evaluate')
# The settings that each stage is the first to depend on; its record's digest covers those before it too.
DEPENDS = {
  'tokenize': ('data', 'tokenizer', 'model.seq_len', 'evaluate.seq_len', 'routing.prefix_tokens', 'seed'),
  'pretrain': ('model', 'pretrain', 'inner', 'train.steps_per_dispatch'),
  'route': ('grid', 'routing', 'train.batch_size'),
  'train': ('levels', 'train.steps_per_phase', 'train.schedule', 'train.paths_per_phase', 'outer'),
  'evaluate': ('evaluate',),
}


@dataclasses.dataclass(frozen=True)
class Run:
  """A run in a workdir, and how it is asked to stop."""

  workdir: pathlib.Path
  settings: settings_lib.Settings
  metrics: metrics.Metrics
  compilations: collections.Counter[str]
  stop_requested: Callable[[], bool]
  graceful: Callable[[], contextlib.AbstractContextManager]  # inside it, a signal only sets stop_requested

  def record(self, name: str) -> dict[str, Any] | None:
    """What a finished stage left, None where it isn't finished."""
    file = self.workdir / 'stages' / f'{name}.json'
    return json.loads(file.read_text()) if file.exists() else None

  def result(self, name: str) -> dict[str, Any]:
    """What a finished stage found."""
    return json.loads((self.workdir / 'stages' / f'{name}.json').read_text())['result']

  @functools.cached_property
  def tokenizer(self) -> tokenizer_lib.Tokenizer:
    return tokenizer_lib.Tokenizer(self.workdir / 'tokenizer.model')

  @functools.cached_property
  def model(self) -> model.Transformer:
    return model.make(self.settings.model, self.result('tokenize')['vocab_size'])

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
    s = self.settings
    plain = dataclasses.replace(
      s, grid=(), levels=(('all', '.*', ()),), outer=settings_lib.Outer('sgd', 1.0, rescale=False, reweigh=False),
      train=dataclasses.replace(s.train, schedule=(), paths_per_phase=0),
    )  # fmt: skip
    return self._programs(plain, 'pretrain')

  def _programs(self, settings: settings_lib.Settings, stage: str) -> programs_lib.Programs:
    layout = modules.make_layout(settings.grid, settings.levels, model.shapes(self.model))
    placement = mesh.place(layout.grid, settings.mesh, settings.batch_sizes(stage), jax.devices())
    return programs_lib.make(settings, placement, layout, self.model)

  def sequences(self, split: str) -> sequences_lib.Sequences:
    """Tokenized and not yet routed."""
    return sequences_lib.Sequences(str(self.workdir / 'sequences' / f'{split}.array_record'))

  def base(self) -> dict[str, np.ndarray]:
    """Parameters of the base model."""
    return dict(sorted(safetensors.numpy.load_file(self.workdir / 'base' / 'params.safetensors').items()))

  def routed(self, split: str) -> np.ndarray:
    """Paths of the split's sequences, as the router left them."""
    return np.load(self.workdir / 'routing' / '0' / f'{split}.npy')

  @property
  def eval_len(self) -> int:
    return self.settings.evaluate.seq_len or self.settings.model.seq_len

  @property
  def eval_batch(self) -> int:
    return self.settings.evaluate.batch_size or self.settings.train.batch_size


def digest(settings: settings_lib.Settings, name: str) -> str:
  """Of everything that a stage's artefact depends on."""
  upto = [prefix for stage in NAMES[: NAMES.index(name) + 1] for prefix in DEPENDS[stage]]
  return settings_lib.digest(settings, *upto)


def write_record(run: Run, name: str, wall_s: float, result: dict[str, Any]):
  """Marks a stage as done; its artefacts are there already."""
  record = {'digest': digest(run.settings, name), 'wall_s': wall_s, 'result': metrics.plain(result)}
  checkpoint.write_json(run.workdir / 'stages' / f'{name}.json', record)


@contextlib.contextmanager
def stopwatch(workdir: pathlib.Path, name: str) -> Iterator[Callable[[], float]]:
  """Seconds that a stage has taken, those of interrupted runs of it too (noted every few seconds)."""
  file = workdir / 'stages' / f'{name}.seconds'
  before = float(file.read_text()) if file.exists() else 0.0
  started, done = time.monotonic(), threading.Event()

  def elapsed() -> float:
    return before + time.monotonic() - started

  def note():
    while not done.wait(5):
      with contextlib.suppress(OSError):
        checkpoint.write_file(file, f'{elapsed():.1f}')

  thread = threading.Thread(target=note, daemon=True)
  thread.start()
  try:
    yield elapsed
  finally:
    done.set()
    thread.join()
  file.unlink(missing_ok=True)


def only_first_process(function: Callable[[], None], name: str):
  """Process 0 does it, the others wait."""
  if jax.process_index() == 0:
    function()
  checkpoint.barrier(name)


def note_environment(run: Run):
  """Records what the digest of the modules depends on beside the config, and warns where a resumed run differs."""
  now = {
    'device': jax.devices()[0].device_kind, 'devices': jax.device_count(), 'processes': jax.process_count(),
    'cpus': len(os.sched_getaffinity(0)), 'jax': jax.__version__,
  }  # fmt: skip
  file = run.workdir / 'environment.json'
  then = json.loads(file.read_text()) if file.exists() else now
  changed = [f'{name} {then.get(name)} -> {value}' for name, value in now.items() if then.get(name) != value]
  if changed:
    logging.warning('this run began elsewhere (%s): it goes on, but its last bits will differ', ', '.join(changed))
  if jax.process_index() == 0:
    checkpoint.write_json(file, now)
