"""The recipe: short runs from one base, judged on hold-outs, and options that a run takes."""

import dataclasses
import json
import math
import os
import pathlib
import shlex
import subprocess
import sys

import numpy as np
import pytest
import quick_xla
import tiny_run

from dipaco_jax import recipe
from dipaco_jax.config import settings
from dipaco_jax.core import paired
from dipaco_jax.reports import recipe_outcomes

TOKENS = np.full(200, 100)


def outcome(name: str, loss: float, tau: int = 50, gap: float | None = 0.01, **changes) -> recipe_outcomes.Outcome:
  losses = (paired.Losses(np.full(200, loss * 100.0), TOKENS),) if math.isfinite(loss) else ()
  return recipe_outcomes.Outcome(name, changes, loss, gap, tau, 60.0, losses)


def test_shorter_phases_divide_the_configs():
  assert recipe.taus(150) == [30, 10]
  assert recipe.taus(24) == [6, 2]
  assert recipe.taus(16) == [4, 1]
  assert recipe.taus(7) == [1]
  assert recipe.taus(1) == []


def test_a_difference_within_the_noise_is_not_significant():
  compared = recipe_outcomes.compare(outcome('tau 4', 4.388), outcome('the config', 4.392))
  assert not compared.is_better and not compared.is_worse
  said = recipe_outcomes.describe(compared)
  assert said.startswith('not significant: tau 4 and the config are level (-0.004 nats a token, 95% interval -0.024 to')
  assert recipe_outcomes.compare(outcome('tau 4', 4.3), outcome('the config', 4.392)).is_better
  worse = recipe_outcomes.compare(outcome('tau 4', 4.5), outcome('the config', 4.392))
  assert recipe_outcomes.describe(worse).startswith('tau 4 is worse than the config (+0.108')


def test_what_diverged_is_worse_and_nothing_is_better_than_it_by_chance():
  good, bad = outcome('a', 4.0), outcome('b', math.inf)
  assert recipe_outcomes.compare(good, bad).is_better and not recipe_outcomes.compare(bad, good).is_better
  assert not recipe_outcomes.compare(bad, bad).is_better
  assert recipe_outcomes.describe(recipe_outcomes.compare(bad, good)) == 'b is worse than a'


def test_seeds_are_combined():
  both = recipe_outcomes.combine([outcome('a', 4.0), outcome('a', 4.2)])
  assert both.loss == pytest.approx(4.1) and len(both.losses) == 2 and both.seconds == 120
  assert recipe_outcomes.combine([outcome('a', 4.0), outcome('a', math.inf)]).losses == ()


def test_a_table_names_what_diverged():
  config, dense = outcome('the config', 3.5), outcome('dense', 3.25)
  compared = [recipe_outcomes.compare(outcome('tau 2', loss), config) for loss in (3.4, math.inf)]
  lines = recipe_outcomes.table(compared, dense).splitlines()
  assert [line.split() for line in lines] == [
    ['loss', 'compared', 'with', 'difference', '95%', 'interval', 'averaging', 'gap', 'seconds'],
    ['dense', '3.250', '60'],
    ['the', 'config', '3.500', '+0.010', '60'],
    ['tau', '2', '3.400', 'the', 'config', '-0.100', '-0.120', 'to', '-0.080', '+0.010', '60'],
    ['tau', '2', 'diverged', 'the', 'config', '+0.010', '60'],
  ]


class Planned:
  """Losses by name, in place of runs."""

  def __init__(self, losses: dict[str, float]):
    self.losses, self.steps, self.ran, self.num_runs, self.seeds = losses, 100, [], 0, (0,)

  def settings_with(self, changes):
    pass

  def run(self, name, changes):
    self.ran.append((name, dict(changes)))
    return outcome(name, self.losses[name], changes.get('train.steps_per_phase', 50))._replace(changes=dict(changes))


def test_what_was_better_is_kept_by_what_comes_after():
  changes = {'train': {'steps_per_phase': 50, 'phases': 40}, 'evaluate': {'every_phases': 2}}
  s = settings.from_dict({'grid': {'a': 2}, 'pretrain': {'steps': 60}} | changes)
  losses = {'the config': 4.0, 'plain averages': 3.7, 'averages by row': 3.5, 'dense': 3.6}
  losses |= {'tau 10': 3.3, 'tau 2': 3.295}
  runs = Planned(losses | {'a third of the rate': 3.4})
  best, compared, dense = recipe.search(s, runs)
  by_row, third = recipe.PLAIN | recipe.BY_ROW, {'train.learning_rate': s.inner.learning_rate / 3}
  assert best.name == 'tau 10' and dense.loss == 3.6 and len(runs.ran) == runs.num_runs == len(compared) + 2
  assert dict(runs.ran)['a third of the rate'] == by_row | recipe.lasting(100, 10) | third
  counted = {'evaluate.every_phases': 10, 'checkpoint.state_every_phases': 80}
  assert recipe.advice(s, best) == by_row | recipe.lasting(2000, 10) | counted
  streaming = dataclasses.replace(s, outer=dataclasses.replace(s.outer, stream='on'))
  assert recipe.advice(streaming, best) == recipe.advice(s, best) | {'outer.closed_every': 80}
  losses |= {'plain averages': 4.2, 'averages by row': 4.1, 'tau 10': 4.1, 'tau 2': 3.99, 'a third of the rate': 3.9}
  best, *_ = recipe.search(s, Planned(losses))
  assert recipe.advice(s, best) == third


def test_nothing_is_recommended_where_all_are_level():
  s = settings.from_dict({'grid': {'a': 2}, 'train': {'steps_per_phase': 50, 'phases': 40}})
  names = ('plain averages', 'averages by row', 'tau 10', 'tau 2', 'a third of the rate', 'dense')
  best, compared, dense = recipe.search(s, Planned(dict.fromkeys(names, 4.388) | {'the config': 4.392}))
  assert best.name == 'the config' and recipe.advice(s, best) == {}
  lines = recipe_outcomes.conclusions(best, compared, dense)
  assert sum('are level' in line and line.endswith('the config stays') for line in lines) == 5
  assert any(line.startswith('not significant: the config and dense are level') for line in lines)


def test_every_candidate_is_run_from_every_seed(monkeypatch, tmp_path):
  ran = []

  def run_seed(self, title, name, changes, seed):
    ran.append((title, changes.get('seed'), seed))
    return outcome(name, 4.0 + seed / 10, **changes)

  monkeypatch.setattr(recipe.Search, 'run_seed', run_seed)
  runs = recipe.Search(tmp_path, 'tiny', [], '', 16, {}, seeds=(3, 4))
  found = runs.run('tau 4', {'train.phases': 8})
  assert ran == [('tau 4', None, 3), ('tau 4, seed 4', 4, 4)]
  assert found.changes == {'train.phases': 8} and found.loss == pytest.approx(4.35) and len(found.losses) == 2


@pytest.mark.parametrize(
  'changes',
  [
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
    (['--config=tiny', '--workdir=x', '--seeds=0'], '--seeds=0 should be a whole number, 1 or more'),
    (['--config=tiny', '--workdir=x', '--steps=160'], 'more than the 96'),
    (['--config=tiny', '--workdir=x', '--config.train.schedule=((0,(0,1)),)'], 'schedule counts phases'),
    (['--config=tiny', '--workdir=x', '--config.outer.rate=1'], '--config.outer.rate'),
  ],
)
def test_wrong_options_are_reported_before_any_work(options, words, tmp_path):
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
  assert 'stages: tokenize [done]' in said and 'train 96/96' in said  # 4 paths of 24 steps, of the text as it is there
