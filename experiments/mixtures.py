"""(15) Averages and mixtures of finished runs of tables (1) and (15), without training.

    EMA     of one model's versions, one after each phase: theta <- d theta + (1 - d) version
    soup    one model, the mean of a flat mixture's paths
    c-BTM   p(x) = sum_p w_p p_p(x) for each token, w = softmax(-distance^2 / T), from the prefix's feature to centroids
            (arXiv 2303.14177); a served token passes through all paths

d and T are those with the lowest loss on router data, which no path was trained on. All figures are of the same targets
of validation text. An EMA begins with the oldest version that a run has kept: rows of baselines.py keep the newest
KEPT_VERSIONS. The runs' workdirs must exist.
"""

import functools
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import baselines
import common
import jax
import numpy as np
import pictures
import runs
from common import Column
from runs import Row

from dipaco_jax.command_line import command
from dipaco_jax.data import packing
from dipaco_jax.inference.trained_run import TrainedRun
from dipaco_jax.models import loss
from dipaco_jax.pipeline import features, rerouted_perplexity, route_stage, run as run_lib, token_losses
from dipaco_jax.storage import module_store

ROWS = ('dense_batch_tokens', 'dense_batch_zero', 'dense_batch_both', 'flat', 'flat_tokens', 'flat_zero', 'flat_both')
DECAYS = (0.5, 0.8, 0.9)  # d, of a phase
TEMPERATURES = (1.0, 3.0, 10.0, 30.0, 100.0)  # T; features have a variance of 1 in each dimension
BATCH = 64

Params = Mapping[str, Any]


def rows(size: str) -> list[Row]:
  by_name = {row.name: row for row in baselines.rows(size)}
  return [by_name[name] for name in ROWS]


def averages(versions: Iterable[Params], decay: float) -> dict[str, np.ndarray]:
  """The exponential moving average of versions, oldest first; it begins with the first of them."""
  first, *later = versions
  mean = {name: np.asarray(x, np.float64) for name, x in first.items()}
  for version in later:
    mean = {name: decay * x + (1 - decay) * version[name] for name, x in mean.items()}
  return {name: x.astype(np.float32) for name, x in mean.items()}


def mixture_nats(nll_PNL: np.ndarray, distance_NP: np.ndarray, temperature: float) -> np.ndarray:
  """Returns -log sum_p w_p p_p of each token, [N, L], with w = softmax(-distance^2 / T) of its sequence.

  `distance_NP`: squared distances, up to a constant of each sequence.
  """
  log_w_PN = jax.nn.log_softmax(-distance_NP / temperature, axis=1).T
  return -np.asarray(jax.nn.logsumexp(log_w_PN[:, :, None] - nll_PNL, axis=0))


def measure(workdir: pathlib.Path) -> dict[str, Any]:
  """Perplexities of a finished run's averages and mixtures, beside that of the run."""
  trained = TrainedRun(str(workdir))
  run = run_lib.unattended(workdir, trained.settings, num_devices=1)
  versions = module_store.best_versions(workdir)
  paths = [module_store.load_path(workdir, run.layout, path, version) for path, version in enumerate(versions)]
  found = of_versions(run) if len(paths) == 1 else of_paths(run, trained, paths)
  assert math.isclose(found['run'], trained.report['perplexity'], rel_tol=1e-4), (found, trained.report['perplexity'])
  return found


def of_versions(run: run_lib.Run) -> dict[str, Any]:
  """Of one model: the last version, and the EMA of all that were kept."""
  kept = module_store.versions(run.workdir)
  versions = [module_store.load_path(run.workdir, run.layout, 0, version) for version in kept]
  means = {decay: averages(versions, decay) for decay in DECAYS}
  decay = min(DECAYS, key=lambda decay: mean_nats(run, means[decay], 'train'))
  perplexity = math.exp(mean_nats(run, means[decay], 'validation'))
  last = math.exp(mean_nats(run, versions[-1], 'validation'))
  return {'run': last, 'ema': perplexity, 'decay': decay, 'versions': len(kept)}


