"""Epochs: how many times a model has read the rows of its training text."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dipaco_jax.config import choices, settings as settings_lib
from dipaco_jax.pipeline import jobs, run as run_lib
from dipaco_jax.storage import seals


def of_base(run: run_lib.Run) -> dict[str, Any]:
  """Returns the epochs of the base model, and the tokens of the text that it reads; {} if its shards are gone."""
  meta = _shards(run.workdir, 'base')
  return _of_base(run.settings, meta) if meta else {}


def of_paths(run: run_lib.Run) -> list[float]:
  """Returns the epochs of each path after all phases, summed over the shards of all rounds."""
  rows = [run.shards_meta(number)['shard_rows'] for number in range(run.settings.rounds + 1)]
  return _of_paths(run.settings, rows)


def of_steps(run: run_lib.Run, steps_P: np.ndarray) -> list[float]:
  """Returns the epochs of each path after so many of its steps on the shards of the first round, [P]."""
  rows_P = np.maximum(1, np.array(run.shards_meta(0)['shard_rows']))
  return (steps_P * run.settings.train.batch_size / rows_P).tolist()


def read(
  workdir: pathlib.Path, s: settings_lib.Settings, results: Mapping[str, Mapping[str, Any]], control_steps: int | None
) -> dict[str, Any]:
  """Returns the epochs of base, paths and dense control, as recorded by the stages, or else from the shards."""
  pretrain, train = results.get('pretrain', {}), results.get('train', {})
  base, of_rounds = _shards(workdir, 'base'), [_shards(workdir, str(number)) for number in range(s.rounds + 1)]
  epochs = {
    'pretrain_epochs': pretrain.get('epochs'),
    'pretrain_text_tokens': pretrain.get('text_tokens'),
    'control_epochs': control_steps * s.train.batch_size / _rows(base) if base and control_steps else None,
    'epochs_by_path': train.get('epochs_by_path'),
  }
  if base and pretrain and epochs['pretrain_epochs'] is None:
    epochs |= {f'pretrain_{name}': value for name, value in _of_base(s, base).items()}
  if all(of_rounds) and train and epochs['epochs_by_path'] is None:
    epochs['epochs_by_path'] = _of_paths(s, [meta['shard_rows'] for meta in of_rounds])
  return epochs


def _shards(workdir: pathlib.Path, name: str) -> dict[str, Any]:
  """Reads the meta.json of the shards of a round, or of 'base'; {} if they are gone."""
  file = workdir / 'shards' / name / 'meta.json'
  return seals.read_json(file, 'shard_rows', 'shard_tokens') if file.exists() else {}


def _of_base(s: settings_lib.Settings, meta: Mapping[str, Any]) -> dict[str, Any]:
  epochs = s.pretrain.steps * s.pretrain.batch_size / _rows(meta)
  return {'epochs': epochs, 'text_tokens': sum(meta['shard_tokens'])}


def _rows(meta: Mapping[str, Any]) -> int:
  return max(1, sum(meta['shard_rows']))


def _of_paths(s: settings_lib.Settings, rows_of_rounds: Sequence[Sequence[int]]) -> list[float]:
  begin, epochs_P = 0, np.zeros(s.num_paths)
  for number, shard_rows in enumerate(rows_of_rounds):
    end = jobs.round_end(s, number)
    phases_P = np.zeros(s.num_paths, int)
    for phase in range(begin, end):
      phases_P += choices.active_paths(s.train, s.num_paths, s.seed, phase)
    rows_P = np.maximum(1, np.array(shard_rows))
    epochs_P += phases_P * s.train.steps_per_phase * s.train.batch_size / rows_P
    begin = end
  return epochs_P.tolist()
