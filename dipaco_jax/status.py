"""Says how far a run is: `python -m dipaco_jax.status --workdir=DIR`; while it runs, on this machine or another."""

import contextlib
import itertools
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from absl import flags

from dipaco_jax.algorithm import averaging_gap
from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.command_line import bucket_copy, command
from dipaco_jax.config import settings
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.pipeline import plan, stage as stage_lib, stage_records
from dipaco_jax.pipeline.stage_records import read_refusal, read_settings, read_stages
from dipaco_jax.processes.display import duration, whose_loss
from dipaco_jax.registry import registry_url
from dipaco_jax.reports import failures, headline, time_table
from dipaco_jax.storage import remedies, seals
from dipaco_jax.storage.lock import owner
from dipaco_jax.telemetry import metrics_log, time_account

AFTER = {'train': ' after phase {phase}', 'pretrain': ' of the base model'}
AFTER |= dict.fromkeys(stage_lib.CONTROLS.values(), ' of the dense control after phase {phase}')


def status(workdir: pathlib.Path) -> str:
  """Returns a few lines on the progress and results of a run. Raises InputError if there is none in workdir."""
  config, complete = read_settings(workdir), read_stages(workdir)
  if (workdir / remedies.OWNERS_MARK).exists():
    published = 'with modules of its paths' if (workdir / 'paths' / 'best.json').exists() else 'of a run that trains'
    return f'{workdir}: the store of an owner, {published}; status of the workdir that all owners share shows its run'
  stage = next((name for name in stage_lib.NAMES if name not in complete), None)
  holder = owner(workdir)
  doing = 'finished'
  if stage:
    number = stage_lib.NAMES.index(stage)
    doing = f'{stage_lib.STAGES[number].doing} (stage {number + 1} of {len(stage_lib.NAMES)})'
  lines = [f'{workdir}: {"" if holder or not stage else "stopped while "}{doing}']
  refused = '' if holder else read_refusal(workdir)
  if refused and stage:
    return '\n'.join(
      [*lines, f'refused: {refused}', 'correct that, and run the command again: what still fits is kept']
    )
  trains, record = stage, stage_records.record_file(workdir, 'evaluate')
  if stage == 'evaluate' and config.evaluate.control and (workdir / stage_lib.CONTROL).exists():
    lines.append('first the dense control:')
    trains = stage_lib.control_name(config)
  metrics, seconds = workdir / 'metrics.jsonl', workdir / time_account.FILE
  if trains in AFTER:
    lines += _part(lambda: _training(workdir, trains, config, holder is not None), metrics)
  lines += _part(lambda: _quality(workdir, complete), *([record] if 'evaluate' in complete else [metrics]))
  lines += _part(lambda: _averaging_gap(workdir, config), metrics) if stage == 'train' else []
  lines += _part(lambda: failures.in_words(failures.read_failures(workdir)), metrics)
  lines += _part(lambda: _checkpoint(workdir, stage), workdir / 'checkpoints')
  lines += _part(lambda: [time_table.in_words(time_account.read(workdir))], seconds)
  if holder:
    lines.append(f'held by process {holder.get("pid", "?")} on {holder.get("host", "?")} since {holder.get("started")}')
  elif stage:
    lines.append('no process is working on it; the command that started it resumes it')
  else:
    lines.append(f'the report: {workdir / "report.html"}')
  return '\n'.join(lines)


def _part(make: Callable[[], list[str]], *files: pathlib.Path) -> list[str]:
  """Returns the lines that `make` makes of files, or one that names them where they hold what no run writes."""
  try:
    with seals.parsing(*files):
      return list(filter(None, make()))
  except seals.Damaged as e:
    return [str(e)]


def of_islands(workdir: str, url: str) -> str:
  """Returns the table of an islands run: tasks, workers, and its result. Raises InputError without a registry."""
  from dipaco_jax.islands import status_table  # SQLAlchemy: for them only
  from dipaco_jax.registry import registry

  file = url.removeprefix('sqlite:///')
  if file != url and not pathlib.Path(file).exists():
    raise InputError(f'--registry={url}: there is no such file; name the registry of a run')
  facts = registry.Registry(url, patience_s=5, reads_only=True)
  with contextlib.closing(facts):
    _check_is_of_run(workdir, facts)
    lines, finished = status_table.lines(facts), facts.facts('finished')
    lines += [*status_table.describe_stop(facts), *_now(facts)] if not finished else []
  for fact in finished:
    outcome, *more = headline.outcome(fact.meta)
    lines = [f'{workdir}: finished, {outcome}', *more, *lines, f'the report: {workdir}/report.html']
  return '\n'.join(lines)


