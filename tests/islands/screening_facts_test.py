"""Screening in islands: a path, a phase, and how a run that has diverged is resumed."""

import math

import excluded_path
import numpy as np
import one_process
import pytest

from dipaco_jax.algorithm import screening
from dipaco_jax.core.errors import Diverged
from dipaco_jax.islands import island, messages, path_steps, screening_facts
from dipaco_jax.registry import registry
from dipaco_jax.registry.registry import Fact, NewTask
from dipaco_jax.telemetry import performance

made = one_process.made
# -- a path


def modules(made: island.Island, version: int, usual: float | None = None):
  about = {} if usual is None else {'usual': usual}
  made.registry.put([Fact('module', module, version, 'x', 'y', about) for module in made.all_modules()])


def test_a_path_is_judged_as_in_one_job(made):
  """By h of the modules that it began from, which is h_0 where none is noted."""
  rng, rates = np.random.default_rng(0), screening_facts.rates(made, 'low', 1, path_steps.planned(made, 1))
  assert rates == pytest.approx(6 * 0.01, rel=0.6)
  old = {name: rng.normal(size=x.shape).astype('f') for name, x in made.shapes.items()}
  size = sum(made.shapes[name].size for name in made.layout.names(made.layout.levels[1]))
  modules(made, 1)

  def judge(new, version=1):
    sent = {}
    for level in made.layout.levels:
      of_level = {name: new[name] for name in made.layout.names(level)}
      sent[level.name] = messages.send('none', old, of_level, {}).square
    return screening_facts.judge(made, 2, version, sent, path_steps.planned(made, version))

  move = lambda length: {n: x + np.float32(length) for n, x in old.items()}  # noqa: E731
  found = judge(move(9.9 * rates))  # r is that of each parameter times the root of how many
  assert found.keys() == {'moved'} and found['moved']['low'] == pytest.approx(9.9 * size**0.5, rel=1e-4)
  assert '10.1 times as long as is usual' in judge(move(10.1 * rates))['excluded']
  noise = {name: rng.normal(0, 20, x.shape).astype('f') for name, x in old.items()}
  assert 'times as long' in judge(noise)['excluded']
  bad = judge(move(0.0) | {'final_norm/scale': np.full(16, np.nan, 'f')})
  assert 'not finite (level ends)' in bad['excluded'] and bad['moved']['ends'] is None and bad['moved']['low'] == 0
  modules(made, 2, usual=1.0)
  assert 'times as long' in judge(move(rates), 2)['excluded']


def test_what_is_usual_follows_the_paths_that_took_part(made):
  first = screening_facts.first_usual(made, 'low/0')
  expected = float(screening.next_usual(np.float32(first), np.float32(30.0), np.int32(2), first))
  assert screening_facts.next_usual(made, 'low/0', first, [10.0, 20.0]) == {'usual': expected}
  assert screening_facts.next_usual(made, 'low/0', 7.0, []) == {'usual': 7.0}
  assert screening_facts.next_usual(made, 'low/0', math.inf, []) == {}, 'of SGD, of which nothing is known yet'


def test_an_exclusion_names_the_step_of_its_path(made):
  """The path's own, if its phase has ended by time; else the step after the phase."""
  sent = Fact('checkpoint', '1', 2, '', '', {'worker': 'w'})
  assert screening_facts.exclusion(made, sent, 'bad').meta['step'] == path_steps.planned(made, 2).end
  timed = sent._replace(meta={'worker': 'w', 'steps': [7, 4]})
  assert screening_facts.exclusion(made, timed, 'bad').meta['step'] == 11


# -- the end


def exclude(made: island.Island, phase: int, *paths: int):
  facts = [excluded_path.exclusion(made, path, phase, f'worker-{path}') for path in paths]
  about = {'excluded': 'bad', 'worker': 'w'}
  made.registry.put([*(Fact('checkpoint', str(path), phase, '', '', about) for path in paths), *facts])


EVEN = np.ones(4, np.float32)


