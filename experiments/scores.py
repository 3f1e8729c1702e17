"""What a router can gain, and labels without scoring all paths: tried on the scores that a run's first round keeps."""

import dataclasses
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import additive_labels
import coordinate_labels
import numpy as np

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.config import settings
from dipaco_jax.data import holdouts, sequences
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import features
from dipaco_jax.routing import path_labels
from dipaco_jax.storage import tensors

SWEEPS = 8
PENALTIES = (1.0, 0.1, 0.03, 0.01, 0.001)  # scikit-learn's C: smaller is stronger
HIDDEN = 64
PREFIXES = (8, 16, 64, 128)  # tokens, beside those that routers see


def read(workdir: pathlib.Path, s: settings.Settings) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Scores [N, P] of all router data, where the first router sent it [N], its documents [N]; which sequences it is."""
  num_paths = s.num_paths
  scores_NP = np.stack([np.load(workdir / 'routing' / '1-scores' / f'{p}.npy') for p in range(num_paths)], axis=1)
  found = sequences.Sequences(workdir / 'sequences', 'train')
  kept = features.draw_router_data(found, s)
  return scores_NP, np.load(workdir / 'routing' / '0' / 'train.npy')[kept, 0], found.columns()[0][kept], kept


def ascent(scores_NP: np.ndarray, start_N: np.ndarray, s: settings.Settings, sweeps: int) -> path_labels.Labels:
  """Labels by coordinate ascent from the path that the first router sent a sequence to."""
  shape = Grid(s.grid).shape
  return coordinate_labels.coordinate_ascent(lambda chosen, paths: scores_NP[chosen, paths], start_N, shape, sweeps)


def compare(workdir: pathlib.Path, s: settings.Settings) -> dict[str, Any]:
  """Of each way: agreement with exact labels, scores taken as a share of all, and regret in nats a sequence.

  The additive fit is given the cross of the path that the first router sent a sequence to, the paths that differ from
  it in one coordinate; `additive_more` as many again, drawn at random.
  """
  shape = Grid(s.grid).shape
  scores_NP, start_N, _, _ = read(workdir, s)

  def score(chosen, paths):
    return scores_NP[chosen, paths]

  cross_NM = additive_labels.cross(start_N, shape)
  random_NM = np.random.default_rng(s.seed).integers(scores_NP.shape[1], size=cross_NM.shape)
  found = {
    'one_sweep': ascent(scores_NP, start_N, s, 1),
    'ascent': ascent(scores_NP, start_N, s, SWEEPS),
    'additive': additive_labels.additive(score, cross_NM, shape),
    'additive_more': additive_labels.additive(score, np.concatenate([cross_NM, random_NM], axis=1), shape),
    'first': path_labels.Labels(start_N, 0, np.zeros(math.prod(shape), np.int64)),
  }
  exact_N = path_labels.exact(scores_NP).paths
  return {'router_sequences': len(start_N)} | {
    name: {
      'agreement': additive_labels.agreement(of.paths, exact_N),
      'scored': of.scored / scores_NP.size,
      'regret': additive_labels.regret(scores_NP, of.paths),
    }
    for name, of in found.items()
  }


def routers(workdir: pathlib.Path, s: settings.Settings) -> dict[str, dict[str, float]]:
  """Of each router, on a part of the router data that no fit has seen: how often it names the best path, and its value.

  The value is the mean log-likelihood that its paths give a sequence less that of the sequence's best path, nats: 0 is
  the best there is. Penalties of `logistic` and `mlp` are chosen on a third part. Those named after what they see are
  logistic too: `layer_K` the output of the first K blocks, `prefix_L` the first L tokens.
  """
  from sklearn import linear_model, neural_network  # comes with .[test] only

  scores_NP, first_N, documents_N, kept = read(workdir, s)
  z_ND = np.load(workdir / 'features' / 'train.npy')[kept].astype(np.float64)
  held_N = holdouts.draw_documents(documents_N, s.seed, 0.2, 'tested')
  chosen_by_N = holdouts.draw_documents(documents_N, s.seed, 0.2, 'chosen by') & ~held_N
  fitted_N = ~held_N & ~chosen_by_N
  best_N, regret_NP = scores_NP.argmax(axis=1), scores_NP - scores_NP.max(axis=1, keepdims=True)

  def judge(paths_N, of_N=held_N) -> dict[str, float]:
    values_N = np.take_along_axis(regret_NP[of_N], paths_N[:, None], axis=1)
    return {'accuracy': float(np.mean(paths_N == best_N[of_N])), 'value': float(values_N.mean())}

  def best_of(fits, z_ND=z_ND) -> dict[str, float]:
    x_ND = (z_ND - z_ND[fitted_N].mean(0)) / np.maximum(z_ND[fitted_N].std(0), 1e-6)
    fits = [fit.fit(x_ND[fitted_N], best_N[fitted_N]) for fit in fits]
    best = max(fits, key=lambda fit: judge(fit.predict(x_ND[chosen_by_N]), chosen_by_N)['value'])
    return judge(best.predict(x_ND[held_N]))

  def logistic(z_ND=z_ND) -> dict[str, float]:
    return best_of([linear_model.LogisticRegression(C=C, max_iter=3000) for C in PENALTIES], z_ND)

  mlps = [neural_network.MLPClassifier((HIDDEN,), alpha=a, max_iter=500, random_state=0) for a in (1e-2, 1.0, 10.0)]
  return {
    'first': judge(first_N[held_N]),
    'single': judge(np.full(held_N.sum(), regret_NP[~held_N].mean(0).argmax())),
    'random': {'accuracy': 1 / scores_NP.shape[1], 'value': float(regret_NP[held_N].mean())},
    'logistic': logistic(),
    'mlp': best_of(mlps),
    **{name: logistic(z) for name, z in other_features(workdir, s, kept)},
    'ascent': judge(ascent(scores_NP, first_N, s, SWEEPS).paths[held_N]),
  }


def other_features(workdir: pathlib.Path, s: settings.Settings, kept: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
  """Features [N, D] that a router might see instead: means over the prefix of lower layers, and over other prefixes."""
  base = dict(tensors.read_arrays(workdir / 'base' / 'params.safetensors'))
  found = [
    sequence.tokens for sequence in sequences.Sequences(workdir / 'sequences', 'train').read(np.flatnonzero(kept))
  ]
  usual = s.routing.prefix_tokens
  for name, blocks, prefix in (
    *((f'layer_{n}', n, usual) for n in range(s.model.num_layers)),
    *((f'prefix_{n}', s.model.num_layers, n) for n in PREFIXES if n != usual and n <= s.model.seq_len),
  ):
    model = transformer.make_model(dataclasses.replace(s.model, num_layers=blocks), s.tokenizer.vocab_size)
    tokens_NL, seen_NL = np.zeros((2, len(found), prefix), np.int32)
    for i, tokens in enumerate(found):
      tokens_NL[i, : len(tokens)], seen_NL[i, : len(tokens)] = tokens[:prefix], 1
    yield name, np.asarray(transformer.features_of_seen(model, base, tokens_NL, seen_NL), np.float64)
