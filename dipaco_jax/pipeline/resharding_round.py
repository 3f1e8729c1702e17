"""Discriminative re-sharding: a round of approximate EM over router data, on which no path has trained [2.4.2, 7.2.1].

Every path scores each router sequence, S[i, p] = sum_j log p_p(token j | before) over the targets after the prefix; the
best path is its label. A classifier learns labels from the prefix's feature z, and a bias makes the frequencies that it
predicts those of the labels. Then all text is routed by it and sharded again. Each part is saved as soon as it is
ready, so that a stopped run resumes from it: scores in `routing/<n>-scores/`, a file per path; `routing/<n>/`;
`shards/<n>/`.
"""

import functools
import logging
import math
from typing import Any

import jax
import numpy as np

from dipaco_jax.core.errors import Diverged
from dipaco_jax.data import holdouts, packing
from dipaco_jax.pipeline import features, route_stage, run as run_lib
from dipaco_jax.processes import display, processes, time_use
from dipaco_jax.routing import balanced_assignment, classifier, own_router, path_labels
from dipaco_jax.storage import module_store, publishing, seals, tensors
from dipaco_jax.training import evaluation

TESTED_SHARE = 0.2  # of the router data, that the classifier's accuracy is reported on
GIVEN_SHARE = 0.1  # of the mean shard, to a path that no text was routed to
ATTEMPTS = 3  # at giving every path text


@time_use.doing(time_use.STAGES)
def reshard(run: run_lib.Run, number: int, version: int):
  """Makes the routes and shards of a round with the paths at a version of their modules."""
  if not (run.workdir / 'routing' / str(number)).exists():
    indices = np.flatnonzero(features.router_data(run))
    score = functools.partial(log_likelihoods, run, version, indices)
    scores_NP = all_scores(run, number, indices, score)
    indices, scores_NP = features.sum_routed_together(features.routed_by(run)[indices], scores_NP)
    labels = path_labels.exact(scores_NP)
    check_scores(number, labels, 'documents' if run.settings.routing.by_document else 'sequences')
    fit = functools.partial(_fit, run, number, indices, labels)
    route_stage.publish_router(run, number, fit, functools.partial(fill, run, number))
  route_stage.write_shards(run, number)


def figures(run: run_lib.Run, number: int) -> dict[str, Any]:
  """Returns the figures of a round for the report."""
  before, after = (run.routed('train', n)[:, 0] for n in (number - 1, number))
  meta = seals.read_json(run.workdir / 'routing' / str(number) / 'meta.json')
  return meta | {'moved_fraction': float(np.mean(before != after))} | route_stage.summarize_shards(run, number)


def check_scores(number: int, labels: path_labels.Labels, kind: str):
  """Raises Diverged if no text has a label; otherwise warns of the paths with scores that are not finite."""
  if (labels.paths == path_labels.NONE).all():
    raise Diverged(f'training diverged before round {number} of re-sharding: no path has a finite score on router data')
  if labels.failed.any() and processes.is_first():
    failed = ', '.join(f'{path} on {labels.failed[path]}' for path in np.flatnonzero(labels.failed))
    message = 'round %d of re-sharding: scores that are not finite give no label: path %s of %d router %s'
    logging.warning(message, number, failed, len(labels.paths), kind)


def log_likelihoods(run: run_lib.Run, version: int, indices: np.ndarray, documents: np.ndarray, paths: np.ndarray):
  """Returns S of the pairs (indices[documents [M]], paths [M]), nats [M]; all processes call it together."""
  programs, train = run.programs, run.sequences('train')
  asked = [np.flatnonzero(paths == path) for path in range(programs.layout.grid.num_paths)]

  def load(path, start, stop):
    chosen = indices[documents[asked[path][start:stop]]]
    return packing.pad([x.to_pack for x in train.read(chosen)], run.settings.model.seq_len)

  def params_of_turn(turn):
    return evaluation.in_flight(
      programs, turn, lambda path: module_store.load_path(run.workdir, run.layout, path, version)
    )

  rows = evaluation.Rows([len(pairs) for pairs in asked], load, run.eval_batch, run.settings.model.seq_len)
  result = np.zeros(len(paths))
  for path, nll in enumerate(evaluation.losses(programs, params_of_turn, rows).nll):
    result[asked[path]] = -nll
  return result


