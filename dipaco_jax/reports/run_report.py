"""The report of a run: report.json, report.html and plots/*.png, from what is in its workdir."""

import contextlib
import datetime
import importlib.metadata
import logging
import pathlib
import platform
import time
from collections.abc import Iterable, Sequence
from typing import Any

import dipaco_jax
from dipaco_jax.core import grid as grids
from dipaco_jax.core import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.pipeline import stage
from dipaco_jax.storage import remedies, seals

EVALUATE = (
  'perplexity perplexity_interval perplexity_final perplexity_by_path perplexity_by_domain base_perplexity '
  'base_perplexity_interval base_perplexity_by_path base_perplexity_by_domain control_perplexity '
  'control_perplexity_interval control_perplexity_by_path control_perplexity_by_domain ratio_to_base '
  'ratio_to_base_interval ratio_to_control ratio_to_control_interval control_tokens validation_documents '
  'validation_tokens validation_tokens_by_path bits_per_byte base_bits_per_byte reroute mixture'
).split()
TRAIN = (
  'phases steps train_tokens paths parameters_path parameters_total train_flops tokens_per_s model_flops_utilization '
  'step_s outer_s outer_fraction outer_bytes_per_phase synchronous_bytes_per_phase peak_memory_bytes compilations '
  'goodput modules_sha256 island_bytes device num_devices dtype'
).split()
DRIFT_BYTES = 300e6  # of modules, that are read while the run trains
ENVIRONMENT = {'device': 'device', 'num_devices': 'devices'}  # by its name in environment.json
DOING = {'pretrain': 'training its base model', 'train': 'training', 'evaluate': 'being evaluated'}
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')


def build(workdir: str | pathlib.Path) -> dict[str, Any]:
  """What report.json holds: figures as measured, None where a stage that measures them is not complete.

  Raises:
    InputError: there is no run in workdir, or none of its stages is complete.
  """
  from dipaco_jax.core import averaging_gap
  from dipaco_jax.pipeline import stage_records
  from dipaco_jax.reports import failures
  from dipaco_jax.training import metrics_log

  workdir = pathlib.Path(workdir)
  s, stages = stage_records.read_settings(workdir), stage_records.read_stages(workdir)
  if not stages:
    raise InputError(f'--workdir={workdir}: no stage of this run is complete yet; run status on it, and report later')
  results = stage_records.read_results(workdir)
  pretrain, route, train, evaluate = (results.get(name, {}) for name in ('pretrain', 'route', 'train', 'evaluate'))
  timed = [stage for stage in stages.values() if 'ended' in stage]
  report = {name: evaluate.get(name) for name in EVALUATE} | {name: train.get(name) for name in TRAIN}
  failed = failures.read(workdir)
  return report | {
    'excluded': failed.excluded,
    'skipped_steps': sum(failed.skipped.values()),
    'averaging_gap_by_phase': [
      row['averaging_gap'] for row in metrics_log.rows_with(workdir, averaging_gap.MARK) if row['stage'] == 'train'
    ],
    'paths': grids.Grid(s.grid).num_paths,
    'held_back': results.get('tokenize', {}).get('held_back'),
    'pretrain_steps': pretrain.get('steps'),
    'pretrain_tokens': pretrain.get('tokens'),
    'domain_nmi': route.get('domain_nmi'),
    'router_accuracy': route.get('calibrated_accuracy', route.get('accuracy')),
    'wall_s': _wall_s(stages),
    'began': _when(min((stage['ended'] - stage['wall_s'] for stage in timed), default=None)),
    'ended': _when(max((stage['ended'] for stage in timed), default=None)),
    'config_sha256': settings.digest(s),
    'versions': versions(),
  }


def _wall_s(stages: dict[str, dict[str, Any]]) -> dict[str, float]:
  """Seconds by stage; those of the dense control, which is trained before it is evaluated, by themselves."""
  found = {name: stage['wall_s'] for name, stage in stages.items()}
  control_s = stages.get('evaluate', {}).get('result', {}).get('control_s')
  if control_s is not None:
    found |= {'control': control_s, 'evaluate': max(0.0, found['evaluate'] - control_s)}
  return found


def versions() -> dict[str, str]:
  """Of what computes: Python, this package and the libraries under it."""
  found = {'python': platform.python_version(), 'dipaco_jax': dipaco_jax.__version__}
  return found | {name.removesuffix('-checkpoint'): importlib.metadata.version(name) for name in PACKAGES}


def _when(unix_s: float | None) -> str | None:
  """A time as ISO 8601 has it, to the second, with the offset of this machine's clock."""
  return None if unix_s is None else datetime.datetime.fromtimestamp(unix_s).astimezone().isoformat(' ', 'seconds')


