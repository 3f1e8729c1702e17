"""Every sequence to its path, and every path's sequences to its shard [2.4]: the stage `route`."""

import functools
import logging
import math
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import holdouts, sequences, shards
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.pipeline import stage_records
from dipaco_jax.routing import agreement, balanced_assignment, classifier, router
from dipaco_jax.storage import files, publishing, seals, tensors
from dipaco_jax.training import display, processes
from dipaco_jax.training import progress as progress_lib

FEATURE_ROWS = 1024  # sequences whose features are computed at one time
MAX_FEATURE_BYTES = 2**30
PART_ROWS = 64 * FEATURE_ROWS  # sequences that a process routes before it keeps their paths


def route(run: run_lib.Run) -> dict[str, Any]:
  """Every sequence to its path, every path's sequences to its shard [2.4]."""
  routing = run.settings.routing
  method = routing.first if routing.method == 'discriminative' else routing.method
  check_router_data(run)
  if method in router.FITS:
    publish_router(run, 0, functools.partial(_fit, run, method))
  else:
    run_lib.only_first_process(lambda: publish_routes(run, 0, functools.partial(by_hash, run)), 'routed')
  write_shards(run, 0)
  return sharded(run, 0)


def sharded(run: run_lib.Run, number: int) -> dict[str, Any]:
  """What a round's shards and routes are like."""
  meta = run.shards_meta(number)
  routed, found, num_paths = run.routed('validation', number), run.sequences('validation'), run.layout.grid.num_paths
  counts = np.bincount(routed, minlength=num_paths).tolist()
  late = [len(x.tokens) - run.settings.routing.prefix_tokens for x in found.read(range(len(found)))]
  tokens = np.bincount(routed, late, num_paths).astype(int).tolist()
  if jax.process_index() == 0 and (words := stage_records.too_little(tokens, run.settings.data.min_validation_tokens)):
    logging.warning(words)
  nmi = agreement.normalized_mutual_information(np.array(meta['sequences_by_path_and_domain']))
  return meta | {'validation_sequences': counts, 'domain_nmi': nmi}


def _fit(run: run_lib.Run, method: str) -> tuple[router.Router, dict[str, Any]]:
  routing = run.settings.routing
  num_sequences = len(run.sequences('train'))
  drawn = np.sort(np.random.default_rng(run.settings.seed).permutation(num_sequences)[: routing.sample])
  z_ND = jax.numpy.asarray(np.concatenate(list(features(run, 'train', drawn))))
  key, shape = jax.random.key(run.settings.seed), run.layout.grid.shape
  return router.fit(method, key, z_ND, shape, routing), {}


def by_hash(run: run_lib.Run, split: str, top_n: int) -> np.ndarray:
  """The control [N, top_n]: paths by a hash of the sequence's number."""
  ids = (f'{split}/{i}' for i in range(len(run.sequences(split))))
  return router.random_assignment(run.settings.seed, ids, run.layout.grid.num_paths, top_n)


def publish_router(
  run: run_lib.Run,
  number: int,
  fit: Callable[[], tuple[router.Router, dict[str, Any]]],
  mend: Callable[[router.Router, np.ndarray], dict[str, Any]] = lambda fitted, paths: {},
):
  """A round's router, and where it sends the sequences of both splits: each process routes its share of them.

  Args:
    fit: the router and what is to be said of it; asked of the first process.
    mend: is given the paths of the training sequences, [N, top_n], to change them; returns what is to be said of that.
  """
  if processes.any_process((run.workdir / 'routing' / str(number)).exists(), f'router {number}'):
    return
  folder = _parts_folder(run, number)
  run_lib.only_first_process(lambda: _keep_router(run, folder, fit), f'fitted {number}')
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

  run_lib.only_first_process(publish, f'routed {number}')


def _keep_router(run: run_lib.Run, folder: pathlib.Path, fit: Callable[[], tuple[router.Router, dict[str, Any]]]):
  """Fits it, unless a run that was stopped has; the features that are kept are there then."""
  if not all([seals.is_whole(folder / name) for name in ('router.safetensors', 'meta.json')]):
    with display.doing('fitting the router'):
      fitted, meta = fit()
    publishing.write_json(folder / 'meta.json', meta)
    arrays = {name: np.asarray(x) for name, x in fitted._asdict().items()}
    publishing.write_sealed(folder / 'router.safetensors', tensors.to_bytes(arrays))
  for split in ('train', 'validation'):
    keep_features(run, split)


