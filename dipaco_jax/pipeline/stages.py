"""The stages of a run, one after another: tokenize, pretrain, route, train, evaluate.

Each stage publishes an artefact in the workdir atomically, and then its record `stages/<name>.json`: a digest of its
inputs, its duration and its result. The same command again continues from the existing artefacts. After `route` nothing
reads raw text again.
"""

import logging
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dipaco_jax.algorithm import outer
from dipaco_jax.core.errors import Diverged
from dipaco_jax.huggingface import model_folder
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import (
  epochs,
  excerpt_choice,
  features,
  inputs,
  jobs,
  rate_check,
  rerouted_perplexity,
  resharding_round,
  route_stage,
  router_refit,
  run as run_lib,
  samples,
  stage as stage_lib,
  stage_records,
  tokenize_stage,
  validate_stage,
)
from dipaco_jax.processes import display, processes, time_use
from dipaco_jax.storage import module_store, publishing, tensors
from dipaco_jax.telemetry import performance
from dipaco_jax.training import (
  job as job_lib,
  mesh,
  module_publishing,
  programs as programs_lib,
  train_state as state_lib,
)

# Causes of time without a cause of its own, by stage.
CAUSES = {
  'tokenize': time_use.STAGES,
  'pretrain': time_use.OTHER,
  'route': time_use.STAGES,
  'train': time_use.OTHER,
  'evaluate': time_use.EVALUATE,
}


def run_all(run: run_lib.Run, last: str = stage_lib.NAMES[-1]):
  """Runs every stage up to the last that is not done yet, in order; a finished run is only reported again."""
  functions = tokenize_stage.tokenize, pretrain, route_stage.route, train, evaluate
  by_name = dict(zip(stage_lib.NAMES, functions, strict=True))
  for stage in stage_lib.up_to(last):
    if not stage_records.is_done(run.workdir, run.settings, stage.name):
      _run_stage(run, stage, by_name[stage.name])
    run.disk.follow(f'stage {stage.name}')


def _run_stage(run: run_lib.Run, stage: stage_lib.Stage, function: Callable[[run_lib.Run], dict[str, Any]]):
  name = stage.name
  if processes.is_first():
    stage_records.reopen(run.workdir, name)
  time_use.enter(name, CAUSES[name])
  with display.doing(stage.doing, tells=False), stage_records.stopwatch(run.workdir, name) as elapsed:
    result = function(run)
    if name in ('train', 'evaluate'):
      result = result | {'phases': run.settings.train.phases}
  time_use.enter(name, time_use.OTHER)
  if processes.is_first():
    stage_records.write_record(run.workdir, run.settings, name, elapsed(), result)
  run.disk.publish()


def pretrain(run: run_lib.Run) -> dict[str, Any]:
  """Trains the base model: one path on all text [2.6]."""
  inputs.note_inputs(run, 'pretrain')
  params, about = first_parameters(run)
  if processes.any_process((run.workdir / 'base').exists(), 'base'):
    s = run.settings.pretrain  # the record was lost, and with it the speed
    return (
      {
        'steps': s.steps,
        'tokens': s.steps * s.batch_size * run.settings.model.seq_len,
        'tokens_per_s': None,
      }
      | epochs.of_base(run)
      | about
    )
  route_stage.write_base_shards(run, 'pretrain')
  record, inner = state_lib.new_record(1), {}
  if run.settings.pretrain.steps:
    state = jobs.train(run, jobs.base_job(run, params))
    params = {name: mesh.fetch(x) for name, x in state.modules['all'].items()}
    record, inner = state.record, jobs.named_leaves(state.inner[0])
  if processes.is_first():
    with publishing.publish_directory(run.workdir / 'base') as aside:
      (aside / 'params.safetensors').write_bytes(tensors.to_bytes(params))
      (aside / 'inner.safetensors').write_bytes(tensors.to_bytes(inner))
  rate = record.timed_tokens / max(record.inner_s, 1e-9)
  figures = {'steps': run.settings.pretrain.steps, 'tokens': record.tokens, 'tokens_per_s': rate}
  return figures | epochs.of_base(run) | about


def first_parameters(run: run_lib.Run) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Returns the parameters that pretraining starts from, fresh or another model's, and what its record says of them."""
  if run.settings.pretrain.init:
    params, about = model_folder.load_params(run.settings.pretrain.init, run.model)
    return params, {'init': about}
  return {name: np.asarray(x) for name, x in transformer.init(run.model, jax.random.key(run.settings.seed)).items()}, {}


def train(run: run_lib.Run) -> dict[str, Any]:
  """Trains the grid of paths from the base, round by round; returns figures for the report.

  The base's checkpoints are removed first: its record is written, so nothing continues from them.
  """
  if run.disk.is_ours:
    shutil.rmtree(run.workdir / 'checkpoints' / 'pretrain', ignore_errors=True)
  for number in range(run.settings.rounds):
    exist = [(run.workdir / tree / str(number + 1)).exists() for tree in ('routing', 'shards')]
    if not processes.any_process(all(exist), f'round {number + 1} is there'):
      jobs.train(run, jobs.paths_job(run, number))
      resharding_round.reshard(run, number + 1, jobs.round_end(run.settings, number))
    run.disk.follow(f'round {number + 1}', with_checkpoints=True)
  job = jobs.paths_job(run, run.settings.rounds)
  state = jobs.train(run, job)
  _publish_again(run, job, state)
  result = figures(run, job, state.record)
  return result | {'rounds': [resharding_round.figures(run, number + 1) for number in range(run.settings.rounds)]}


