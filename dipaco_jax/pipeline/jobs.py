"""What is trained: the base model, the grid of paths from it, and a dense control for the comparison."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dipaco_jax.core import grid as grid_lib
from dipaco_jax.core import outer
from dipaco_jax.core import settings as settings_lib
from dipaco_jax.data import loader
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.pipeline import validate_stage
from dipaco_jax.storage import tensors
from dipaco_jax.training import display, mesh, training_loop
from dipaco_jax.training import job as job_lib
from dipaco_jax.training import train_state as state_lib
from dipaco_jax.training.programs import Programs


def base_job(run: run_lib.Run, params: dict[str, np.ndarray]) -> job_lib.Job:
  """Returns the pretraining of one path on all text: plain AdamW, as one phase whose outer step only takes over."""
  s, made = run.settings, run.base_programs
  return job_lib.Job(
    'pretrain',
    made,
    job_lib.Schedule(phases=1, steps_per_phase=s.pretrain.steps, steps_per_dispatch=s.train.steps_per_dispatch),
    job_lib.Data(s.pretrain.batch_size, streams(run, 'base', s.pretrain.batch_size)),
    weights=lambda phase: np.ones((), np.float32),
    base=params,
    base_state=None,
    evaluation=job_lib.Evaluation(validate=functools.partial(validate_stage.validate, run, made)),
  )


def paths_job(run: run_lib.Run, number: int = 0) -> job_lib.Job:
  """Returns the training of all paths on the shards of a round.

  Global steps, and so schedules, go on from the base and from earlier rounds. So do a path's own steps, which say where
  it is in its shard.
  """
  s, made = run.settings, run.programs
  begin = round_end(s, number - 1) if number else 0
  return job_lib.Job(
    'train',
    made,
    dataclasses.replace(_schedule(s), begin=begin, until=round_end(s, number)),
    job_lib.Data(s.train.batch_size, streams(run, str(number), s.train.batch_size)),
    weights=weights(run, number),
    base=run.base(),
    base_state=base_state(run, made) if s.inner.inherit_state else None,
    keep_state=s.inner.keep_state,
    evaluation=job_lib.Evaluation(
      validate_stage.holdout_rows(run, number) if s.train.early_stopping else None,
      functools.partial(validate_stage.validate, run, made, number=number),
      s.evaluate.every_phases,
    ),
    publish=True,
    round=number,
    lost=lost(run) if s.outer.lost else None,
  )


def control_job(run: run_lib.Run) -> job_lib.Job:
  """Returns the training of the dense control: plain AdamW from the base, on all text, for as many steps as a path.

  Schedules go on from the base, and text where the base stopped reading. Phases are for hold-outs and validation only.
  """
  s, made = run.settings, run.control_programs
  first = -(-s.pretrain.steps * s.pretrain.batch_size // s.train.batch_size) - s.pretrain.steps
  batch = streams(run, 'base', s.train.batch_size)
  return job_lib.Job(
    run_lib.CONTROL,
    made,
    _schedule(s),
    job_lib.Data(s.train.batch_size, lambda path, step: batch(path, first + step)),
    weights=lambda phase: np.ones((), np.float32),
    base=run.base(),
    base_state=base_state(run, made) if s.inner.inherit_state else None,
    evaluation=job_lib.Evaluation(
      validate_stage.control_holdout(run) if s.train.early_stopping else None,
      functools.partial(validate_stage.validate, run, made),
      s.evaluate.every_phases,
    ),
    publish=True,
  )


def _schedule(s: settings_lib.Settings) -> job_lib.Schedule:
  """Returns all phases after pretraining, of the paths and of their dense control."""
  return job_lib.Schedule(
    phases=s.train.phases,
    steps_per_phase=s.train.steps_per_phase,
    steps_per_dispatch=s.train.steps_per_dispatch,
    first_step=s.pretrain.steps,
  )


def lost(run: run_lib.Run) -> Callable[[int], np.ndarray]:
  """Returns phase -> which paths' outer gradients are lost, bool, shaped like the grid."""
  s, shape = run.settings, run.layout.grid.shape

  @functools.lru_cache(4)
  def of_phase(phase: int) -> np.ndarray:
    return outer.lost_paths(s.outer.lost, shape, s.seed, phase)

  return of_phase


def weights(run: run_lib.Run, number: int) -> Callable[[int], np.ndarray]:
  """Returns phase -> w_i of every path on the shards of a round, shaped like the grid [2.7].

  It is 0 for a path that takes no part.
  """
  s, grid = run.settings, grid_lib.Grid(run.settings.grid)
  tokens = run.shards_meta(number)['shard_tokens']

  @functools.lru_cache(2)  # asked at every dispatch, of all paths
  def of_phase(phase: int) -> np.ndarray:
    active = outer.active_paths(s.train, grid.num_paths, s.seed, phase)
    return outer.path_weights(active, tokens, s.outer.reweigh, grid.shape)

  return of_phase


def round_end(s: settings_lib.Settings, number: int) -> int:
  """Returns the number of phases after which a round's shards are no longer trained on."""
  return s.train.phases if number == s.rounds else (number + 1) * s.routing.phases_per_round


def train(run: run_lib.Run, job: job_lib.Job, folder: str = '') -> state_lib.State:
  """Runs a job to its end, in a folder of the workdir's; a signal makes it save and raise training_loop.Stopped."""
  checkpoint, workdir = run.settings.checkpoint, run.workdir / folder
  with display.doing('looking for a checkpoint to go on from'):
    trainer = training_loop.Trainer(job, workdir, checkpoint, run.metrics, run.stop_requested)
  with run.graceful(trainer.has_news):
    return trainer.train()


def streams(run: run_lib.Run, shard: str, batch_size: int) -> Callable[[int, int], tuple[np.ndarray, np.ndarray]]:
  """Returns (path, its own step) -> tokens and segments of a batch, from the shards of one routing.

  A shard is opened when it is first asked for. The base has one for each part of the text; they are read as one.
  """
  s = run.settings

  @functools.cache
  def stream(path: int) -> loader.Shard:
    names = range(s.data.parts) if shard == 'base' else [path]
    files = [str(run.workdir / 'shards' / shard / str(name) / 'train.array_record') for name in names]
    return loader.Shard(files, batch_size, s.model.seq_len, s.seed, path)

  return lambda path, step: stream(path).batch(step)


def named_leaves(tree) -> dict[str, np.ndarray]:
  """Returns a pytree's arrays on the host, by their place in it; `from_leaves` is the inverse."""
  return {jax.tree_util.keystr(path): mesh.fetch(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def from_leaves(arrays: Mapping[str, np.ndarray], structure) -> Any:
  """Returns the arrays as a pytree of a structure; the inverse of `named_leaves`."""
  return jax.tree_util.tree_map_with_path(lambda at, _: arrays[jax.tree_util.keystr(at)], structure)


def base_state(run: run_lib.Run, made: Programs) -> Any:
  """Returns the inner state that the base model ended with; None where it was not trained."""
  arrays = tensors.read_arrays(run.workdir / 'base' / 'inner.safetensors')
  return from_leaves(arrays, jax.eval_shape(made.specs.inner.init, made.shapes)) if arrays else None