def _parts_folder(run: run_lib.Run, number: int) -> pathlib.Path:
  """Of a round's router and what it has routed, until all is routed."""
  return run.workdir / 'routing' / f'{number}-parts'


def _parts(run: run_lib.Run, folder: pathlib.Path, split: str) -> list[pathlib.Path]:
  """Files of paths, of PART_ROWS sequences each."""
  return [folder / f'{split}-{i}.npy' for i in range(-(-len(run.sequences(split)) // PART_ROWS))]


def route_parts(
  run: run_lib.Run, fitted: router.Router, folder: pathlib.Path, split: str, top_n: int, share: tuple[int, int]
):
  """The files of share (k, n): k, k + n, k + 2n..., but for those that a run that was stopped has left."""
  num_sequences = len(run.sequences(split))
  parts = _parts(run, folder, split)
  for i in publishing.missing(parts, share):
    mine = np.arange(i * PART_ROWS, min((i + 1) * PART_ROWS, num_sequences))
    routed = [np.asarray(router.route(fitted, z, top_n)) for z in features(run, split, mine)]
    publishing.write_array(parts[i], np.concatenate(routed).astype(np.int32))


def _assign_within(run: run_lib.Run, fitted: router.Router, split: str, capacity: float) -> np.ndarray:
  """Paths [N, 1], none of which gets more than `capacity` times the mean."""
  num_paths = run.layout.grid.num_paths
  chunks = (jax.numpy.asarray(z) for z in features(run, split))
  scores_NP = np.concatenate([np.asarray(router.scores(fitted, z)) for z in chunks])
  room_P = np.full(num_paths, math.ceil(capacity * len(scores_NP) / num_paths))
  # The greedy rule (arXiv 2410.03529) alone gets part of what is to be had; on scores and duals nearly all.
  bias_P = np.asarray(classifier.calibration(jax.numpy.asarray(scores_NP), jax.numpy.asarray(room_P)))
  return balanced_assignment.assign(scores_NP + bias_P, room_P)[:, None]


def publish_routes(run: run_lib.Run, number: int, assign, others: dict[str, files.Data] | None = None):
  """`routing/<number>/`: paths of the sequences by `assign(split, top_n) -> int32 [N, top_n]`, and other files."""
  if (run.workdir / 'routing' / str(number)).exists():
    return
  with publishing.publish_directory(run.workdir / 'routing' / str(number)) as aside:
    np.save(aside / 'train.npy', assign('train', run.settings.routing.top_n))
    np.save(aside / 'validation.npy', assign('validation', 1)[:, 0])
    for name, data in (others or {}).items():
      (aside / name).write_bytes(data)


def features(run: run_lib.Run, split: str, indices: np.ndarray | None = None) -> Iterator[np.ndarray]:
  """z of a split's sequences (all, or those at `indices`), float32, FEATURE_ROWS at a time, by the base model.

  Those that `keep_features` has kept are read.
  """
  indices = np.arange(len(run.sequences(split))) if indices is None else indices
  if (file := keep_features(run, split)) is None:
    yield from _compute_features(run, split, indices)
    return
  kept = tensors.read_array(file, mmap_mode='r')
  yield from (kept[indices[start : start + FEATURE_ROWS]] for start in range(0, len(indices), FEATURE_ROWS))


def keep_features(run: run_lib.Run, split: str) -> pathlib.Path | None:
  """`features/<split>.npy`, made if it is not there; None where it would be larger than MAX_FEATURE_BYTES."""
  file, everything = run.workdir / 'features' / f'{split}.npy', np.arange(len(run.sequences(split)))
  if not seals.is_whole(file):
    if 4 * len(everything) * run.settings.model.width > MAX_FEATURE_BYTES:
      return None
    publishing.write_array(file, np.concatenate(list(_compute_features(run, split, everything))))
  return file


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
def _features_program(network: transformer.Transformer):
  return jax.jit(lambda params, tokens: transformer.features(network, params, tokens))


def router_data(run: run_lib.Run) -> np.ndarray:
  """bool [training sequences]: whether one is of a document that is kept from all training [2.4.2]."""
  found, fraction = run.sequences('train'), run.settings.routing.router_fraction
  documents, _ = found.columns()
  return holdouts.drawn(documents, run.settings.seed, fraction, 'router data', router_pieces(found, fraction))


def router_pieces(found: sequences.Sequences, fraction: float) -> holdouts.Drawn | None:
  """Of longer texts, what is router data; hold-outs lie before it."""
  draws = found.draws()
  return None if draws is None else holdouts.drawn_pieces(found.columns()[0], draws, fraction)


def check_router_data(run: run_lib.Run):
  """Before training: raises InputError where router data is too little for a discriminative router."""
  num_paths, count = run.layout.grid.num_paths, int(router_data(run).sum()) if run.settings.rounds else 0
  if run.settings.rounds and count < num_paths:
    raise InputError(
      f'config.routing.router_fraction={run.settings.routing.router_fraction} keeps {count} sequences, fewer '
      f'than the {num_paths} paths: raise it, or give more text'
    )


def write_shards(run: run_lib.Run, number: int):
  """`shards/<number>/` of the paths, as `routing/<number>/` says, whose parts are of no more use."""
  if jax.process_index() == 0:
    shutil.rmtree(_parts_folder(run, number), ignore_errors=True)  # here: it may be left by a run that was killed
  _write_shards(run, str(number), run.layout.grid.num_paths, lambda: run.routed('train', number))


def write_base_shards(run: run_lib.Run):
  """`shards/base/`: all text, for the base model; a shard for each part of it, which are read as one."""

  def part_of_each():
    counts = run.sequences('train').counts
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)[:, None]

  _write_shards(run, 'base', run.settings.data.parts, part_of_each)


def _write_shards(run: run_lib.Run, name: str, num_shards: int, assign: Callable[[], np.ndarray]):
  done, folder = run.workdir / 'shards' / name, run.workdir / 'shards' / f'{name}-parts'
  if processes.any_process(done.exists(), f'shards {name}'):
    return
  folders = [folder / str(i) for i in range(num_shards)]
  write_shard_parts(run, folders, assign, (jax.process_index(), jax.process_count()))
  processes.barrier(f'shards {name} in parts')
  run_lib.only_first_process(lambda: _publish_shards(run, done, folder, num_shards), f'sharded {name}')


def deal(run: run_lib.Run, assignment: np.ndarray, num_shards: int) -> shards.Dealt:
  """Which training sequences are whose, and held back; router data is nobody's, which is written into `assignment`."""
  s = run.settings
  assignment[router_data(run)] = -1
  fraction, found = s.data.holdout_fraction if s.train.early_stopping else 0.0, run.sequences('train', open_parts=1)
  pieces = router_pieces(found, s.routing.router_fraction)
  return shards.deal(found, assignment, num_shards, s.seed, fraction, pieces.end if pieces else 0.0)


def write_shard_parts(
  run: run_lib.Run, folders: list[pathlib.Path], assign: Callable[[], np.ndarray], share: tuple[int, int]
):
  """The shards of share (k, n): k, k + n, k + 2n..., but for those that a run that was stopped has left."""
  missing = publishing.missing(folders, share)
  if not missing:
    return
  s, found, dealt = run.settings, run.sequences('train', open_parts=1), deal(run, assign(), len(folders))
  progress = progress_lib.Progress(f'shards/{folders[0].parent.name.removesuffix("-parts")}', len(missing), 'shards')
  for count, i in enumerate(missing, 1):
    with publishing.publish_directory(folders[i]) as aside:
      shards.write_shard(found, dealt, i, str(aside), s.model.seq_len)
    progress.update(count)
  progress.close()


def _publish_shards(run: run_lib.Run, done: pathlib.Path, folder: pathlib.Path, num_shards: int):
  meta = shards.merge(str(folder), num_shards, run.settings.model.seq_len)
  empty = [path for path, rows in enumerate(meta['shard_rows']) if not rows]
  if empty and done.name != 'base':
    raise InputError(f'no text was routed to paths {empty}: use a smaller config.grid, or more text')
  publishing.write_json(folder / 'meta.json', meta)
  files.put_in_place(folder, done)
