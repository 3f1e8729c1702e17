"""Withdrawal of facts with objects that cannot be read, and of published objects that are malformed."""

import contextlib
import dataclasses
import types

import numpy as np
import one_process
import pytest

from dipaco_jax.islands import (
  island,
  lineage,
  messages,
  outer_executor,
  outer_weights,
  own_levels,
  path_messages,
  pieces,
  schedule,
  state_facts,
  status_table,
  withdrawals,
)
from dipaco_jax.islands.guard import Gone, Malformed
from dipaco_jax.islands.held_states import HeldStates, Key
from dipaco_jax.islands.module_weights import BEFORE, SINCE, ModuleWeights
from dipaco_jax.islands.path_state import INNER, Own, PathState
from dipaco_jax.registry import registry
from dipaco_jax.registry.registry import Fact, NewTask, Withdrawal

made = one_process.made
LEVEL = 2  # 'high', whose module high/0 has the paths 0 and 2


def contribution(of: island.Island, by: float, path: int = 0, phase: int = 0) -> Fact:
  """The checkpoint of a path that has moved by so much; its objects are in storage."""
  objects = {
    level.name: of.write_object(
      f'paths/{phase}/{path}-{level.name}',
      {name: np.full(of.shapes[name].shape, by, 'f') for name in of.layout.names(level)},
    )
    for level in of.layout.levels
  }
  return schedule.checkpoint_fact(path, phase, objects, {'worker': f'worker of {by}', 'holder': 'h'})


def done(of: island.Island, fact: Fact) -> registry.Task:
  """Completes the task of a checkpoint with it, and claims the task again, as if something were missing."""
  of.registry.add_tasks([NewTask('train', fact.key, fact.number)])
  task = of.registry.claim('w', ['train'], [fact.key])
  withdrawals.complete(of, task, [fact])
  of.registry.add_tasks([NewTask('outer', 'any', 1)])
  asking = of.registry.claim('o', ['outer'])
  of.registry.reopen(asking, 'train', fact.key, fact.number)
  of.registry.release(asking)
  return of.registry.claim('w', ['train'], [fact.key])


def lose(of: island.Island, fact: Fact):
  of.storage.delete(fact.meta['objects']['high'][0])


def withdrawn(of: island.Island) -> list[tuple[str, str]]:
  return [(fact.key, fact.sha256) for fact in of.registry.facts('withdrawn')]


# -- a machine that computes other bits


def test_what_was_published_first_stands_while_it_can_be_read(made, caplog):
  first, other = contribution(made, 1.0), contribution(made, 1.5)
  assert withdrawals.complete(made, done(made, first), [other]) == [first]
  assert made.registry.facts('checkpoint') == [first] and not withdrawn(made)
  assert made.registry.is_done('train', '0', 0) and 'the repeated result is dropped' in caplog.text


def test_a_fact_that_nobody_can_read_is_replaced_with_what_depends_on_it(made, caplog):
  first, other = contribution(made, 1.0), contribution(made, 1.5)
  task = done(made, first)
  state_facts.publish(made, first, {})
  lose(made, first)
  assert withdrawals.complete(made, task, [other]) == [other]
  assert made.registry.facts('checkpoint') == [other] and not made.registry.facts('state')
  assert ('checkpoint 0 1', first.sha256) in withdrawn(made) and len(withdrawn(made)) == 2
  assert 'is replaced by the repeated result: ' in caplog.text
  lose(made, other)
  withdrawals.complete(made, done_again(made, other), [first])
  assert ('checkpoint 0 2', other.sha256) in withdrawn(made), 'each withdrawal is a fact of its own'
  assert any('withdrawn checkpoint 0 0, by all: ' in line for line in status_table.lines(made.registry))


def done_again(of: island.Island, fact: Fact) -> registry.Task:
  asking = of.registry.claim('o', ['outer'])
  of.registry.reopen(asking, 'train', fact.key, fact.number)
  of.registry.release(asking)
  return of.registry.claim('w', ['train'], [fact.key])


def test_another_process_forgets_the_fact_when_it_next_hears_of_a_task(made):
  first, other = contribution(made, 1.0), contribution(made, 1.5)
  task = done(made, first)
  with contextlib.closing(registry.Registry(f'sqlite:///{made.run.workdir}/registry.db')) as them:
    assert them.facts('checkpoint', ['0'], 0) == [first]
    lose(made, first)
    withdrawals.complete(made, task, [other])
    assert them.facts('checkpoint', ['0'], 0) == [first], 'it has not heard of it'
    assert them.claim('x', ['outer'])
    assert them.facts('checkpoint', ['0'], 0) == [other]


def test_a_replay_sends_again_what_the_next_version_needs_and_storage_lacks(made):
  fact = contribution(made, 1.0)
  made.registry.put([fact])
  sent = {level: messages.Sent(made.read_object(*named), 0.0, {}) for level, named in fact.meta['objects'].items()}
  lose(made, fact)
  path_messages.send_again(made, 0, pieces.Part(0, 0), sent)
  for level in made.layout.levels:
    made.read_contribution(fact, level)


