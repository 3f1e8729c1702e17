"""A workdir of published paths: models of several owners, each in a folder of its own, and a router among them.

Each path is a folder as `export` writes it. The base is one too: its features are what the router sees. A linear router
is fitted to the losses of public text under each path (`classifier.fit_to_losses`) [2.4.2], and measured on public text
that was held back. Commands that use a trained run, such as `generate`, `serve` and `route`, use the workdir.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core import bootstrap, json_text
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import holdouts
from dipaco_jax.huggingface import model_folder, pretrained
from dipaco_jax.pipeline import (
  features,
  inputs,
  preflight,
  rerouted_perplexity,
  route_stage,
  router_refit,
  run as run_lib,
  stages,
  token_losses,
)
from dipaco_jax.processes import display
from dipaco_jax.routing import classifier, own_router
from dipaco_jax.storage import lock, module_store, publishing, remote_files, seals, tensors
from dipaco_jax.training import evaluation, module_publishing

AXIS = 'path'
VERSION = 1  # of the modules
RESULT = 'evaluation/assembled.json'
MOST_LEN = 1024  # tokens of a sequence that is scored
BATCH = 16  # of them at one time


def make_settings(folders: Mapping[str, str], base: str, data: Sequence[str]) -> settings_lib.Settings:
  """Returns the settings of a workdir of published paths. Raises InputError if one does not fit the base.

  Args:
    folders: of the paths, by name.
    base: the folder of their base.
    data: globs of public text.
  """
  if len(folders) < 2:
    raise InputError('name two paths or more, each as --path=court=FOLDER')
  values = settings_lib.Settings().to_dict()
  sections: dict[str, dict[str, Any]] = {
    'data': {'source': 'files', 'train': tuple(data)},
    'pretrain': {'init': base, 'steps': 0, 'batch_size': BATCH},
    'train': {'phases': VERSION, 'early_stopping': False, 'batch_size': BATCH},
    'evaluate': {'samples': 0},
    'metrics': {'sinks': ()},
  }
  values |= {section: values[section] | fields for section, fields in sections.items()}
  values |= {'grid': {AXIS: tuple(folders)}, 'levels': (('all', '.*', (AXIS,)),)}
  with_base(values)
  s = settings_lib.from_dict(values)
  named = {'--base': base} | {f'--path={name}': folder for name, folder in folders.items()}
  for option, folder in named.items():
    try:
      model_folder.check_config(dataclasses.replace(s, pretrain=dataclasses.replace(s.pretrain, init=folder)))
    except InputError as e:
      raise InputError(f'{option}={str(e).removeprefix("config.pretrain.init=")}') from e
  return s


def with_base(values: dict[str, Any]):
  """Fills in the model and the tokenizer of the base, in place. Raises InputError."""
  folder = values['pretrain']['init']
  try:
    pretrained.fill(values, ())
    config = json_text.parse(remote_files.read(f'{folder}/config.json'))
  except InputError as e:
    raise InputError(f'--base={str(e).removeprefix("config.pretrain.init=")}') from e
  values['model']['seq_len'] = min(MOST_LEN, config.get('max_position_embeddings') or MOST_LEN)


def assemble(
  workdir: pathlib.Path, s: settings_lib.Settings, folders: Mapping[str, str], command: str
) -> dict[str, Any]:  # fmt: skip
  """Makes what is missing of a workdir of published paths; returns perplexities on public text. Raises InputError."""
  preflight.check_text(workdir, s)
  with preflight.kept(workdir), lock.hold(workdir):
    preflight.settle_config(workdir, s, command)
    inputs.check_inputs(workdir, s)
    run = run_lib.unattended(workdir, s)
    stages.run_all(run, 'pretrain')
    sha256 = publish_modules(run, list(folders.values()))
    file = workdir / RESULT
    if not seals.keep_if_whole(file) or seals.read_json(file)['sha256'] != sha256:
      publishing.write_json(file, fit_router(run, list(folders.values()), sha256) | {'sha256': sha256})
    return seals.read_json(file)


def publish_modules(run: run_lib.Run, folders: Sequence[str]) -> list[str]:
  """Writes the parameters of each path as a module; returns digests of the files that they were read from."""
  [level], digests = run.layout.levels, list[str]()

  def modules():
    for path, folder in enumerate(folders):
      params, about = model_folder.load_params(folder, run.model)
      digests.append(' '.join(about['sha256'].values()))
      yield level, (path,), params

  with display.doing('copying the paths'):
    module_publishing.publish_module_files(run.workdir, VERSION, modules())
  (run.workdir / 'paths').mkdir(exist_ok=True)
  best = {'version': [VERSION] * len(folders), 'holdout_loss': [None] * len(folders)}
  publishing.write_json(run.workdir / 'paths' / 'best.json', best)
  return digests


def fit_router(run: run_lib.Run, folders: Sequence[str], sha256: Sequence[str]) -> dict[str, Any]:
  """Fits the router to losses of public text and saves it; returns figures on public text that was held back."""
  count, drawn = len(run.sequences('train')), run.settings.routing.sample
  indices = np.sort(np.random.default_rng(run.settings.seed).permutation(count)[:drawn])
  nll_NP, _ = score(run, 'train', indices, sha256)
  z_ND = np.concatenate(list(features.compute(run, 'train', indices)))
  contents = run.sequences('train').contents()[indices]
  tested_N = holdouts.draw_documents(contents, run.settings.seed, router_refit.TESTED_SHARE, 'tested')
  with display.doing('fitting the router'):
    fitted, _ = classifier.fit_to_losses(z_ND, nll_NP, np.ones(len(indices)), tested_N)
  with publishing.publish_directory(run.workdir / 'routing' / '0') as aside:
    (aside / 'router.safetensors').write_bytes(tensors.to_bytes(own_router.arrays(fitted)))
  return {'sequences': len(indices), 'folders': list(folders)} | measure(run, fitted, sha256)


def score(run: run_lib.Run, split: str, indices: np.ndarray, sha256: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
  """Returns the nats of sequences under each path, [N, P], and the number of targets that count, [N]."""
  length = run.settings.model.seq_len if split == 'train' else run.eval_len
  rows = token_losses.Rows(run.sequences(split), indices, length, run.eval_batch)
  params = functools.partial(_load, run)
  scored = token_losses.write(run.programs, params, sha256, rows, run.workdir / 'evaluation' / split)
  assert scored is not None
  return rerouted_perplexity.sums(scored), np.asarray(scored.counts).sum(axis=1)


def _load(run: run_lib.Run, path: int) -> dict[str, np.ndarray]:
  return module_store.load_path(run.workdir, run.layout, path, VERSION)


def measure(run: run_lib.Run, fitted: own_router.AnyRouter, sha256: Sequence[str]) -> dict[str, Any]:
  """Returns perplexities of held-back public text: routed, and under each path; the ratio to the best of these."""
  validation = run.sequences('validation')
  nll_NP, count_N = score(run, 'validation', np.arange(len(validation)), sha256)
  routed_N = route_stage.scores(run, fitted, 'validation').argmax(axis=1)
  nats_N, contents_N = nll_NP[np.arange(len(nll_NP)), routed_N], validation.contents()
  best = int(nll_NP.sum(axis=0).argmin())
  difference_N = nats_N - nll_NP[:, best]
  return {
    'documents': len(np.unique(contents_N[count_N > 0])),
    'perplexity': evaluation.perplexity(nats_N.sum() / count_N.sum()),
    'perplexity_by_path': [evaluation.perplexity(x / count_N.sum()) for x in nll_NP.sum(axis=0)],
    'sequences_by_path': np.bincount(routed_N, minlength=nll_NP.shape[1]).tolist(),
    'best_path': best,
    'ratio_to_best': evaluation.perplexity(difference_N.sum() / count_N.sum()),
    'ratio_to_best_interval': bootstrap.interval(difference_N, count_N, contents_N=contents_N),
  }
