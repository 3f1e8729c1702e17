"""An evaluator's task with a floor: a path's loss on public text without and with its contribution [floor_facts.py].

Both losses are of the modules of the version that the phase began with. Modules that stay with the path are those
of the base model, because no other process has them. The text is the hold-out of all shards or, in a run without
hold-outs or whose owners keep theirs, the validation text; `outer.floor_rows` of its rows are drawn by `seed`, the
same for all paths and phases.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from dipaco_jax.islands import floor_facts, inner_phase, messages, pieces
from dipaco_jax.islands.guard import Later, Malformed
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.path_state import Arrays
from dipaco_jax.pipeline import validate_stage
from dipaco_jax.registry.registry import Fact, Task
from dipaco_jax.training import evaluation


def judge(island: Island, task: Task) -> list[Fact]:
  """Evaluates a path without and with what it has sent after a phase; returns the fact. Raises Later."""
  path, phase = int(task.key), task.number
  for checkpoint in island.registry.facts(pieces.CHECKPOINT, [task.key], phase):
    try:
      without, with_it = parameters(island, path, checkpoint)
    except Malformed as e:
      return [floor_facts.judged(checkpoint, None, island.name, str(e))]
    rows = public_rows(island)
    losses = mean_loss(island, rows, path, without), mean_loss(island, rows, path, with_it)
    return [floor_facts.judged(checkpoint, losses, island.name)]
  raise Later(f'the checkpoint of path {path} in phase {phase + 1} was withdrawn')


def parameters(island: Island, path: int, checkpoint: Fact) -> tuple[Arrays, Arrays]:
  """Returns a path's parameters before a phase, and with what it has sent after it. Raises Gone, Malformed."""
  own = island.path_parameters(path, 0, island.own_levels) if island.own_levels else {}
  shared = island.path_parameters(path, checkpoint.number, island.shared_levels)
  without = dict(sorted((own | shared).items()))
  with_it = dict(without)
  for level in island.layout.levels:
    if level.name not in island.own_levels:
      arrays, _ = messages.split_rows(island.read_contribution(checkpoint, level))
      old = {name: without[name] for name in island.layout.names(level)}
      minuend, subtrahend = messages.read_delta(island.kind(level), arrays, old)
      with_it |= {name: (x - (minuend[name] - subtrahend[name])).astype(x.dtype) for name, x in old.items()}
  return without, with_it


def mean_loss(island: Island, rows: evaluation.Rows, path: int, params: Arrays) -> float:
  """Returns the loss of parameters, nats per target; infinite if it is not finite."""
  loss, _ = inner_phase.evaluate(island.run.programs, rows, path, params)
  return math.inf if loss is None else loss


@functools.lru_cache(1)
def public_rows(island: Island) -> evaluation.Rows:
  """Returns the rows of public text on which contributions are judged, the same for each path."""
  s = island.run.settings
  has_holdouts = s.train.early_stopping and not s.data.own_text
  island.fetch_trees('shards/0' if has_holdouts else 'sequences')
  if has_holdouts:
    rows = validate_stage.holdout_rows(island.run, 0)
  else:
    count = len(island.run.sequences('validation'))
    rows = validate_stage.validation_rows(island.run, np.zeros(count, np.int32), 1)
  drawn = draw_rows(rows.counts, s.outer.floor_rows, s.seed)
  parts = [rows.load(shard, row, row + 1) for shard, row in drawn]
  tokens, segments = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))

  def load(path: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    del path
    return tokens[start:stop], segments[start:stop]

  return rows._replace(counts=[len(drawn)] * s.num_paths, load=load)


def draw_rows(counts: Sequence[int], most: int, seed: int) -> list[tuple[int, int]]:
  """Draws rows of shards, without repetition; returns shard and row of each, in order."""
  shards = np.repeat(np.arange(len(counts)), counts)
  rows = np.concatenate([np.arange(count) for count in counts])
  chosen = np.sort(np.random.default_rng(seed).permutation(len(rows))[:most])
  return [(int(shards[i]), int(rows[i])) for i in chosen]