def _check_is_of_run(workdir: str, facts: Any):
  """Raises InputError if a folder has the run of another registry."""
  mark = pathlib.Path(workdir) / remedies.ISLANDS_MARK
  if '://' not in workdir and mark.exists():
    known = [config.meta.get('id') for config in facts.facts('config')]
    if known != [mark.read_text(errors='replace')]:
      raise InputError(registry_url.explain_unknown(workdir))


def find_registry(workdir: str, option: str | None) -> str:
  """Returns the URL of the registry of a run of islands; '' of another run, of one that is finished, or in a bucket.

  Raises InputError if it is not known.
  """
  folder = pathlib.Path(workdir)
  file, has_islands = folder / registry_url.OF_FOLDER, (folder / remedies.ISLANDS_MARK).exists()
  is_of_main = (folder / stage_records.COMMAND).exists() and not has_islands  # even if the environment names a registry
  url = '' if is_of_main and not option else registry_url.given(option)
  if stage_records.record_file(folder, stage_lib.NAMES[-1]).exists():
    return ''
  if not url and file.exists():
    return registry_url.in_folder(folder)
  if not url and has_islands:
    raise InputError(registry_url.explain_unknown(workdir))
  return url


def _now(facts: Any) -> list[str]:
  """Returns lines on what paths wait for, and what replays would cost, in a registry that knows the config."""
  import jax

  from dipaco_jax.islands import audit_history, lineage, members, run_costs, schedule, status_table, wire_status
  from dipaco_jax.pipeline import run
  from dipaco_jax.planning import barriers
  from dipaco_jax.reports import audit_lines
  from dipaco_jax.storage import object_store

  jax.config.update('jax_platforms', 'cpu')  # accelerators are for the roles
  lines: list[str] = []
  for config in facts.facts('config'):
    with contextlib.suppress(InputError):  # of another version of this program, whose table is shown all the same
      own_run = run.unattended(pathlib.Path(os.devnull), settings.of_run(config.meta['config']))
      here = members.make_island(own_run, facts, object_store.open_storage(os.devnull), 'status')
      grid = here.layout.grid
      lines += members.lines(here)
      lines += status_table.time_left(facts, own_run.settings)
      lines += barriers.lines(here.layout, here.shapes)
      lines += [f'waiting for {why}: {_paths(grid, paths)}' for why, paths in schedule.waits(here).items()]
      for (n, s), paths in lineage.costs(here).items():
        again = f'{n} phase{"s" * (n > 1)}{f" (about {duration(s)})" if s else ""} again'
        lines.append(f'without its worker, {again}: {_paths(grid, paths)}')
      lines += wire_status.lines(here)
      found = audit_lines.in_words(audit_history.figures(here))
      lines += [line for line in found if not line.startswith('suspended')]  # the table has those
      lines += [text] if (text := time_table.in_words(run_costs.seconds(here))) else []
  return lines


def _paths(grid: Grid, paths: list[int]) -> str:
  return f'path {", ".join(map(grid.path_name, paths))}'


def _training(workdir: pathlib.Path, stage: str, config: settings.Settings, running: bool) -> list[str]:
  """Returns lines on phase and step, loss and speed, and time to go, from the last rows of metrics.jsonl."""
  rows = itertools.takewhile(lambda row: row['stage'] == stage, metrics_log.rows_backwards(workdir))
  rows_of_steps = list(itertools.islice((row for row in rows if row['kind'] == 'step'), 40))
  if not rows_of_steps:
    return ['no step is made yet' + (': the first compiles' if running else '')]
  last, num_paths = rows_of_steps[0], config.num_paths if stage == 'train' else 1
  is_control = stage in stage_lib.CONTROLS.values()
  steps = _control_steps(config) if is_control else config.train.steps_per_phase
  if stage == 'pretrain':
    done, total = last['step'], config.pretrain.steps
    position = f'step {done:,} of {total:,}'
  else:
    phases, steps_in_all = config.train.phases, config.train.phases * steps
    done, total = last['updates'], steps_in_all * num_paths
    position = f'phase {min(last["phase"] + 1, phases)} of {phases}, step {last["step"]:,} of '
    position += f'{config.pretrain.steps + steps_in_all:,}'
  lines = [f'{position}, {100 * done / total:.0f}% of {"it" if is_control else "this stage"}']
  left, losses = total - done, [loss for loss in last['loss'] if loss is not None]
  loss_name = whose_loss(last['paths'], num_paths, Grid(config.grid).path_name).replace('_', ' ')
  figures = [f'{loss_name} {statistics.mean(losses):.3f}'] if losses else [f'{loss_name} is not a number']
  if last.get('tokens_per_s'):
    figures.append(f'{last["tokens_per_s"]:,.0f} tokens/s')
  pairs = itertools.pairwise(rows_of_steps)
  rates = [(b['time'] - a['time']) / (b['updates'] - a['updates']) for b, a in pairs if b['updates'] > a['updates']]
  rate = statistics.median(rates) if rates else None  # so ends of phases and pauses between two sittings don't count
  if running and rate is not None:  # 0 if rows were written within a tick of the clock
    figures.append(f'about {duration(left * rate)} to go {"with it" if is_control else "in this stage"}')
    if later := plan.later_work(config, stage_lib.CONTROL if is_control else stage):
      figures.append(f'about {duration((left + later * total) * rate)} in the whole run')
  return [*lines, ', '.join(figures) + f' ({duration(time.time() - last["time"])} ago)']


