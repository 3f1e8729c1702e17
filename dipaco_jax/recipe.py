"""Finds how often paths should exchange, how, and at what learning rate, by short copies of a run.

    python -m dipaco_jax.recipe --config=configs/text.py --workdir=runs/recipe --config.data.train='books/*.txt'

A short copy has a part of the config's steps, the base's and the paths' alike, and a whole cosine: it shows what a
large step costs at once and gains later. One base is trained for all copies, in folders of their own inside --workdir.
Candidates come one after another, each with the best changes so far: the config as it is, plain averages in place of
its outer step, averages by row (outer.py), shorter phases, a third of the paths' learning rate; and at the end the base
trained on as one dense path. They are judged by the loss on the paths' hold-outs after the last outer step, weighted by
their shards' tokens. Prints the options that did best. The same command again goes on.
"""

import dataclasses
import math
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from dipaco_jax.command_line import command, config_file
from dipaco_jax.core import averaging_gap, extension, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.training import stopping

PHASES, SHARE = 4, 0.05  # a copy has at least so many phases, and such a part of the config's
TOLERANCE = 0.01  # nats a token that longer phases may cost, for the exchanges that they save
FIRST = 'the-config'
SHORTER = (4, 16)  # times shorter than the config's phases
PLAIN = {'outer.optimizer': 'sgd', 'outer.learning_rate': 1.0, 'outer.rescale': False, 'outer.row_weights': False}
BY_ROW = {'outer.row_weights': True}
ALONE = PLAIN | {'grid': {}, 'levels': (('all', '.*', ()),), 'routing.method': 'single', 'routing.top_n': 1}
ALONE |= {'train.paths_per_phase': 0, 'train.learning_rate': 0.0, 'outer.lost': 0.0}
ALONE |= {'routing.arrange': 'none', 'routing.capacity': 0.0}
# Nothing but training, and one validation at the end, which cannot be left out.
BARE: dict[str, Any] = {'evaluate.control': False, 'evaluate.matrix': False, 'evaluate.reroute_every': ()}
BARE |= {'evaluate.every_phases': 0, 'evaluate.chunk_router_steps': 0, 'evaluate.mixture': 0}
BARE |= {'evaluate.refit_router': False}


class Outcome(NamedTuple):
  name: str
  changes: dict[str, Any]  # fields of the config
  loss: float  # nats a token, on hold-outs after the last outer step; inf where it diverged
  gap: float | None  # the averaging gap, mean of the phases
  tau: int
  seconds: float  # of training


def copy_changes(s: settings.Settings, steps: int) -> dict[str, Any]:
  """Returns the fields that all copies change: a shorter schedule, and no rounds of re-sharding."""
  share = steps / (s.train.phases * s.train.steps_per_phase)
  base = math.ceil(s.pretrain.steps * share)
  first: dict[str, Any] = {'routing.method': s.routing.first} if s.routing.method == 'discriminative' else {}
  first |= {'routing.capacity': 0.0} if first and s.routing.first == 'random' else {}
  schedule = {'pretrain.steps': base, 'inner.decay_steps': base + steps}
  warmups = {'warmup_steps': s.inner.warmup(s.decay_steps), 'rewarm_steps': s.inner.rewarm_steps}
  schedule |= {f'inner.{name}': math.ceil(steps * share) for name, steps in warmups.items()}
  return BARE | first | lasting(steps, s.train.steps_per_phase) | schedule