def test_only_a_fact_that_is_still_there_is_withdrawn(made):
  first, other = contribution(made, 1.0), contribution(made, 1.5)
  made.registry.put([other])
  assert not made.registry.revoke(Withdrawal([first], 'gone', 'w'), [NewTask('train', '0', 0)])
  assert made.registry.facts('checkpoint') == [other] and not withdrawn(made)


def module(of: island.Island, number: int, by: float, **meta) -> Fact:
  arrays = {name: np.full(of.shapes[name].shape, by, 'f') for name in of.layout.names(of.layout.levels[LEVEL])}
  return Fact('module', 'high/0', number, *of.write_object(f'modules/{number}/high/0', arrays), meta)


def test_later_versions_that_have_the_same_object_are_replaced_too(made):
  made = one_process.with_settings(made, train=dict(phases=3))
  first, other = module(made, 1, 1.0), module(made, 1, 1.5, usual=2.0)
  carried, next_own = first._replace(number=2, meta={'usual': 1.0}), module(made, 3, 3.0)
  made.registry.put([first, carried, next_own])
  made.storage.delete(first.uri)
  withdrawals.put(made, [other])
  assert made.registry.facts('module', ['high/0']) == [other, other._replace(number=2), next_own]


def test_facts_that_name_other_objects_in_their_metadata_are_others(made):
  first = module(made, 1, 1.0, outer=['objects/outer/1/high/0-0.safetensors', 'f' * 64])  # which is lost
  other = module(made, 1, 1.0, outer=made.write_object('outer/1/high/0', {}))
  made.registry.put([first])
  withdrawals.put(made, [other])
  assert made.registry.facts('module')[0].meta == other.meta


def test_a_version_that_differs_from_a_replaced_one_is_gone(made):
  of = one_process.with_settings(made, outer=dict(wire='thin'))
  base = module(of, 1, 1.0, since=1)
  link = module(of, 2, 2.0, **{SINCE: 1, BEFORE: 'objects/modules/1/high/0-other.safetensors'})
  of.registry.put([base, link])
  with pytest.raises(Gone, match='differs from weights that were replaced'):
    ModuleWeights().read(of, link)


def test_own_modules_that_nobody_has_as_their_fact_says_are_replaced(made):
  levels = (('shared', 'embed|block_0|final', ()), ('own', 'block_1', ('a', 'b')))
  of = one_process.with_settings(made, levels=levels, train=dict(phases=9))
  key, names = 'own/0-0', of.layout.names(of.layout.levels[1])
  old = Fact('module', key, 5, f'objects/modules/5/{key}-0.safetensors', '0' * 64, {})
  last = Fact(
    'module', key, 9, *of.write_object(f'modules/9/{key}', weights := {n: np.ones(2, 'f') for n in names}), {}
  )
  of.registry.put([old])
  state = PathState({}, {}, own=Own(weights, {}, {}, {n: np.zeros(2, 'f') for n in names}, 5, 1.0))
  own_levels.publish(of, [last], state)
  [found] = of.registry.facts('module', number=5)
  assert of.read_object(found.uri, found.sha256)[names[0]].tolist() == [0, 0]


# -- malformed objects


def malformed(of: island.Island, kind: str) -> Fact:
  """A checkpoint of path 2 whose digests are right."""
  good = contribution(of, 1.0, path=2)
  names = of.layout.names(of.layout.levels[LEVEL])
  arrays = {name: np.ones(of.shapes[name].shape, 'f') for name in names}
  data = {
    'random bytes': np.random.default_rng(0).bytes(1000),
    'empty': b'',
    'deep': (10**6).to_bytes(8, 'little') + b'[' * 10**6,
    'too large': (60).to_bytes(8, 'little') + b'{"x":{"dtype":"F32","shape":[9999999],"data_offsets":[0,4]}}',
  }
  changes = {
    'another shape': {names[0]: np.ones(3, 'f')},
    'another dtype': {names[0]: np.ones(of.shapes[names[0]].shape, 'd')},
    'one more': {'more': np.ones(3, 'f')},
  }
  named: dict = dict(good.meta['objects'])
  if kind in data:
    name, sha256 = of.object_name('paths/0/2-high', data[kind])
    of.storage.write(name, data[kind])
    named['high'] = [name, sha256]
  elif kind in changes:
    named['high'] = of.write_object('paths/0/2-high', arrays | changes[kind])
  elif kind == 'a level is missing':
    del named['high']
  else:
    named['high'] = {'a path': ['../../etc/passwd', 'f' * 64], 'elsewhere': ['elsewhere/x-1', 'f' * 64], 'no name': 7}[
      kind
    ]
  return schedule.checkpoint_fact(2, 0, named, {'worker': 'stranger'})


MALFORMED = (
  'random bytes|empty|deep|too large|another shape|another dtype|one more|a level is missing|a path|elsewhere|no name'
)


