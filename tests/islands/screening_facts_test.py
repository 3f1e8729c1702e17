"""What is judged in islands by itself: a contribution, a path, a phase; and how a run that has diverged goes on."""

import functools
import math
import types

import numpy as np
import one_process
import optax
import pytest
from one_process import Machine, close

from dipaco_jax.core import exact_sum, outer, screening
from dipaco_jax.core.errors import Diverged
from dipaco_jax.islands import island, outer_executor, registry, schedule, screening_facts
from dipaco_jax.islands.registry import Fact, NewTask, Task

BOUNDS = screening_facts.Bounds({'low': 100.0}, 0.5, 10.0)  # |old - new| up to 500
OLD = {'w': np.zeros(10_000, np.float32)}


@pytest.fixture
def made(tmp_path):
  found = Machine(one_process.two_phases(tmp_path), {}).island(tmp_path)
  yield found
  close(found)


# -- a contribution


def moved(length: float) -> dict[str, np.ndarray]:
  """As far from OLD, in one direction."""
  return {'w': np.full(10_000, length / 100, np.float32)}


BAD = {
  'nan': ({'w': np.where(np.arange(10_000) == 9_000, np.nan, 1).astype('f')}, 'not finite'),
  'infinite': ({'w': np.full(10_000, np.inf, 'f')}, 'not finite'),
  'so large that its square is infinite': ({'w': np.full(10_000, 1e30, 'f')}, 'out of range'),
  'moved by 1000': ({'w': np.full(10_000, 1000, 'f')}, 'out of range'),
  'noise': (moved(501.0), '10 times as long as is usual'),
  'another shape': ({'w': np.zeros(3, 'f')}, 'does not belong'),
}


@pytest.mark.parametrize('kind', BAD)
def test_what_is_bad_is_left_out_of_a_sum_which_is_then_as_before(kind, tmp_path):
  file, expected = tmp_path / 'x.sum', exact_sum.ExactSum()
  partial = outer_executor.Partial(file, OLD, {}, BOUNDS)
  partial.add('0', 0.5, moved(10.0))
  expected.add(0.5, OLD, moved(10.0))
  bad, words = BAD[kind]
  partial.add('1', 0.7, bad)
  assert partial.squares.keys() == {'0'} and words in partial.left_out['1']
  partial.save()
  kept = outer_executor.Partial(file, OLD, {}, BOUNDS)
  assert kept.left_out == partial.left_out and kept.moved == partial.moved == {'0': pytest.approx(20.0)}
  for one in (partial, kept):
    one.add('2', 1.0, moved(-499.0))
  expected.add(1.0, OLD, moved(-499.0))
  for one in (partial, kept):
    assert one.sum.weight == expected.weight and np.array_equal(one.sum.mean()['w'], expected.mean()['w'])


def test_a_sum_that_left_out_all_is_of_nothing(tmp_path):
  partial = outer_executor.Partial(tmp_path / 'x.sum', OLD, {}, BOUNDS)
  partial.add('0', 1.0, moved(501.0))
  assert not partial.squares and not partial.sum.contributions and not partial.sum.weight_quanta


@pytest.mark.parametrize('weights', [[256, 1, 3, 0], [1, 1, 1, 1], [0.3, 0.2, 0.01, 0.1], [1e-3, 2e-3, 0, 0]])
def test_weights_are_scaled_by_a_power_of_two(weights, made, monkeypatch):
  monkeypatch.setattr(outer_executor, 'path_weights', lambda island, phase: np.array(weights, np.float32))
  found = outer_executor.module_weights(made, 'ends/shared', 0)
  assert 0.5 < max(found.values()) <= 1
  ratios = {math.log2(np.float32(weights[int(path)]) / w) for path, w in found.items()}
  assert len(ratios) == 1 and ratios.pop().is_integer() and len(found) == sum(w > 0 for w in weights)


def test_the_largest_weight_does_not_put_a_move_out_of_range(made, monkeypatch):
  """256 times 0.6 is above 2^7."""
  monkeypatch.setattr(outer_executor, 'path_weights', lambda island, phase: np.array([256, 1, 3, 0], np.float32))
  made_sum = exact_sum.ExactSum()
  for path, weight in outer_executor.module_weights(made, 'ends/shared', 0).items():
    made_sum.add(weight, {'w': np.zeros(2, 'f')}, {'w': np.full(2, -0.6 if path == '0' else 0.1, 'f')})
  expected = (256 * 0.6 - 4 * 0.1) / 260
  np.testing.assert_allclose(made_sum.mean()['w'], expected, rtol=1e-6)


