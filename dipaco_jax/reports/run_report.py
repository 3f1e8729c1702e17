"""The report of a run: report.json, report.html and plots/*.png, from the files in its workdir."""

import hashlib
import importlib.metadata
import logging
import pathlib
import platform
from collections.abc import Callable, Iterable
from typing import Any

import dipaco_jax
from dipaco_jax.algorithm import grid as grids
from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import time_use
from dipaco_jax.storage import remedies, seals

EVALUATE = (
  'perplexity perplexity_interval perplexity_final perplexity_by_path perplexity_by_domain base_perplexity '
  'base_perplexity_interval base_perplexity_by_path base_perplexity_by_domain control_perplexity '
  'control_perplexity_interval control_perplexity_by_path control_perplexity_by_domain ratio_to_base '
  'ratio_to_base_interval ratio_to_control ratio_to_control_interval as_trained_perplexity ratio_to_as_trained '
  'ratio_to_as_trained_interval router_refit control_budget control_steps control_tokens control_flops '
  'control_bits_per_byte ratio_to_base_by_domain ratio_to_base_interval_by_domain ratio_to_base_by_path '
  'ratio_to_base_interval_by_path ratio_to_control_by_domain ratio_to_control_interval_by_domain '
  'ratio_to_control_by_path ratio_to_control_interval_by_path validation_documents validation_documents_by_domain '
  'validation_documents_by_path validation_tokens validation_tokens_by_domain validation_tokens_by_path '
  'bits_per_byte base_bits_per_byte reroute perplexity_by_answer base_perplexity_by_answer'
).split()
TRAIN = (
  'phases steps highest_learning_rate train_tokens paths parameters_path parameters_total train_flops tokens_per_s '
  'model_flops_utilization step_s outer_s outer_fraction outer_bytes_per_phase synchronous_bytes_per_phase '
  'peak_memory_bytes compilations seconds seconds_by_path modules_sha256 island_bytes island_bytes_by_phase '
  'island_mbits diloco_bytes_per_phase goodput_over_time replay_s epochs_by_path device num_devices dtype'
).split()
OF_SOME = ('audits', 'suspended', 'replay', 'steps_by_path')  # of islands with these, or with timed phases
TOKENIZE = {  # names in report.json, and in the record of tokenizing
  'text_documents': 'documents',
  'text_tokens': 'tokens',
  'dropped_documents': 'dropped_documents',
  'dropped_sequences': 'dropped_sequences',
  'dropped_tokens': 'dropped_tokens',
  'copies_of_validation': 'copies_of_validation',
  'skipped_records': 'skipped_records',
}
RELOAD_S = 60  # between reloads of the page of a run that is running
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')


def make_report(workdir: str | pathlib.Path) -> dict[str, Any]:
  """Returns what report.json holds: figures as measured, None if the stage that measures them is not complete.

  Raises InputError if there is no run in workdir, or none of its stages is complete.
  """
  from dipaco_jax.pipeline import epochs, stage_records
  from dipaco_jax.reports import amounts
  from dipaco_jax.telemetry import time_account

  workdir = pathlib.Path(workdir)
  s, stages = stage_records.read_settings(workdir), stage_records.read_stages(workdir)
  if not stages:
    raise InputError(f'--workdir={workdir}: no stage of this run is complete yet; run status on it, and report later')
  results = stage_records.read_results(workdir)
  pretrain, route, train, evaluate = (results.get(name, {}) for name in ('pretrain', 'route', 'train', 'evaluate'))
  report = {name: evaluate.get(name) for name in EVALUATE} | {name: train.get(name) for name in TRAIN}
  report['seconds'] = report['seconds'] or time_account.read(workdir) or None
  return (
    report
    | _costs(report, pretrain)
    | _failures(workdir)
    | {name: train[name] for name in OF_SOME if name in train}
    | {'paths': grids.Grid(s.grid).num_paths}
    | _text(results.get('tokenize', {}))
    | {'pretrain_steps': pretrain.get('steps'), 'pretrain_tokens': pretrain.get('tokens')}
    | epochs.read(workdir, s, results, report['control_steps'])
    | {
      'shard_tokens': route.get('shard_tokens'),
      'bytes_per_token': amounts.bytes_per_token(report['perplexity'], report['bits_per_byte']),
      'domain_nmi': route.get('domain_nmi'),
      'router_accuracy': route.get('calibrated_accuracy', route.get('accuracy')),
      'wall_s': _wall_s(stages),
      'goodput': time_use.goodput((report['seconds'] or {}).get('train', {})),
      **_clock_times([stage for stage in stages.values() if 'ended' in stage]),
      'config_sha256': settings.digest(s),
      'versions': versions(),
    }
  )


def _failures(workdir: pathlib.Path) -> dict[str, Any]:
  """Returns excluded paths, numbers of skipped steps, and the averaging gap of each phase."""
  from dipaco_jax.reports import failures
  from dipaco_jax.telemetry import metrics_log

  failed = failures.read_failures(workdir)
  rows = metrics_log.read_rows(workdir, b'"averaging_gap": ')
  return {
    'excluded': failed.excluded,
    'skipped_steps': sum(failed.skipped.values()),
    'averaging_gap_by_phase': [row['averaging_gap'] for row in rows if row['stage'] == 'train'],
  }