def lasting(steps: int, tau: int) -> dict[str, int]:
  """Returns the fields that make training `steps` long, in phases of tau."""
  return {'train.steps_per_phase': tau, 'train.phases': steps // tau}


def shorter(s: settings.Settings, steps: int, tau: int) -> dict[str, int]:
  """Returns the fields of phases of tau steps; what overlaps with a phase's steps is as much of them as before."""
  overlap = s.outer.overlap_steps * tau // s.train.steps_per_phase
  return lasting(steps, tau) | ({'outer.overlap_steps': overlap} if s.outer.overlap_steps > 0 else {})


def taus(tau: int) -> list[int]:
  """Returns the lengths of shorter phases, divisors of the config's, longest first."""
  divisors = [d for d in range(1, tau) if tau % d == 0]
  near = {min(divisors, key=lambda d: abs(math.log(d * times / tau))) for times in SHORTER if divisors}
  return sorted(near, reverse=True)


def longest_good(candidates: Sequence[Outcome]) -> Outcome:
  """Returns the candidate with the longest phases whose loss is within `TOLERANCE` of the best; they differ in tau."""
  least = min(one.loss for one in candidates)
  return max((one for one in candidates if one.loss <= least + TOLERANCE), key=lambda one: one.tau)


def read_outcome(workdir: pathlib.Path, name: str, changes: Mapping[str, Any]) -> Outcome:
  """Reads the outcome of a run that is finished, or has diverged."""
  from dipaco_jax.pipeline import stage_records
  from dipaco_jax.storage import seals
  from dipaco_jax.training import metrics_log

  s = stage_records.read_settings(workdir)
  rows = [row for row in metrics_log.read_rows(workdir) if (row['kind'], row['stage']) == ('phase', 'train')]
  complete = bool(rows) and rows[-1]['phase'] == s.train.phases
  pairs: Iterable[tuple[float | None, int, int]] = ()  # where the base has diverged, there are no shards
  if complete:
    meta = seals.read_json(workdir / 'shards' / '0' / 'meta.json', 'shard_tokens', 'holdout_rows')
    pairs = zip(rows[-1]['holdout_loss_by_path'], meta['shard_tokens'], meta['holdout_rows'], strict=True)
  known = [(math.inf if loss is None else loss, tokens) for loss, tokens, held in pairs if held]
  loss = math.fsum(loss * n for loss, n in known) / max(1, sum(n for _, n in known)) if complete else math.inf
  seconds = stage_records.read_stages(workdir).get('train', {'wall_s': math.nan})['wall_s']
  gap = averaging_gap.mean_gap([row.get('averaging_gap') for row in rows])
  return Outcome(name, dict(changes), loss, gap, s.train.steps_per_phase, seconds)


def table(found: Sequence[Outcome], dense: Outcome) -> str:
  from dipaco_jax.reports import comparison

  lines = [['', 'loss', 'minus dense', 'averaging gap', 'seconds']]
  for one in (dense, *found):
    others = one is not dense
    less = f'{one.loss - dense.loss:+.3f}' if others and math.isfinite(one.loss - dense.loss) else ''
    gap = f'{one.gap:+.3f}' if one.gap is not None and others else ''
    loss = f'{one.loss:.3f}' if math.isfinite(one.loss) else 'diverged'
    lines.append([one.name, loss, less, gap, f'{one.seconds:,.0f}' if math.isfinite(one.seconds) else ''])
  return comparison.text(lines)


@dataclasses.dataclass
class Search:
  """Runs candidates one after another, each once."""

  workdir: pathlib.Path
  config: str
  overrides: Sequence[config_file.Override]  # of the command
  reuse: str
  steps: int
  common: Mapping[str, Any]  # fields that all candidates change
  done: list[pathlib.Path] = dataclasses.field(default_factory=list)
  num_runs: int = 0  # that there will be

  def overrides_with(self, changes: Mapping[str, Any]) -> list[config_file.Override]:
    """Returns the overrides of a candidate, those of the command included."""
    ours = (config_file.Override(name, str(value)) for name, value in {**self.common, **changes}.items())
    return [*self.overrides, *ours]

  def settings_with(self, changes: Mapping[str, Any]) -> settings.Settings:
    """Returns the settings of a candidate; raises InputError where they are not valid."""
    return extension.with_digests(settings.from_dict(config_file.read(self.config, self.overrides_with(changes))))

  def run(self, name: str, changes: Mapping[str, Any]) -> Outcome:
    """Runs a candidate, unless it is done, and reads its outcome.

    Raises SystemExit where the run was stopped, and InputError where its folder holds a run with other options.
    """
    from dipaco_jax.pipeline import stage_records

    folder = self.workdir / name.replace(' ', '-')
    diverged = folder.with_name(f'{folder.name}.diverged')
    if (folder / 'config.json').exists():
      there, wanted = (settings.digest(s) for s in (stage_records.read_settings(folder), self.settings_with(changes)))
      if there != wanted:
        words = f'{folder.name} holds a run with other options or another config: name another folder'
        raise InputError(f'--workdir={self.workdir}: {words}')
    if not (folder / 'stages' / 'evaluate.json').exists() and not diverged.exists():
      print(f'[{len(self.done) + 1}/{self.num_runs}] {name}', file=sys.stderr, flush=True)
      other = str(self.done[0]) if self.done else self.reuse
      line = [f'--config={self.config}', f'--workdir={folder}', *([f'--reuse={other}'] if other else [])]
      line += [f'--config.{field}={value}' for field, value in self.overrides_with(changes)]
      cache = {'JAX_COMPILATION_CACHE_DIR': str((self.workdir / 'cache').absolute())}  # many have the same programs
      status = train(line, cache | os.environ, subprocess.DEVNULL)
      if status not in (0, command.DIVERGED):
        sys.exit(status)
      if status:
        diverged.touch()
    self.done.append(folder)
    return read_outcome(folder, name, changes)


def train(options: Sequence[str], env: Mapping[str, str], stdout: int | None = None) -> int:
  """Runs `main` in a process and returns its exit status; passes signals on and waits for its end."""
  return stopping.run_process([sys.executable, '-m', 'dipaco_jax.main', *options], env=env, stdout=stdout)


def search(s: settings.Settings, runs: Search) -> tuple[Outcome, list[Outcome], Outcome]:
  """Runs candidates; returns the best, all of them, and the dense path."""
  tau, steps = s.train.steps_per_phase, runs.steps
  third = (s.train.learning_rate or s.inner.learning_rate) / 3
  rate = {} if extension.is_reference(s.inner.schedule) else {'train.learning_rate': third}  # whose rates are its own
  is_plain = all(getattr(s.outer, field.split('.')[1]) == value for field, value in PLAIN.items())
  by_row = BY_ROW if s.inner.optimizer == 'adamw' and not s.outer.row_weights else {}
  planned: list[Mapping[str, Any]] = [{}, PLAIN, PLAIN | by_row, rate, ALONE]
  for changes in (*planned, *(shorter(s, steps, t) for t in taus(tau))):
    runs.settings_with(changes)  # before any work
  runs.num_runs = 2 + (not is_plain) + bool(by_row) + bool(rate) + len(taus(tau))
  share = runs.num_runs * steps / (s.train.phases * tau)
  words = f'{runs.num_runs} short runs, with {share:.0%} of the steps of the run itself; fewer with --steps'
  print(words, file=sys.stderr)
  found = [runs.run(FIRST.replace('-', ' '), {})]
  best = found[0]

  def run_candidate(name: str, changes: Mapping[str, Any]) -> Outcome:
    """Runs a candidate on the best so far, and adds it to `found`."""
    found.append(runs.run(name, best.changes | dict(changes)))
    return found[-1]

  if not is_plain:
    best = min(best, run_candidate('plain averages', PLAIN), key=lambda one: one.loss)
  if by_row:
    best = min(best, run_candidate('averages by row', PLAIN | by_row), key=lambda one: one.loss)
  best = longest_good([best, *(run_candidate(f'tau {t}', shorter(s, steps, t)) for t in taus(tau))])
  if rate:
    best = min(best, run_candidate('a third of the rate', rate), key=lambda one: one.loss)
  return best, found, runs.run('dense', ALONE)


def advice(s: settings.Settings, best: Outcome) -> dict[str, Any]:
  """Returns the options for the whole run. Fields that count phases span as many steps as before."""
  tau = s.train.steps_per_phase
  if best.tau == tau:
    return dict(best.changes)
  times = tau // best.tau
  every = {'evaluate.every_phases': s.evaluate.every_phases}
  every |= {'checkpoint.state_every_phases': s.checkpoint.state_every_phases}
  counted = {name: phases * times for name, phases in every.items() if phases}
  if s.routing.method == 'discriminative':
    counted |= {'routing.phases_per_round': s.routing.phases_per_round * times}
  return best.changes | lasting(s.train.phases * tau, best.tau) | counted


def check_settings(s: settings.Settings, steps: int):
  """Raises InputError where short copies of the config cannot be compared."""
  tau = s.train.steps_per_phase
  if s.num_paths < 2:
    raise InputError('config.grid has one path, which exchanges nothing: there is nothing to find')
  if not s.train.early_stopping:
    raise InputError('config.train.early_stopping=False holds no rows back, by which candidates are judged')
  if not s.data.holdout_fraction:
    raise InputError('config.data.holdout_fraction=0 holds no text back, by which candidates are judged')
  if s.train.schedule:
    raise InputError('config.train.schedule counts phases, which candidates have more of: leave it out')
  if steps % tau:
    raise InputError(f'--steps={steps} should be a multiple of config.train.steps_per_phase={tau}')
  if steps > s.train.phases * tau:
    raise InputError(f'--steps={steps} is more than the {s.train.phases * tau} of the config')


def main(overrides: Sequence[config_file.Override]):
  f = flags.FLAGS
  if not f.config or not f.workdir:
    raise InputError('name a config with --config and a folder of its own with --workdir')
  if '://' in f.workdir:
    raise InputError(f'--workdir={f.workdir}: name a folder of this machine; the run itself may be in a bucket')
  s = extension.with_digests(settings.from_dict(config_file.read(f.config, overrides)))
  tau = s.train.steps_per_phase
  steps = f.steps or tau * min(s.train.phases, max(PHASES, math.ceil(s.train.phases * SHARE)))
  check_settings(s, steps)
  from dipaco_jax.storage import publishing  # not for --help
  from dipaco_jax.training import metrics_log

  workdir = pathlib.Path(f.workdir)
  runs = Search(workdir, f.config, overrides, f.reuse, steps, copy_changes(s, steps))
  best, found, dense = search(s, runs)
  chosen = advice(s, best)
  report = {'steps': steps, 'dense': dense._asdict(), 'candidates': [one._asdict() for one in found], 'options': chosen}
  publishing.write_json(workdir / 'recipe.json', metrics_log.plain(report))
  print(f'loss on hold-outs after {steps} steps, nats a token\n\n{table(found, dense)}\n')
  if not best.loss < dense.loss:
    print('no candidate is below the dense path: paths need more steps, text that differs more, or a longer base')
  if chosen.get('outer.row_weights'):
    print('row weights are for a run in one job; islands (--role) do without')
  print(shlex.join([*(f'--config.{name}={value}' for name, value in chosen.items()), f'--reuse={workdir / FIRST}']))


if __name__ == '__main__':
  flags.DEFINE_string('config', None, 'A file, or a config of the package; --config.FIELD=VALUE changes it.')
  flags.DEFINE_string('workdir', None, 'The folder of the short runs; made if it is not there.')
  flags.DEFINE_string('reuse', '', 'A run whose tokenized text is reused where its settings are the same.')
  flags.DEFINE_integer('steps', 0, 'Steps of each short run; by default 4 phases or 5% of all.', lower_bound=0)
  try:
    sys.argv[1:], overrides = config_file.split(sys.argv[1:])
  except InputError as e:
    command.fail(str(e))
  command.run(lambda: main(overrides))
