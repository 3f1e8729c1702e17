"""Epochs: how many times a model has read the rows of its training text."""

from typing import Any

import numpy as np

from dipaco_jax.core import outer
from dipaco_jax.pipeline import jobs, run as run_lib
from dipaco_jax.storage import seals


def of_base(run: run_lib.Run) -> dict[str, Any]:
  """Returns the epochs of the base model, and the tokens of the text that it reads; {} if its shards are gone."""
  file, s = run.workdir / 'shards' / 'base' / 'meta.json', run.settings.pretrain
  if not file.exists():
    return {}
  meta = seals.read_json(file, 'shard_rows', 'shard_tokens')
  return {'epochs': s.steps * s.batch_size / max(1, sum(meta['shard_rows'])), 'text_tokens': sum(meta['shard_tokens'])}


def of_paths(run: run_lib.Run) -> list[float]:
  """Returns the epochs of each path after all phases; those on the shards of all rounds are added."""
  s, begin = run.settings, 0
  epochs_P = np.zeros(s.num_paths)
  for number in range(s.rounds + 1):
    end = jobs.round_end(s, number)
    phases_P = np.zeros(s.num_paths, int)
    for phase in range(begin, end):
      phases_P += outer.active_paths(s.train, s.num_paths, s.seed, phase)
    rows_P = np.array(run.shards_meta(number)['shard_rows'])
    epochs_P += phases_P * s.train.steps_per_phase * s.train.batch_size / np.maximum(1, rows_P)
    begin = end
  return epochs_P.tolist()