def _text(tokenized: dict[str, Any]) -> dict[str, Any]:
  """Returns the figures of the text, known after the stage `tokenize`."""
  return {'held_back': tokenized.get('held_back'), 'text_by_domain': tokenized.get('by_domain')} | {
    name: tokenized.get(key) for name, key in TOKENIZE.items()
  }


def _clock_times(timed: list[dict[str, Any]]) -> dict[str, str | None]:
  """Returns when the first of the stages began and the last one ended; None if there is none."""
  from dipaco_jax.reports import amounts

  if not timed:
    return {'began': None, 'ended': None}
  return {
    'began': amounts.clock_time(min(stage['ended'] - stage['wall_s'] for stage in timed)),
    'ended': amounts.clock_time(max(stage['ended'] for stage in timed)),
  }


def _costs(report: dict[str, Any], pretrain: dict[str, Any]) -> dict[str, Any]:
  """Returns tokens and FLOPs of the paths and the base, and the FLOPs of serving a token."""
  tokens, base = report['train_tokens'], pretrain.get('tokens')
  per_token = report['train_flops'] / tokens if report['train_flops'] and tokens else None
  costs: dict[str, Any] = {
    'paths_tokens': tokens - base if tokens and base is not None else None,
    'paths_flops': None, 'pretrain_flops': None, 'serve_flops_per_token': None,
  }  # fmt: skip
  if per_token:
    costs['pretrain_flops'] = None if base is None else per_token * base
    costs['paths_flops'] = None if costs['paths_tokens'] is None else per_token * costs['paths_tokens']
    costs['serve_flops_per_token'] = per_token / 3  # the forward pass
  return costs


def _wall_s(stages: dict[str, dict[str, Any]]) -> dict[str, float]:
  """Returns seconds by stage, with those of the dense control, which the stage `evaluate` trains, by themselves."""
  wall_s = {name: stage['wall_s'] for name, stage in stages.items()}
  control_s = stages.get('evaluate', {}).get('result', {}).get('control_s')
  if control_s is not None:
    wall_s |= {'control': control_s, 'evaluate': max(0.0, wall_s['evaluate'] - control_s)}
  return wall_s


def versions() -> dict[str, str]:
  """Returns the versions of Python, this package and the libraries that compute."""
  versions = {'python': platform.python_version(), 'dipaco_jax': dipaco_jax.__version__}
  return versions | {name.removesuffix('-checkpoint'): importlib.metadata.version(name) for name in PACKAGES}


def source_digest() -> str:
  """Returns the sha256 of this package's source: of the names and contents of its Python files, without the configs."""
  package, digest = pathlib.Path(dipaco_jax.__file__).parent, hashlib.sha256()
  for file in sorted(package.rglob('*.py')):
    name = file.relative_to(package).as_posix()
    if not name.startswith('configs/'):  # these count by the fields that they set
      digest.update(f'{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n'.encode())
  return digest.hexdigest()


def write(workdir: str | pathlib.Path, note_time: Callable[[bool], None] = lambda is_last: None) -> dict[str, Any]:
  """Writes report.json, report.html and plots/*.png into the workdir; returns what report.json holds.

  `note_time` notes the seconds up to now in the workdir; its argument says whether for the last time.
  """
  from dipaco_jax.reports import figures, plot_style, report_page, run_data
  from dipaco_jax.storage import files, publishing

  workdir = pathlib.Path(workdir)
  note_time(False)
  report = make_report(workdir)
  publishing.write_json(workdir / 'report.json', report)
  run = run_data.read_run(workdir, report)
  _check_artefacts(run)
  pictures = figures.draw_all(run)
  for name, picture in pictures.items():
    with plot_style.left_out(name):
      files.write_file(workdir / 'plots' / f'{name}.png', plot_style.to_png(picture.figure))
  files.write_file(workdir / 'report.html', report_page.render(run, pictures))
  note_time(True)
  report = make_report(workdir)  # with the seconds that drawing took
  publishing.write_json(workdir / 'report.json', report)
  return report


def _check_artefacts(run):
  """Warns of files that the page lacks. Raises seals.Damaged if paths/best.json is missing."""
  from dipaco_jax.routing import chunk_losses

  phases, best = run.report['phases'] or 0, run.workdir / 'paths' / 'best.json'
  if phases and not best.exists():
    raise seals.Damaged(best)
  excerpts, has_axes = run.workdir / chunk_losses.FILE, any(level.axes for level in run.levels)
  if 'evaluate' in run.results and has_axes and not excerpts.exists():
    logging.warning('%s', remedies.explain(excerpts))
  if gaps := {*range(1, phases + 1)} - {*run.history.phases.tolist()}:
    logging.warning('%s has no rows of %d phases: the curves have gaps', run.workdir / 'metrics.jsonl', len(gaps))


def page_so_far(workdir: pathlib.Path, rows: Iterable[dict[str, Any]] | None = None, tasks: list | None = None) -> str:
  """Returns the page of a run that is not finished; raises as `make_report`.

  The page reloads itself, until the final one takes its place. `rows` and `tasks` are what metrics.jsonl and
  timeline.json would hold, for a workdir without them; the page then says that the run is running.
  """
  from dipaco_jax.reports import figures, report_page, run_data

  run = run_data.read_run(workdir, make_report(workdir), rows)
  if rows is not None:
    notice = run_data.progress_notice(run.settings, run.results, run.history, True)
    run = run._replace(notice=notice, tasks=tasks or [])
  return report_page.render(run, figures.draw_all(run), RELOAD_S)
