"""Routed perplexity on validation documents and losses on hold-outs, for the stage `evaluate` and during training."""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.core import bootstrap
from dipaco_jax.data import loader, packing
from dipaco_jax.pipeline import answer_losses, document_losses, group_ratios, run as run_lib, stage
from dipaco_jax.processes import display
from dipaco_jax.storage import module_store
from dipaco_jax.training import evaluation
from dipaco_jax.training.programs import Programs


def control_holdout(run: run_lib.Run) -> evaluation.Rows:
  """Returns hold-out rows of all text, about `train.max_holdout_rows`, as many from every part."""
  s = run.settings
  folder = run.workdir / 'shards' / 'base'
  counts = run.shards_meta('base')['holdout_rows']
  most = -(-s.train.max_holdout_rows // len(counts)) or max(counts)
  ends = np.cumsum([min(rows, most) for rows in counts]).tolist()

  def load(path, start, stop):
    spans = [(k, max(start - begin, 0), min(stop, end) - begin) for k, (begin, end) in enumerate(pairwise([0, *ends]))]
    files = ((str(folder / str(k) / 'holdout.array_record'), first, last) for k, first, last in spans if first < last)
    parts = [loader.read_rows(file, first, last, s.model.seq_len) for file, first, last in files]
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))

  return evaluation.Rows([ends[-1]], load, run.eval_batch, s.model.seq_len)


def holdout_rows(run: run_lib.Run, number: int) -> evaluation.Rows:
  """Returns the first `train.max_holdout_rows` hold-out rows of every shard of a round."""
  s, folder = run.settings, run.workdir / 'shards' / str(number)

  def load(path, start, stop):
    return loader.read_rows(str(folder / str(path) / 'holdout.array_record'), start, stop, s.model.seq_len)

  counts = run.shards_meta(number)['holdout_rows']
  most = s.train.max_holdout_rows or max(counts)
  return evaluation.Rows([min(rows, most) for rows in counts], load, run.eval_batch, s.model.seq_len)


def holdout_of_path(run: run_lib.Run, path: int) -> evaluation.Rows:
  """Returns those of `holdout_rows` of one path, as rows of the only path of a grid."""
  rows = holdout_rows(run, 0)
  return rows._replace(counts=[rows.counts[path]], load=lambda _, start, stop: rows.load(path, start, stop))


def validation_rows(run: run_lib.Run, assignment: np.ndarray, num_paths: int) -> evaluation.Rows:
  """Returns validation documents as rows, by the path that they are routed to."""
  validation = run.sequences('validation')
  mine = [np.flatnonzero(assignment == path) for path in range(num_paths)]

  def load(path, start, stop):
    return packing.pad([x.to_pack for x in validation.read(mine[path][start:stop])], run.eval_len)

  return evaluation.Rows([len(indices) for indices in mine], load, run.eval_batch, run.eval_len)


class Measured(NamedTuple):
  """Losses of all validation documents, [N] each."""

  nll: np.ndarray  # nats, over the targets that count
  targets: np.ndarray  # number of those


def measure(run: run_lib.Run, programs: Programs, params_of_turn, assignment: np.ndarray | None = None) -> Measured:
  """Measures validation documents, each under the path that it is assigned to, or all under the only path."""
  validation, num_paths = run.sequences('validation'), programs.layout.grid.num_paths
  assignment = np.zeros(len(validation), np.int32) if assignment is None else assignment
  with display.doing('validating'):
    losses = evaluation.losses(programs, params_of_turn, validation_rows(run, assignment, num_paths))
  nll, count = np.zeros(len(validation)), np.zeros(len(validation))
  for path in range(num_paths):
    nll[assignment == path], count[assignment == path] = losses.nll[path], losses.targets[path]
  return Measured(nll, count)


def validate(run: run_lib.Run, programs: Programs, params_of_turn, number: int | None = None) -> dict[str, Any]:
  """Returns perplexities of validation documents, each under its path by a round's router, or all under one."""
  count = len(run.sequences('validation'))
  assignment = np.zeros(count, np.int32) if number is None else run.routed('validation', number)
  return summary(run, measure(run, programs, params_of_turn, assignment), assignment, programs.layout.grid.num_paths)


