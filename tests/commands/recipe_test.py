"""The recipe: short runs from one base, judged on hold-outs, and options that a run takes."""

import json
import math
import os
import pathlib
import shlex
import subprocess
import sys

import pytest
import quick_xla
import tiny_run

from dipaco_jax import recipe
from dipaco_jax.core import settings


def found(tau: int, loss: float, name: str = '', **changes) -> recipe.Outcome:
  return recipe.Outcome(name, changes, loss, 0.01, tau, 60.0)


def test_shorter_phases_divide_the_configs():
  assert recipe.taus(150) == [30, 10]
  assert recipe.taus(24) == [6, 2]
  assert recipe.taus(16) == [4, 1]
  assert recipe.taus(7) == [1]
  assert recipe.taus(1) == []


def test_longer_phases_win_unless_they_cost_something():
  assert recipe.longest_good([found(100, 3.05), found(25, 3.009), found(5, 3.0)]).tau == 25
  assert recipe.longest_good([found(100, math.inf), found(25, 3.5), found(5, 3.0)]).tau == 5
  assert recipe.longest_good([found(100, math.inf), found(25, math.inf)]).tau == 100


def test_a_table_names_what_diverged():
  lines = recipe.table([found(8, 3.5, 'the config'), found(2, math.inf, 'tau 2')], found(8, 3.25, 'dense')).splitlines()
  assert [line.split() for line in lines] == [
    ['loss', 'minus', 'dense', 'averaging', 'gap', 'seconds'],
    ['dense', '3.250', '60'],
    ['the', 'config', '3.500', '+0.250', '+0.010', '60'],
    ['tau', '2', 'diverged', '+0.010', '60'],
  ]


class Planned:
  """Losses by name, in place of runs."""

  def __init__(self, losses: dict[str, float]):
    self.losses, self.steps, self.ran, self.num_runs = losses, 100, [], 0

  def settings_with(self, changes):
    pass

  def run(self, name, changes):
    self.ran.append((name, dict(changes)))
    return recipe.Outcome(name, dict(changes), self.losses[name], 0.0, changes.get('train.steps_per_phase', 50), 1.0)


def test_what_was_better_is_kept_by_what_comes_after():
  changes = {'train': {'steps_per_phase': 50, 'phases': 40}, 'evaluate': {'every_phases': 2}}
  s = settings.from_dict({'grid': {'a': 2}, 'pretrain': {'steps': 60}} | changes)
  losses = {'the config': 4.0, 'plain averages': 3.7, 'averages by row': 3.5, 'dense': 3.6}
  losses |= {'tau 10': 3.3, 'tau 2': 3.295}
  runs = Planned(losses | {'a third of the rate': 3.4})
  best, candidates, dense = recipe.search(s, runs)
  by_row, third = recipe.PLAIN | recipe.BY_ROW, {'train.learning_rate': s.inner.learning_rate / 3}
  assert best.name == 'tau 10' and dense.loss == 3.6 and len(runs.ran) == runs.num_runs == len(candidates) + 1
  assert dict(runs.ran)['a third of the rate'] == by_row | recipe.lasting(100, 10) | third
  counted = {'evaluate.every_phases': 10, 'checkpoint.state_every_phases': 80}
  assert recipe.advice(s, best) == by_row | recipe.lasting(2000, 10) | counted
  losses |= {'plain averages': 4.2, 'averages by row': 4.1, 'tau 10': 4.1, 'tau 2': 4.0, 'a third of the rate': 3.9}
  best, *_ = recipe.search(s, Planned(losses))
  assert recipe.advice(s, best) == third


