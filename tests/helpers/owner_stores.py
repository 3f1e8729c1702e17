"""The store of an owner after the end of a run, without a run: the path's modules are the base, moved at random."""

import pathlib

import numpy as np
import one_process
import owners_run

from dipaco_jax.algorithm import modules
from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.config import owners, settings as settings_lib
from dipaco_jax.data import corpus, equality, source
from dipaco_jax.islands import owner_store, owner_workdir
from dipaco_jax.pipeline import own_text_stage, run as run_lib, stages
from dipaco_jax.storage import publishing
from dipaco_jax.training import module_publishing

OWNER = 'court'
LEVELS = (('shared', 'embed|final', ()), ('own', 'block_0', ('owner',)))


def keep(folder: pathlib.Path, **sections) -> run_lib.Run:
  """The texts of all, and the public stages, on one device."""
  owners_run.write_text(folder)
  values = owners_run.settings(folder, **sections).to_dict()
  small = {'levels': LEVELS, 'model': values['model'] | {'num_layers': 1}}
  run = run_lib.unattended(folder / 'keeper', settings_lib.from_dict(values | small))
  run.workdir.mkdir()
  stages.run_all(run, 'pretrain')
  return run


def make(folder: pathlib.Path, keeper: run_lib.Run, s: settings_lib.Settings | None = None, first_phase: int = 0):
  """The owner's store in a folder that is made."""
  folder.mkdir()
  one_process.copy(keeper.workdir, folder, 'base', 'stages', 'tokenizer.model', 'tokenizer.model.sha256')
  run = run_lib.unattended(folder, s or keeper.settings)
  held = equality.HeldText(corpus.read_held_text(source.settings_of(keeper.settings), fraction=1.0))
  globs = (str(owners_run.own_file(keeper.workdir.parent, OWNER)),)
  own_text_stage.make(run, own_text_stage.Text(OWNER, globs, held))
  paths = owners.paths_of(Grid(run.settings.grid), OWNER)
  publish_modules(run, paths)
  publishing.write_json(folder / 'config.json', settings_lib.recorded(run.settings))
  publishing.write_json(folder / owner_store.MARK, {'owner': OWNER, 'run': 'a1'})
  about = {'owner': OWNER, 'paths': paths, 'first_phase': first_phase}
  publishing.write_json(folder / owner_workdir.PHASES, about)
  best = {'version': [run.settings.train.phases] * run.settings.num_paths, 'holdout_loss': [None]}
  publishing.write_json(folder / owner_workdir.POINTERS, best)
  return run


def publish_modules(run: run_lib.Run, paths: list[int]):
  """Publishes the modules that an owner's paths go through, in the last version."""
  layout: modules.Layout = run.layout
  base, rng = run.base(), np.random.default_rng(0)
  moved = {name: (x + 0.01 * rng.standard_normal(x.shape)).astype(x.dtype) for name, x in base.items()}
  points = [layout.grid.coordinates(path) for path in paths]
  places = {(level, layout.grid.module(level, at)) for at in points for level in layout.levels}
  of = [(level, at, {name: moved[name] for name in layout.names(level)}) for level, at in sorted(places, key=str)]
  (run.workdir / 'paths').mkdir()
  module_publishing.publish_module_files(run.workdir, run.settings.train.phases, of)
