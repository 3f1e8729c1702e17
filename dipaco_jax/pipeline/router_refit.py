"""A router for the trained paths, fitted to their losses on router data instead of clusters.

While paths train, k-means or a classifier of an earlier round says which text is whose. Afterwards every path scores
the router data, and a linear classifier of z minimizes the loss that text has under the path it is sent to
(`classifier.fit_to_losses`). First sequences of documents are a small part of router data, and all that a router sees
of a prompt: they weigh as much as all others together. A part of the documents is kept to choose the decay by, and
whether the fitted router is better there than the one that paths were trained by; if it is not, that one stays.

`evaluation/router.safetensors` is the router, and `evaluation/routes.npy` the paths of validation documents; from then
on evaluation, generation and servers route by it. This is not in the paper.
"""

import logging
from typing import Any

import numpy as np

from dipaco_jax.core.errors import Diverged
from dipaco_jax.data import holdouts
from dipaco_jax.pipeline import features, rerouted_perplexity, route_stage, run as run_lib, token_losses
from dipaco_jax.processes import display
from dipaco_jax.routing import classifier, own_router
from dipaco_jax.storage import publishing, tensors
from dipaco_jax.telemetry import metrics_log

TESTED_SHARE = 0.2  # of the router data's documents, see above
LEAST_SEQUENCES = 4  # of router data, for each path
LEAST_GAIN = 1e-6  # of the nats, so that rounding is none
FIRST_SHARE = 0.5  # of all weight, of the first sequences of documents


def refit(run: run_lib.Run, scored: token_losses.TokenLosses | None) -> dict[str, Any]:
  """Fits and saves the router and its choices; returns figures for the record. All processes call it together.

  `scored` are token losses of router data, on the first process.
  """
  about: dict[str, Any] = {}

  def keep():
    nll_NP = rerouted_perplexity.sums(scored) if scored else np.zeros((0, run.layout.grid.num_paths))
    with display.doing('fitting the router'):
      fitted, figures = fit(run, nll_NP)
    about.update(figures)
    publishing.write_sealed(run.workdir / run_lib.REFITTED, tensors.to_bytes(own_router.arrays(fitted)))
    paths_N = route_stage.scores(run, fitted, 'validation').argmax(axis=1).astype(np.int32)
    publishing.write_array(run.workdir / run_lib.REFITTED_ROUTES, paths_N)

  run.disk.only_first(keep, 'the router of the last version')
  return about


def fit(run: run_lib.Run, nll_NP: np.ndarray) -> tuple[own_router.AnyRouter, dict[str, Any]]:
  """Fits a router to the paths' losses on router data, nats a sequence; returns it, or the last router, and figures.

  With `routing.by_document`, it is fitted to the sums over documents and the features of their first sequences.
  """
  s = run.settings
  indices, nll_NP = features.sum_routed_together(features.routed_by(run)[features.router_data(run)], nll_NP)
  last = run.router(run.settings.rounds)
  if last is not None and len(indices) < LEAST_SEQUENCES * nll_NP.shape[1]:
    logging.warning('the router is not fitted again: %d sequences to fit it to are too few', len(indices))
    return last, _about(len(indices), None, None, True)
  if not np.isfinite(nll_NP).any():
    raise Diverged('training diverged: no path has a finite loss on router data')
  everything = run.sequences('train').columns()[0]
  is_first_N = np.zeros(len(everything), bool)
  is_first_N[np.unique(everything, return_index=True)[1]] = True
  contents, weight_N = run.sequences('train').contents()[indices], weights(is_first_N[indices])
  tested = holdouts.draw_documents(contents, s.seed, TESTED_SHARE, 'tested')  # whole documents
  if tested.all() or not tested.any():  # they are few: parts of them
    tested = np.arange(len(contents)) % round(1 / TESTED_SHARE) == 0
  z_ND = np.concatenate(list(features.compute(run, 'train', indices)))
  fitted, after = classifier.fit_to_losses(z_ND, nll_NP, weight_N, tested)
  if last is None:
    routed_N = run.routed('train', s.rounds)[indices, 0]
  else:  # not the routes that text was sharded by, which routing.capacity may have changed
    routed_N = route_stage.scores(run, last, 'train', indices).argmax(axis=1)
  routed_nll_N = classifier.finite_losses(nll_NP)[np.arange(len(nll_NP)), routed_N]  # as `after` counts them
  before = float(np.average(routed_nll_N[tested], weights=weight_N[tested]))
  stays = last is not None and after > before * (1 - LEAST_GAIN)
  return (last if last is not None and stays else fitted), _about(len(indices), before, after, stays)


def _about(sequences: int, before: float | None, after: float | None, stays: bool) -> dict[str, Any]:
  about = {'router_sequences': sequences, 'nats_before': before, 'nats': after, 'kept_the_last': stays}
  return {'router_refit': metrics_log.plain(about)}


def weights(is_first_N: np.ndarray) -> np.ndarray:
  """Returns a weight for each sequence, of mean 1, by whether it is the first of its document."""
  share = is_first_N.mean()
  if share in (0, 1):
    return np.ones(len(is_first_N))
  return np.where(is_first_N, FIRST_SHARE / share, (1 - FIRST_SHARE) / (1 - share))
