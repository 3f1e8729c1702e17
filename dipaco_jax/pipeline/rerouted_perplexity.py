"""Routing more often while evaluating [2.4.3, 7.2.2], from every path's token losses.

Only the learned chooser could be used in serving: the oracle and history score each chunk under all paths, and
hindsight has seen what it predicts, so it is a bound.
"""

import hashlib
from typing import Any

import jax
import numpy as np

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import packing
from dipaco_jax.pipeline import features, run as run_lib, token_losses
from dipaco_jax.processes import processes
from dipaco_jax.routing import chunk_policies, chunk_router
from dipaco_jax.storage import module_store, publishing, seals, tensors
from dipaco_jax.training import evaluation


def score_router_data(run: run_lib.Run) -> token_losses.TokenLosses | None:
  """Returns token losses of router data on the first process, if the config has a use for them; see `score`."""
  is_needed = run.settings.evaluate.refit_router or _is_learned(run)
  return score(run, 'train') if is_needed and features.router_data(run).any() else None


def _is_learned(run: run_lib.Run) -> bool:
  s = run.settings.evaluate
  return bool(s.reroute_every and s.chunk_router_steps)


def figures(run: run_lib.Run, router_data: token_losses.TokenLosses | None) -> dict[str, Any]:
  """Returns `reroute`, {chooser: {W: perplexity}}, if the config asks for it; the first process does, once all scored.

  `router_data` is what `score_router_data` has returned.
  """
  if not run.settings.evaluate.reroute_every:
    return {}
  scored = score(run, 'validation')
  chosen = learned_choices(run, router_data) if _is_learned(run) else None
  return _figures(run, scored, chosen) if scored else {}


def _figures(run: run_lib.Run, scored: token_losses.TokenLosses, chosen: np.ndarray | None) -> dict[str, Any]:
  first = run.last_routes()

  def perplexity(nll_N: np.ndarray) -> float:
    return evaluation.perplexity(nll_N.astype(np.float64).sum() / scored.counts.sum())

  by: dict[str, Any] = {
    'oracle': chunk_policies.oracle,
    'history': chunk_policies.history,
    'hindsight': lambda nll, counts, W, _: chunk_policies.hindsight(nll, counts, W),
  }
  if chosen is not None:
    by['learned'] = lambda nll, counts, W, first: chunk_policies.by_chooser(nll, counts, W, first, chosen)
  widths = run.settings.evaluate.reroute_every
  return {
    'reroute': {name: {str(W): perplexity(choose(*scored, W, first)) for W in widths} for name, choose in by.items()}
  }


def score(run: run_lib.Run, split: str) -> token_losses.TokenLosses | None:
  """Returns token losses of all paths, each at its version, on validation documents or, for 'train', router data.

  All processes call it, once for each split; the first has them.
  """
  s, split_sequences = run.settings, run.sequences(split)
  indices = np.arange(len(split_sequences)) if split == 'validation' else np.flatnonzero(features.router_data(run))
  rows = token_losses.Rows(
    split_sequences, indices, run.eval_len if split == 'validation' else s.model.seq_len, run.eval_batch
  )
  versions = module_store.best_versions(run.workdir)

  def params_of_path(path):
    return module_store.load_path(run.workdir, run.layout, path, versions[path])

  folder = run.workdir / 'evaluation' / split
  return token_losses.write(run.programs, params_of_path, sources(run), rows, folder, run.disk)


def sums(scored: token_losses.TokenLosses) -> np.ndarray:
  """Returns the nats of each sequence under each path, over the targets that count: float64 [N, P]."""
  return np.stack([(nll * scored.counts).sum(axis=1, dtype=np.float64) for nll in scored.nll], axis=1)


def sources(run: run_lib.Run) -> list[str]:
  """Returns the digests of the modules of the paths' versions."""
  return token_losses.published(run.workdir, run.layout, module_store.best_versions(run.workdir))


def learned_choices(run: run_lib.Run, scored: token_losses.TokenLosses | None) -> np.ndarray | None:
  """Returns the path that the learned chooser prefers after each token of the validation documents, int32 [N, L].

  All processes call it; the first has them.
  """
  made_from = hashlib.sha256(repr((sources(run), run.settings.evaluate.chunk_router_steps)).encode()).hexdigest()
  file = run.workdir / 'evaluation' / f'chosen-{made_from[:12]}.npy'
  if scored and not seals.keep_if_whole(file):
    _learn(run, scored, file)
  processes.barrier('chosen')
  return tensors.read_array(file) if scored else None


def _learn(run: run_lib.Run, scored: token_losses.TokenLosses, file):
  """Fine-tunes the chooser from the base on router data [7.2.2], keeps it, and lets it choose."""
  s, data = run.settings, run.sequences('train')
  for older in file.parent.glob('chosen-*.npy'):  # choices of another chooser, which are about to be replaced
    older.unlink()
  indices, labels_NL = np.flatnonzero(features.router_data(run)), chunk_router.labels(scored.nll)

  def rows(sequences, chosen, length):
    return packing.pad([x.to_pack for x in sequences.read(chosen)], length)

  def batch(step):
    drawn = np.random.default_rng([s.seed, step]).integers(len(indices), size=s.train.batch_size)
    return *rows(data, indices[drawn], s.model.seq_len), labels_NL[drawn]

  start = chunk_router.init_params(run.base(), run.layout.grid.num_paths)
  params, _ = chunk_router.train(run.model, start, batch, s.evaluate.chunk_router_steps, s.inner)
  arrays = {name: np.asarray(x) for name, x in params.items()}
  if not all(np.isfinite(x).all() for x in arrays.values()):
    raise InputError('the chooser of paths diverged: set config.evaluate.chunk_router_steps=0, or fewer')
  kept = tensors.to_bytes(arrays)
  publishing.write_sealed(file.with_name('chooser.safetensors'), kept)
  choose = jax.jit(lambda tokens, segments: chunk_router.choose(run.model, params, tokens, segments))
  texts, blocks = run.sequences('validation'), []
  for begin in range(0, len(texts), run.eval_batch):
    chosen = np.arange(begin, min(begin + run.eval_batch, len(texts)))
    blocks.append(np.asarray(choose(*rows(texts, chosen, run.eval_len))))
  publishing.write_array(file, np.concatenate(blocks))
