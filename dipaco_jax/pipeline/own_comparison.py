"""What a federation is worth to an owner: losses of its path and of models without one, on its own hold-out.

The documents that a path's shard holds back are measured one by one under three models: the `base` that all start from;
`alone`, trained on from the base on the owner's text only, for as many steps (`jobs.alone_job`); and `federation`, the
path at the version that early stopping chose. Ratios of perplexities get intervals over documents (`bootstrap`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.core import bootstrap
from dipaco_jax.data import packing
from dipaco_jax.pipeline import jobs, route_stage, run as run_lib, stage
from dipaco_jax.processes import display
from dipaco_jax.storage import module_store, seals
from dipaco_jax.storage.records import read_meta
from dipaco_jax.training import evaluation

MODELS = BASE, ALONE, FEDERATION = 'base', 'alone', 'federation'
RATIOS = ((FEDERATION, ALONE), (FEDERATION, BASE), (ALONE, BASE))


class Losses(NamedTuple):
  """Losses of held-back sequences, [N] each."""

  nats: dict[str, np.ndarray]  # by model, over the targets that count
  targets: np.ndarray  # number of those
  contents: np.ndarray  # digest of the document of each sequence


def train_alone(
  run: run_lib.Run, path: int, first_phase: int, later_work: float = 0.0, steps: int | None = None
) -> dict[str, Any]:  # fmt: skip
  """Trains a path alone, or continues from where it stopped; returns its figures. Arguments: see `jobs.alone_job`."""
  job = jobs.alone_job(run, path, first_phase, later_work, steps)
  record = jobs.train(run, job, folder(path)).record
  steps = job.schedule.phases * job.schedule.steps_per_phase
  return {'steps': steps, 'tokens': record.tokens, 'phase_of_alone': first_phase + record.best_version[0]}


def folder(path: int) -> str:
  """Returns the folder, in the workdir, of the model of a path that is trained alone."""
  return f'{stage.ALONE}/{path}'


def measure(run: run_lib.Run, path: int) -> Losses:
  """Measures the documents that a path's shard holds back, all of them, under all models."""
  indices, contents = held_back(run, path)
  train = run.sequences('train', open_parts=1)

  def load(_: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    return packing.pad([x.to_pack for x in train.read(indices[start:stop])], run.settings.model.seq_len)

  rows = evaluation.Rows([len(indices)], load, run.eval_batch, run.settings.model.seq_len)
  alone = functools.partial(module_store.load_path, run.workdir / folder(path), run.alone_programs.layout, 0)
  of_model: dict[str, Callable[[], dict[str, np.ndarray]]] = {
    BASE: run.base,
    ALONE: alone,
    FEDERATION: functools.partial(module_store.load_path, run.workdir, run.layout, path),
  }
  nats, targets = {}, np.zeros(0)
  for name, load_model in of_model.items():
    with display.doing(f'evaluating {name}'):
      nats[name], targets = _losses(run, load_model(), rows)
  return Losses(nats, targets, contents)


def _losses(
  run: run_lib.Run, params: dict[str, np.ndarray], rows: evaluation.Rows
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
  """Returns the nats and the number of targets of each row under a model."""
  programs = run.alone_programs
  losses = evaluation.losses(programs, lambda turn: evaluation.in_flight(programs, turn, lambda _: params), rows)
  return losses.nll[0], losses.targets[0]


def held_back(run: run_lib.Run, path: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the indices of the sequences that a path's shard holds back, and digests of their documents.

  Raises seals.Damaged if they are not those of the shard.
  """
  shard = run.workdir / 'shards' / '0' / str(path)
  dealt = route_stage.deal(run, run.routed('train', 0), run.settings.num_paths)
  indices = np.flatnonzero(dealt.held & (dealt.assignment[:, 0] == path))
  if len(indices) != read_meta(str(shard))['holdout']['sequences']:
    raise seals.Damaged(shard / 'meta.json')
  return indices, run.sequences('train').contents()[indices]


def pool(losses: Sequence[Losses]) -> Losses:
  """Returns the losses of several paths as those of one; a document of several paths counts once in intervals."""
  nats = {name: np.concatenate([of_path.nats[name] for of_path in losses]) for name in MODELS}
  return Losses(nats, *(np.concatenate(parts) for parts in zip(*(x[1:] for x in losses), strict=True)))


def summarize(losses: Losses) -> dict[str, Any]:
  """Returns perplexities of the models, their ratios, and intervals of both; None where nothing finite is known."""
  count = losses.targets.sum()

  def of(nats_N: np.ndarray) -> tuple[float | None, tuple[float, float] | None]:
    mean = nats_N.sum() / count if count else np.nan
    if not np.isfinite(mean):
      return None, None
    return evaluation.perplexity(mean), bootstrap.interval(nats_N, losses.targets, contents_N=losses.contents)

  models = {name: of(losses.nats[name]) for name in MODELS}
  ratios = {f'{one}_to_{other}': of(losses.nats[one] - losses.nats[other]) for one, other in RATIOS}
  return {
    'documents': len(np.unique(losses.contents[losses.targets > 0])),
    'targets': int(count),
    'perplexity': {name: value for name, (value, _) in models.items()},
    'perplexity_interval': {name: interval for name, (_, interval) in models.items()},
    'ratio': {name: value for name, (value, _) in ratios.items()},
    'ratio_interval': {name: interval for name, (_, interval) in ratios.items()},
  }
