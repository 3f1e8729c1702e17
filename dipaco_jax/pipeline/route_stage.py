"""The stage `route`: every sequence gets a path, and every path its shard [2.4]."""

import functools
import logging
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dipaco_jax.pipeline import features, shard_stage, stage_records
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.routing import balanced_assignment, classifier, path_labels, router
from dipaco_jax.storage import files, publishing, seals, tensors
from dipaco_jax.training import display, processes

PART_ROWS = 64 * features.FEATURE_ROWS  # sequences that a process routes before it keeps their paths


def route(run: run_lib.Run) -> dict[str, Any]:
  """Fits the first router, and routes and shards all text by it; returns figures for the record [2.4]."""
  routing = run.settings.routing
  method = routing.first if routing.method == 'discriminative' else routing.method
  features.check_router_data(run)
  if method in router.FITS:
    publish_router(run, 0, functools.partial(_fit, run, method))
  else:
    processes.only_first(lambda: publish_routes(run, 0, functools.partial(by_hash, run)), 'routed')
  shard_stage.write_shards(run, 0)
  return sharded(run, 0)


def sharded(run: run_lib.Run, number: int) -> dict[str, Any]:
  """Summarizes a round's shards and routes for the stage's record."""
  meta = run.shards_meta(number)
  routed, found, num_paths = run.routed('validation', number), run.sequences('validation'), run.layout.grid.num_paths
  counts = np.bincount(routed, minlength=num_paths).tolist()
  late = [len(x.tokens) - run.settings.routing.prefix_tokens for x in found.read(range(len(found)))]
  tokens = np.bincount(routed, late, num_paths).astype(int).tolist()
  if processes.is_first() and (words := stage_records.too_little(tokens, run.settings.data.min_validation_tokens)):
    logging.warning(words)
  nmi = path_labels.normalized_mutual_information(np.array(meta['sequences_by_path_and_domain']))
  return meta | {'validation_sequences': counts, 'domain_nmi': nmi}


def _fit(run: run_lib.Run, method: str) -> tuple[router.Router, dict[str, Any]]:
  routing = run.settings.routing
  num_sequences = len(run.sequences('train'))
  drawn = np.sort(np.random.default_rng(run.settings.seed).permutation(num_sequences)[: routing.sample])
  z_ND = jax.numpy.asarray(np.concatenate(list(features.compute(run, 'train', drawn))))
  key, shape = jax.random.key(run.settings.seed), run.layout.grid.shape
  return router.fit(method, key, z_ND, shape, routing), {}


def by_hash(run: run_lib.Run, split: str, top_n: int) -> np.ndarray:
  """Returns paths by a hash of each sequence's number, [N, top_n]: the control without a router."""
  ids = (f'{split}/{i}' for i in range(len(run.sequences(split))))
  return router.random_assignment(run.settings.seed, ids, run.layout.grid.num_paths, top_n)


def publish_router(
  run: run_lib.Run,
  number: int,
  fit: Callable[[], tuple[router.Router, dict[str, Any]]],
  mend: Callable[[router.Router, np.ndarray], dict[str, Any]] = lambda fitted, paths: {},
):
  """Fits and publishes a round's router, and the paths of both splits' sequences; each process routes its share.

  Args:
    fit: returns the router and facts for its record; called by the first process.
    mend: changes the paths of the training sequences, [N, top_n], in place; returns facts for the record.
  """
  if processes.any_process((run.workdir / 'routing' / str(number)).exists(), f'router {number}'):
    return
  folder = shard_stage.parts_folder(run, number)
  processes.only_first(lambda: _keep_router(run, folder, fit), f'fitted {number}')
  arrays = tensors.read_arrays(folder / 'router.safetensors')
  fitted = router.Router(**{name: jax.numpy.asarray(x) for name, x in arrays.items()})
  top = {'train': run.settings.routing.top_n, 'validation': 1}
  capacity = {'train': run.settings.routing.capacity, 'validation': 0.0}
  for split in top:
    if not capacity[split]:
      route_parts(run, fitted, folder, split, top[split], (jax.process_index(), jax.process_count()))
  processes.barrier(f'routed {number} in parts')

  def assign(split: str, top_n: int) -> np.ndarray:
    if capacity[split]:
      return _assign_within(run, fitted, split, capacity[split])
    return np.concatenate([tensors.read_array(file) for file in _parts(run, folder, split)])

  def publish():
    paths = {split: assign(split, top_n) for split, top_n in top.items()}
    meta = seals.read_json(folder / 'meta.json') | mend(fitted, paths['train'])
    others: dict[str, files.Data] = {'meta.json': seals.dumps(meta).encode()}
    others['router.safetensors'] = seals.read(folder / 'router.safetensors')
    publish_routes(run, number, lambda split, _: paths[split], others)

  processes.only_first(publish, f'routed {number}')


