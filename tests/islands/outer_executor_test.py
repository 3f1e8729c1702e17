"""An outer executor: the contributions that it adds or leaves out, and the new versions of a module."""

import dataclasses
import functools
import math
import os
import types
import weakref

import excluded_path
import jax
import jax.numpy as jnp
import numpy as np
import one_process
import optax
import pytest
import slow
import small
import tiny_run
from one_process import with_settings

from dipaco_jax.algorithm import exact_sum, modules, outer, reference
from dipaco_jax.config import choices, fields, settings as settings_lib
from dipaco_jax.config.owners import Members
from dipaco_jax.core.errors import Diverged
from dipaco_jax.islands import (
  island,
  messages,
  outer_executor,
  outer_weights,
  schedule,
  screening_facts,
  suspensions,
  withdrawals,
)
from dipaco_jax.islands.module_weights import ModuleWeights
from dipaco_jax.registry.registry import Fact, NewTask, Task

made = one_process.made
BOUNDS = screening_facts.Bounds({'low': 100.0}, 10.0)
RATES = 0.5  # so |old - new| is up to 500
OLD = {'w': np.zeros(10_000, np.float32)}


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
  'another shape': ({'w': np.zeros(3, 'f')}, 'cannot be added'),
}


@pytest.mark.parametrize('kind', BAD)
def test_what_is_bad_is_left_out_of_a_sum_which_is_then_as_before(kind, tmp_path):
  file, expected = tmp_path / 'x.sum', exact_sum.ExactSum()
  partial = outer_executor.Partial(file, OLD, {}, BOUNDS, 'none')
  partial.add('0', 0.5, RATES, moved(10.0))
  expected.add(0.5, OLD, moved(10.0))
  bad, words = BAD[kind]
  partial.add('1', 0.7, RATES, bad)
  assert partial.squares.keys() == {'0'} and words in partial.left_out['1']
  partial.save()
  kept = outer_executor.Partial(file, OLD, {}, BOUNDS, 'none')
  assert kept.left_out == partial.left_out and kept.moved == partial.moved == {'0': pytest.approx(20.0)}
  for one in (partial, kept):
    one.add('2', 1.0, RATES, moved(-499.0))
  expected.add(1.0, OLD, moved(-499.0))
  for one in (partial, kept):
    assert one.sum.weight == expected.weight and np.array_equal(one.sum.mean()['w'], expected.mean()['w'])


def test_a_sum_that_leaves_out_all_paths_is_empty(tmp_path):
  partial = outer_executor.Partial(tmp_path / 'x.sum', OLD, {}, BOUNDS, 'none')
  partial.add('0', 1.0, RATES, moved(501.0))
  assert not partial.squares and not partial.sum.contributions and not partial.sum.weight_quanta


@pytest.mark.parametrize('weights', [[256, 1, 3, 0], [1, 1, 1, 1], [0.3, 0.2, 0.01, 0.1], [1e-3, 2e-3, 0, 0]])
def test_weights_are_scaled_by_a_power_of_two(weights, made, monkeypatch):
  monkeypatch.setattr(outer_weights, 'path_weights', lambda island, phase: np.array(weights, np.float32))
  found = outer_weights.module_weights(made, 'ends/shared', 0)
  assert 0.5 < max(found.values()) <= 1
  ratios = {math.log2(np.float32(weights[int(path)]) / w) for path, w in found.items()}
  assert len(ratios) == 1 and ratios.pop().is_integer() and len(found) == sum(w > 0 for w in weights)


def test_the_largest_weight_does_not_put_a_move_out_of_range(made, monkeypatch):
  """256 times 0.6 is above 2^7."""
  monkeypatch.setattr(outer_weights, 'path_weights', lambda island, phase: np.array([256, 1, 3, 0], np.float32))
  made_sum = exact_sum.ExactSum()
  for path, weight in outer_weights.module_weights(made, 'ends/shared', 0).items():
    made_sum.add(weight, {'w': np.zeros(2, 'f')}, {'w': np.full(2, -0.6 if path == '0' else 0.1, 'f')})
  expected = (256 * 0.6 - 4 * 0.1) / 260
  np.testing.assert_allclose(made_sum.mean()['w'], expected, rtol=1e-6)