def of_paths(run: run_lib.Run, trained: TrainedRun, paths: list[dict[str, np.ndarray]]) -> dict[str, Any]:
  """Of a flat mixture: each text under its own path, the soup of all paths, and c-BTM."""
  soup = {name: np.mean([path[name] for path in paths], axis=0) for name in paths[0]}
  distances, scored = {}, {}
  for split in ('train', 'validation'):
    of_split = rerouted_perplexity.score(run, split)
    assert of_split  # this is the first process
    scored[split] = of_split
    distances[split] = -route_stage.scores(run, trained.router.fitted, split, indices_of(run, split))

  def cbtm(split: str, temperature: float) -> float:
    return mean_of_mixture(scored[split], distances[split], temperature)

  temperature = min(TEMPERATURES, key=functools.partial(cbtm, 'train'))
  path_N, of_rows = run.routed('validation', run.settings.rounds), rerouted_perplexity.sums(scored['validation'])
  routed = of_rows[np.arange(len(path_N)), path_N].sum() / scored['validation'].counts.sum()
  perplexities = {'run': routed, 'soup': mean_nats(run, soup, 'validation'), 'cbtm': cbtm('validation', temperature)}
  return {name: math.exp(nats) for name, nats in perplexities.items()} | {'temperature': temperature}


def mean_of_mixture(scored: token_losses.TokenLosses, distance_NP: np.ndarray, temperature: float) -> float:
  """Returns the nats of a target under the mixture, over the targets that count."""
  nats_NL = mixture_nats(np.stack(scored.nll), distance_NP, temperature)
  return float((nats_NL * scored.counts).sum(dtype=np.float64) / scored.counts.sum())


def indices_of(run: run_lib.Run, split: str) -> np.ndarray:
  """Returns the sequences of validation text, or for 'train' those of router data."""
  if split == 'validation':
    return np.arange(len(run.sequences(split)))
  return np.flatnonzero(features.router_data(run))


def mean_nats(run: run_lib.Run, params: Params, split: str) -> float:
  """Returns the nats of a target under one model, over the targets that count."""
  sequences, indices = run.sequences(split), indices_of(run, split)
  length = run.eval_len if split == 'validation' else run.settings.model.seq_len
  prefix, nats, targets = run.settings.routing.prefix_tokens, 0.0, 0.0
  for start in range(0, len(indices), BATCH):
    tokens = [x.tokens for x in sequences.read(indices[start : start + BATCH])]
    rows = packing.pad(tokens + [np.zeros(0, np.int32)] * (BATCH - len(tokens)), length)  # so that there is one program
    nats_B, targets_B = program(run.model, prefix)(params, *rows)
    nats, targets = nats + float(nats_B.sum()), targets + float(targets_B.sum())
  return nats / targets


@functools.cache
def program(model: Any, prefix_tokens: int) -> Any:
  return jax.jit(functools.partial(loss.row_losses, model, prefix_tokens))


COLUMNS = (
  Column('perplexity of the run', 'mixtures.run'),
  Column('EMA of versions', 'mixtures.ema'),
  Column('its decay in a phase', 'mixtures.decay', '.2g'),
  Column('soup of paths', 'mixtures.soup'),
  Column('c-BTM', 'mixtures.cbtm'),
  Column('its T', 'mixtures.temperature', '.2g'),
  Column('parameters', 'parameters_total', ',.0f'),
)
TABLE = common.Table('mixtures', 'Averages and mixtures of finished runs', rows, COLUMNS, pictures.dots)


def main() -> int:
  return common.score_finished(TABLE, 'mixtures', lambda one, workdirs: measure(runs.workdir(one, workdirs)))


if __name__ == '__main__':
  common.define_flags()
  command.run(main)
