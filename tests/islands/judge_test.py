"""Judgements: both losses are those of the path's parameters; a run leaves out a worker that makes its path worse."""

import dataclasses

import cheater
import island_fixtures
import numpy as np
import one_process
import plain_transformer
import pytest
from one_process import OWN_LEVELS, Faults, changed

from dipaco_jax.config.owners import Members
from dipaco_jax.islands import evaluator, guard, judge, messages, schedule
from dipaco_jax.islands.island import Island
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import validate_stage
from dipaco_jax.registry.registry import Fact, Task
from dipaco_jax.training import evaluation

pytestmark = pytest.mark.usefixtures('one_device')
one_device, machine, prepared = island_fixtures.one_device, island_fixtures.machine, island_fixtures.prepared
made = one_process.made
ROWS, PATH = 4, 3
FLOOR = dict(floor=0.05, floor_rows=16)
WORSE = {(2, 0): 'flipped', (2, 1): 'flipped'}  # contributions of the other sign


def rows(shard: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
  tokens = np.random.default_rng(shard).integers(0, 250, (ROWS, 64)).astype(np.int32)
  return tokens[start:stop], np.ones((stop - start, 64), np.int32)


def draw(of: Island, names, scale: float) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(len(names))
  return {name: scale * rng.normal(size=of.shapes[name].shape).astype('f') for name in names}


def send(of: Island, damaged: str = '') -> tuple[dict, dict]:
  """Publishes modules and what PATH has sent; returns its parameters before, and with that, in numpy."""
  before, after, objects = {}, {}, {}
  for key in of.all_modules():
    level, _ = of.parse_module(key)
    version = 0 if level.name in of.own_levels else 1
    module = draw(of, of.layout.names(level), 1.0)
    of.registry.put([Fact('module', key, version, *of.write_object(f'modules/{version}/{key}', module), {})])
    if key not in of.modules_of(PATH).values():
      continue
    before |= module
    if level.name not in of.own_levels:
      new = {name: 0.7 * x + 0.1 for name, x in module.items()}
      sent = messages.send(of.kind(level), module, new, {}).arrays
      if level.name == damaged:
        sent.pop(min(sent))
      objects[level.name] = of.write_object(f'paths/1/{PATH}-{level.name}', sent)
      after |= new
  of.registry.put([schedule.checkpoint_fact(PATH, 1, objects, {})])
  return before, before | after


@pytest.fixture
def scene(made, monkeypatch, request) -> Island:
  """A run whose hold-outs have 4 rows of path 0 and of path 3."""
  monkeypatch.setattr(Island, 'fetch_trees', lambda *trees: None)
  holdout = evaluation.Rows([ROWS, 0, 0, ROWS], rows, 2, 64)
  monkeypatch.setattr(validate_stage, 'holdout_rows', lambda run, number: holdout)
  levels, outer = getattr(request, 'param', (None, {}))
  settings = changed(made.run.settings, levels, outer=dict(floor=0.1, floor_rows=5) | outer)
  of = dataclasses.replace(made, run=dataclasses.replace(made.run, settings=settings))
  of.run.__dict__['model'] = transformer.make_model(of.run.settings.model, of.run.settings.tokenizer.vocab_size)
  return of


def perform(of: Island) -> Fact:
  [fact] = evaluator.perform(of, Task(0, 'judge', str(PATH), 1, 1, '', 0), None)()
  return fact


@pytest.mark.parametrize('scene', [(None, {}), (OWN_LEVELS, dict(compress='int8'))], indirect=True)
def test_losses_are_those_of_the_path_before_the_phase_and_with_what_it_has_sent(scene):
  """By the transformer in numpy; modules that stay with the path are those of the base in both."""
  drawn = judge.draw_rows([ROWS, 0, 0, ROWS], 5, scene.run.settings.seed)
  tokens = np.concatenate([rows(shard, row, row + 1)[0] for shard, row in drawn])
  prefix, losses = scene.run.settings.routing.prefix_tokens, []
  for params in send(scene):
    nll = [plain_transformer.nll(params, row, scene.run.model.config)[prefix - 1 :] for row in tokens]
    losses.append(np.mean(nll))
  fact = perform(scene)
  assert fact[:3] == ('judged', str(PATH), 1) and abs(losses[1] - losses[0]) > 0.1, losses
  tolerance = 1e-3 if scene.run.settings.outer.compress == 'int8' else 1e-5
  assert fact.meta['losses'] == pytest.approx(losses, rel=tolerance)


def test_what_cannot_be_read_is_left_to_the_executor(scene):
  send(scene, damaged='low')
  fact = perform(scene)
  assert fact.meta['losses'] is None and 'malformed' in fact.meta['unreadable']


def test_what_is_lost_is_waited_for_unless_its_owner_has_left(scene):
  send(scene)
  for name, _ in guard.objects_of(scene.registry.facts('checkpoint', [str(PATH)])[0]).values():
    scene.storage.delete(name)
  with pytest.raises(guard.Gone):
    perform(scene)
  fact = perform(dataclasses.replace(scene, members=Members(until={PATH: 2})))
  assert fact.meta['losses'] is None and 'paths/1/3-' in fact.meta['unreadable']


def test_rows_are_drawn_once_each_from_all_shards():
  drawn = judge.draw_rows([40, 0, 60], 50, 0)
  assert len({*drawn}) == 50 and drawn == judge.draw_rows([40, 0, 60], 50, 0) != judge.draw_rows([40, 0, 60], 50, 1)
  assert {shard for shard, _ in drawn} == {0, 2} and max(row for _, row in drawn) > 40
  assert judge.draw_rows([2, 1], 50, 0) == [(0, 0), (0, 1), (1, 0)]


# -- whole runs


def play(machine, prepared, place, faults=None, **outer):
  """Trains all phases, in which path 2 sends contributions of the other sign; returns facts, and counts of tasks."""
  settings = changed(machine.settings, outer=FLOOR | outer, train=dict(phases=2))
  alone, faults = machine.other(settings).begin(prepared, place, settings), faults or Faults()
  with cheater.installed(WORSE):
    alone.to_the_end(place, faults, end=one_process.TRAINED)
  of = alone.island(place)
  facts = {kind: of.registry.facts(kind) for kind in ('module', 'judged', 'excluded')}
  tasks = of.registry.counts()
  one_process.close(of)
  return facts, tasks


def modules_of(facts) -> dict[tuple, tuple]:
  return {fact[:3]: (fact.sha256, sorted(fact.meta.get('left_out', {}))) for fact in facts['module']}


@pytest.mark.slow
def test_a_worker_that_makes_its_path_worse_is_left_out_and_honest_ones_are_not(machine, prepared, tmp_path):
  facts, tasks = play(machine, prepared, tmp_path / 'run')
  added = {(int(fact.key), fact.number): fact.meta['losses'][1] - fact.meta['losses'][0] for fact in facts['judged']}
  assert len(added) == 8 and tasks['judge'] == {'done': 8}
  assert {at for at, nats in added.items() if nats > FLOOR['floor']} == {*WORSE}, added
  through_2 = {'ends/shared', 'low/1', 'high/0'}
  left_out = {fact.key: [*fact.meta['left_out']] for fact in facts['module'] if 'left_out' in fact.meta}
  assert left_out == {module: ['2'] for module in through_2}
  assert {fact[1:3] for fact in facts['excluded']} == {('2', 0), ('2', 1)}


@pytest.mark.slow
def test_a_run_without_a_floor_judges_nothing_and_one_that_leaves_nothing_out_has_the_same_modules(
  machine, prepared, tmp_path
):
  plain, tasks = play(machine, prepared, tmp_path / 'plain', floor=0.0)
  assert 'judge' not in tasks and not plain['judged'] and not plain['excluded']
  judged, tasks = play(machine, prepared, tmp_path / 'judged', floor=100.0)
  assert tasks['judge'] == {'done': 8} and modules_of(judged) == modules_of(plain)


@pytest.mark.slow
def test_a_run_that_is_killed_at_judgements_has_the_same_modules(machine, prepared, tmp_path):
  expected, _ = play(machine, prepared, tmp_path / 'undisturbed')
  points = ['after claim judge 0 0', 'before complete judge 2 0', 'after complete judge 2 0']
  points += ['after wake outer ends/shared+high/0+low/1 1', 'after complete judge 1 1']
  points += ['before complete outer high/0 2']
  faults = Faults(points)
  facts, _ = play(machine, prepared, tmp_path / 'killed', faults)
  assert {*points} <= {*faults.hit} and modules_of(facts) == modules_of(expected)
  assert [fact.meta['losses'] for fact in facts['judged']] == [fact.meta['losses'] for fact in expected['judged']]
  assert any(fact.meta.get('left_out') for fact in facts['module'])
