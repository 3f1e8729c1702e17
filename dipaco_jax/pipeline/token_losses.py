"""Every path's nats at every target of every sequence of a set, from which re-routing is computed [2.4.3].

A folder holds a set of N sequences, at most L tokens of each:

    nll-<path>.npy    [N, L] float32    -log p(token j + 1 | tokens to j) at position j, for every target inside the
                                        sequence, those of the prefix too; 0 if there is none
    counts.npy        [N, L] bool       which of them count for perplexity: those after the prefix
    meta.json                           what the files were made from
    *.sha256                            seals

A file is published whole, and a turn is skipped if all its paths have their files, so that a killed run resumes with
the next one. Files of paths with changed parameters are removed first. The process with the device of a path writes its
file. Memory is that of a few batches of the paths in flight, for any N.
"""

import contextlib
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dipaco_jax.algorithm import modules
from dipaco_jax.algorithm.grid import Coordinates
from dipaco_jax.algorithm.inner import gather
from dipaco_jax.buckets import disks
from dipaco_jax.data import packing, prefetching
from dipaco_jax.data.sequences import Sequences
from dipaco_jax.models import loss
from dipaco_jax.processes import display, processes
from dipaco_jax.storage import files, module_store, publishing, seals, tensors
from dipaco_jax.training import evaluation
from dipaco_jax.training.programs import Programs


class Rows(NamedTuple):
  """Sequences to score, the first `length` tokens of each, one in a row."""

  sequences: Sequences
  indices: np.ndarray  # [N], the sequences of the file to score, in this order
  length: int
  batch_size: int


class TokenLosses(NamedTuple):
  """The files, as memory maps."""

  nll: list[np.ndarray]  # by path, [N, L] float32
  counts: np.ndarray  # [N, L] bool


def read(folder: pathlib.Path, num_paths: int) -> TokenLosses:
  """Reads what `write` has written. Raises seals.Damaged, also if it was not completed."""
  nll = [tensors.read_array(nll_file(folder, path), mmap_mode='r') for path in range(num_paths)]
  return TokenLosses(nll, tensors.read_array(folder / 'counts.npy', mmap_mode='r'))


def nll_file(folder: pathlib.Path, path: int) -> pathlib.Path:
  """Path of the file of a path's token losses."""
  return folder / f'nll-{path}.npy'


def write(
  programs: Programs, params_of_path: Callable[[int], Any], sources: Sequence[str], rows: Rows, folder: pathlib.Path,
  disk: disks.Disk = disks.SHARED,
) -> TokenLosses | None:  # fmt: skip
  """Computes the missing scores of all sequences under all paths; every process of a job calls it once per folder.

  Returns the losses on the first process.

  Args:
    params_of_path: returns a path's parameters, on the host; called for paths that this process holds and has to score.
    sources: identities of the paths' parameters (`published`); a path with a different one is scored again.
    rows: the sequences; if they differ from the recorded ones, all scores are computed again.
  """
  name = '/'.join(folder.parts[-2:])  # for the processes together, which may have mounted it at several places
  if disk.is_ours:
    _prepare(programs, sources, rows, folder)
  processes.barrier(f'{name} is prepared')
  placement = programs.placement
  # All processes look before any of them writes.
  is_written = {
    turn: all(nll_file(folder, path).exists() for path in placement.paths(turn)) for turn in placement.turns()
  }
  turns = [turn for turn, is_there in is_written.items() if processes.any_process(not is_there, f'{name}: turn {turn}')]
  progress = display.Progress(f'score {folder.name}', len(turns), 'turns')
  for done, turn in enumerate(turns, 1):
    _write_turn(programs, evaluation.in_flight(programs, turn, params_of_path), turn, rows, folder)
    progress.update(done)
  progress.close()
  disk.gather(f'{name} is whole', f'{name}/nll-*')
  return read(folder, placement.grid.num_paths) if processes.is_first() else None


def published(workdir: pathlib.Path, layout: modules.Layout, versions: Sequence[int]) -> list[str]:
  """Returns each path's source: sha256 over the recorded digests of the modules that it picks at its version."""
  folders = {version: workdir / 'modules' / str(version) for version in versions}
  recorded = {version: module_store.recorded_modules(folder) for version, folder in folders.items()}

  def source(path: int, version: int) -> str:
    at, total = layout.grid.coordinates(path), hashlib.sha256()
    for level in layout.levels:
      file = module_store.module_file(workdir, version, level, layout.grid.module(level, at))
      total.update(recorded[version][f'{level.name}/{file.name}'].encode())
    return total.hexdigest()

  return [source(path, version) for path, version in enumerate(versions)]