class Executor:
  """One of module high/0, whose path 0 has sent."""

  def __init__(self, of: island.Island, monkeypatch, folder):
    monkeypatch.setattr(outer_weights, 'path_weights', lambda *_: np.array([1, 1, 1, 0], np.float32))
    self.of, self.executor = of, outer_executor.Executor(folder)
    of.registry.put([module(of, 0, 0.99), contribution(of, 1.0)])
    of.registry.add_tasks([NewTask('train', '2', 0)])

  def train(self, fact: Fact):
    task = self.of.registry.claim('w', ['train'])
    assert (task.key, task.number) == ('2', 0)
    withdrawals.complete(self.of, task, [fact])

  def perform(self):
    task = registry.Task(0, 'outer', 'high/0', 1, 1, '', 0)
    lease = types.SimpleNamespace(about={}, check=lambda: None)
    publish = self.executor.perform(dataclasses.replace(self.of), task, lease)
    return publish and publish()


def test_whatever_a_contribution_is_it_is_malformed_or_can_be_added(made):
  for kind in MALFORMED.split('|'):
    with pytest.raises(Malformed, match='malformed'):
      made.read_contribution(malformed(made, kind), made.layout.levels[LEVEL])
  assert made.read_contribution(contribution(made, 1.0), made.layout.levels[LEVEL])


@pytest.mark.parametrize('kind', ['random bytes', 'a level is missing'])
def test_a_malformed_contribution_is_trained_again(kind, made, tmp_path, monkeypatch, caplog):
  scene = Executor(made, monkeypatch, tmp_path / 'sums')
  scene.train(malformed(made, kind))
  assert scene.perform() is None
  [note] = [line for line in caplog.messages if 'malformed' in line]
  assert 'checkpoint 2 0 by stranger is withdrawn, and trained again' in note
  assert len(withdrawn(made)) == 1 and not made.registry.facts('checkpoint', ['2'], 0)
  scene.train(contribution(made, 1.0, path=2))
  [fact] = scene.perform()
  assert fact.meta['paths'] == 2 and 'left_out' not in fact.meta


def test_a_path_that_sends_nothing_else_is_left_out(made, tmp_path, monkeypatch):
  scene = Executor(made, monkeypatch, tmp_path / 'sums')
  for _ in range(withdrawals.MOST):
    scene.train(malformed(made, 'random bytes'))
    assert scene.perform() is None
  scene.train(malformed(made, 'random bytes'))
  fact, excluded = scene.perform()
  assert fact.meta['paths'] == 1 and 'malformed' in fact.meta['left_out']['2']
  assert excluded[:3] == ('excluded', '2', 0) and excluded.meta['worker'] == 'stranger'
  made.registry.put([fact, excluded])
  assert scene.perform()[0][:5] == fact[:5], 'who makes it again leaves out the same'


def test_a_malformed_module_counts_as_lost(made):
  bad = made.write_object('modules/1/high/0', {'x': np.ones(3, 'f')})
  good = module(made, 1, 1.0)
  for fact in (
    good._replace(uri=bad[0], sha256=bad[1]),
    good._replace(uri='elsewhere', sha256=bad[1]),
    good._replace(uri='objects/modules/1/low/0-0123456789abcdef.safetensors'),
    good._replace(uri=good.uri.replace('/1/', '/7/')),
    good._replace(meta={'outer': made.write_object('outer/1/high/0', {'x': np.ones(3, 'f')})}),
    good._replace(meta={'outer': 'no name'}),
    good._replace(meta={'outer': ['objects/outer/1/low/0-0123456789abcdef.safetensors', bad[1]]}),
  ):
    with pytest.raises(Malformed) as told:
      dataclasses.replace(made, weights=ModuleWeights()).read_module(fact)
    assert island.maker(told.value.name, made) == ('outer', 'high/0', 1)


def test_no_module_takes_the_weights_of_another_from_memory(made):
  other = module(made, 1, 1.0)
  made.read_module(other)
  with pytest.raises(Malformed, match='cannot be of low/0 in version 1'):
    made.read_module(other._replace(key='low/0'))


def test_a_state_that_cannot_be_read_is_withdrawn_and_may_be_published_again(made, caplog):
  fact = contribution(made, 1.0, path=3)
  made.registry.put([fact])
  bad = {'x': np.ones(2, 'f')}, {f"['{INNER}'].count": np.zeros((), np.int32)}, None
  for n, arrays in enumerate(bad, 1):
    state_facts.publish(made, fact, arrays or bad[0])
    if arrays is None:
      made.storage.delete(made.registry.facts('state')[0].meta['objects'][0][0])
    assert lineage.read_state(made, HeldStates(), 3, 0) is None
    assert [key for key, _ in withdrawn(made)] == [f'state 3 {i}' for i in range(1, n + 1)]
  assert 'state 3 0 is withdrawn' in caplog.text
  good = {f"['{INNER}']{at}": np.zeros(x.shape, x.dtype) for at, x in made.inner_shapes.items()}
  state_facts.publish(made, fact, good)
  assert lineage.read_state(made, HeldStates(), 3, 0).keys() == good.keys()


def test_a_state_whose_checkpoint_was_withdrawn_is_not_asked_for(made):
  held = HeldStates()
  held.put(Key(3, 0, 'f' * 64), {'x': np.ones(2, 'f')})
  assert lineage.read_state(made, held, 3, 0) is None
