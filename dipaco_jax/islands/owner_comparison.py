"""What a federation is worth to an owner, from the owner's store alone, after the end of the run.

A model of each path is trained in the store on the owner's own text alone, and compared with the path
(pipeline/own_comparison.py). Neither the registry nor the shared place nor a gateway is used, so nothing leaves.
"""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.islands import owner_store, owner_workdir, roles
from dipaco_jax.pipeline import own_comparison, run as run_lib, stage, stage_records
from dipaco_jax.processes import display, stopping
from dipaco_jax.reports import worth_page
from dipaco_jax.storage import files, lock, object_store, publishing, seals, user_modules
from dipaco_jax.telemetry import metrics_log, performance

TREES = 'stages', 'base', 'sequences', 'routing/0', 'shards/0', 'modules'
RESULT, PAGE, PICTURE = (f'{stage.ALONE}/{name}' for name in ('compare.json', 'compare.html', 'compare.png'))


def compare(store: str, signals: stopping.Signals) -> dict[str, Any]:
  """Trains models of an owner's paths alone, and writes the comparison; returns the content of its JSON file.

  If it was stopped or killed, the next call continues. Raises InputError if there is no store of a finished run;
  Diverged; KeyboardInterrupt after a signal, with everything saved.
  """
  storage = object_store.open_storage(store)
  check(storage)
  local = roles.make_local_place(store)
  with lock.hold(local):
    if storage.local_path('') is None:
      fetch(storage, local)
    part, settings = read_part(local), stage_records.read_settings(local)
    user_modules.check_run(settings, storage.url)
    (local / stage.ALONE).mkdir(exist_ok=True)
    file = local / RESULT
    if not seals.keep_if_whole(file):
      publishing.write_json(file, make_report(local, settings, part, signals))
      for path in part.paths:
        shutil.rmtree(local / own_comparison.folder(path) / 'checkpoints', ignore_errors=True)
    report = seals.read_json(file, 'owner', 'by_path')
    write_pages(local, report)
    if storage.local_path('') is None:
      for name in (RESULT, PAGE, PICTURE):
        storage.write(name, (local / name).read_bytes())
  return report


def check(storage: object_store.Storage):
  """Raises InputError, before any work, unless a place is an owner's store of a finished run."""
  if not storage.exists(owner_store.MARK):
    raise InputError(f"--store={storage.url} is no owner's store: name the --store of the owner's worker")
  if not storage.exists(owner_workdir.POINTERS) or not storage.exists(owner_workdir.PHASES):
    fix = "wait for the end of the run and of the owner's worker"
    raise InputError(f'--store={storage.url} has no model yet: {fix}; an owner who has left a run gets none')


def fetch(storage: object_store.Storage, local: pathlib.Path):
  """Downloads what is compared from a bucket."""
  with display.doing('downloading the store'):
    for tree in TREES:
      storage.download_tree(tree, local / tree)
    result = [RESULT] if storage.exists(RESULT) else []
    for name in ('config.json', owner_workdir.POINTERS, owner_workdir.PHASES, *result):
      (local / name).parent.mkdir(exist_ok=True)
      files.write_file(local / name, storage.fetch(name))


def read_part(local: pathlib.Path) -> owner_workdir.Part:
  """Reads what an owner's store says of the owner's part in its run. Raises seals.Damaged."""
  fields, optional = owner_workdir.Part._fields, owner_workdir.Part._field_defaults
  about = seals.read_json(local / owner_workdir.PHASES, *(name for name in fields if name not in optional))
  return owner_workdir.Part(**{name: about[name] for name in fields if name in about})


def make_report(
  local: pathlib.Path, settings: settings_lib.Settings, part: owner_workdir.Part, signals: stopping.Signals
) -> dict[str, Any]:  # fmt: skip
  """Trains and measures each path of an owner; returns the content of the comparison's JSON file."""
  grid, losses, by_path = Grid(settings.grid), [], {}
  with make_run(local, roles.on_own_devices(settings), signals) as run:
    for number, path in enumerate(part.paths):
      steps = part.steps[number] if part.steps else None
      about = own_comparison.train_alone(run, path, part.first_phase, len(part.paths) - number - 1.0, steps)
      losses.append(own_comparison.measure(run, path))
      by_path[grid.path_name(path)] = {'path': path} | about | own_comparison.summarize(losses[-1])
  report = part._asdict() | {'phases': settings.train.phases, 'by_path': by_path}
  return report | ({'all': own_comparison.summarize(own_comparison.pool(losses))} if len(losses) > 1 else {})


@contextlib.contextmanager
def make_run(
  local: pathlib.Path, settings: settings_lib.Settings, signals: stopping.Signals
) -> Iterator[run_lib.Run]:  # fmt: skip
  """Yields the run of a store, with metrics of the models that are trained alone."""
  events = 'tensorboard' in settings.metrics.sinks
  with (
    metrics_log.Metrics(local / stage.ALONE, events=events) as metrics,
    performance.watch_compilations() as compilations,
  ):
    yield run_lib.Run(local, settings, metrics, compilations, signals.requested, signals.graceful, settings.mesh.data)


def write_pages(local: pathlib.Path, report: dict[str, Any]):
  """Writes the page of a comparison, and its picture."""
  html, png = worth_page.render(report)
  files.write_file(local / PAGE, html)
  files.write_file(local / PICTURE, png)
