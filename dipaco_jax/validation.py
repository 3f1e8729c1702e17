"""Routed perplexity on validation documents, losses on hold-outs: the stage `evaluate`, and what training asks for."""

import functools
from typing import Any

import numpy as np

from dipaco_jax import checkpoint, evaluate, metrics, shards
from dipaco_jax import run as run_lib
from dipaco_jax.programs import Programs


def holdout_rows(run: run_lib.Run, number: int) -> evaluate.Rows:
  """The first `train.max_holdout_rows` of the hold-out of every shard of a round."""
  s, folder = run.settings, run.workdir / 'shards' / str(number)

  def load(path, start, stop):
    return shards.read_rows(str(folder / str(path) / 'holdout.array_record'), start, stop, s.model.seq_len)

  counts = run.shards_meta(number)['holdout_rows']
  most = s.train.max_holdout_rows or max(counts)
  return evaluate.Rows([min(rows, most) for rows in counts], load, run.eval_batch, s.model.seq_len)


def validation_rows(run: run_lib.Run, assignment: np.ndarray, num_paths: int) -> evaluate.Rows:
  """Validation documents by the path that they are routed to, one in a row."""
  found = run.sequences('validation')
  mine = [np.flatnonzero(assignment == path) for path in range(num_paths)]

  def load(path, start, stop):
    return shards.pad([x.tokens for x in found.read(mine[path][start:stop])], run.eval_len)

  return evaluate.Rows([len(indices) for indices in mine], load, run.eval_batch, run.eval_len)


def validate(run: run_lib.Run, made: Programs, params_of_turn, number: int | None = None) -> dict[str, Any]:
  """Perplexity of validation documents, each under its path by the router of a round, or all under the only path."""
  found, num_paths = run.sequences('validation'), made.layout.grid.num_paths
  assignment = np.zeros(len(found), np.int32) if number is None else run.routed('validation', number)
  losses = evaluate.losses(made, params_of_turn, validation_rows(run, assignment, num_paths))
  nll, count = np.zeros(len(found)), np.zeros(len(found))
  for path in range(num_paths):
    nll[assignment == path], count[assignment == path] = losses.nll[path], losses.targets[path]
  return summary(run, nll, count, assignment, num_paths)


def summary(
  run: run_lib.Run, nll: np.ndarray, count: np.ndarray, assignment: np.ndarray, num_paths: int
) -> dict[str, Any]:
  """Perplexities from each validation document's nats, number of targets and path, [N] each."""
  found = run.sequences('validation')
  piece_bytes, prefix = run.tokenizer.piece_bytes(), run.settings.routing.prefix_tokens
  everything = found.read(range(len(found)))
  num_bytes = np.array([piece_bytes[x.tokens[prefix : run.eval_len]].sum() for x in everything])
  domains = np.array([x.domain for x in everything])
  return metrics.summarize(nll, count, num_bytes, assignment, domains, num_paths, run.result('tokenize')['domains'])


def evaluate_all(run: run_lib.Run) -> dict[str, Any]:
  """The base, the last version of all paths, and each path at the version that early stopping chose."""
  s = run.settings
  single, made = run.base_programs, run.programs
  base = validate(run, single, lambda turn: evaluate.in_flight(single, turn, lambda _: run.base()))

  def of_version(version: int | None):
    def load(path):
      return checkpoint.load_path(run.workdir, run.layout, path, version)

    return lambda turn: evaluate.in_flight(made, turn, load)

  final = validate(run, made, of_version(s.train.phases), s.rounds)
  best = validate(run, made, of_version(None), s.rounds) if s.train.early_stopping else final
  result = best | {
    'perplexity_final': final['perplexity'], 'base_perplexity': base['perplexity'],
    'base_bits_per_byte': base['bits_per_byte'], 'base_perplexity_by_domain': base['perplexity_by_domain'],
  }  # fmt: skip
  if s.evaluate.matrix:
    load = functools.partial(checkpoint.load_path, run.workdir, run.layout)
    result['loss_matrix'] = evaluate.matrix(made, load, holdout_rows(run, s.rounds))
  return result
