"""Training jobs: the base model, the grid of paths that starts from it, and a dense control for comparison.

For owners of text there is one more: a path that trains alone, without a federation.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dipaco_jax.algorithm import grid as grid_lib, outer
from dipaco_jax.config import choices, dense_control, settings as settings_lib
from dipaco_jax.data import loader
from dipaco_jax.pipeline import plan, run as run_lib, samples, stage, validate_stage
from dipaco_jax.processes import display, time_use
from dipaco_jax.storage import tensors
from dipaco_jax.training import job as job_lib, mesh, train_state as state_lib, training_loop
from dipaco_jax.training.programs import Programs


def base_job(run: run_lib.Run, params: dict[str, np.ndarray]) -> job_lib.Job:
  """Returns the pretraining of one path on all text: plain AdamW, as one phase whose outer step adopts the result."""
  s, programs = run.settings, run.base_programs
  once = job_lib.Schedule(phases=1, steps_per_phase=s.pretrain.steps, steps_per_dispatch=s.train.steps_per_dispatch)
  data = job_lib.Data(s.pretrain.batch_size, streams(run, 'base', s.pretrain.batch_size))
  evaluation = job_lib.Evaluation(validate=functools.partial(validate_stage.validate, run, programs))
  return job_lib.Job(
    'pretrain', programs, once, data, _alone, base=params, base_state=None, evaluation=evaluation,
    later_work=plan.later_work(s, 'pretrain'),
  )  # fmt: skip


def _alone(phase: int) -> np.ndarray:
  """Returns the weight w of a single path."""
  return np.ones((), np.float32)


def paths_job(run: run_lib.Run, number: int = 0) -> job_lib.Job:
  """Returns the training of all paths on the shards of a round.

  Global steps, schedules and a path's position in its shard continue from the base and earlier rounds.
  """
  s, programs = run.settings, run.programs
  begin = round_end(s, number - 1) if number else 0
  schedule = dataclasses.replace(_schedule(s), begin=begin, until=round_end(s, number), timetable=programs.timetable)
  data = job_lib.Data(s.train.batch_size, streams(run, str(number), s.train.batch_size))
  holdout = validate_stage.holdout_rows(run, number) if s.train.early_stopping else None
  validate = functools.partial(validate_stage.validate, run, programs, number=number)
  sample = samples.while_training(run, programs, number)
  evaluation = job_lib.Evaluation(holdout, validate, s.evaluate.every_phases, sample)
  return job_lib.Job(
    'train', programs, schedule, data, weights(run, number), base=run.base(), base_state=base_state(run, programs),
    keep_state=s.inner.keep_state, evaluation=evaluation, publish=True, round=number, lost=lost(run),
    later_work=plan.later_work(s, 'train'),
  )  # fmt: skip


def control_job(run: run_lib.Run) -> job_lib.Job:
  """Returns the training of the dense control: plain AdamW from the base, on all text, for `dense_control`'s steps.

  Schedules and the position in the text continue from the base. Phases only determine when hold-outs and validation are
  measured.
  """
  s, programs = run.settings, run.control_programs
  first = -(-s.pretrain.steps * s.pretrain.batch_size // s.train.batch_size) - s.pretrain.steps
  batch = streams(run, 'base', s.train.batch_size)
  data = job_lib.Data(s.train.batch_size, lambda path, step: batch(path, first + step))
  holdout = validate_stage.control_holdout(run) if s.train.early_stopping else None
  validate = functools.partial(validate_stage.validate, run, programs)
  evaluation = job_lib.Evaluation(holdout, validate, s.evaluate.every_phases)
  schedule = _schedule(dense_control.control_settings(s, run.steps_taken))
  return job_lib.Job(
    stage.control_name(s), programs, schedule, data, _alone, base=run.base(), base_state=base_state(run, programs),
    evaluation=evaluation, publish=True,
  )  # fmt: skip


def alone_job(
  run: run_lib.Run, path: int, first_phase: int = 0, later_work: float = 0.0, steps: int | None = None
) -> job_lib.Job:  # fmt: skip
  """Returns the training of a path by itself: AdamW from the base on the path's shard, without outer steps.

  Steps, batches, learning rates and hold-out are those of the path in its run. Phases only determine when the hold-out
  is measured.

  Args:
    first_phase: the first phase that the path has trained in, as of an owner that joined a run.
    later_work: of the jobs after this one, in multiples of it.
    steps: that the path has taken in all phases, where these end by time; it then counts its own steps. They are
      divided into equal phases, of which the rest is left out.
  """
  s, programs = run.settings, run.alone_programs
  phases, batch = s.train.phases - first_phase, streams(run, '0', s.train.batch_size)
  skipped = first_phase * s.train.steps_per_phase if steps is None else 0
  schedule = dataclasses.replace(_schedule(s), phases=phases, first_step=s.pretrain.steps + skipped)
  if steps is not None:
    schedule = dataclasses.replace(schedule, steps_per_phase=max(1, steps // phases))
  data = job_lib.Data(s.train.batch_size, lambda _, step: batch(path, step - skipped))
  holdout = validate_stage.holdout_of_path(run, path) if s.train.early_stopping else None
  return job_lib.Job(
    f'{stage.ALONE}-{run.layout.grid.path_name(path)}', programs, schedule, data, _alone, base=run.base(),
    base_state=base_state(run, programs), evaluation=job_lib.Evaluation(holdout), publish=True, later_work=later_work,
  )  # fmt: skip


def _schedule(s: settings_lib.Settings) -> job_lib.Schedule:
  """Returns all phases after pretraining."""
  t, first = s.train, s.pretrain.steps
  return job_lib.Schedule(
    phases=t.phases, steps_per_phase=t.steps_per_phase, steps_per_dispatch=t.steps_per_dispatch, first_step=first
  )


def lost(run: run_lib.Run) -> Callable[[int], np.ndarray] | None:
  """Returns phase -> which paths' outer gradients are lost, bool, shaped like the grid; None if none are."""
  s, shape = run.settings, run.layout.grid.shape
  of_phase = functools.lru_cache(4)(lambda phase: outer.lost_paths(s.outer.lost, shape, s.seed, phase))
  return of_phase if s.outer.lost else None