def _publish_again(run: run_lib.Run, job: job_lib.Job, state: state_lib.State):
  """Publishes the last phase's modules again, from the last checkpoint, if they were removed."""
  programs = job.programs
  last = job.schedule.phases
  pointers = run.workdir / 'paths' / 'best.json'
  if not processes.any_process((run.workdir / 'modules' / str(last)).exists(), 'the last version'):
    module_publishing.publish_modules(
      run.workdir, last, programs.layout, programs.unshard(state.modules), disk=run.disk
    )
    run.disk.follow('the last version is out')
  if processes.is_first() and not pointers.exists():
    best, losses = state.record.best_version, state.record.best_loss
    publishing.write_json(pointers, {'version': best, 'holdout_loss': losses})


def evaluate(run: run_lib.Run) -> dict[str, Any]:
  """Returns perplexities of validation documents: routed once and, as the config asks, more often."""
  if run.settings.evaluate.refit_router:
    features.check_router_data(run)  # the option may be new
  trained = train_control(run) if run.settings.evaluate.control else {}
  router_data = rerouted_perplexity.score_router_data(run)
  if run.settings.evaluate.refit_router:
    trained |= router_refit.refit(run, router_data)
  result = validate_stage.evaluate_all(run, 'control_tokens' in trained) | rerouted_perplexity.figures(run, router_data)
  excerpt_choice.write(run)
  samples.write(run, 'control_tokens' in trained)
  return result | trained


def train_control(run: run_lib.Run) -> dict[str, Any]:
  """Trains the dense control, which the paths are compared with, from the base on, or from where it stopped."""
  s = run.settings
  _remove_other_control(run)
  route_stage.write_base_shards(run, stage_lib.CONTROL)  # one of many processes has none yet
  here = time_use.within(stage_lib.CONTROL, time_use.OTHER)
  with here, stage_records.stopwatch(run.workdir, stage_lib.CONTROL) as elapsed:
    try:
      job = jobs.control_job(run)
      record = jobs.train(run, job, stage_lib.CONTROL).record
    except Diverged as e:
      logging.warning('the dense control is left out of the comparison: %s', e)
      return {'control_diverged': str(e), 'control_s': elapsed()}
  flops = performance.flops_per_token(s.model, run.model.vocab_size, s.model.seq_len)
  return {
    'control_budget': s.evaluate.control_budget,
    'control_steps': job.schedule.phases * job.schedule.steps_per_phase,
    'control_tokens': record.tokens,
    'control_flops': flops * record.tokens,
    'control_s': elapsed(),
  }


def _remove_other_control(run: run_lib.Run):
  """Removes a dense control that was trained for another budget: it has no checkpoint to continue from."""
  folder = run.workdir / stage_lib.CONTROL
  has_checkpoints = (folder / 'checkpoints' / stage_lib.control_name(run.settings)).exists()
  if processes.any_process(folder.exists() and not has_checkpoints, 'a control of another budget'):
    if run.disk.is_ours:
      shutil.rmtree(folder, ignore_errors=True)
      stage_records.seconds_file(run.workdir, stage_lib.CONTROL).unlink(missing_ok=True)
    run.disk.follow('no control of another budget')


def figures(run: run_lib.Run, job: job_lib.Job, record: state_lib.Record) -> dict[str, Any]:
  """Returns the figures of training for the report."""
  s = run.settings
  programs = job.programs
  phases = job.schedule.phases
  tau = job.schedule.steps_per_phase
  devices = programs.placement.mesh.devices.reshape(-1)
  flops = performance.flops_per_token(s.model, run.model.vocab_size, s.model.seq_len)
  rate = record.timed_tokens / max(record.inner_s, 1e-9)
  path_parameters = sum(x.size for x in programs.shapes.values())
  tokens = record.tokens + run.result('pretrain')['tokens']
  took_part = [[int((of(phase) > 0).sum()) for phase in range(phases)] for of in (job.weights, job.outer_weights)]
  active, heard = (sum(counts) / max(1, phases) for counts in took_part)
  return {
    'phases': phases, 'steps': phases * tau, 'highest_learning_rate': rate_check.find_highest(s),
    'train_tokens': tokens, 'tokens_per_s': rate,
    'epochs_by_path': epochs.of_paths(run),
    'step_s': record.inner_s / max(1, record.timed_steps), 'outer_s': record.outer_s / max(1, phases),
    'outer_fraction': record.outer_s / max(1e-9, record.outer_s + record.inner_s),
    'outer_bytes_per_phase':
      outer.exchanged_bytes(programs.layout, programs.shapes, heard, s.outer.row_weights, programs.specs.compress),
    'synchronous_bytes_per_phase': round(2 * 4 * path_parameters * active * tau),
    'peak_memory_bytes': performance.device_peak_bytes(devices) or performance.process_peak_bytes(),
    'train_flops': flops * tokens,
    'model_flops_utilization':
      performance.mfu(flops * rate, devices[0].device_kind, run.model.dtype.name, len(devices)),
    'parameters_path': path_parameters, 'parameters_total': programs.layout.num_parameters(programs.shapes),
    'paths': programs.layout.grid.num_paths, 'device': devices[0].device_kind, 'num_devices': len(devices),
    'dtype': run.model.dtype.name,
    'compilations': sum(run.compilations[name] for name in programs_lib.NAMES),
    'seconds_by_path': [{time_use.INNER: s} for s in record.path_s],
    'modules_sha256': module_store.modules_sha256(run.workdir, phases),
  }  # fmt: skip