def _prepare(programs: Programs, sources: Sequence[str], rows: Rows, folder: pathlib.Path):
  """Removes stale files and leftovers of killed runs; then records the sources of the files, and writes `counts`."""
  prefix = programs.settings.num_unscored_tokens
  indices_sha256 = hashlib.sha256(np.asarray(rows.indices, '<i8').tobytes()).hexdigest()
  about: dict[str, Any] = {'paths': len(sources), 'sequences': len(rows.indices), 'length': rows.length}
  about |= {'prefix_tokens': prefix, 'indices_sha256': indices_sha256}
  folder.mkdir(parents=True, exist_ok=True)
  for leftover in folder.glob('.*'):
    leftover.unlink()
  meta = folder / 'meta.json'
  old = seals.read_json(meta, 'rows', 'sources') if seals.keep_if_whole(meta) else {}
  stale = list(folder.glob('*.npy'))
  if old.get('rows') == about:
    changed = (now != then for now, then in zip(sources, old['sources'], strict=True))
    stale = [nll_file(folder, path) for path, is_other in enumerate(changed) if is_other]
  for file in stale:
    file.unlink(missing_ok=True)
  # After the stale files are gone: a run killed in between removes the rest.
  publishing.write_json(meta, {'rows': about, 'sources': list(sources)})
  for path in range(len(sources)):  # remove damaged files before the processes list the files
    seals.keep_if_whole(nll_file(folder, path))
  if not seals.keep_if_whole(folder / 'counts.npy'):
    with _array_file(folder / 'counts.npy', np.dtype(bool), rows) as f:
      for start in range(0, len(rows.indices), rows.batch_size):
        tokens_BL, segments_BL = map(jnp.asarray, _block(rows, start))
        counts_BL = np.asarray(loss.targets(tokens_BL, segments_BL, prefix)[1]) > 0
        f.write(counts_BL[: len(rows.indices) - start].tobytes())


def _write_turn(programs: Programs, params: Any, turn: Coordinates, rows: Rows, folder: pathlib.Path):
  """Scores all sequences under the paths in flight; batches are read and dispatched ahead of writing."""
  score, placement = program(programs), programs.placement

  def everywhere(x_BL: np.ndarray) -> jax.Array:
    return placement.assemble(x_BL.shape, programs.specs.rows(), lambda position: x_BL)

  def dispatch(start: int) -> tuple[int, jax.Array]:
    return start, score(params, *map(everywhere, _block(rows, start)))

  with contextlib.ExitStack() as stack:
    opened: dict[int, IO[bytes]] = {}
    for start, scores in prefetching.prefetch(dispatch, range(0, len(rows.indices), rows.batch_size)):
      for shard in scores.addressable_shards:
        if shard.replica_id == 0:
          path = placement.path(turn, tuple(s.start or 0 for s in shard.index[: programs.specs.num_axes]))
          if path not in opened:
            opened[path] = stack.enter_context(_array_file(nll_file(folder, path), np.dtype('<f4'), rows))
          nll_BL = np.asarray(shard.data).reshape(-1, rows.length)
          opened[path].write(nll_BL[: len(rows.indices) - start].tobytes())


@functools.lru_cache(8)  # one compilation for a run's programs, however often it scores
def program(programs: Programs):
  """Returns token_losses(params, tokens [m.., B, L], segments) -> nll [m.., B, L], whole on each device of a path."""

  def token_losses(params, tokens, segments):
    params, rows = gather(programs.squeeze(params), programs.specs.dims), programs.squeeze((tokens, segments))
    nll_BL = loss.token_losses(programs.model, params, *rows)
    return programs.expand(jax.lax.all_gather(nll_BL, 'data', tiled=True))

  rows = programs.specs.rows()
  return programs.shard_map(token_losses, (programs.specs.params, rows, rows), P(*programs.layout.grid.names))


def _block(rows: Rows, start: int) -> tuple[np.ndarray, np.ndarray]:
  """Tokens and segment ids [B, L] of a batch; the last one is filled up with padding."""
  block = rows.sequences.read(rows.indices[start : start + rows.batch_size])
  empty = [np.zeros(0, np.int32)] * (rows.batch_size - len(block))
  return packing.pad([x.to_pack for x in block] + empty, rows.length)


@contextlib.contextmanager
def _array_file(file: pathlib.Path, dtype: np.dtype, rows: Rows) -> Iterator[IO[bytes]]:
  """Opens a file to write an [N, L] array to, row by row; it appears when it is complete and on the disk."""
  aside = file.with_name(f'.{file.name}.{os.getpid()}')
  shape = (len(rows.indices), rows.length)
  try:
    with open(aside, 'wb') as f:
      np.lib.format.write_array_header_1_0(f, {'descr': dtype.str, 'fortran_order': False, 'shape': shape})
      yield f
      f.flush()
      os.fsync(f.fileno())
    sha256 = files.digests(aside.parent, [aside.name])[aside.name]
    files.write_file(file.with_name(f'{file.name}.sha256'), seals.line(file.name, sha256))
    os.replace(aside, file)
  finally:
    aside.unlink(missing_ok=True)
  files.sync(file.parent)