def write(workdir: str | pathlib.Path) -> dict[str, Any]:
  """Writes report.json, report.html and plots/*.png into the workdir; returns what report.json holds."""
  from dipaco_jax.reports import figures, plot_style, report_page
  from dipaco_jax.routing import chunk_losses
  from dipaco_jax.storage import files, publishing

  workdir = pathlib.Path(workdir)
  report = build(workdir)
  publishing.write_json(workdir / 'report.json', report)
  run, best = read_run(workdir, report), workdir / 'paths' / 'best.json'
  if report['phases'] and not best.exists():
    raise seals.Damaged(best)
  if (
    'evaluate' in run.results and any(level.axes for level in run.levels) and not (workdir / chunk_losses.FILE).exists()
  ):
    logging.warning('%s', remedies.explain(workdir / chunk_losses.FILE))
  if gaps := {*range(1, (report['phases'] or 0) + 1)} - {*run.history.phases.tolist()}:
    logging.warning('%s has no rows of %d phases: the curves have gaps', workdir / 'metrics.jsonl', len(gaps))
  found = figures.make(run)
  for name, picture in found.items():
    with plot_style.left_out(name):
      files.write_file(workdir / 'plots' / f'{name}.png', plot_style.to_png(picture.figure))
  files.write_file(workdir / 'report.html', report_page.make(run, found))
  return report


def page_so_far(workdir: pathlib.Path, rows: Iterable[dict[str, Any]] | None = None, tasks: list | None = None) -> str:
  """The page of a run that is not finished.

  Args:
    rows, tasks: of metrics.jsonl and timeline.json, where they are not in the workdir; then somebody works on it.

  Raises:
    InputError: as `build`.
  """
  from dipaco_jax.reports import figures, report_page

  run = read_run(workdir, build(workdir), rows)
  if rows is not None:
    run = run._replace(notice=unfinished(run.settings, run.results, run.history, True), tasks=tasks or [])
  return report_page.make(run, figures.make(run))


def read_run(workdir: pathlib.Path, report: dict[str, Any], rows: Iterable[dict[str, Any]] | None = None):
  """What the page is made from; of a run that is not finished, with the figures that there are so far."""
  from dipaco_jax.pipeline import stage_records
  from dipaco_jax.reports import figures, history
  from dipaco_jax.storage import lock
  from dipaco_jax.training import metrics_log

  s = stage_records.read_settings(workdir)
  grid = grids.Grid(s.grid)
  levels = grids.make_levels(grid, s.levels)
  results = stage_records.read_results(workdir)
  curves = history.of_rows(metrics_log.read_rows(workdir) if rows is None else rows, grid.num_paths)
  finished, notice = 'evaluate' in results, ''
  if not finished:
    report = so_far(workdir, report, curves)
    notice = unfinished(s, results, curves, lock.owner(workdir) is not None)
  drifts = read_drifts(workdir, grid, levels, finished)
  return figures.Run(workdir, s, grid, levels, results, report, curves, drifts, history.read_tasks(workdir), notice)


def read_drifts(workdir: pathlib.Path, grid: grids.Grid, levels: Sequence[grids.Level], finished: bool) -> list:
  """Of the last version; while a run trains, where it is not much to read, and not just being collected."""
  from dipaco_jax.reports import module_drift
  from dipaco_jax.storage import module_store

  published = module_store.versions(workdir)
  if not published:
    return []
  if finished:
    return module_drift.measure(workdir, published[-1], grid, levels)
  newest = (workdir / 'modules' / str(published[-1])).glob('*/*.safetensors')
  with contextlib.suppress(OSError):
    if sum(file.stat().st_size for file in newest) <= DRIFT_BYTES:
      return module_drift.measure(workdir, published[-1], grid, levels)
  return []


def so_far(workdir: pathlib.Path, report: dict[str, Any], curves) -> dict[str, Any]:
  """The report with what training has measured until now, where the stage that measures it in the end is not done."""
  from dipaco_jax.pipeline import stage_records

  found = {name: curves.last.get(name) for name in ('perplexity_by_path', 'perplexity_by_domain')}
  found['base_perplexity'] = curves.first.get('perplexity')
  found['base_perplexity_by_domain'] = curves.first.get('perplexity_by_domain')
  report = report | {name: value for name, value in found.items() if report.get(name) is None}
  environment = stage_records.read_environment(workdir)
  report |= {name: report[name] or environment.get(as_) for name, as_ in ENVIRONMENT.items()}
  dtype = stage_records.read_settings(workdir).model.dtype
  if dtype == 'auto' and report['device']:
    dtype = 'float32' if report['device'] == 'cpu' else 'bfloat16'
  report['dtype'] = report['dtype'] or (dtype if dtype != 'auto' else None)
  return report | {'wall_s': report['wall_s'] | stage_records.read_seconds(workdir), 'ended': None}


def unfinished(s: settings.Settings, results: dict[str, Any], curves, is_running: bool) -> str:
  """How far a run is, and when this was written."""
  doing = next(name for name in stage.NAMES if name not in results)
  how = f'is still {DOING.get(doing, "at work")}' if is_running else 'is not finished, and no process works on it'
  done = int(max(curves.phases, default=0))
  if doing == 'train':
    how += f': {f"phase {done}" if done else "none"} of {s.train.phases}{"" if done else " phases"} is done'
  now = _when(time.time()) or ''
  return f'This run {how}. Written at {now[:19]} {now[19:]}.'
