"""A run in its workdir: its settings, its artefacts, its programs, and the records of its stages."""

import collections
import contextlib
import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dipaco_jax.algorithm import modules
from dipaco_jax.buckets import disks
from dipaco_jax.config import dense_control, settings as settings_lib
from dipaco_jax.data import sequences as sequences_lib, tokenizer as tokenizer_lib, tokenizer_files
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import stage_records
from dipaco_jax.processes import time_use
from dipaco_jax.routing import own_router
from dipaco_jax.storage import seals, tensors
from dipaco_jax.telemetry import metrics_log, metrics_server, performance, profiling
from dipaco_jax.training import mesh, programs as programs_lib

REFITTED, REFITTED_ROUTES = 'evaluation/router.safetensors', 'evaluation/routes.npy'  # see router_refit


@dataclasses.dataclass(frozen=True)
class Run:
  """A run in a workdir, and the function that asks whether it should stop."""

  workdir: pathlib.Path
  settings: settings_lib.Settings
  metrics: metrics_log.Metrics
  compilations: collections.Counter[str]
  stop_requested: Callable[[], bool]
  # Inside the block, a signal only sets stop_requested, if there is something to save.
  graceful: Callable[[Callable[[], bool]], contextlib.AbstractContextManager]
  num_devices: int = 0  # that are used, the first ones; 0: all
  disk: disks.Disk = disks.SHARED  # of the workdir
  profiler: profiling.Profiler = profiling.NONE
  steps_taken: Sequence[int] = ()  # by path, where they are not those of the config: see dense_control.py

  def record(self, name: str) -> dict[str, Any] | None:
    """Returns the record of a finished stage; None if it is not finished."""
    return stage_records.read_record(self.workdir, name)

  def result(self, name: str) -> dict[str, Any]:
    """Returns the result of a finished stage."""
    return seals.read_json(stage_records.record_file(self.workdir, name), 'result')['result']

  @functools.cached_property
  def tokenizer(self) -> tokenizer_lib.Tokenizer:
    def read(name: str) -> bytes:
      with seals.reading(self.workdir / name) as file:
        return file.read_bytes()

    return tokenizer_files.read(self.settings.tokenizer, lambda name: (self.workdir / name).exists(), read)

  @functools.cached_property
  def model(self) -> transformer.Transformer:
    return transformer.make_model(self.settings.model, self.result('tokenize')['vocab_size'])

  @property
  def layout(self) -> modules.Layout:
    return self.programs.layout

  @functools.cached_property
  def programs(self) -> programs_lib.Programs:
    """Programs of the grid of paths."""
    return self._programs(self.settings, 'train')

  @functools.cached_property
  def base_programs(self) -> programs_lib.Programs:
    """Programs of the base model."""
    return self._programs(self.settings.dense(), 'pretrain')

  @functools.cached_property
  def control_programs(self) -> programs_lib.Programs:
    """Programs of the dense control: those of the base model, unless its batches or its schedule differ."""
    dense = dense_control.control_settings(self.settings, self.steps_taken)
    programs = self._programs(dense, 'train')
    is_same = programs.placement == self.base_programs.placement and dense.decay_steps == self.settings.decay_steps
    return self.base_programs if is_same else programs

  @functools.cached_property
  def alone_programs(self) -> programs_lib.Programs:
    """Programs of one path that trains alone."""
    return self._programs(self.settings.alone(), 'train')

  def _programs(self, settings: settings_lib.Settings, stage: str) -> programs_lib.Programs:
    layout = modules.make_layout(settings.grid, settings.levels, transformer.shapes(self.model))
    devices = jax.devices()[: self.num_devices or None]
    placement = mesh.place(layout.grid, settings.mesh, settings.batch_sizes(stage), devices)
    return programs_lib.Programs(placement, layout, self.model, settings)

  def sequences(self, split: str, open_parts: int | None = None) -> sequences_lib.Sequences:
    """Returns a split's sequences, tokenized and not yet routed."""
    return sequences_lib.Sequences(self.workdir / 'sequences', split, open_parts)

  def validation_bytes(self) -> np.ndarray:
    """Returns the bytes of text after the prefix of each validation sequence, int64 [N]: those of the original text.

    For files of tokens, they are the bytes of the decoded text.
    """
    validation = self.sequences('validation')
    if (counted := validation.scored_bytes()) is not None:
      return counted.astype(np.int64)
    sizes, prefix = self.tokenizer.piece_bytes(), self.settings.num_unscored_tokens
    return np.array([sizes[x.tokens[prefix:]].sum() for x in validation.read(range(len(validation)))], np.int64)

  def base(self) -> dict[str, np.ndarray]:
    """Returns the parameters of the base model, read from its file each time."""
    return dict(sorted(tensors.read_arrays(self.workdir / 'base' / 'params.safetensors').items()))

  def routed(self, split: str, number: int) -> np.ndarray:
    """Returns the paths of a split's sequences by a round's router, int32: [N, top_n], or [N] of 'validation'."""
    return tensors.read_array(self.workdir / 'routing' / str(number) / f'{split}.npy')

  def router(self, number: int) -> own_router.AnyRouter | None:
    """Returns the router of a round; None if text was not routed by one."""
    file = self.workdir / 'routing' / str(number) / 'router.safetensors'
    return own_router.of_arrays(self.settings, tensors.read_arrays(file)) if file.exists() else None

  def last_routes(self) -> np.ndarray:
    """Returns the paths of validation documents by the router that the run ends with, int32 [N]."""
    if self.settings.evaluate.refit_router:
      return tensors.read_array(self.workdir / REFITTED_ROUTES)
    return self.routed('validation', self.settings.rounds)

  def last_router(self) -> own_router.AnyRouter | None:
    """Returns the router that the run ends with; None if text was not routed by one."""
    if self.settings.evaluate.refit_router:
      return own_router.of_arrays(self.settings, tensors.read_arrays(self.workdir / REFITTED))
    return self.router(self.settings.rounds)

  def shards_meta(self, number: int | str) -> dict[str, Any]:
    """Returns the meta.json of the shards of a round, or of 'base': sizes by path (see `shards.merge_meta`).

    Those of an owner's text may be older than the last paths of the grid, which are of owners that joined later.
    """
    meta = seals.read_json(self.workdir / 'shards' / str(number) / 'meta.json', 'shard_tokens', 'holdout_rows')
    if self.settings.data.own_text and number != 'base':
      for sizes in meta.values():
        if isinstance(sizes, list) and sizes and not isinstance(sizes[0], list):
          sizes += [0] * (self.settings.num_paths - len(sizes))
    return meta

  @property
  def eval_len(self) -> int:
    return self.settings.evaluate.seq_len or self.settings.model.seq_len

  @property
  def eval_batch(self) -> int:
    return self.settings.evaluate.batch_size or self.settings.train.batch_size


def read_metrics(run: Run, clock: time_use.Clock) -> metrics_server.Reading:
  """Returns the current metrics of a run in this process."""
  row = run.metrics.last_step
  losses = [loss for loss in row.get('loss', ()) if loss is not None]
  numbers = {name: row.get(name) for name in ('step', 'tokens_per_s')}
  numbers |= {
    'phase': row['phase'] + 1 if row else None,
    'loss': statistics.fmean(losses) if losses else None,
    'tokens': run.metrics.tokens,
    'compilations': run.compilations.total(),
  }
  return metrics_server.Reading(clock.place, numbers, clock.read_all())


def unattended(
  workdir: pathlib.Path, settings: settings_lib.Settings, num_devices: int = 0,
  profiler: profiling.Profiler = profiling.NONE,
) -> Run:  # fmt: skip
  """Returns a run that writes no metrics and is not asked to stop, for one process of an islands run."""
  silent, counted = metrics_log.Metrics(workdir, writes=False), performance.count_compilations()
  never, nothing = lambda: False, contextlib.nullcontext
  return Run(workdir, settings, silent, counted, never, nothing, num_devices, profiler=profiler)