@pytest.mark.parametrize('damage', [tiny_run.flip_a_bit, lambda f: os.truncate(f, 40), lambda f: os.truncate(f, 0)])
def test_a_damaged_sum_is_summed_again(damage, tmp_path):
  file, old = tmp_path / 'x.sum', {'w': np.ones(100, np.float32)}
  kept = outer_executor.Partial(file, old, {}, BOUNDS, 'none')
  kept.add('3', 0.5, RATES, {'w': np.zeros(100, np.float32)})
  kept.save()
  found = outer_executor.Partial(file, old, {}, BOUNDS, 'none')
  assert found.squares == {'3': 25.0} and (found.sum.mean()['w'] == 1).all()
  damage(file)
  assert outer_executor.Partial(file, old, {}, BOUNDS, 'none').squares == {}


@pytest.mark.parametrize('most, expected', [(1.0, [0.5, 0.25, 0.25]), (0.4, [0.4, 0.3, 0.3])])
def test_weights_are_capped_within_each_module(most, expected, made, monkeypatch):
  of = one_process.with_settings(made, outer=dict(max_weight=most))
  monkeypatch.setattr(outer_weights, 'path_weights', lambda island, phase: np.array([2, 1, 1, 0], np.float32))
  weights = outer_weights.module_weights(of, 'ends/shared', 0)
  assert [w / sum(weights.values()) for w in weights.values()] == pytest.approx(expected)
  assert outer_weights.module_weights(of, 'high/1', 0) == {'1': 1.0}


# -- an executor, of real modules


class Scene:
  """Paths' checkpoints of phase 0, and an executor of 'high/0', whose paths are 0 and 2."""

  def __init__(self, made: island.Island, folder):
    self.made = made
    self.old = {name: np.ones(made.shapes[name].shape, 'f') for name in made.layout.names(made.layout.levels[2])}
    self.first = made.write_object('modules/0/high', self.old)
    made.registry.put([Fact('module', 'high/0', 0, *self.first, {})])
    self.executor = outer_executor.Executor(folder)

  def checkpoint(self, path: int, by: float, phase: int = 0):
    new = {n: x + np.float32(by) for n, x in self.old.items()}
    objects = {'high': self.made.write_object(f'paths/{phase}/{path}-high', new)}
    self.made.registry.put([schedule.checkpoint_fact(path, phase, objects, {'worker': f'worker-{path}'})])

  def claimed(self) -> list[Task]:
    """A claim of a task, which tells of suspensions."""
    self.made.registry.add_tasks([NewTask('outer', 'high/0', 1)])
    task = self.made.registry.claim('all', ['outer'])
    self.made.registry.release(task)
    return [task]

  def first_version(self) -> tuple[str, str]:
    return tuple(self.first)

  def perform(self, number: int = 1):
    task = Task(0, 'outer', 'high/0', number, 1, '', 0)
    found = self.executor.perform(self.made, task, types.SimpleNamespace(about={}, check=lambda: None))
    return found and found()


@pytest.fixture
def scene(made, tmp_path, monkeypatch):
  monkeypatch.setattr(outer_weights, 'path_weights', lambda island, phase: np.array([256, 1, 3, 0], np.float32))
  return Scene(made, tmp_path / 'sums')


def test_its_outer_step_is_that_of_main(scene):
  """Invariant 8 without a run: two phases of a module, with weights, rescaling and momentum."""
  layout, config = scene.made.layout, scene.made.run.settings.outer
  assert config.rescale and config.reweigh and config.optimizer == 'nesterov'
  weights, rng = jnp.array([[256.0, 1], [3, 0]]), np.random.default_rng(0)
  all_modules = modules.stack(layout, {name: jnp.ones(x.shape) for name, x in scene.made.shapes.items()})
  made = choices.make_outer(config)
  state, old = outer.init(layout, made.optimizer, all_modules, 'adamw'), scene.old
  update = jax.jit(functools.partial(outer.update, layout, made))
  for number in (1, 2):
    by_path = {path: {n: x + rng.normal(0, 0.01, x.shape).astype('f') for n, x in old.items()} for path in (0, 2)}
    for path, new in by_path.items():
      objects = {'high': scene.made.write_object(f'paths/{number - 1}/{path}-high', new)}
      scene.made.registry.put([schedule.checkpoint_fact(path, number - 1, objects, {'worker': f'worker-{path}'})])
    [made_module] = scene.perform(number)
    scene.made.registry.put([made_module])
    sums = {n: 256 * (x - by_path[0][n]) + 3 * (x - by_path[2][n]) for n, x in old.items()}
    sums = {'high': {n: jnp.stack([x, jnp.zeros_like(x)]) for n, x in sums.items()}}
    all_modules, _, state, norms = update(all_modules, state, outer.Sums(sums, weights))
    old = scene.made.read_weights(made_module)
    for name, x in old.items():  # values near 1, each of a few roundings
      np.testing.assert_allclose(x, all_modules['high'][name][0], rtol=0, atol=8 * small.EPS)
    assert made_module.meta['norm'] == pytest.approx(float(norms['high'][0]), rel=1e-5)


