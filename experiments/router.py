"""Why a discriminative router gains what it gains: what its labels are worth, and how much of it can be learned.

    python experiments/evidence.py --workdir=runs/experiments/tiny/discriminative-...

of a run with one round, by its artefacts alone. The value of a router is the mean log-likelihood that its paths give
router documents that no fit has seen, less that of each document's best path, in nats a sequence: 0 is the best there
is. Routers: the first one, none (a path at random, the best single path), and classifiers of the prefix's feature.
"""

import json
import pathlib

import numpy as np
import scores
from absl import flags
from sklearn import linear_model

from dipaco_jax import command, history, shards

PENALTIES = (1e4, 1.0, 0.1, 0.03, 0.01, 0.001)  # scikit-learn's C: smaller is stronger


def read(workdir: pathlib.Path):
  """Scores [N, P], features [N, D], paths of the first router [N] of all router data, and which is held out [N]."""
  s = history.read_settings(workdir)
  scores_NP, first_N, documents_N, kept = scores.read(workdir, s)
  z_ND = np.load(workdir / 'features' / 'train.npy')[kept].astype(np.float64)
  return scores_NP, z_ND, first_N, shards.drawn(documents_N, s.seed, 0.2, 'tested')


def compare(scores_NP, z_ND, first_N, held_N) -> dict[str, tuple[float, float]]:
  """{router: (accuracy, value)} on the held-out part."""
  best_N, regret_NP = scores_NP.argmax(axis=1), scores_NP - scores_NP.max(axis=1, keepdims=True)
  x_ND = (z_ND - z_ND[~held_N].mean(0)) / z_ND[~held_N].std(0)

  def judge(paths_N):
    values_N = np.take_along_axis(regret_NP[held_N], paths_N[:, None], axis=1)
    return float(np.mean(paths_N == best_N[held_N])), float(values_N.mean())

  single = np.full(held_N.sum(), regret_NP[~held_N].mean(0).argmax())
  found = {'the first router': judge(first_N[held_N]), 'the path that is best on the rest': judge(single)}
  found['a path at random'] = 1 / scores_NP.shape[1], float(regret_NP[held_N].mean())
  for C in PENALTIES:
    fitted = linear_model.LogisticRegression(C=C, max_iter=3000).fit(x_ND[~held_N], best_N[~held_N])
    found[f'logistic, C = {C:g}'] = judge(fitted.predict(x_ND[held_N]))
  return found


def main():
  workdir = pathlib.Path(flags.FLAGS.workdir)
  if not (workdir / 'routing' / '1-scores').exists():
    raise ValueError(f'--workdir={workdir}: there are no scores (routing/1-scores); name a discriminative run')
  scores_NP, z_ND, first_N, held_N = read(workdir)
  print(f'{len(held_N)} router sequences, {held_N.sum()} of them held out; features of {z_ND.shape[1]} numbers\n')
  print('| router | accuracy | value, nats a sequence |\n| --- | ---: | ---: |')
  for name, (accuracy, value) in compare(scores_NP, z_ND, first_N, held_N).items():
    print(f'| {name} | {accuracy:.3f} | {value:.2f} |')
  own = json.loads((workdir / 'routing' / '1' / 'meta.json').read_text())
  print(f"| the run's own, before and after calibration | {own['accuracy']:.3f}, {own['calibrated_accuracy']:.3f} | |")


if __name__ == '__main__':
  flags.DEFINE_string('workdir', '', 'A discriminative run.')
  command.run(main)
