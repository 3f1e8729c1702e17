"""Every sequence to its path, and every path's sequences to its shard [2.4]: the stage `route`."""

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from dipaco_jax import checkpoint, model, router, shards
from dipaco_jax import progress as progress_lib
from dipaco_jax import run as run_lib
from dipaco_jax import sequences as sequences_lib

FEATURE_ROWS = 1024  # sequences whose features are computed at one time


def route(run: run_lib.Run) -> dict[str, Any]:
  """Every sequence to its path, every path's sequences to its shard [2.4]."""
  run_lib.only_first_process(lambda: _route(run), 'routed')
  validation = run.routed('validation')
  counts = np.bincount(validation, minlength=run.layout.grid.num_paths).tolist()
  return json.loads((run.workdir / 'shards' / '0' / 'meta.json').read_text()) | {'validation_sequences': counts}


def _route(run: run_lib.Run):
  s, num_paths = run.settings, run.layout.grid.num_paths
  if not (run.workdir / 'routing' / '0').exists():
    with checkpoint.publish_directory(run.workdir / 'routing' / '0') as aside:
      assign = make_router(run, aside)
      np.save(aside / 'train.npy', assign('train', s.routing.top_n))
      np.save(aside / 'validation.npy', assign('validation', 1)[:, 0])
  write_shards(run, '0', run.routed('train'), num_paths)


def make_router(run: run_lib.Run, aside: pathlib.Path) -> Callable[[str, int], np.ndarray]:
  """`assign(split, top_n) -> int32 [sequences, top_n]`, and the router's file beside it where one is fitted."""
  s, num_paths = run.settings, run.layout.grid.num_paths
  if s.routing.method not in router.FITS:

    def by_hash(split, top_n):
      ids = (f'{split}/{i}' for i in range(len(run.sequences(split))))
      return router.random_assignment(s.seed, ids, num_paths, top_n)

    return by_hash
  features = make_features(run)
  everything = run.sequences('train')
  drawn = np.sort(np.random.default_rng(s.seed).permutation(len(everything))[: s.routing.sample])
  z_ND = np.concatenate(list(features('fit the router', everything, drawn)))
  key, shape = jax.random.key(s.seed), run.layout.grid.shape
  fitted = router.fit(s.routing.method, key, jax.numpy.asarray(z_ND), shape, s.routing)
  arrays = {name: np.asarray(x) for name, x in fitted._asdict().items()}
  (aside / 'router.safetensors').write_bytes(checkpoint.to_bytes(arrays))

  def by_features(split, top_n):
    found = run.sequences(split)
    routed = [router.route(fitted, z, top_n) for z in features(f'route {split}', found, np.arange(len(found)))]
    return np.concatenate([np.asarray(r) for r in routed]).astype(np.int32)

  return by_features


def make_features(run: run_lib.Run):
  """`features(title, sequences, indices)` yields z of FEATURE_ROWS sequences at a time, float32, by the base model."""
  base, prefix = jax.device_put(run.base()), run.settings.routing.prefix_tokens
  compute = jax.jit(lambda params, tokens: model.features(run.model, params, tokens))

  def features(title: str, found: sequences_lib.Sequences, indices: np.ndarray) -> Iterator[np.ndarray]:
    progress = progress_lib.Progress(title, len(indices), 'sequences')
    for start in range(0, len(indices), FEATURE_ROWS):
      chosen = indices[start : start + FEATURE_ROWS]
      tokens = np.zeros((FEATURE_ROWS, prefix), np.int32)
      tokens[: len(chosen)] = [sequence.tokens[:prefix] for sequence in found.read(chosen)]
      yield np.asarray(compute(base, tokens))[: len(chosen)]
      progress.update(start + len(chosen))
    progress.close()

  return features


def write_shards(run: run_lib.Run, name: str, assignment: np.ndarray, num_paths: int):
  s = run.settings
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