# -- a path


def modules(made: island.Island, version: int, usual: float | None = None):
  about = {} if usual is None else {'usual': usual}
  made.registry.put([Fact('module', module, version, 'x', 'y', about) for module in made.all_modules()])


def test_a_path_is_judged_as_in_one_job(made):
  """By h of the modules that it began from, which is h_0 where none is noted."""
  rng, rates = np.random.default_rng(0), screening_facts.rates(made, 1)
  assert rates == pytest.approx(6 * 0.01, rel=0.6)
  old = {name: rng.normal(size=x.shape).astype('f') for name, x in made.shapes.items()}
  size = sum(made.shapes[name].size for name in made.layout.names(made.layout.levels[1]))
  modules(made, 1)
  judge = functools.partial(screening_facts.judge, made, 2, 1, old)
  move = lambda length: {n: x + np.float32(length) for n, x in old.items()}  # noqa: E731
  found = judge(move(9.9 * rates))  # r is that of each parameter times the root of how many
  assert found.keys() == {'moved'} and found['moved']['low'] == pytest.approx(9.9 * size**0.5, rel=1e-4)
  assert '10.1 times as long as is usual' in judge(move(10.1 * rates))['excluded']
  noise = {name: rng.normal(0, 20, x.shape).astype('f') for name, x in old.items()}
  assert 'times as long' in judge(noise)['excluded']
  bad = judge(move(0.0) | {'final_norm/scale': np.full(16, np.nan, 'f')})
  assert 'not finite (level ends)' in bad['excluded'] and bad['moved']['ends'] is None and bad['moved']['low'] == 0
  modules(made, 2, usual=1.0)
  assert 'times as long' in screening_facts.judge(made, 2, 2, old, move(rates))['excluded']


def test_what_is_usual_follows_the_paths_that_took_part(made):
  first = screening_facts.first_usual(made, 'low/0')
  expected = float(screening.next_usual(np.float32(first), np.float32(30.0), np.int32(2), first))
  assert screening_facts.next_usual(made, 'low/0', first, [10.0, 20.0]) == {'usual': expected}
  assert screening_facts.next_usual(made, 'low/0', 7.0, []) == {'usual': 7.0}
  assert screening_facts.next_usual(made, 'low/0', math.inf, []) == {}, 'of SGD, of which nothing is known yet'


# -- the end


def exclude(made: island.Island, phase: int, *paths: int):
  facts = [screening_facts.exclusion(made, path, phase, 'bad', f'worker-{path}') for path in paths]
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
  told = screening_facts.exclusion(made, 0, 1, 'bad', 'worker-0', 'outer-0')
  made.registry.put([told])
  exclude(made, 1, 2)
  screening_facts.check(made, 'high/0', 1, EVEN, {'2': 'bad'})
  with pytest.raises(Diverged, match='no path of module high/0'):
    screening_facts.check(made, 'high/0', 1, EVEN, {'0': 'bad', '2': 'bad'})


def test_all_paths_or_one_too_often(made):
  for phase in range(3):
    exclude(made, phase, 3)
    screening_facts.check(made, 'low/1', phase, EVEN, {'3': 'bad'})
  exclude(made, 3, 3)
  with pytest.raises(Diverged, match=r'path 3 was excluded in 4 phases in a row, more than .*max_excluded=3'):
    screening_facts.check(made, 'low/1', 3, EVEN, {'3': 'bad'})
  exclude(made, 9, 0, 1, 2, 3)
  with pytest.raises(Diverged):
    screening_facts.check(made, 'low/1', 9, EVEN, {'3': 'bad'})


def test_it_goes_on_with_what_blocked_it_trained_again(made):
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


# -- an executor, of real modules


