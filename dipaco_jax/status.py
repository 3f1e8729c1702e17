"""Says how far a run is: `python -m dipaco_jax.status --workdir=DIR`; while it runs, on this machine or another."""

import contextlib
import itertools
import math
import mmap
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

from absl import flags

from dipaco_jax.command_line import command
from dipaco_jax.core import averaging_gap, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.islands import registry_url
from dipaco_jax.pipeline import corrections
from dipaco_jax.pipeline import stage as stage_lib
from dipaco_jax.pipeline.stage_records import read_settings, read_stages
from dipaco_jax.reports import failures, headline
from dipaco_jax.storage.lock import owner
from dipaco_jax.training import metrics_log
from dipaco_jax.training.display import duration, whose_loss

CONTROL = 'control'  # the dense control, trained before it is evaluated: its folder, and the stage of its rows
AFTER = {
  'train': ' after phase {phase}',
  'pretrain': ' of the base model',
  CONTROL: ' of the dense control after phase {phase}',
}
REGISTRY = 'registry.db'


def status(workdir: pathlib.Path) -> str:
  """Returns a few lines on what a run does, and how well.

  Raises:
    InputError: there is no run in workdir.
  """
  config, complete = read_settings(workdir), read_stages(workdir)
  stage = next((name for name in stage_lib.NAMES if name not in complete), None)
  holder = owner(workdir)
  lines = [f'{workdir}: {_doing(stage, holder)}']
  refused = '' if holder else corrections.words(workdir)
  if refused and stage:
    return '\n'.join([*lines, f'refused: {refused}', 'mend that, and run the command again: what fits is kept'])
  if stage in ('pretrain', 'train'):
    lines += _training(workdir, stage, config, holder is not None)
  elif stage == 'evaluate' and config.evaluate.control and (workdir / CONTROL).exists():
    lines += ['first the dense control:', *_training(workdir, CONTROL, config, holder is not None)]
  lines += _quality(workdir, complete) + (_averaging_gap(workdir, config) if stage == 'train' else [])
  lines += failures.in_words(failures.read_failures(workdir)) + _checkpoint(workdir, stage)
  if holder:
    lines.append(f'held by process {holder.get("pid", "?")} on {holder.get("host", "?")} since {holder.get("started")}')
  elif stage:
    lines.append('no process is working on it; the command that started it goes on from here')
  else:
    lines.append(f'the report: {workdir / "report.html"}')
  return '\n'.join(lines)


def of_islands(workdir: str, url: str) -> str:
  """Returns the table of an islands run: its tasks, its workers, and, when it is finished, its result.

  Raises:
    InputError: there is no registry.
  """
  from dipaco_jax.islands import registry, status_table  # SQLAlchemy: for them only

  file = url.removeprefix('sqlite:///')
  if file != url and not pathlib.Path(file).exists():
    raise InputError(f'--registry={url}: there is no such file; name the registry of a run')
  facts = registry.Registry(url, patience_s=5)
  with contextlib.closing(facts):
    lines, finished = status_table.lines(facts), facts.facts('finished')
  for fact in finished:
    words, *more = headline.outcome(fact.meta)
    lines = [f'{workdir}: finished, {words}', *more, *lines, f'the report: {workdir}/report.html']
  return '\n'.join(lines)


def _doing(stage: str | None, holder: dict[str, Any] | None) -> str:
  if stage is None:
    return 'finished'
  number = stage_lib.NAMES.index(stage)
  words = f'{stage_lib.STAGES[number].doing} (stage {number + 1} of {len(stage_lib.NAMES)})'
  return words if holder else f'stopped while {words}'


def _training(workdir: pathlib.Path, stage: str, config: settings.Settings, running: bool) -> list[str]:
  """Returns lines on phase and step, loss and speed, and time to go, from the last rows of metrics.jsonl."""
  steps: list[dict[str, Any]] = []
  for row in rows_backwards(workdir):
    if row['stage'] != stage or len(steps) == 40:
      break
    if row['kind'] == 'step':
      steps.append(row)
  if not steps:
    return ['no step is made yet' + (': the first compiles' if running else '')]
  last = steps[0]
  if stage == 'pretrain':
    position, left = f'step {last["step"]:,} of {config.pretrain.steps:,}', config.pretrain.steps - last['step']
    share = last['step'] / config.pretrain.steps
  else:
    phases, tau = config.train.phases, config.train.steps_per_phase
    updates = phases * tau * (math.prod(size for _, size in config.grid) if stage == 'train' else 1)
    position = f'phase {min(last["phase"] + 1, phases)} of {phases}, step {last["step"]:,} of '
    position += f'{config.pretrain.steps + phases * tau:,}'
    left, share = updates - last['updates'], last['updates'] / updates
  lines = [f'{position}, {100 * share:.0f}% of {"it" if stage == CONTROL else "this stage"}']
  losses = [loss for loss in last['loss'] if loss is not None]
  whose = whose_loss(last['paths'], math.prod(size for _, size in config.grid) if stage == 'train' else 1)
  words = whose.replace('_', ' ')
  figures = [f'{words} {statistics.mean(losses):.3f}'] if losses else [f'{words} is not a number']
  if last.get('tokens_per_s'):
    figures.append(f'{last["tokens_per_s"]:,.0f} tokens/s')
  rate = _seconds_per_update(steps)
  if running and rate is not None:  # 0 if rows were written within a tick of the clock
    figures.append(f'about {duration(left * rate)} to go {"with it" if stage == CONTROL else "in this stage"}')
  return [*lines, ', '.join(figures) + f' ({duration(time.time() - last["time"])} ago)']