def _control_steps(config: settings.Settings) -> int:
  """Returns the steps of the dense control between two evaluations."""
  from dipaco_jax.config import dense_control  # loads JAX, which `--help` does not need

  return dense_control.steps_per_phase(config)


def _quality(workdir: pathlib.Path, complete: dict[str, Any]) -> list[str]:
  """Returns a line on validation perplexity: the final one, else the last one measured in training."""
  result = complete.get('evaluate', {}).get('result', {})
  if result.get('perplexity') is not None:
    of = [('', ''), ('base_', ', of the base model'), ('control_', f', of {headline.dense(result)}')]
    figures = [
      f'{label} {headline.with_interval(result[f"{name}perplexity"], result.get(f"{name}perplexity_interval"))}'
      for name, label in of
      if result.get(f'{name}perplexity') is not None
    ]
    return [f'validation perplexity{"".join(figures)}']
  so_far: dict[str, str] = {}
  for row in metrics_log.rows_backwards(workdir):
    if row['kind'] == 'evaluation' and row['perplexity'] is not None and row['stage'] not in so_far:
      after = AFTER[row['stage']].format(phase=row['phase'])
      so_far[row['stage']] = f'{row["perplexity"]:.2f}{after}'
    if 'pretrain' in so_far or (row['kind'] == 'step' and row['stage'] == 'pretrain'):
      break  # the base model's last rows have its perplexity
  return [f'validation perplexity {", ".join(so_far.values())}'] if so_far else []


def _averaging_gap(workdir: pathlib.Path, config: settings.Settings) -> list[str]:
  """Returns a line on the averaging gap of the newest phase; none for a run of one path."""
  if config.num_paths < 2:
    return []
  rows = itertools.takewhile(lambda row: row['stage'] == 'train', metrics_log.rows_backwards(workdir))
  newest = next((row for row in rows if row['kind'] == 'phase'), {})
  gap = newest.get('averaging_gap')
  return [] if gap is None else [f'phase {newest["phase"]}, {averaging_gap.describe(gap)}']


def _checkpoint(workdir: pathlib.Path, stage: str | None) -> list[str]:
  """Returns a line on the newest checkpoint of the stage."""
  if stage not in ('pretrain', 'train'):
    return []
  checkpoints = [p for p in (workdir / 'checkpoints' / stage).glob('*') if p.name.isdecimal()]
  if not checkpoints:
    return ['no checkpoint of this stage yet']
  newest = max(checkpoints, key=lambda p: int(p.name))
  return [f'last checkpoint after {int(newest.name):,} updates, {duration(time.time() - newest.stat().st_mtime)} ago']


def main():
  if not flags.FLAGS.workdir:
    raise InputError('name a run with --workdir=DIR')
  place = flags.FLAGS.workdir.rstrip('/') or '/'  # no Path, which would make s3:/ of s3://
  if url := find_registry(place, flags.FLAGS.registry):
    print(printable.text(of_islands(place, url)))
  elif '://' in place:
    with bucket_copy.copied(place) as copy:
      print(printable.text(status(copy).replace(str(copy), place)))
  else:
    print(printable.text(status(pathlib.Path(place))))


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'Workdir of the run: a folder, s3://BUCKET/... or gs://BUCKET/...')
  flags.DEFINE_string('registry', None, 'Registry of an islands run. By default, registry.db in the workdir.')
  command.run(main)
