"""Finds how often paths should exchange, how, and at what learning rate, by short copies of a run.

    python -m dipaco_jax.recipe --config=configs/text.py --workdir=runs/recipe --config.data.train='books/*.txt'

A short copy has a part of the config's steps, the base's and the paths' alike, and a whole cosine: it shows what a
large step costs at once and gains later. One base is trained for all copies, in folders of their own inside --workdir.
Candidates come one after another, each with the best changes so far: the config as it is, plain averages in place of
its outer step, averages by row (outer.py), shorter phases, a third of the paths' learning rate; and at the end the base
trained on as one dense path.

They are compared by their losses on the same validation documents. A candidate replaces the best one so far only if all
of the 95% interval of their difference is below 0 (core/paired.py); otherwise the two are level, and the earlier one,
which exchanges less or is the config's own, stays. --seeds=3 trains every copy from three seeds, which shows smaller
differences. Prints the options that did best. The same command again continues.
"""

import dataclasses
import math
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from dipaco_jax.command_line import command, config_file
from dipaco_jax.config import extension, settings, wires
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import stopping
from dipaco_jax.reports import recipe_outcomes
from dipaco_jax.reports.recipe_outcomes import Comparison, Outcome
from dipaco_jax.storage import user_modules

PHASES, SHARE = 4, 0.05  # a copy has at least this many phases, and this part of the config's
FIRST = 'the-config'
SHORTER = (4, 16)  # times shorter than the config's phases
PLAIN = {'outer.optimizer': 'sgd', 'outer.learning_rate': 1.0, 'outer.rescale': False, 'outer.row_weights': False}
BY_ROW = {'outer.row_weights': True}
ALONE = PLAIN | {'grid': {}, 'levels': (('all', '.*', ()),), 'routing.method': 'single', 'routing.top_n': 1}
ALONE |= {'train.paths_per_phase': 0, 'train.learning_rate': 0.0, 'outer.lost': 0.0}
ALONE |= {'routing.capacity': 0.0}
# Nothing but training, and one validation at the end, which cannot be left out.
BARE: dict[str, Any] = {'evaluate.control': False, 'evaluate.matrix': False, 'evaluate.reroute_every': ()}
BARE |= {'evaluate.every_phases': 0, 'evaluate.chunk_router_steps': 0}
BARE |= {'evaluate.refit_router': False}


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


@dataclasses.dataclass
class Search:
  """Runs candidates one after another, each once."""

  workdir: pathlib.Path
  config: str
  overrides: Sequence[config_file.Override]  # of the command
  reuse: str
  steps: int
  common: Mapping[str, Any]  # fields that all candidates change
  seeds: Sequence[int] = (0,)
  bases: dict[int, pathlib.Path] = dataclasses.field(default_factory=dict)  # by seed, the run that trained the base
  num_done: int = 0
  num_runs: int = 0  # that there will be

  def overrides_with(self, changes: Mapping[str, Any]) -> list[config_file.Override]:
    """Returns the overrides of a candidate, those of the command included."""
    ours = (config_file.Override(name, str(value)) for name, value in {**self.common, **changes}.items())
    return [*self.overrides, *ours]

  def settings_with(self, changes: Mapping[str, Any]) -> settings.Settings:
    """Returns the settings of a candidate; raises InputError if they are not valid."""
    return user_modules.admit_own(settings.from_dict(config_file.read(self.config, self.overrides_with(changes))))

  def run(self, name: str, changes: Mapping[str, Any]) -> Outcome:
    """Runs a candidate from every seed, and returns its outcome."""
    first, *others = self.seeds
    outcomes = [self.run_seed(name, name, changes, first)]
    outcomes += [self.run_seed(f'{name}, seed {seed}', name, {**changes, 'seed': seed}, seed) for seed in others]
    return recipe_outcomes.combine(outcomes)._replace(changes=dict(changes))

  def run_seed(self, title: str, name: str, changes: Mapping[str, Any], seed: int) -> Outcome:
    """Runs a candidate from one seed, unless it is done, and reads its outcome.

    Raises SystemExit if the run was stopped, and InputError if its folder holds a run with other options.
    """
    from dipaco_jax.pipeline import stage_records

    folder = self.workdir / title.replace(',', '').replace(' ', '-')
    diverged = folder.with_name(f'{folder.name}.diverged')
    if (folder / 'config.json').exists():
      actual, expected = (
        settings.digest(s) for s in (stage_records.read_settings(folder), self.settings_with(changes))
      )
      if actual != expected:
        problem = f'{folder.name} holds a run with other options or another config: name another folder'
        raise InputError(f'--workdir={self.workdir}: {problem}')
    if not (folder / 'stages' / 'evaluate.json').exists() and not diverged.exists():
      print(f'[{self.num_done + 1}/{self.num_runs}] {title}', file=sys.stderr, flush=True)
      other = str(self.bases.get(seed, self.reuse))
      line = [f'--config={self.config}', f'--workdir={folder}', *([f'--reuse={other}'] if other else [])]
      line += [f'--config.{field}={value}' for field, value in self.overrides_with(changes)]
      status = train(line, os.environ, subprocess.DEVNULL)
      if status not in (0, command.DIVERGED):
        sys.exit(status)
      if status:
        diverged.touch()
    self.num_done += 1
    self.bases.setdefault(seed, folder)
    return recipe_outcomes.read_outcome(folder, name, changes)