@pytest.mark.parametrize(
  'changes',
  [
    {'routing': {'arrange': 'alike'}},
    {'routing': {'capacity': 1.5}},
    {'outer': {'stream': 'on', 'overlap_steps': 20}},
    {'outer': {'wire': 'thin'}},
    {'routing': {'method': 'discriminative', 'first': 'random', 'router_fraction': 0.1, 'capacity': 1.5}},
    {'inner': {'schedule': 'os.path:join'}, 'outer': {'lost': 0.1}},
  ],
)
def test_every_valid_config_has_candidates(changes):
  levels = (('all', '.*', ('a',)),)
  train = {'steps_per_phase': 50, 'phases': 40}
  s = settings.from_dict({'grid': {'a': 2}, 'levels': levels, 'train': train} | changes)
  common = recipe.copy_changes(s, 200)

  class Checked(Planned):
    def settings_with(self, changes):
      values = s.to_dict()
      for name, x in (common | dict(changes)).items():
        section, _, field = name.partition('.')
        values |= {section: values[section] | {field: x}} if field else {section: x}
      made = settings.from_dict(values)
      assert made.num_paths > 1 or not made.outer.lost

  names = ('the config', 'plain averages', 'averages by row', 'tau 10', 'tau 2', 'a third of the rate', 'dense')
  recipe.search(s, runs := Checked(dict.fromkeys(names, 3.0)))
  assert len(runs.ran) == runs.num_runs
  assert ('a third of the rate' in dict(runs.ran)) == ('inner' not in changes)


def test_a_copy_has_the_shape_of_the_whole_run():
  train, inner = {'steps_per_phase': 50, 'phases': 40}, {'warmup_steps': 100}
  s = settings.from_dict({'grid': {'a': 2}, 'pretrain': {'steps': 1000}, 'train': train, 'inner': inner})
  short = recipe.copy_changes(s, 200)
  assert short['pretrain.steps'] == 100 and short['inner.warmup_steps'] == 10
  assert short['inner.decay_steps'] == 300 and short['train.phases'] == 4


def start(*options: str) -> subprocess.CompletedProcess:
  folder = str(pathlib.Path(recipe.__file__).parent.parent)
  env = os.environ | {'XLA_FLAGS': quick_xla.FLAGS, 'PYTHONPATH': folder}
  command = [sys.executable, '-m', 'dipaco_jax.recipe', *options]
  return subprocess.run(command, env=env, capture_output=True, text=True, timeout=4 * tiny_run.PATIENCE_S)


@pytest.mark.parametrize(
  'options, words',
  [
    (['--workdir=x'], 'name a config'),
    (['--config=tiny:dense', '--workdir=x'], 'one path'),
    (['--config=tiny', '--workdir=x', '--steps=17'], '--steps=17 should be a multiple'),
    (['--config=tiny', '--workdir=x', '--config.train.early_stopping=False'], 'early_stopping=False'),
    (['--config=tiny', '--workdir=x', '--config.data.holdout_fraction=0'], 'holdout_fraction=0 holds no text back'),
    (['--config=tiny', '--workdir=x', '--steps=160'], 'more than the 96'),
    (['--config=tiny', '--workdir=x', '--config.train.schedule=((0,(0,1)),)'], 'schedule counts phases'),
    (['--config=tiny', '--workdir=x', '--config.outer.rate=1'], '--config.outer.rate'),
  ],
)
def test_wrong_options_are_told_before_any_work(options, words, tmp_path):
  done = start(*[option.replace('=x', f'={tmp_path / "recipe"}') for option in options])
  assert done.returncode == 2 and words in done.stderr and not (tmp_path / 'recipe').exists()


@pytest.mark.slow
def test_its_options_are_those_of_a_run_that_takes_its_base(tmp_path):
  config, folder = tiny_run.write_config(tmp_path), tmp_path / 'recipe'
  options = f'--config={config}', f'--workdir={folder}', '--steps=6'
  done = start(*options)
  assert done.returncode == 0, done.stderr
  told = json.loads((folder / 'recipe.json').read_text())
  names = [one['name'] for one in told['candidates']]
  assert names == ['the config', 'plain averages', 'averages by row', 'tau 2', 'tau 1', 'a third of the rate']
  assert all(math.isfinite(one['loss']) for one in [*told['candidates'], told['dense']])
  again = start(*options)
  assert again.stdout == done.stdout and '[1/7]' in done.stderr and '[1/7]' not in again.stderr  # nothing is run twice
  other = start(*options[:2], '--steps=12')
  assert other.returncode == 2 and 'holds a run with other options' in other.stderr
  said = tiny_run.run(config, tmp_path / 'run', *shlex.split(done.stdout.splitlines()[-1]))
  assert 'tokenize' not in said and 'train 96/96' in said  # 4 paths of 24 steps, of the text as it is there