def all_scores(run: run_lib.Run, number: int, indices: np.ndarray, score) -> np.ndarray:
  """Returns S [N, P]; the scores of each turn of paths are kept, so that a stopped run resumes after them."""
  placement, num_paths = run.programs.placement, run.layout.grid.num_paths
  folder, everything = run.workdir / 'routing' / f'{number}-scores', np.arange(len(indices))
  files = [folder / f'{path}.npy' for path in range(num_paths)]
  are_whole = [seals.keep_if_whole(file) for file in files]
  missing = [turn for turn in placement.turns() if not all(are_whole[path] for path in placement.paths(turn))]
  processes.barrier(f'what is missing in {folder.name}')
  progress = display.Progress(f'score router data {number}', len(missing), 'turns')
  for i, turn in enumerate(missing):
    paths = placement.paths(turn)
    scores = score(np.tile(everything, len(paths)), np.repeat(paths, len(indices))).reshape(len(paths), -1)
    for path, of_path in zip(paths, scores, strict=True):
      if processes.is_first():
        publishing.write_array(files[path], of_path)
    progress.update(i + 1)
  progress.close()
  run.disk.follow(f'{folder.name} are there')
  return np.stack([tensors.read_array(file) for file in files], axis=1)


def fill(run: run_lib.Run, number: int, fitted: own_router.AnyRouter, paths_NT: np.ndarray) -> dict[str, Any]:
  """Gives each path without training text the sequences that the router prefers for it.

  Changes the training sequences' `paths_NT` in place; returns how many each path was given, for the record.
  """
  given_P, routed_by_N = np.zeros(run.layout.grid.num_paths, np.int64), features.routed_by(run)
  for _ in range(ATTEMPTS):  # because moved sequences may change what is held back
    dealt = route_stage.deal(run, paths_NT.copy(), len(given_P))
    trains_N = (dealt.assignment[:, 0] >= 0) & ~dealt.held & (routed_by_N == np.arange(len(routed_by_N)))
    count_P = np.bincount(paths_NT[trains_N].reshape(-1), minlength=len(given_P))
    if count_P.all():
      break
    for path, mine in _suitable(run, number, fitted, paths_NT, np.flatnonzero(trains_N), count_P):
      moves_N = np.isin(routed_by_N, mine)
      paths_NT[moves_N, -1] = path  # instead of its worst
      given_P[path] += moves_N.sum()
  if given_P.any():
    each = ', '.join(f'{path} gets {given_P[path]}' for path in np.flatnonzero(given_P))
    message = (
      'round %d of re-sharding: paths to which no training text was routed get sequences that suit them: path %s'
    )
    logging.warning(message, number, each)
  return {'given_by_path': given_P.tolist()}


def _suitable(run: run_lib.Run, number: int, fitted: own_router.AnyRouter, paths_NT, indices, count_P):
  """Returns (path, indices of sequences) for paths without text, drawn from `indices`: GIVEN_SHARE of a mean shard."""
  drawn = np.random.default_rng([run.settings.seed, number]).permutation(indices)[: run.settings.routing.sample]
  drawn, empty = np.sort(drawn), np.flatnonzero(count_P == 0)
  scores_NP = route_stage.scores(run, fitted, 'train', drawn)
  quota = max(1, math.floor(GIVEN_SHARE * paths_NT.shape[1] * len(drawn) / len(count_P)))
  lack_NE = scores_NP.max(axis=1, keepdims=True) - scores_NP[:, empty]
  chosen = balanced_assignment.fill_empty_paths(lack_NE, paths_NT[drawn, -1], count_P, quota)
  return [(path, drawn[mine]) for path, mine in zip(empty, chosen, strict=True)]


def _fit(run: run_lib.Run, number: int, indices: np.ndarray, labels: path_labels.Labels) -> route_stage.Fitted:
  """Fits the classifier and its bias to the labels; returns it and figures of its accuracy."""
  s, num_paths = run.settings, run.layout.grid.num_paths
  has_label = labels.paths != path_labels.NONE
  of_all = len(indices)
  labels_N = labels.paths[has_label]
  indices = indices[has_label]
  z_ND = jax.numpy.concatenate(list(features.compute(run, 'train', indices)))
  key = jax.random.fold_in(jax.random.key(s.seed), number)
  contents = run.sequences('train').contents()
  tested = holdouts.draw_documents(contents[indices], s.seed, TESTED_SHARE, 'tested')  # whole documents
  tested &= not tested.all()  # unless nothing would be left to learn from
  fitted = classifier.fit_classifier(key, z_ND[~tested], labels_N[~tested], num_paths, hidden=s.routing.hidden)

  def accuracy() -> float | None:
    return classifier.accuracy(fitted, z_ND[tested], labels_N[tested]) if tested.any() else None

  frequency_P = np.bincount(labels_N, minlength=num_paths) / len(labels_N)
  meta = {'scored_pairs': labels.scored, 'not_finite_by_path': labels.failed.tolist(), 'router_sequences': of_all}
  meta['accuracy'] = accuracy()
  meta['majority'] = float(np.bincount(labels_N[tested], minlength=num_paths).max() / max(1, tested.sum()))
  meta['label_frequency_by_path'] = frequency_P.tolist()
  if s.routing.calibrate:
    target_P = (frequency_P * len(labels_N) + 1) / (len(labels_N) + num_paths)  # no path is left without text
    fitted = classifier.calibrate(fitted, z_ND, target_P)
    meta['calibrated_accuracy'] = accuracy()
  return fitted, meta
