"""The stage `route`: every sequence gets a path, and every path its shard [2.4]."""

import functools
import logging
import math
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from dipaco_jax.config import owners
from dipaco_jax.config.extension import is_reference
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import shards
from dipaco_jax.pipeline import features, run as run_lib, stage_records
from dipaco_jax.processes import display, processes
from dipaco_jax.routing import balanced_assignment, classifier, own_router, path_labels, router
from dipaco_jax.storage import files, publishing, seals, tensors
from dipaco_jax.storage.publishing import Share

PART_ROWS = 64 * features.FEATURE_ROWS  # sequences that a process routes before it keeps their paths

Fitted = tuple[own_router.AnyRouter, dict[str, Any]]
Mend = Callable[[own_router.AnyRouter, np.ndarray], dict[str, Any]]


def route(run: run_lib.Run) -> dict[str, Any]:
  """Fits the first router, and routes and shards all text by it; returns figures for the record [2.4]."""
  routing = run.settings.routing
  method = routing.first if routing.method == 'discriminative' else routing.method
  features.check_router_data(run)
  if method in router.FITS or is_reference(method):
    publish_router(run, 0, functools.partial(_fit, run, method))
  else:
    assign = by_owner if method == 'owner' else by_hash
    run.disk.only_first(lambda: publish_routes(run, 0, functools.partial(assign, run)), 'routed')
  write_shards(run, 0)
  return summarize_shards(run, 0)


def summarize_shards(run: run_lib.Run, number: int) -> dict[str, Any]:
  """Summarizes a round's shards and routes for the stage's record."""
  meta = run.shards_meta(number)
  routed = run.routed('validation', number)
  validation = run.sequences('validation')
  num_paths = run.layout.grid.num_paths
  counts = np.bincount(routed, minlength=num_paths).tolist()
  late = [x.num_scored(run.settings.num_unscored_tokens) for x in validation.read(range(len(validation)))]
  tokens = np.bincount(routed, late, num_paths).astype(int).tolist()
  if processes.is_first() and (warning := stage_records.too_little(tokens, run.settings.data.min_validation_tokens)):
    logging.warning(warning)
  nmi = path_labels.normalized_mutual_information(np.array(meta['sequences_by_path_and_domain']))
  return meta | {'validation_sequences': counts, 'domain_nmi': nmi}


def _fit(run: run_lib.Run, method: str) -> Fitted:
  s, candidates = run.settings, np.unique(features.routed_by(run))
  drawn = candidates[np.sort(np.random.default_rng(s.seed).permutation(len(candidates))[: s.routing.sample])]
  if is_reference(method):
    [texts] = features.texts(run, 'train', [drawn])
    return own_router.fit(s.routing, s.num_paths, s.seed, texts), {}
  z_ND = jax.numpy.asarray(np.concatenate(list(features.compute(run, 'train', drawn))))
  return router.fit(method, jax.random.key(s.seed), z_ND, run.layout.grid.shape, s.routing), {}


def by_hash(run: run_lib.Run, split: str, top_n: int) -> np.ndarray:
  """Returns paths by a hash of sequences' numbers (`features.routed_by`), [N, top_n], as a control without a router."""
  return router.random_assignment(run.settings.seed, _ids(run, split), run.layout.grid.num_paths, top_n)


def by_owner(run: run_lib.Run, split: str, top_n: int) -> np.ndarray:
  """Returns paths of the owner that each sequence's domain is named after, [N, top_n]; of several, drawn by a hash."""
  names, (_, domain_N), ids = run.result('tokenize')['domains'], run.sequences(split).columns(), _ids(run, split)
  paths_N = np.zeros((len(ids), top_n), np.int32)
  for number in np.unique(domain_N):
    owners.check_domain(run.layout.grid, names[number])
    mine, chosen_M = np.array(owners.paths_of(run.layout.grid, names[number])), np.flatnonzero(domain_N == number)
    drawn = router.random_assignment(run.settings.seed, [ids[i] for i in chosen_M], len(mine), top_n)
    paths_N[chosen_M] = mine[drawn]
  return paths_N