def test_a_phase_that_leaves_no_path_for_a_module_ends_the_run_for_all(made):
  exclude(made, 1, 0)
  screening_facts.check(made, 'low/0', 1, EVEN, {'0': 'bad'})
  exclude(made, 1, 1)
  with pytest.raises(Diverged, match='train diverged in phase 2: no path of module low/0 has'):
    screening_facts.check(made, 'low/0', 1, EVEN, {'0': 'bad', '1': 'bad'})
  with pytest.raises(Diverged, match='no path of module low/0'):
    screening_facts.heed(made)
  with pytest.raises(Diverged, match='no path of module low/0'):  # who was first is heard
    screening_facts.end(made, 1, 'something else')


def test_what_one_executor_does_without_is_not_missing_elsewhere(made):
  told = excluded_path.exclusion(made, 0, 1, 'worker-0', 'outer-0')
  made.registry.put([told])
  exclude(made, 1, 2)
  screening_facts.check(made, 'high/0', 1, EVEN, {'2': 'bad'})
  with pytest.raises(Diverged, match='no path of module high/0'):
    screening_facts.check(made, 'high/0', 1, EVEN, {'0': 'bad', '2': 'bad'})


def test_a_run_ends_where_all_paths_are_excluded_or_one_too_often(made):
  made = one_process.with_settings(made, train=dict(phases=10))
  for phase in range(3):
    exclude(made, phase, 3)
    screening_facts.check(made, 'low/1', phase, EVEN, {'3': 'bad'})
  exclude(made, 3, 3)
  with pytest.raises(Diverged, match=r'path 3 was excluded in 4 phases in a row, more than .*max_excluded=3'):
    screening_facts.check(made, 'low/1', 3, EVEN, {'3': 'bad'})
  exclude(made, 9, 0, 1, 2, 3)
  with pytest.raises(Diverged):
    screening_facts.check(made, 'low/1', 9, EVEN, {'3': 'bad'})


def test_a_resumed_run_trains_again_what_blocked_it(made):
  """But not what some module has gone on without, or with."""
  exclude(made, 1, 0, 1, 3)
  done = [NewTask('train', str(path), 1) for path in range(4)]
  made.registry.add_tasks([*done, NewTask('outer', 'low/0', 2, 'waiting'), NewTask('outer', 'high/0', 2)])
  for _ in done:
    made.registry.complete(made.registry.claim('w', ['train']), [])
  claimed = made.registry.claim('outer-0', ['outer'])
  without = {'low/1': '3', 'high/1': '13', 'ends/shared': '013'}
  made.registry.put([Fact('module', m, 2, 'x', 'y', {'left_out': dict.fromkeys(p, 'bad')}) for m, p in without.items()])
  with pytest.raises(Diverged):
    screening_facts.end(made, 1, 'low/0 has none', {'0': 'bad', '1': 'bad'})
  assert screening_facts.resume(made) == 1 == screening_facts.resume(made)
  assert [fact.key for fact in made.registry.facts('checkpoint')] == ['3']
  assert [fact.key for fact in made.registry.facts('excluded')] == ['3']
  states = {(t['kind'], t['key']): t['state'] for t in made.registry.tasks()}
  assert [states['train', key] for key in '0123'] == ['ready', 'ready', 'done', 'done']
  assert states['outer', 'low/0'] == states['outer', 'high/0'] == 'ready'
  with pytest.raises(registry.Lost):
    made.registry.heartbeat(claimed)
  with pytest.raises(Diverged, match='low/0 has none'):
    screening_facts.heed(made)  # a process that began before


def test_sums_of_learning_rates_are_compiled_once(made):
  screening_facts._sum_of_rates.cache_clear()
  level, counts = made.layout.levels[0].name, performance.count_compilations()
  found = [screening_facts.rates(made, level, phase, path_steps.planned(made, phase)) for phase in range(2)]
  first = counts.copy()
  found += [screening_facts.rates(made, level, phase, path_steps.planned(made, phase)) for phase in range(2, 5)]
  assert len({*found}) == 5 and counts == first and first
