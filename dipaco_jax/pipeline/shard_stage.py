"""The second half of the stage `route`: every path gets its shard of the sequences [2.4]."""

import pathlib
import shutil
from collections.abc import Callable

import jax
import numpy as np

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import shards
from dipaco_jax.pipeline import features
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.storage import files, publishing
from dipaco_jax.training import display, processes


def write_shards(run: run_lib.Run, number: int):
  """Writes `shards/<number>/` by the paths in `routing/<number>/`, and removes the parts that those were made from."""
  if processes.is_first():
    shutil.rmtree(parts_folder(run, number), ignore_errors=True)  # here: it may be left by a run that was killed
  _write_shards(run, str(number), run.layout.grid.num_paths, lambda: run.routed('train', number))


def write_base_shards(run: run_lib.Run):
  """Writes `shards/base/`: all text, one shard for each part of it, which are read as one."""

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
  processes.only_first(lambda: _publish_shards(run, done, folder, num_shards), f'sharded {name}')


def deal(run: run_lib.Run, assignment: np.ndarray, num_shards: int) -> shards.Dealt:
  """Deals the training sequences to the paths and hold-outs; marks router data in `assignment` as nobody's."""
  s = run.settings
  assignment[features.router_data(run)] = -1
  fraction, found = s.data.holdout_fraction if s.train.early_stopping else 0.0, run.sequences('train', open_parts=1)
  pieces = features.router_pieces(found, s.routing.router_fraction)
  return shards.deal(found, assignment, num_shards, s.seed, fraction, pieces.end if pieces else 0.0)


def write_shard_parts(
  run: run_lib.Run, folders: list[pathlib.Path], assign: Callable[[], np.ndarray], share: tuple[int, int]
):
  """Writes the shards of share (k, n) that are missing: those of k, k + n, k + 2n, ..."""
  missing = publishing.missing(folders, share)
  if not missing:
    return
  s, found, dealt = run.settings, run.sequences('train', open_parts=1), deal(run, assign(), len(folders))
  progress = display.Progress(f'shards/{folders[0].parent.name.removesuffix("-parts")}', len(missing), 'shards')
  for count, i in enumerate(missing, 1):
    with publishing.publish_directory(folders[i]) as aside:
      shards.write_shard(found, dealt, i, str(aside), s.model.seq_len)
    progress.update(count)
  progress.close()


def _publish_shards(run: run_lib.Run, done: pathlib.Path, folder: pathlib.Path, num_shards: int):
  """Publishes the shards when all parts are there. Raises InputError where a path has no text."""
  meta = shards.merge_meta(str(folder), num_shards, run.settings.model.seq_len)
  empty = [path for path, rows in enumerate(meta['shard_rows']) if not rows]
  if empty and done.name != 'base':
    raise InputError(f'no text was routed to paths {empty}: use a smaller config.grid or more text')
  publishing.write_json(folder / 'meta.json', meta)
  files.put_in_place(folder, done)


def parts_folder(run: run_lib.Run, number: int) -> pathlib.Path:
  """Returns the folder of a round's router and of what it has routed so far."""
  return run.workdir / 'routing' / f'{number}-parts'