def summary(run: run_lib.Run, measured: Measured, assignment: np.ndarray, num_paths: int) -> dict[str, Any]:
  """Returns perplexities from each validation document's losses and path."""
  _, domains = run.sequences('validation').columns()
  scored = evaluation.Scored(*measured, run.validation_bytes(), assignment, domains)
  return evaluation.summarize(scored, num_paths, run.result('tokenize')['domains'])


def evaluate_all(run: run_lib.Run, has_control: bool = False) -> dict[str, Any]:
  """Evaluates the base, the control if there is one, all paths at their last version, and each at its chosen one.

  Where a router was fitted after training, paths are evaluated with that of training too.
  """
  s, programs = run.settings, run.programs
  assignment, num_paths = run.last_routes(), programs.layout.grid.num_paths
  validation = run.sequences('validation')
  _, domains = validation.columns()
  groups = group_ratios.Groups(domains, run.result('tokenize')['domains'], assignment, validation.contents())
  load = functools.partial(module_store.load_path, run.workdir, run.layout)
  final = _measure_paths(run, programs, functools.partial(load, version=s.train.phases), assignment)
  best = _measure_paths(run, programs, load, assignment) if s.train.early_stopping else final
  result = _with_interval(run, best, groups, num_paths) | {
    'perplexity_final': summary(run, final, assignment, num_paths)['perplexity'],
    'validation_documents': len(np.unique(groups.content[best.targets > 0])),
    'validation_tokens_by_path': np.bincount(assignment, best.targets, num_paths).astype(int).tolist(),
  }
  result |= group_ratios.count_documents(groups, best.targets, num_paths)
  others = {'base': _measure_paths(run, run.base_programs, lambda _: run.base())}
  if has_control:
    others['control'] = _measure_paths(run, *control(run))
  if s.evaluate.refit_router:
    others['as_trained'] = _measure_paths(run, programs, load, run.routed('validation', s.rounds))
  for name, other in others.items():
    result |= _compare(run, name, best, other, groups, num_paths)
  if s.data.format == 'messages':
    result['perplexity_by_answer'] = answer_losses.perplexities(run, programs, load, assignment)
    result['base_perplexity_by_answer'] = answer_losses.perplexities(run, run.base_programs, lambda _: run.base())
  nats = {'paths': best.nll} | {name: other.nll for name, other in others.items()}
  document_losses.write(run, assignment, best.targets, nats)
  if s.evaluate.matrix:
    result['loss_matrix'] = evaluation.loss_matrix(programs, load, holdout_rows(run, s.rounds))
  return result


def _measure_paths(
  run: run_lib.Run, programs: Programs, params_of_path: Callable, assignment: np.ndarray | None = None
) -> Measured:
  """Measures validation documents under parameters that are loaded path by path."""
  return measure(run, programs, lambda turn: evaluation.in_flight(programs, turn, params_of_path), assignment)


def _with_interval(run: run_lib.Run, measured: Measured, groups: group_ratios.Groups, num_paths: int) -> dict[str, Any]:
  """Returns perplexities with a bootstrap interval."""
  interval = bootstrap.interval(measured.nll, measured.targets, contents_N=groups.content)
  return summary(run, measured, groups.path, num_paths) | {'perplexity_interval': interval}


def _compare(
  run: run_lib.Run, name: str, best: Measured, other: Measured, groups: group_ratios.Groups, num_paths: int
) -> dict[str, Any]:
  """Returns another model's perplexities, and the ratio of the paths' perplexity to its own."""
  nats = best.nll - other.nll  # whose mean is the logarithm of the perplexities' ratio
  figures = _with_interval(run, other, groups, num_paths)
  result = {f'{name}_{key}': value for key, value in figures.items() if key != 'validation_tokens'}
  result[f'ratio_to_{name}'] = float(np.exp(min(nats.sum() / best.targets.sum(), 700.0)))
  interval = bootstrap.interval(nats, best.targets, contents_N=groups.content)
  result[f'ratio_to_{name}_interval'] = interval
  return result | group_ratios.compare(f'ratio_to_{name}', groups, nats, best.targets, num_paths)


def control(run: run_lib.Run) -> tuple[Programs, Callable[[int], dict[str, np.ndarray]]]:
  """Returns the dense control's programs, and what loads it, as path 0, at the version that was chosen, or the last."""
  s, programs = run.settings, run.control_programs
  version = None if s.train.early_stopping else s.train.phases
  return programs, functools.partial(
    module_store.load_path, run.workdir / stage.CONTROL, programs.layout, version=version
  )