@pytest.mark.parametrize('optimizer', dict(fields.fields(settings_lib.Outer))['optimizer'].choices)
def test_its_outer_step_is_that_of_the_reference(optimizer):
  config = settings_lib.Outer(optimizer=optimizer, learning_rate=0.1, momentum=0.8, b2=0.95, epsilon=0.01)
  rng, factor, state, momentum = np.random.default_rng(0), np.float32(2), {}, None
  module = {'x': np.ones(7, 'f')}
  expected = module['x']
  for _ in range(4):
    mean = {'x': rng.normal(size=7).astype('f')}
    module, state, _, is_sound = outer_executor.step(config, module, state, mean, factor)
    expected, momentum = reference.outer_opt(expected, momentum, factor * mean['x'], config)
    assert is_sound
  np.testing.assert_allclose(module['x'], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('by', [np.nan, 1000.0, 5.0])
def test_an_executor_continues_without_what_is_bad_and_says_whose_it_is(by, scene, caplog):
  scene.checkpoint(0, 0.01)
  scene.checkpoint(2, by)
  module, told = scene.perform()
  assert told[:3] == ('excluded', '2', 0) and told.meta['worker'] == 'worker-2' and told.meta['executor'] == 'all'
  assert list(module.meta['left_out']) == ['2'] and module.meta['paths'] == 1
  assert 'train, phase 1, step 18: path 2 (a1 b0) of worker-2 takes no part' in caplog.text
  new = scene.made.read_object(module.uri, module.sha256)
  assert new.keys() == scene.old.keys(), 'weights alone'
  for name, x in new.items():  # Nesterov, first step: (1 + mu) eta Delta
    np.testing.assert_allclose(x, scene.old[name] + 1.9 * 0.7 * 0.01, rtol=1e-5)
  scene.made.registry.put([module, told])
  again = scene.perform()
  assert again[0][:5] == module[:5] and len(again) == 1, 'who makes it again leaves out the same, without asking'


def test_a_suspended_workers_contribution_is_taken_out_of_the_sum_and_leaves_a_fact(scene):
  scene.checkpoint(0, 0.01)
  scene.checkpoint(2, 0.02)
  [task] = scene.claimed()
  partial = scene.executor.take(scene.made, task)
  partial.add('2', 1.0, RATES, {n: x + np.float32(0.02) for n, x in scene.old.items()})
  scene.executor.put_back(task, partial)
  suspensions.suspend(scene.made.registry, 'worker-2', 'it lies', 'test')
  scene.claimed()  # whose answer tells of the suspension
  module, told = scene.perform()
  why = {'2': 'its worker worker-2 is suspended'}
  assert module.meta['left_out'] == why and module.meta['paths'] == 1
  assert told[:3] == ('excluded', '2', 0) and told.meta['why'] == why['2'] and told.meta['executor'] == 'all'
  for name, x in scene.made.read_object(module.uri, module.sha256).items():
    np.testing.assert_allclose(x, scene.old[name] + 1.9 * 0.7 * 0.01, rtol=1e-5)


def test_a_module_of_suspended_workers_alone_stays_and_the_run_goes_on(scene):
  scene.checkpoint(0, 0.01)
  scene.checkpoint(2, 0.02)
  for name in ('worker-0', 'worker-2'):
    suspensions.suspend(scene.made.registry, name, 'it lies', 'test')
  scene.claimed()
  module, *told = scene.perform()
  assert (module.uri, module.sha256) == scene.first_version() and [fact.key for fact in told] == ['0', '2']


def test_a_worker_that_may_work_again_counts_again(scene):
  scene.checkpoint(0, 0.01)
  scene.checkpoint(2, 0.02)
  suspensions.suspend(scene.made.registry, 'worker-2', 'it lies', 'test')
  suspensions.resume(scene.made.registry, 'worker-2')
  scene.claimed()
  [module] = scene.perform()
  assert module.meta['paths'] == 2 and 'left_out' not in module.meta


def test_weights_are_read_without_the_outer_state(scene):
  scene.checkpoint(0, 0.01)
  scene.checkpoint(2, 0.02)
  [module] = scene.perform()
  weights, state = scene.made.read_module(module)
  assert weights.keys() == scene.old.keys() and len(state) == len(weights)
  assert sum(x.nbytes for x in state.values()) == sum(x.nbytes for x in weights.values())
  other = dataclasses.replace(scene.made, weights=ModuleWeights())
  before = other.storage.bytes_in
  assert other.read_weights(module).keys() == weights.keys()
  assert other.storage.bytes_in - before < 1.1 * sum(x.nbytes for x in weights.values())


def two_versions(scene) -> list[Fact]:
  """The facts of the versions after two phases; the first is in the registry."""
  for phase, by in ((0, 0.01), (1, -0.03)):
    scene.checkpoint(0, by, phase)
    scene.checkpoint(2, 0.02, phase)
  [first] = scene.perform()
  scene.made.registry.put([first])
  return [first, *scene.perform(2)]


def test_the_next_version_reads_contributions_alone(scene, monkeypatch):
  names, read = [], type(scene.made.storage).read
  monkeypatch.setattr(type(scene.made.storage), 'read', lambda self, *of: (names.append(of[0]), read(self, *of))[1])
  first, second = two_versions(scene)
  assert [name.split('/')[1] for name in names] == ['modules', *['paths'] * 4], 'version 0, and what paths wrote'
  scene.made, names[:] = dataclasses.replace(scene.made, weights=ModuleWeights()), []
  assert scene.perform(2)[0][:5] == second[:5] and {first.uri, first.meta[island.OUTER][0]} < {*names}


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
  monkeypatch.setattr(choices, 'make_outer_optimizer', lambda config: optax.sgd(1e30, 0.9))
  outer_executor._compiled.cache_clear()
  scene.checkpoint(0, 0.01)
  scene.checkpoint(2, 0.01)
  before = scene.made.storage.names(island.OBJECTS)
  with pytest.raises(Diverged, match='phase 1: after the outer step the parameters or the momentum of module high/0'):
    scene.perform()
  outer_executor._compiled.cache_clear()
  assert scene.made.storage.names(island.OBJECTS) == before


def test_the_mean_is_freed_before_the_version_is_written(scene, monkeypatch):
  step, write, means, alive = outer_executor.step, type(scene.made).write_object, [], []

  def noted_step(config, params, state, mean, factor):
    means.extend(map(weakref.ref, mean.values()))
    return step(config, params, state, mean, factor)

  def noted_write(self, name, arrays):
    alive.append([found for mean in means if (found := mean()) is not None])
    return write(self, name, arrays)

  monkeypatch.setattr(outer_executor, 'step', noted_step)
  scene.checkpoint(0, 0.01)
  scene.checkpoint(2, 0.01)
  monkeypatch.setattr(type(scene.made), 'write_object', noted_write)
  scene.perform()
  assert means and alive == [[], []], 'the outer state, the weights'


def test_a_module_whose_only_path_is_left_out_stays_as_it_is(made, tmp_path, monkeypatch):
  monkeypatch.setattr(outer_weights, 'path_weights', lambda island, phase: np.array([1, 1, 0, 1], np.float32))
  scene = Scene(made, tmp_path / 'sums')
  about = {'excluded': 'bad', 'worker': 'w'}
  told = excluded_path.exclusion(made, 0, 0, 'worker-0')
  made.registry.put([Fact('checkpoint', '0', 0, '', '', about), told])
  [module] = scene.perform()
  assert [module.uri, module.sha256] == scene.first and module.number == 1
  assert module.meta['usual'] == pytest.approx(screening_facts.first_usual(made, 'high/0'))


def test_what_is_summed_outlives_a_contribution_that_is_gone(scene, tmp_path):
  scene.checkpoint(0, 0.01)
  scene.checkpoint(2, 0.02)
  [file] = (tmp_path / island.OBJECTS / 'paths' / '0').glob('2-high-*')
  data = file.read_bytes()
  file.unlink()
  with pytest.raises(island.Gone, match='2-high'):
    scene.perform()
  assert scene.executor.partials['high/0', 1].squares.keys() == {'0'}
  file.write_bytes(data)
  [found] = scene.perform()
  again = outer_executor.Executor(tmp_path / 'other')
  scene.executor, before = again, scene.executor
  [expected] = scene.perform()
  assert found.sha256 == expected.sha256 and not before.partials


def test_what_an_owner_who_has_left_can_send_no_more_is_left_out(scene, tmp_path):
  """Nobody would train it again."""
  scene.checkpoint(0, 0.01)
  scene.checkpoint(2, 0.02)
  [file] = (tmp_path / island.OBJECTS / 'paths' / '0').glob('2-high-*')
  file.unlink()
  scene.made = dataclasses.replace(scene.made, members=Members(until={2: 1}))
  module, told = scene.perform()
  assert list(module.meta['left_out']) == ['2'] and module.meta['paths'] == 1
  assert told[:3] == ('excluded', '2', 0) and '2-high' in told.meta['why']
  [fact] = scene.made.registry.facts('checkpoint', ['2'])
  assert not withdrawals.train_again(scene.made, fact, island.Gone('x', 'malformed'))


@pytest.mark.parametrize('is_in_memory', [True, False])
def test_a_sum_that_another_executor_has_finished_goes_with_the_next(is_in_memory, scene, tmp_path):
  scene.checkpoint(0, 0.01)
  assert scene.perform() is None, 'path 2 is late'
  if not is_in_memory:
    scene.executor.partials.popitem()[1].save()
  mine, scene.executor = scene.executor, outer_executor.Executor(tmp_path / 'of another')
  scene.checkpoint(2, 0.02)
  scene.made.registry.put(scene.perform())
  scene.executor = mine
  sums = tmp_path / 'sums'
  sums.mkdir(exist_ok=True)
  others = {sums / name for name in ('high-1-1.sum', 'high-0-1-1.sum', 'high-0-3.sum')}
  for file in others:
    file.touch()
  scene.checkpoint(0, 0.01, 1)
  assert scene.perform(2) is None
  assert [*mine.partials] == [('high/0', 2)]
  assert {*sums.iterdir()} == others, 'of other modules, and of a later version'


# -- row weights

INNER = settings_lib.Inner()
BY_ROW = settings_lib.Outer(optimizer='sgd', learning_rate=1.0, rescale=False, row_weights=True)


@pytest.mark.parametrize('kind', slow.but(['none', 'int4'], 'int4'))
def test_row_weights_give_the_outer_step_of_one_job(kind, made):
  """Against `outer.update`, from what two paths send: their messages have row weights beside what they have learned."""
  rng, level = np.random.default_rng(0), made.layout.levels[2]
  old = {name: rng.normal(size=made.shapes[name].shape).astype('f') for name in made.layout.names(level)}
  partial = outer_executor.Partial(None, old, {}, BOUNDS, kind, by_row=True)
  sums, masses = dict.fromkeys(old, 0.0), dict.fromkeys(old, 0.0)
  for path, weight in (('0', 1.0), ('2', 0.75)):
    new = {name: x + rng.normal(size=x.shape).astype('f') / 100 for name, x in old.items()}
    moments = {name: rng.exponential(1e-6, x.shape).astype('f') for name, x in old.items()}
    rows = {n: np.asarray(x) for n, x in outer.row_weights(moments, np.int32(9), INNER.b2, INNER.epsilon).items()}
    message = messages.send(kind, old, new, {}, rows)
    partial.add(path, weight, RATES, message.arrays)
    assert partial.moved[path] == pytest.approx(math.sqrt(message.square) / 0.5, rel=1e-5), 'r is without row weights'
    one, other = messages.read_delta(kind, messages.split_rows(message.arrays)[0], old)
    for name, x in old.items():
      sums[name] += weight * outer.broadcast_rows(rows[name], x) * (one[name] - other[name])
      masses[name] += weight * rows[name]
  assert not partial.left_out
  weights = np.array([[1.0, 0], [0.75, 0]], 'f')  # paths 0 and 2 go through module 0 of the level
  whole = {level.name: {name: np.stack([x, x]) for name, x in old.items()}}
  layout = dataclasses.replace(made.layout, levels=(level,))
  stacked = [{level.name: {name: np.stack([x, x]) for name, x in part.items()}} for part in (sums, masses)]
  by_row = choices.make_outer(BY_ROW)
  state = outer.init(layout, by_row.optimizer, whole, 'adamw')
  expected, *_ = outer.update(layout, by_row, whole, state, outer.Sums(stacked[0], weights, stacked[1]))
  made = with_settings(made, outer=dataclasses.asdict(BY_ROW))
  found, _, figures = outer_executor.outer_step(made, 'high/0', 1, partial)
  for name, x in found.items():
    np.testing.assert_allclose(x, expected[level.name][name][0], rtol=1e-5, atol=1e-6)
  assert figures['square_of_sum'] == pytest.approx(sum((x**2).sum() for x in sums.values()), rel=1e-5)


def test_a_message_without_row_weights_is_left_out_where_they_are_expected():
  partial = outer_executor.Partial(None, OLD, {}, BOUNDS, 'none', by_row=True)
  partial.add('0', 1.0, RATES, moved(10.0))
  assert 'cannot be added' in partial.left_out['0'] and not partial.sum.contributions
