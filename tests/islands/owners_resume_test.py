"""Workers of owners that are killed, and stores that are lost: the same bits in the end."""

import pathlib
import shutil

import one_process
import owners_run
import pytest
from owners_run import OWNERS, Member, OwnersRun

from dipaco_jax.islands import hand_over
from dipaco_jax.islands.island import OBJECTS, STATES
from dipaco_jax.registry.registry import Registry

pytestmark = pytest.mark.slow
SECTIONS = {'train': dict(phases=6)}
BEFORE = 4  # phases before a store is lost


@pytest.fixture(scope='module')
def one_device():
  with one_process.one_device(), pytest.MonkeyPatch.context() as patch:
    patch.setattr(hand_over, 'WORTHWHILE', float('inf'))  # nobody would answer
    yield


def begin(folder: pathlib.Path, programs: dict, every: int = 1) -> OwnersRun:
  owners_run.write_text(folder)
  sections = SECTIONS | {'checkpoint': dict(state_every_phases=every, every_steps=2)}
  return OwnersRun(folder, owners_run.settings(folder, **sections), programs)


@pytest.fixture(scope='module')
def undisturbed(one_device, tmp_path_factory) -> tuple[dict, dict]:
  """What a run comes to, and its programs."""
  run = begin(tmp_path_factory.mktemp('undisturbed'), {})
  with run.members() as members:
    run.to('finished', members)
  return run.outcome(), run.programs


def test_workers_that_are_killed_after_each_task_end_with_the_same_bits(undisturbed, tmp_path):
  outcome, programs = undisturbed
  run = begin(tmp_path, programs)
  with run.members() as members:
    run.to('prepared', members)
  lives = 0
  for _ in range(owners_run.TURNS):
    with run.members() as members:
      lives += 1
      for member in members:
        member.island.run.__dict__.update(programs)
        if not member.turn():
          owners_run.schedule.advance(member.island)
      if members[0].island.registry.facts('finished'):
        break
  assert run.outcome() == outcome and lives > 4


@pytest.mark.parametrize('every', [1, 16])
def test_a_store_that_is_lost_is_made_again(every, undisturbed, tmp_path, monkeypatch):
  """States that were published are lost with it: their phases are trained again, from the base on."""
  outcome, programs = undisturbed
  run = begin(tmp_path, programs, every)
  with run.members() as members:
    while len(members[0].island.registry.facts('checkpoint')) < BEFORE * len(OWNERS):
      for member in members:
        member.turn()
    assert any((run.store('court') / OBJECTS / STATES).rglob('*')) == (every == 1)
    members[2].close()
    shutil.rmtree(run.store('court'))
    members[2] = Member(run, 'court')
    run.to('finished', members)
  assert run.outcome() == outcome
  assert (run.store('court') / 'shards' / '0').exists()
  facts = Registry(f'sqlite:///{run.place}/registry.db')
  replays = {fact.key: fact.meta['replay'] for fact in facts.facts('checkpoint') if 'replay' in fact.meta}
  facts.close()
  assert replays['1']['phases'][0] == 0 and not replays['1']['differing'], 'from the base on'


def test_a_store_keeps_the_two_newest_states_of_a_path(undisturbed, tmp_path):
  _, programs = undisturbed
  run = begin(tmp_path, programs)
  with run.members() as members:
    run.to('finished', members)
  names = (run.store('court') / OBJECTS / STATES / '1').iterdir()
  assert {name.name.partition('-')[0] for name in names} == {'3', '4'}, 'the last phase publishes none'
  facts = Registry(f'sqlite:///{run.place}/registry.db')
  assert [fact.number for fact in facts.facts('state', ['1'])] == [0, 1, 2, 3, 4]
  facts.close()