def train(options: Sequence[str], env: Mapping[str, str], stdout: int | None = None) -> int:
  """Runs `main` in a process and returns its exit status; passes signals on and waits for its end."""
  return stopping.run_process([sys.executable, '-m', 'dipaco_jax.main', *options], env=env, stdout=stdout)


def search(s: settings.Settings, runs: Search) -> tuple[Outcome, list[Comparison], Outcome]:
  """Runs candidates; returns the best, each beside the one that it was to replace, and the dense path."""
  tau, steps = s.train.steps_per_phase, runs.steps
  third = (s.train.learning_rate or s.inner.learning_rate) / 3
  rate = {} if extension.is_reference(s.inner.schedule) else {'train.learning_rate': third}  # whose rates are its own
  is_plain = all(getattr(s.outer, field.split('.')[1]) == value for field, value in PLAIN.items())
  by_row = BY_ROW if s.inner.optimizer == 'adamw' and not s.outer.row_weights else {}
  planned: list[Mapping[str, Any]] = [{}, PLAIN, PLAIN | by_row, rate, ALONE]
  for changes in (*planned, *(shorter(s, steps, t) for t in taus(tau))):
    runs.settings_with(changes)  # before any work
  runs.num_runs = (2 + (not is_plain) + bool(by_row) + bool(rate) + len(taus(tau))) * len(runs.seeds)
  share = runs.num_runs * steps / (s.train.phases * tau)
  message = f'{runs.num_runs} short runs, with {share:.0%} of the steps of the run itself; fewer with --steps'
  print(message, file=sys.stderr)
  compared: list[Comparison] = []
  best = runs.run(FIRST.replace('-', ' '), {})

  def run_candidate(name: str, changes: Mapping[str, Any]) -> Outcome:
    """Runs a candidate with the changes of the best so far; returns the better of the two."""
    compared.append(recipe_outcomes.compare(runs.run(name, best.changes | dict(changes)), best))
    return compared[-1].candidate if compared[-1].is_better else best

  if not is_plain:
    best = run_candidate('plain averages', PLAIN)
  if by_row:
    best = run_candidate('averages by row', PLAIN | by_row)
  for length in taus(tau):  # longest first: the shorter has to be better than what costs less traffic
    best = run_candidate(f'tau {length}', shorter(s, steps, length))
  if rate:
    best = run_candidate('a third of the rate', rate)
  return best, compared, runs.run('dense', ALONE)


def advice(s: settings.Settings, best: Outcome) -> dict[str, Any]:
  """Returns the options for the whole run. Fields that count phases span as many steps as before."""
  tau = s.train.steps_per_phase
  if best.tau == tau:
    return dict(best.changes)
  times = tau // best.tau
  every = {'evaluate.every_phases': s.evaluate.every_phases}
  every |= {'checkpoint.state_every_phases': s.checkpoint.state_every_phases}
  if wires.make_wire(s.outer, s.train).stream:
    every |= {'outer.closed_every': s.outer.closed_every}
  counted = {name: phases * times for name, phases in every.items() if phases}
  if s.routing.method == 'discriminative':
    counted |= {'routing.phases_per_round': s.routing.phases_per_round * times}
  return best.changes | lasting(s.train.phases * tau, best.tau) | counted


def check_settings(s: settings.Settings, steps: int):
  """Raises InputError if short copies of the config cannot be compared."""
  tau = s.train.steps_per_phase
  if s.num_paths < 2:
    raise InputError('config.grid has one path, which exchanges nothing: there is nothing to find')
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
  s = user_modules.admit_own(settings.from_dict(config_file.read(f.config, overrides)), f.workdir)
  tau = s.train.steps_per_phase
  steps = f.steps or tau * min(s.train.phases, max(PHASES, math.ceil(s.train.phases * SHARE)))
  check_settings(s, steps)
  from dipaco_jax.storage import publishing  # not for --help
  from dipaco_jax.telemetry import metrics_log

  workdir = pathlib.Path(f.workdir)
  seeds = [s.seed + i for i in range(f.seeds)]
  runs = Search(workdir, f.config, overrides, f.reuse, steps, copy_changes(s, steps), seeds)
  best, compared, dense = search(s, runs)
  chosen = advice(s, best)
  report = {'steps': steps, 'seeds': seeds, **recipe_outcomes.to_json(best, compared, dense), 'options': chosen}
  publishing.write_json(workdir / 'recipe.json', metrics_log.plain(report))
  print(f'loss on validation documents after {steps} steps, nats a token\n\n{recipe_outcomes.table(compared, dense)}\n')
  for line in recipe_outcomes.conclusions(best, compared, dense):
    print(line)
  print(shlex.join([*(f'--config.{name}={value}' for name, value in chosen.items()), f'--reuse={workdir / FIRST}']))


if __name__ == '__main__':
  flags.DEFINE_string('config', None, 'Config file, or name of an included config; --config.FIELD=VALUE sets a field.')
  flags.DEFINE_string('workdir', None, 'Folder for the short runs, created if it does not exist.')
  flags.DEFINE_string('reuse', '', 'Another run, whose tokenized text is reused where the settings are equal.')
  flags.DEFINE_integer(
    'steps', 0, 'Number of steps of each short run. By default, 4 phases or 5% of all steps.', lower_bound=0
  )
  flags.DEFINE_integer('seeds', 1, 'Number of seeds per short run; more seeds show smaller differences.', lower_bound=1)
  try:
    sys.argv[1:], overrides = config_file.split(sys.argv[1:])
  except InputError as e:
    command.fail(str(e))
  command.run(lambda: main(overrides))