def _ids(run: run_lib.Run, split: str) -> list[str]:
  """Returns an id of each sequence, or of the sequence that it is routed by."""
  numbers = features.routed_by(run) if split == 'train' else range(len(run.sequences(split)))
  return [f'{split}/{i}' for i in numbers]


def publish_router(run: run_lib.Run, number: int, fit: Callable[[], Fitted], mend: Mend = lambda fitted, paths: {}):
  """Fits and publishes a round's router, and the paths of both splits' sequences; each process routes its share.

  Args:
    fit: returns the router and facts for its record; called by the first process.
    mend: changes the paths of the training sequences, [N, top_n], in place; returns facts for the record.
  """
  if processes.any_process((run.workdir / 'routing' / str(number)).exists(), f'router {number}'):
    return
  folder = parts_folder(run, number)
  run.disk.only_first(lambda: _keep_router(run, folder, fit), f'fitted {number}')
  fitted = own_router.of_arrays(run.settings, tensors.read_arrays(folder / 'router.safetensors'))
  capacity = run.settings.routing.capacity  # of training text
  top = {'validation': 1} if capacity else {'train': run.settings.routing.top_n, 'validation': 1}
  for split, top_n in top.items():
    route_parts(run, fitted, folder, split, top_n, (jax.process_index(), jax.process_count()))
  run.disk.gather(f'routed {number} in parts', f'routing/{folder.name}/*')

  def publish():
    paths = {split: np.concatenate([*map(tensors.read_array, _parts(run, folder, split))]) for split in top}
    routed_by_N = features.routed_by(run)
    paths['train'] = _assign_within(run, fitted, routed_by_N) if capacity else paths['train'][routed_by_N]
    meta = seals.read_json(folder / 'meta.json') | mend(fitted, paths['train'])
    others: dict[str, files.Data] = {'meta.json': seals.dumps(meta).encode()}
    others['router.safetensors'] = seals.read(folder / 'router.safetensors')
    publish_routes(run, number, lambda split, _: paths[split], others)

  run.disk.only_first(publish, f'routed {number}')


def _keep_router(run: run_lib.Run, folder: pathlib.Path, fit: Callable[[], Fitted]):
  """Fits and saves the router, unless an interrupted run has; also saves the features for all processes."""
  # A list: both are checked, so that both damaged files are removed.
  if not all([seals.keep_if_whole(folder / name) for name in ('router.safetensors', 'meta.json')]):  # noqa: C419
    with display.doing('fitting the router'):
      fitted, meta = fit()
    publishing.write_json(folder / 'meta.json', meta)
    publishing.write_sealed(folder / 'router.safetensors', tensors.to_bytes(own_router.arrays(fitted)))
  for split in ('train', 'validation') if own_router.uses_features(run.settings.routing) else ():
    features.keep(run, split)