def _seconds_per_update(steps: list[dict[str, Any]]) -> float | None:
  """Returns a median, so that ends of phases and pauses between two sittings don't count; `steps` are newest first."""
  pairs = itertools.pairwise(steps)
  rates = [(b['time'] - a['time']) / (b['updates'] - a['updates']) for b, a in pairs if b['updates'] > a['updates']]
  return statistics.median(rates) if rates else None


def _quality(workdir: pathlib.Path, complete: dict[str, Any]) -> list[str]:
  """Returns a line on validation perplexity: the final one, else the last one measured in training."""
  result = complete.get('evaluate', {}).get('result', {})
  if result.get('perplexity') is not None:
    of = [('', ''), ('base_', ', of the base model'), ('control_', f', of {headline.DENSE}')]
    found = [
      f'{words} {headline.with_interval(result[f"{name}perplexity"], result.get(f"{name}perplexity_interval"))}'
      for name, words in of
      if result.get(f'{name}perplexity') is not None
    ]
    return [f'validation perplexity{"".join(found)}']
  so_far: dict[str, str] = {}
  for row in rows_backwards(workdir):
    if row['kind'] == 'evaluation' and row['perplexity'] is not None and row['stage'] not in so_far:
      after = AFTER[row['stage']].format(phase=row['phase'])
      so_far[row['stage']] = f'{row["perplexity"]:.2f}{after}'
    if 'pretrain' in so_far or (row['kind'] == 'step' and row['stage'] == 'pretrain'):
      break  # the base model's last rows have its perplexity
  return [f'validation perplexity {", ".join(so_far.values())}'] if so_far else []


def _averaging_gap(workdir: pathlib.Path, config: settings.Settings) -> list[str]:
  """Returns a line on the averaging gap of the newest phase; none for a run of one path."""
  if math.prod(size for _, size in config.grid) < 2:
    return []
  rows = itertools.takewhile(lambda row: row['stage'] == 'train', rows_backwards(workdir))
  newest = next((row for row in rows if row['kind'] == 'phase'), {})
  gap = newest.get('averaging_gap')
  return [] if gap is None else [f'phase {newest["phase"]}, {averaging_gap.describe(gap)}']


def _checkpoint(workdir: pathlib.Path, stage: str | None) -> list[str]:
  """Returns a line on the newest checkpoint of the stage."""
  if stage not in ('pretrain', 'train'):
    return []
  found = [p for p in (workdir / 'checkpoints' / stage).glob('*') if p.name.isdigit()]
  if not found:
    return ['no checkpoint of this stage yet']
  newest = max(found, key=lambda p: int(p.name))
  return [f'last checkpoint after {int(newest.name):,} updates, {duration(time.time() - newest.stat().st_mtime)} ago']


def rows_backwards(workdir: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields rows of metrics.jsonl, newest first: the file may be long, and its last line half written."""
  file = workdir / 'metrics.jsonl'
  if not file.exists() or not file.stat().st_size:
    return
  with open(file, 'rb') as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as text:
    end = len(text)
    while end > 0:
      start = text.rfind(b'\n', 0, end) + 1
      if row := metrics_log.from_line(text[start:end]):  # else the line is empty, torn or damaged
        yield row
      end = start - 1


def main():
  if not flags.FLAGS.workdir:
    raise InputError('name a run with --workdir=DIR')
  workdir = pathlib.Path(flags.FLAGS.workdir)
  file = workdir / REGISTRY
  is_of_main = (workdir / 'command.txt').exists()  # even if the environment names a registry
  named = '' if is_of_main and not flags.FLAGS.registry else registry_url.given(flags.FLAGS.registry)
  url = named or (f'sqlite:///{file.absolute()}' if file.exists() else '')
  if '://' in flags.FLAGS.workdir and not url:
    raise InputError(f'--workdir={flags.FLAGS.workdir}: name its --registry, which knows where a run in a bucket is')
  if url and not (workdir / 'report.json').exists():
    print(of_islands(flags.FLAGS.workdir.rstrip('/'), url))  # a Path would make s3:/ of s3://
  else:
    print(status(workdir))


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'The run.')
  flags.DEFINE_string('registry', None, 'The registry of an islands run; by default registry.db in the workdir.')
  command.run(main)
