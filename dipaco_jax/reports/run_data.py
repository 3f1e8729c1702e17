"""The data of a run's page, read from its workdir; figures so far if the run is not finished."""

import pathlib
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dipaco_jax.algorithm import grid as grids
from dipaco_jax.algorithm.grid import Grid, Level
from dipaco_jax.config import settings
from dipaco_jax.pipeline import stage, stage_records
from dipaco_jax.reports import amounts, history, module_drift, timeline_plot
from dipaco_jax.reports.history import History
from dipaco_jax.storage import lock, module_store
from dipaco_jax.telemetry import metrics_log

MAX_DRIFT_BYTES = 300e6  # of modules that are read while the run trains
DOING = {'pretrain': 'training its base model', 'train': 'training', 'evaluate': 'being evaluated'}


class Run(NamedTuple):
  workdir: pathlib.Path
  settings: settings.Settings
  grid: Grid
  levels: tuple[Level, ...]
  results: dict[str, dict[str, Any]]  # of complete stages
  report: dict[str, Any]
  history: History
  drifts: list[tuple[module_drift.Storey, module_drift.Drift]]  # empty where no modules are published yet
  tasks: list[timeline_plot.Task]  # of islands
  notice: str  # how far a run that is not finished is; ''


def path_names(grid: Grid) -> list[str]:
  """Returns what paths are called: the names or numbers that commands know them by."""
  return [*map(grid.path_name, range(grid.num_paths))] if grid.num_paths > 1 else ['path']


def kind_of_text(s: settings.Settings) -> str:
  """Returns what the domains of a run's text stand for."""
  return 'owner' if s.routing.method == 'owner' else 'kind of text'


def read_run(workdir: pathlib.Path, report: dict[str, Any], rows: Iterable[dict[str, Any]] | None = None) -> Run:
  """Reads the data of a page; `report` is what report.json holds, `rows` those of a metrics.jsonl that is not there."""
  s, results = stage_records.read_settings(workdir), stage_records.read_results(workdir)
  grid = Grid(s.grid)
  levels = grids.make_levels(grid, s.levels)
  rows = metrics_log.read_rows(workdir) if rows is None else rows
  curves = history.make_curves(rows, grid.num_paths, stage.control_name(s))
  finished, notice = 'evaluate' in results, ''
  if not finished:
    report = with_figures_so_far(workdir, report, s, curves)
    notice = progress_notice(s, results, curves, lock.owner(workdir) is not None)
  drifts = read_drifts(workdir, grid, levels, finished)
  return Run(workdir, s, grid, levels, results, report, curves, drifts, history.read_tasks(workdir), notice)


def read_drifts(workdir: pathlib.Path, grid: Grid, levels: Sequence[Level], finished: bool) -> list:
  """Measures the drift of the last version; while a run trains, [] if modules are large, or being removed."""
  published = module_store.versions(workdir)
  if not published:
    return []
  try:
    files = (workdir / 'modules' / str(published[-1])).glob('*/*.safetensors')
    if finished or sum(file.stat().st_size for file in files) <= MAX_DRIFT_BYTES:
      return module_drift.measure(workdir, published[-1], grid, levels)
  except OSError:
    if finished:
      raise
  return []


def with_figures_so_far(workdir: pathlib.Path, report: dict[str, Any], s: settings.Settings, curves: History) -> dict:
  """Returns the report, with what training has measured so far where the last stages have measured nothing yet."""
  environment = stage_records.read_environment(workdir)
  device = report['device'] or environment.get('device')
  dtype: str | None = s.model.dtype
  if dtype == 'auto':
    dtype = ('float32' if device == 'cpu' else 'bfloat16') if device else None
  so_far = {name: curves.last.get(name) for name in ('perplexity_by_path', 'perplexity_by_domain')}
  so_far |= {f'base_{name}': curves.first.get(name) for name in ('perplexity', 'perplexity_by_domain')}
  so_far |= {'device': device, 'num_devices': environment.get('devices'), 'dtype': dtype}
  measured = {name: value for name, value in report.items() if value is not None or name not in so_far}
  wall_s = report['wall_s'] | stage_records.read_seconds(workdir)
  return report | so_far | measured | {'wall_s': wall_s, 'ended': None}


def progress_notice(s: settings.Settings, results: dict[str, Any], curves: History, is_running: bool) -> str:
  """Describes the progress of an unfinished run, and when this was written."""
  doing = next(name for name in stage.NAMES if name not in results)
  how = f'is still {DOING.get(doing, "at work")}' if is_running else 'is not finished, and no process works on it'
  done = int(max(curves.phases, default=0))
  if doing == 'train':
    how += f': phase {done} of {s.train.phases} is done' if done else f': none of {s.train.phases} phases is done'
  now = amounts.clock_time(time.time())
  return f'This run {how}. Written at {now[:19]} {now[19:]}.'
