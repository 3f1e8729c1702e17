"""Discriminative re-sharding: a round of approximate EM over router data, which no training has seen [2.4.2, 7.2.1].

Every path scores each router sequence, S[i, p] = sum_j log p_p(token j | before) over the targets after the prefix; the
best path is its label. A classifier learns labels from the prefix's feature z, and a bias makes the frequencies that it
predicts those of the labels. Then all text is routed by it, and sharded anew. Each part is kept as soon as it is there,
so that a run that was stopped goes on from it: scores in `routing/<n>-scores/`, a file per path; `routing/<n>/`;
`shards/<n>/`.
"""

import functools
import json
from typing import Any

import jax
import numpy as np

from dipaco_jax import checkpoint, classifier, evaluate, labels, router, routing, shards
from dipaco_jax import progress as progress_lib
from dipaco_jax import run as run_lib

SWEEPS = 8  # over the axes, of coordinate ascent, unless it settles before
TESTED = 0.2  # of the router data, that the classifier's accuracy is reported on


def reroute(run: run_lib.Run, number: int, version: int):
  """Routes and shards of a round, by what the paths know at a version of their modules."""
  if not (run.workdir / 'routing' / str(number)).exists():
    indices = np.flatnonzero(routing.router_data(run))
    if len(indices) < run.layout.grid.num_paths:
      raise ValueError(
        f'config.routing.router_fraction={run.settings.routing.router_fraction} keeps {len(indices)} sequences, fewer '
        f'than the {run.layout.grid.num_paths} paths: raise it, or give more text'
      )
    found = find_labels(run, number, version, indices)
    routing.publish_router(run, number, functools.partial(_fit, run, number, indices, *found))
  routing.write_shards(run, number)


def figures(run: run_lib.Run, number: int) -> dict[str, Any]:
  """What a round found, for the report."""
  before, after = (run.routed('train', n)[:, 0] for n in (number - 1, number))
  found = json.loads((run.workdir / 'routing' / str(number) / 'meta.json').read_text())
  return found | {'moved_fraction': float(np.mean(before != after))} | routing.sharded(run, number)


def find_labels(run: run_lib.Run, number: int, version: int, indices: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
  """The best path of every router sequence, [N], and how many (sequence, path) pairs were scored for it."""
  score = functools.partial(log_likelihoods, run, version, indices)
  if run.settings.routing.labels == 'coordinate':
    start_N = run.routed('train', number - 1)[indices, 0]
    found = labels.coordinate_ascent(score, start_N, run.layout.grid.shape, SWEEPS)
    return found.paths, {'scored_pairs': int(found.scored)}
  scores_NP = all_scores(run, number, indices, score)
  return labels.exact(scores_NP), {'scored_pairs': scores_NP.size}


def log_likelihoods(run: run_lib.Run, version: int, indices: np.ndarray, documents: np.ndarray, paths: np.ndarray):
  """S of the pairs (documents [M], paths [M]), nats [M]; `documents` count in `indices`. By all processes."""
  made, found = run.programs, run.sequences('train')
  asked = [np.flatnonzero(paths == path) for path in range(made.layout.grid.num_paths)]

  def load(path, start, stop):
    chosen = indices[documents[asked[path][start:stop]]]
    return shards.pad([x.tokens for x in found.read(chosen)], run.settings.model.seq_len)

  def params_of_turn(turn):
    return evaluate.in_flight(made, turn, lambda path: checkpoint.load_path(run.workdir, run.layout, path, version))

  rows = evaluate.Rows([len(pairs) for pairs in asked], load, run.eval_batch, run.settings.model.seq_len)
  result = np.zeros(len(paths))
  for path, nll in enumerate(evaluate.losses(made, params_of_turn, rows).nll):
    result[asked[path]] = -nll
  return result


def all_scores(run: run_lib.Run, number: int, indices: np.ndarray, score) -> np.ndarray:
  """S [N, P]; each turn of paths is scored once and kept, whatever stops the run."""
  placement, num_paths = run.programs.placement, run.layout.grid.num_paths
  folder, everything = run.workdir / 'routing' / f'{number}-scores', np.arange(len(indices))
  missing = [turn for turn in placement.turns() if not all(_file(folder, p).exists() for p in placement.paths(turn))]
  checkpoint.barrier(f'what is missing in {folder.name}')
  progress = progress_lib.Progress(f'score router data {number}', len(missing), 'turns')
  for i, turn in enumerate(missing):
    paths = placement.paths(turn)
    found = score(np.tile(everything, len(paths)), np.repeat(paths, len(indices))).reshape(len(paths), -1)
    for path, of_path in zip(paths, found, strict=True):
      if jax.process_index() == 0:
        checkpoint.write_array(_file(folder, path), of_path)
    progress.update(i + 1)
  progress.close()
  checkpoint.barrier(f'{folder.name} are there')
  return np.stack([np.load(_file(folder, path)) for path in range(num_paths)], axis=1)


def _file(folder, path: int):
  return folder / f'{path}.npy'


def _fit(
  run: run_lib.Run, number: int, indices: np.ndarray, labels_N: np.ndarray, cost: dict[str, Any]
) -> tuple[router.Router, dict[str, Any]]:
  """The classifier with its bias, and what it is like."""
  s, num_paths = run.settings, run.layout.grid.num_paths
  z_ND = jax.numpy.concatenate(list(routing.features(run, 'train', indices)))
  key = jax.random.fold_in(jax.random.key(s.seed), number)
  documents, _ = run.sequences('train').columns()
  tested = shards.drawn(documents[indices], s.seed, TESTED, 'tested')  # whole documents, the rest is learned from
  fitted = classifier.fit_classifier(key, z_ND[~tested], labels_N[~tested], num_paths, hidden=s.routing.hidden)
  frequency_P = np.bincount(labels_N, minlength=num_paths) / len(labels_N)
  meta = cost | {
    'router_sequences': len(indices),
    'accuracy': classifier.accuracy(fitted, z_ND[tested], labels_N[tested]),
    'majority': float(np.bincount(labels_N[tested], minlength=num_paths).max() / max(1, tested.sum())),
    'label_frequency_by_path': frequency_P.tolist(),
  }
  if s.routing.calibrate:
    target_P = (frequency_P * len(labels_N) + 1) / (len(labels_N) + num_paths)  # no path is left without text
    fitted = classifier.calibrate(fitted, z_ND, jax.numpy.asarray(target_P))
    meta['calibrated_accuracy'] = classifier.accuracy(fitted, z_ND[tested], labels_N[tested])
  return fitted, meta
