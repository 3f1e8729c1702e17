"""A holder publishes the state that another worker asks for, and a worker that gets no answer replays."""

import dataclasses

import numpy as np
import one_process
import pytest
import tiny_run
from one_process import with_settings

from dipaco_jax.islands import hand_over, island, lineage, path_state
from dipaco_jax.islands.held_states import HeldStates, Key
from dipaco_jax.registry.registry import Fact, NewTask

made = one_process.made
DIGEST, PHASE = 'c' * 64, 5
STATE = {"['inner'].mu": np.arange(4, dtype=np.float32)}
LEASE_S = one_process.LEASE_S


class Scene:
  """Path 3 before its phase 6; 'theirs' holds its state. A phase takes as long as a test says."""

  def __init__(self, made, monkeypatch):
    self.mine = with_settings(made, train=dict(phases=9))
    self.theirs = dataclasses.replace(self.mine, name='theirs')
    self.held = HeldStates(None, 'holder of theirs')
    self.held.put(Key(3, PHASE, DIGEST), STATE)
    about = {'objects': {}, 'holder': self.held.holder, 'worker': 'theirs'}
    made.registry.put([Fact('checkpoint', '3', t, '', DIGEST, about) for t in range(PHASE + 1)])
    made.registry.add_tasks([NewTask('train', '3', PHASE + 1)])
    self.monkeypatch = monkeypatch
    monkeypatch.setattr(path_state, 'check_carried', lambda *_: None)  # STATE is not shaped as a model's

  def takes(self, seconds: float):
    self.monkeypatch.setattr(type(self.mine.registry), 'durations', lambda *_: [seconds])

  def begin(self) -> lineage.NewestState:
    """As a worker that holds nothing fetches the task; gives it back where it has to wait."""
    task = self.mine.registry.claim('all', ['train'])
    found = lineage.find(self.mine, HeldStates(), task)
    try:
      hand_over.ask(self.mine, task, found)
    finally:
      self.mine.registry.release(task)
    return found

  def facts(self) -> list[Fact]:
    return self.mine.registry.facts(hand_over.STATE)


@pytest.fixture
def scene(made, monkeypatch) -> Scene:
  return Scene(made, monkeypatch)


def test_a_short_replay_is_begun_at_once(scene):
  scene.takes(0.1 * LEASE_S)
  assert len(scene.begin().phases) == PHASE + 2 and not scene.mine.registry.tasks(kind=hand_over.SHIP)


def test_the_holder_publishes_what_it_is_asked_for(scene):
  scene.takes(LEASE_S)
  for _ in range(2):
    with pytest.raises(island.Later, match='path 3 is requested from its holder, theirs'):
      scene.begin()
  [row] = scene.mine.registry.tasks(kind=hand_over.SHIP)
  assert (row['key'], row['number'], row['holder']) == ('3', PHASE, scene.held.holder)
  hand_over.answer(scene.theirs, scene.held)
  found = scene.begin()
  assert found.phases == (PHASE + 1,) and (found.carried["['inner'].mu"] == STATE["['inner'].mu"]).all()
  assert not [fact for fact in scene.mine.registry.unscheduled() if fact.kind == hand_over.STATE]
  assert scene.facts()[0].meta['objects'][0][0].startswith(f'objects/states/3/{PHASE}-0-')


def test_without_an_answer_any_worker_says_that_there_is_none(scene):
  scene.takes(LEASE_S)
  with pytest.raises(island.Later):
    scene.begin()
  hand_over.answer(scene.mine, HeldStates(None, 'another holder'))
  assert not scene.facts(), 'the holder has a lease to answer'
  one_process.threading.Event().wait(1.2 * LEASE_S)
  hand_over.answer(scene.mine, HeldStates(None, 'another holder'))
  assert not scene.facts() and scene.mine.registry.is_done(hand_over.SHIP, '3', PHASE)
  assert len(scene.begin().phases) == PHASE + 2


@pytest.mark.parametrize('damage', [tiny_run.flip_a_bit, lambda file: file.unlink()])
def test_what_was_shipped_and_is_gone_is_made_by_a_replay(damage, scene):
  scene.takes(LEASE_S)
  with pytest.raises(island.Later):
    scene.begin()
  hand_over.answer(scene.theirs, scene.held)
  damage(scene.mine.run.workdir / scene.facts()[0].meta['objects'][0][0])
  assert len(scene.begin().phases) == PHASE + 2


def test_a_copy_asks_nobody(scene):
  scene.takes(LEASE_S)
  task = scene.mine.registry.claim('another', ['train'])
  hand_over.ask(scene.mine, task, lineage.find(scene.mine, HeldStates(), task))
  assert not scene.mine.registry.tasks(kind=hand_over.SHIP)


def test_a_thread_answers_beside_other_tasks(scene):
  scene.takes(LEASE_S)
  with hand_over.answering(scene.theirs, scene.held):
    with pytest.raises(island.Later):
      scene.begin()
    for _ in range(100):
      if scene.facts():
        break
      one_process.threading.Event().wait(0.1)
  assert scene.facts()[0].meta['objects']