def _keep_router(run: run_lib.Run, folder: pathlib.Path, fit: Callable[[], tuple[router.Router, dict[str, Any]]]):
  """Fits and keeps the router, unless a run that was stopped has.

  It also keeps the features, so that all processes find them.
  """
  # A list: both are checked, so that both damaged files are removed.
  if not all([seals.is_whole(folder / name) for name in ('router.safetensors', 'meta.json')]):  # noqa: C419
    with display.doing('fitting the router'):
      fitted, meta = fit()
    publishing.write_json(folder / 'meta.json', meta)
    arrays = {name: np.asarray(x) for name, x in fitted._asdict().items()}
    publishing.write_sealed(folder / 'router.safetensors', tensors.to_bytes(arrays))
  for split in ('train', 'validation'):
    features.keep(run, split)


def _parts(run: run_lib.Run, folder: pathlib.Path, split: str) -> list[pathlib.Path]:
  """Returns the files that paths are kept in, of PART_ROWS sequences each."""
  return [folder / f'{split}-{i}.npy' for i in range(-(-len(run.sequences(split)) // PART_ROWS))]


def route_parts(
  run: run_lib.Run, fitted: router.Router, folder: pathlib.Path, split: str, top_n: int, share: tuple[int, int]
):
  """Routes the parts of share (k, n) that are missing: those of k, k + n, k + 2n, ..."""
  num_sequences = len(run.sequences(split))
  parts = _parts(run, folder, split)
  for i in publishing.missing(parts, share):
    mine = np.arange(i * PART_ROWS, min((i + 1) * PART_ROWS, num_sequences))
    routed = [np.asarray(router.route(fitted, z, top_n)) for z in features.compute(run, split, mine)]
    publishing.write_array(parts[i], np.concatenate(routed).astype(np.int32))


def _assign_within(run: run_lib.Run, fitted: router.Router, split: str, capacity: float) -> np.ndarray:
  """Returns paths [N, 1], none of which gets more than `capacity` times the mean."""
  num_paths = run.layout.grid.num_paths
  chunks = (jax.numpy.asarray(z) for z in features.compute(run, split))
  scores_NP = np.concatenate([np.asarray(router.scores(fitted, z)) for z in chunks])
  room_P = np.full(num_paths, math.ceil(capacity * len(scores_NP) / num_paths))
  # Greedy assignment (arXiv 2410.03529) by scores alone loses part of the likelihood; with the duals added it loses
  # almost none.
  bias_P = np.asarray(classifier.calibration(jax.numpy.asarray(scores_NP), jax.numpy.asarray(room_P)))
  return balanced_assignment.assign(scores_NP + bias_P, room_P)[:, None]


def publish_routes(run: run_lib.Run, number: int, assign, others: dict[str, files.Data] | None = None):
  """Publishes `routing/<number>/`: the sequences' paths, assign(split, top_n) -> int32 [N, top_n], and other files."""
  if (run.workdir / 'routing' / str(number)).exists():
    return
  with publishing.publish_directory(run.workdir / 'routing' / str(number)) as aside:
    np.save(aside / 'train.npy', assign('train', run.settings.routing.top_n))
    np.save(aside / 'validation.npy', assign('validation', 1)[:, 0])
    for name, data in (others or {}).items():
      (aside / name).write_bytes(data)