def _parts(run: run_lib.Run, folder: pathlib.Path, split: str) -> list[pathlib.Path]:
  """Returns the files that paths are kept in, of PART_ROWS sequences each."""
  return [folder / f'{split}-{i}.npy' for i in range(-(-len(run.sequences(split)) // PART_ROWS))]


def route_parts(
  run: run_lib.Run, fitted: own_router.AnyRouter, folder: pathlib.Path, split: str, top_n: int, share: Share
):
  """Routes the parts of a share that are missing."""
  num_sequences, parts = len(run.sequences(split)), _parts(run, folder, split)
  missing = publishing.missing(parts, share)
  chunks = [np.arange(i * PART_ROWS, min((i + 1) * PART_ROWS, num_sequences)) for i in missing]
  for i, routed in zip(missing, _routed(run, fitted, split, top_n, chunks), strict=True):
    publishing.write_array(parts[i], routed)


def _routed(run: run_lib.Run, fitted: own_router.AnyRouter, split: str, top_n: int, chunks) -> Iterator[np.ndarray]:
  """Yields the best paths of the sequences of each chunk of indices, int32 [N, top_n]."""
  if isinstance(fitted, own_router.OwnRouter):
    yield from (fitted.route(texts, top_n) for texts in features.texts(run, split, chunks))
    return
  for indices in chunks:
    routes = [np.asarray(router.route(fitted, z, top_n)) for z in features.compute(run, split, indices)]
    yield np.concatenate(routes).astype(np.int32)


def _assign_within(run: run_lib.Run, fitted: own_router.AnyRouter, routed_by_N: np.ndarray) -> np.ndarray:
  """Returns the paths [N, 1] of training text. No path gets more than `routing.capacity` times the mean.

  Sequences are counted, or documents if all sequences of a document are routed together.
  """
  indices_M, text_N = np.unique(routed_by_N, return_inverse=True)
  room = math.ceil(run.settings.routing.capacity * len(indices_M) / run.layout.grid.num_paths)
  return within(scores(run, fitted, 'train', indices_M), room)[text_N][:, None]


def within(scores_NP: np.ndarray, room: int) -> np.ndarray:
  """Returns the paths [N] with the highest scores, with at most `room` sequences for each path.

  Where a path would get none, all get equal shares.
  """
  P = scores_NP.shape[1]
  free_N, room_P = scores_NP.argmax(axis=1).astype(np.int32), np.full(P, room)
  counts_P = np.bincount(free_N, minlength=P)
  if not np.isnan(scores_NP).any() and 0 < counts_P.min() <= counts_P.max() <= room:
    return free_N
  # Greedy assignment (arXiv 2410.03529) by scores alone loses part of the likelihood; with the duals of the shares that
  # it comes to added, it loses almost none.
  share_P = np.bincount(balanced_assignment.assign(scores_NP, room_P), minlength=P)
  share_P = share_P if share_P.all() else room_P
  bias_P = np.asarray(classifier.calibration(jax.numpy.asarray(scores_NP), share_P))
  return balanced_assignment.assign(scores_NP + bias_P, room_P)


def scores(run: run_lib.Run, fitted: own_router.AnyRouter, split: str, indices: np.ndarray | None = None) -> np.ndarray:
  """Returns how much a router prefers each path for a split's sequences (all, or those at `indices`), [N, P]."""
  if isinstance(fitted, own_router.OwnRouter):
    indices = np.arange(len(run.sequences(split))) if indices is None else indices
    parts = [indices[start : start + PART_ROWS] for start in range(0, len(indices), PART_ROWS)]
    return np.concatenate([fitted.scores(texts) for texts in features.texts(run, split, parts)])
  chunks = (router.scores(fitted, jax.numpy.asarray(z)) for z in features.compute(run, split, indices))
  return np.concatenate([np.asarray(chunk) for chunk in chunks])


def publish_routes(run: run_lib.Run, number: int, assign, others: dict[str, files.Data] | None = None):
  """Publishes `routing/<number>/`: the sequences' paths, assign(split, top_n) -> int32 [N, top_n], and other files."""
  if (run.workdir / 'routing' / str(number)).exists():
    return
  with publishing.publish_directory(run.workdir / 'routing' / str(number)) as aside:
    np.save(aside / 'train.npy', assign('train', run.settings.routing.top_n))
    np.save(aside / 'validation.npy', assign('validation', 1)[:, 0])
    for name, data in (others or {}).items():
      (aside / name).write_bytes(data)


def parts_folder(run: run_lib.Run, number: int) -> pathlib.Path:
  """Returns the folder of a round's router and its routes so far."""
  return run.workdir / 'routing' / f'{number}-parts'


# -- shards


def write_shards(run: run_lib.Run, number: int):
  """Writes `shards/<number>/` by the paths in `routing/<number>/`, and removes the parts that those were made from."""
  if run.disk.is_ours:
    shutil.rmtree(parts_folder(run, number), ignore_errors=True)  # here: it may be left by a run that was killed
  _write_shards(run, str(number), run.layout.grid.num_paths, lambda: run.routed('train', number), 'train')


def write_base_shards(run: run_lib.Run, reader: str):
  """Writes `shards/base/`: all text, one shard for each part of it, which are read as one, for a job of this name."""

  def part_of_each():
    counts = run.sequences('train').counts
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)[:, None]

  _write_shards(run, 'base', run.settings.data.parts, part_of_each, reader)


def _write_shards(run: run_lib.Run, name: str, num_shards: int, assign: Callable[[], np.ndarray], reader: str):
  done, folder = run.workdir / 'shards' / name, run.workdir / 'shards' / f'{name}-parts'
  if processes.any_process(done.exists(), f'shards {name} for {reader}'):
    return
  folders = [folder / str(i) for i in range(num_shards)]
  write_shard_parts(run, folders, assign, (jax.process_index(), jax.process_count()))
  run.disk.gather(f'shards {name} in parts', f'shards/{folder.name}/*')
  run.disk.only_first(lambda: _publish_shards(run, done, folder, num_shards), f'sharded {name}')


def deal(run: run_lib.Run, assignment: np.ndarray, num_shards: int) -> shards.Dealt:
  """Divides the training sequences among paths and hold-outs; marks router data in `assignment` as unassigned."""
  s = run.settings
  assignment[features.router_data(run)] = -1
  fraction, train = s.data.holdout_fraction if s.train.early_stopping else 0.0, run.sequences('train', open_parts=1)
  pieces = features.router_pieces(train, s.routing.router_fraction)
  return shards.deal(train, assignment, num_shards, s.seed, fraction, pieces.end if pieces else 0.0)


def write_shard_parts(run: run_lib.Run, folders: list[pathlib.Path], assign: Callable[[], np.ndarray], share: Share):
  """Writes the shards of a share that are missing."""
  if not (missing := publishing.missing(folders, share)):
    return
  s = run.settings
  train = run.sequences('train', open_parts=1)
  dealt = deal(run, assign(), len(folders))
  name = folders[0].parent.name.removesuffix('-parts')
  is_trained_on = name != 'base' and (name != '0' or (s.pretrain.steps > 0 and len(folders) > 1))
  if dealt.undrawn and is_trained_on and share[0] == 0:
    few = f'of config.data.holdout_fraction={s.data.holdout_fraction} no document was drawn for paths {dealt.undrawn}'
    so = 'one is held back that the base has read, and perhaps paths of an earlier round: early stopping may choose too'
    logging.warning('%s: %s early a version. Give more text, a larger fraction, or fewer paths', few, so)
  progress = display.Progress(f'shards/{name}', len(missing), 'shards')
  for count, i in enumerate(missing, 1):
    with publishing.publish_directory(folders[i]) as aside:
      shards.write_shard(train, dealt, i, str(aside), s.model.seq_len)
    progress.update(count)
  progress.close()


def _publish_shards(run: run_lib.Run, done: pathlib.Path, folder: pathlib.Path, num_shards: int):
  """Publishes the shards when all parts exist. Raises InputError if a path has no text."""
  meta = shards.merge_meta(str(folder), num_shards, run.settings.model.seq_len)
  empty = [path for path, rows in enumerate(meta['shard_rows']) if not rows]
  if empty and done.name != 'base':
    method = run.settings.routing.method
    own = f', or correct config.routing.method={method!r}' if is_reference(method) else ''
    raise InputError(f'no text was routed to paths {empty}: use a smaller config.grid or more text{own}')
  publishing.write_json(folder / 'meta.json', meta)
  files.put_in_place(folder, done)
