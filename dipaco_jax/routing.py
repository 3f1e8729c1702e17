"""Every sequence to its path, and every path's sequences to its shard [2.4]: the stage `route`."""

import functools
import json
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dipaco_jax import balance, checkpoint, classifier, metrics, model, router, shards
from dipaco_jax import progress as progress_lib
from dipaco_jax import run as run_lib

FEATURE_ROWS = 1024  # sequences whose features are computed at one time
MAX_FEATURE_BYTES = 2**30


def route(run: run_lib.Run) -> dict[str, Any]:
  """Every sequence to its path, every path's sequences to its shard [2.4]."""
  run_lib.only_first_process(lambda: _route(run), 'routed')
  return sharded(run, 0)


def sharded(run: run_lib.Run, number: int) -> dict[str, Any]:
  """What a round's shards and routes are like."""
  meta = run.shards_meta(number)
  counts = np.bincount(run.routed('validation', number), minlength=run.layout.grid.num_paths).tolist()
  nmi = metrics.normalized_mutual_information(np.array(meta['sequences_by_path_and_domain']))
  return meta | {'validation_sequences': counts, 'domain_nmi': nmi}


def _route(run: run_lib.Run):
  routing = run.settings.routing
  method = routing.first if routing.method == 'discriminative' else routing.method
  if method not in router.FITS:
    publish_routes(run, 0, lambda split, top_n: by_hash(run, split, top_n))
  elif not (run.workdir / 'routing' / '0').exists():
    num_sequences = len(run.sequences('train'))
    drawn = np.sort(np.random.default_rng(run.settings.seed).permutation(num_sequences)[: routing.sample])
    z_ND = jax.numpy.asarray(np.concatenate(list(features(run, 'train', drawn))))
    key, shape = jax.random.key(run.settings.seed), run.layout.grid.shape
    publish_router(run, 0, router.fit(method, key, z_ND, shape, routing))
  write_shards(run, 0)


def by_hash(run: run_lib.Run, split: str, top_n: int) -> np.ndarray:
  """The control [N, top_n]: paths by a hash of the sequence's number."""
  ids = (f'{split}/{i}' for i in range(len(run.sequences(split))))
  return router.random_assignment(run.settings.seed, ids, run.layout.grid.num_paths, top_n)


def publish_router(run: run_lib.Run, number: int, fitted: router.Router, meta: dict[str, Any] | None = None):
  """A round's router, and where it sends the sequences of both splits."""
  capacity, num_paths = run.settings.routing.capacity, run.layout.grid.num_paths

  def assign(split: str, top_n: int) -> np.ndarray:
    if split == 'train' and capacity:
      chunks = (jax.numpy.asarray(z) for z in features(run, split))
      scores_NP = np.concatenate([np.asarray(router.scores(fitted, z)) for z in chunks])
      room_P = np.full(num_paths, math.ceil(capacity * len(scores_NP) / num_paths))
      # The greedy rule (arXiv 2410.03529) alone gets part of what is to be had; on scores and duals nearly all.
      bias_P = np.asarray(classifier.calibration(jax.numpy.asarray(scores_NP), jax.numpy.asarray(room_P)))
      return balance.assign(scores_NP + bias_P, room_P)[:, None]
    routed = [np.asarray(router.route(fitted, z, top_n)) for z in features(run, split)]
    return np.concatenate(routed).astype(np.int32)

  arrays = {name: np.asarray(x) for name, x in fitted._asdict().items()}
  about = json.dumps(meta or {}).encode()
  publish_routes(run, number, assign, {'router.safetensors': checkpoint.to_bytes(arrays), 'meta.json': about})