class Scene:
  """Paths' checkpoints of phase 0, and an executor of 'high/0', whose paths are 0 and 2."""

  def __init__(self, made: island.Island, folder):
    self.made = made
    self.old = {name: np.ones(made.shapes[name].shape, 'f') for name in made.layout.names(made.layout.levels[2])}
    self.first = made.write_object('modules/0/high', self.old)
    made.registry.put([Fact('module', 'high/0', 0, *self.first, {})])
    self.executor = outer_executor.Executor(folder)

  def checkpoint(self, path: int, by: float):
    objects = {
      'high': self.made.write_object(f'paths/0/{path}-high', {n: x + np.float32(by) for n, x in self.old.items()})
    }
    self.made.registry.put([schedule.checkpoint_fact(path, 0, objects, {'worker': f'worker-{path}'})])

  def perform(self):
    task = Task(0, 'outer', 'high/0', 1, 1, '', 0, None)
    found = self.executor.perform(self.made, task, types.SimpleNamespace(about={}, check=lambda: None))
    return found and found()


@pytest.fixture
def scene(made, tmp_path, monkeypatch):
  monkeypatch.setattr(outer_executor, 'path_weights', lambda island, phase: np.array([256, 1, 3, 0], np.float32))
  return Scene(made, tmp_path / 'sums')


@pytest.mark.parametrize('by', [np.nan, 1000.0, 5.0])
def test_an_executor_goes_on_without_what_is_bad_and_says_whose_it_is(by, scene, caplog):
  scene.checkpoint(0, 0.01)
  scene.checkpoint(2, by)
  module, told = scene.perform()
  assert told[:3] == ('excluded', '2', 0) and told.meta['worker'] == 'worker-2' and told.meta['executor'] == 'all'
  assert list(module.meta['left_out']) == ['2'] and module.meta['paths'] == 1
  assert 'train, phase 1, step 18: path 2 (a1 b0) of worker-2 takes no part' in caplog.text
  new, _ = island.unpack_module(scene.made.read_object(module.uri, module.sha256))
  for name, x in new.items():  # Nesterov, first step: (1 + mu) eta Delta
    np.testing.assert_allclose(x, scene.old[name] + 1.9 * 0.7 * 0.01, rtol=1e-5)
  scene.made.registry.put([module, told])
  again = scene.perform()
  assert again[0][:5] == module[:5] and len(again) == 1, 'who makes it again leaves out the same, without asking'


def test_who_makes_a_version_again_leaves_out_what_was_left_out_then(scene):
  """Though it finds nothing wrong with it."""
  scene.checkpoint(0, 0.01)
  scene.checkpoint(2, 0.02)
  module = scene.perform()[0]
  scene.made.registry.put([module._replace(meta={'left_out': {'2': 'by a bad machine'}})])
  again = scene.perform()[0]
  assert again.sha256 != module.sha256 and list(again.meta['left_out']) == ['2'] and again.meta['paths'] == 1


def test_a_module_of_which_nothing_is_left_ends_the_run_and_nothing_is_written(scene):
  scene.checkpoint(0, np.nan)
  scene.checkpoint(2, 1000.0)
  before = scene.made.storage.names(island.OBJECTS)
  with pytest.raises(Diverged, match='phase 1: no path of module high/0'):
    scene.perform()
  assert scene.made.storage.names(island.OBJECTS) == before
  assert scene.made.registry.facts('diverged')[0].meta['left_out'] == ['0', '2']


def test_an_outer_step_that_makes_what_no_model_is_ends_the_run(scene, monkeypatch):
  monkeypatch.setattr(outer, 'make_optimizer', lambda config: optax.sgd(1e30, 0.9))
  outer_executor._compiled.cache_clear()
  scene.checkpoint(0, 0.01)
  scene.checkpoint(2, 0.01)
  before = scene.made.storage.names(island.OBJECTS)
  with pytest.raises(Diverged, match='phase 1: the outer step makes module high/0'):
    scene.perform()
  outer_executor._compiled.cache_clear()
  assert scene.made.storage.names(island.OBJECTS) == before


def test_a_module_of_one_path_rests(made, tmp_path, monkeypatch):
  monkeypatch.setattr(outer_executor, 'path_weights', lambda island, phase: np.array([1, 1, 0, 1], np.float32))
  scene = Scene(made, tmp_path / 'sums')
  exclude(made, 0, 0)
  [module] = scene.perform()
  assert [module.uri, module.sha256] == scene.first and module.number == 1
  assert module.meta['usual'] == pytest.approx(screening_facts.first_usual(made, 'high/0'))