def weights(run: run_lib.Run, number: int) -> Callable[[int], np.ndarray]:
  """Returns phase -> w_i of every path on a round's shards, like the grid; 0 for one that takes no part [2.7]."""
  s, grid = run.settings, grid_lib.Grid(run.settings.grid)
  tokens = run.shards_meta(number)['shard_tokens']

  @functools.lru_cache(2)  # asked at every dispatch, of all paths
  def of_phase(phase: int) -> np.ndarray:
    active = choices.active_paths(s.train, grid.num_paths, s.seed, phase)
    return outer.path_weights(active, tokens, s.outer.reweigh, grid.shape)

  return of_phase


def round_end(s: settings_lib.Settings, number: int) -> int:
  """Returns the number of phases after which a round's shards are no longer trained on."""
  return s.train.phases if number == s.rounds else (number + 1) * s.routing.phases_per_round


def train(run: run_lib.Run, job: job_lib.Job, folder: str = '') -> state_lib.State:
  """Runs a job to its end, in a folder of the workdir's; a signal makes it save and raise training_loop.Stopped."""
  checkpoint, workdir = run.settings.checkpoint, run.workdir / folder
  run.disk.publish()
  with display.doing('looking for a checkpoint to resume from'), time_use.doing(time_use.CHECKPOINT):
    trainer = training_loop.Trainer(job, workdir, checkpoint, run.metrics, run.stop_requested, run.disk)
  with run.graceful(trainer.has_news):
    state = trainer.train(run.profiler)
  if job.publish:
    run.disk.follow(f'{job.name} is trained to phase {job.schedule.end}')
  return state


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
  return {place: mesh.fetch(x) for place, x in by_place(tree).items()}


def by_place(tree: Any) -> dict[str, Any]:
  """Returns a pytree's leaves by their place in it, as `jax.tree_util.keystr` writes it."""
  return {jax.tree_util.keystr(place): x for place, x in jax.tree_util.tree_leaves_with_path(tree)}


def from_leaves(arrays: Mapping[str, np.ndarray], structure) -> Any:
  """Returns the arrays as a pytree of a structure; the inverse of `named_leaves`."""
  return jax.tree_util.tree_map_with_path(lambda at, _: arrays[jax.tree_util.keystr(at)], structure)


def base_state(run: run_lib.Run, programs: Programs) -> Any:
  """Returns the inner state that the base model ended with; None if it was not trained, or is not taken over."""
  if not run.settings.inner.inherit_state:
    return None
  arrays = tensors.read_arrays(run.workdir / 'base' / 'inner.safetensors')
  return from_leaves(arrays, jax.eval_shape(programs.specs.inner.init, programs.shapes)) if arrays else None