def publish_routes(run: run_lib.Run, number: int, assign, files: dict[str, checkpoint.Data] | None = None):
  """`routing/<number>/`: paths of the sequences by `assign(split, top_n) -> int32 [N, top_n]`, and other files."""
  if (run.workdir / 'routing' / str(number)).exists():
    return
  with checkpoint.publish_directory(run.workdir / 'routing' / str(number)) as aside:
    np.save(aside / 'train.npy', assign('train', run.settings.routing.top_n))
    np.save(aside / 'validation.npy', assign('validation', 1)[:, 0])
    for name, data in (files or {}).items():
      (aside / name).write_bytes(data)


def features(run: run_lib.Run, split: str, indices: np.ndarray | None = None) -> Iterator[np.ndarray]:
  """z of a split's sequences (all, or those at `indices`), float32, FEATURE_ROWS at a time, by the base model.

  Those of a split are kept in `features/<split>.npy`, unless that would be larger than MAX_FEATURE_BYTES.
  """
  everything = np.arange(len(run.sequences(split)))
  indices = everything if indices is None else indices
  file = run.workdir / 'features' / f'{split}.npy'
  if not file.exists() and 4 * len(everything) * run.settings.model.width <= MAX_FEATURE_BYTES:
    checkpoint.write_array(file, np.concatenate(list(_compute_features(run, split, everything))))
  if not file.exists():
    yield from _compute_features(run, split, indices)
    return
  kept = np.load(file, mmap_mode='r')
  yield from (kept[indices[start : start + FEATURE_ROWS]] for start in range(0, len(indices), FEATURE_ROWS))


def _compute_features(run: run_lib.Run, split: str, indices: np.ndarray) -> Iterator[np.ndarray]:
  found, prefix = run.sequences(split), run.settings.routing.prefix_tokens
  base = jax.device_put(run.base())
  progress = progress_lib.Progress(f'features of {split}', len(indices), 'sequences')
  for start in range(0, len(indices), FEATURE_ROWS):
    chosen = indices[start : start + FEATURE_ROWS]
    tokens = np.zeros((FEATURE_ROWS, prefix), np.int32)
    tokens[: len(chosen)] = [sequence.tokens[:prefix] for sequence in found.read(chosen)]
    yield np.asarray(_features_program(run.model)(base, tokens))[: len(chosen)]
    progress.update(start + len(chosen))
  progress.close()


@functools.cache
def _features_program(transformer: model.Transformer):
  return jax.jit(lambda params, tokens: model.features(transformer, params, tokens))


def router_data(run: run_lib.Run) -> np.ndarray:
  """bool [training sequences]: whether one is of a document that is kept from all training [2.4.2]."""
  documents, _ = run.sequences('train').columns()
  return shards.drawn(documents, run.settings.seed, run.settings.routing.router_fraction, 'router data')


def write_shards(run: run_lib.Run, number: int):
  """`shards/<number>/` of the paths, as `routing/<number>/` says."""
  _write_shards(run, str(number), run.routed('train', number), run.layout.grid.num_paths)


def write_base_shards(run: run_lib.Run):
  """`shards/base/`: all text, for the base model."""
  _write_shards(run, 'base', np.zeros((len(run.sequences('train')), 1), np.int32), 1)


def _write_shards(run: run_lib.Run, name: str, assignment: np.ndarray, num_paths: int):
  s = run.settings
  if (run.workdir / 'shards' / name).exists():
    return
  assignment[router_data(run)] = -1
  progress = progress_lib.Progress(f'shards/{name}', num_paths, 'paths')
  with checkpoint.publish_directory(run.workdir / 'shards' / name) as aside:
    meta = shards.write_shards(
      run.sequences('train'), assignment, num_paths, str(aside), seq_len=s.model.seq_len, seed=s.seed,
      holdout_fraction=s.data.holdout_fraction if s.train.early_stopping else 0.0,
      num_domains=len(run.result('tokenize')['domains']), progress=lambda done, _: progress.update(done),
    )  # fmt: skip
    empty = [path for path, rows in enumerate(meta['shard_rows']) if not rows]
    if empty:
      raise ValueError(f'no text was routed to paths {empty}: use a smaller config.grid, or more text')
  progress.close()
