"""Owners that join and leave: what is decided, once, in one transaction each; what other processes do about it."""

import dataclasses

import one_process
import owners_run
import pytest
from owners_run import OwnersRun

from dipaco_jax.config import owners, settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.islands import local_config, members, outer_weights, owner_facts, role_loop, roles, schedule
from dipaco_jax.islands.claims import Claims
from dipaco_jax.islands.island import OWN_TEXT
from dipaco_jax.registry import fact_rows
from dipaco_jax.registry.registry import Fact, Lost, NewTask
from dipaco_jax.storage import publishing

SHARED = 'shared/shared'
TOKENS = {'clinic': 100, 'court': 200, 'press': 600}


def text_fact(owner: str, path: int) -> Fact:
  return Fact(OWN_TEXT, owner, 0, '', owner, {'paths': {str(path): {'tokens': TOKENS[owner]}}})


def module(key: str, version: int) -> Fact:
  return Fact('module', key, version, f'objects/modules/{version}/{key}-aa.safetensors', f'{key}{version}', {})


def checkpoint(path: int, phase: int) -> Fact:
  return Fact('checkpoint', str(path), phase, '', '', {'objects': {}})


@pytest.fixture
def keeper(tmp_path):
  """The keeper's island; as far as facts are concerned, all text is read and two phases are done."""
  owners_run.write_text(tmp_path)
  with one_process.one_device():
    made = OwnersRun(tmp_path, owners_run.settings(tmp_path, train=dict(phases=6))).begin()
  registry = made.registry
  facts = [Fact('prepared', '', 0, '', '', {}), *(module(key, 0) for key in made.all_modules())]
  registry.complete(registry.claim('keeper', ['prepare']), facts)
  facts += [text_fact(owner, path) for path, owner in enumerate(owners_run.OWNERS)]
  facts += [module(key, 1) for key in made.all_modules()]
  facts += [checkpoint(path, phase) for path in (0, 1) for phase in (0, 1)]
  registry.put(facts)
  registry.mark_scheduled(facts)
  registry.add_tasks(NewTask('train', path, phase) for path in '01' for phase in (0, 1))
  while task := registry.claim('a worker', ['train']):
    registry.complete(task, [])
  registry.put([module(key, 2) for key in made.all_modules()])
  schedule.advance(made)
  yield made
  one_process.close(made)


def join(island) -> members.Island:
  """Adds press, whose text is then read; returns the island that knows it."""
  members.add(island, 'press')
  grown = members.grow(island)
  members.add_text_task(grown, 'press')
  fact = text_fact('press', 2)
  grown.registry.complete(grown.registry.claim('press', [OWN_TEXT], ['press']), [fact])
  schedule.schedule(grown, [fact])
  return grown


def test_an_owner_that_is_added_changes_no_other_path_and_nobody_waits_for_it(keeper):
  names = [keeper.layout.grid.path_name(path) for path in range(2)]
  members.add(keeper, 'press')
  grown = members.grow(keeper)
  assert [grown.layout.grid.path_name(path) for path in range(3)] == [*names, 'press']
  assert set(grown.all_modules()) - set(keeper.all_modules()) == {'own/2'}
  [own, other] = grown.registry.facts('module', ['own/0', 'own/2'], 0)
  assert own._replace(key='own/2')[2:] == other._replace(uri=own.uri, sha256=own.sha256)[2:]
  assert other.uri.startswith('objects/modules/0/own/')
  assert [grown.active_paths(phase).tolist() for phase in (0, 5)] == [[True, True, False]] * 2
  assert owner_facts.missing(grown) == []
  members.add_text_task(grown, 'press')
  for kind in ('train', 'outer', 'evaluate'):
    while task := grown.registry.claim('any', [kind]):
      grown.registry.complete(task, [])
  schedule.advance(grown)  # what follows from the facts, and then the next task
  schedule.advance(grown)
  assert grown.registry.tasks('ready', 'finish'), 'the end does not wait for a text either'


def test_an_owner_trains_from_the_newest_version_on_which_executors_make_anew(keeper):
  registry = keeper.registry
  registry.add_tasks([NewTask('outer', SHARED, 3)])
  running = registry.claim('an executor', ['outer'])
  join(keeper)
  with pytest.raises(Lost):
    registry.complete(running, [module(SHARED, 3)])
  grown = members.grow(keeper)
  assert grown.members.since == {'press': 2}
  assert [grown.active_paths(phase)[2] for phase in (1, 2, 5)] == [False, True, True]
  assert [fact.number for fact in registry.facts('module', ['own/2'])] == [0, 2]
  schedule.advance(grown)
  assert [(task['key'], task['number']) for task in registry.tasks('ready', 'train') if task['key'] == '2'] == [
    ('2', 2)
  ]
  assert outer_weights.module_weights(grown, SHARED, 1).keys() == {'0', '1'}
  assert outer_weights.module_weights(grown, SHARED, 2).keys() == {'0', '1', '2'}
  before, after = (owner_facts.weights(island)(1).reshape(-1)[:2] for island in (keeper, grown))
  assert before.tolist() == after.tolist(), 'of phases before it, to the bit'


def test_a_text_that_was_read_by_a_worker_that_was_killed_counts(keeper):
  members.add(keeper, 'press')
  keeper.registry.put([text_fact('press', 2)])
  schedule.advance(members.grow(keeper))
  assert members.grow(keeper).members.since == {'press': 2}


def test_a_process_that_does_not_know_gives_its_task_back_and_grows(keeper):
  registry = keeper.registry
  claims = Claims(keeper, 'outer', ['outer'])
  join(keeper)
  registry.add_tasks([NewTask('outer', SHARED, 3)])
  dataclasses.replace(keeper)  # its names and number of facts count again
  with pytest.raises(members.Changed):
    claims.next()
  assert [task['key'] for task in registry.tasks('ready', 'outer')] == [SHARED] and not claims.leases
  role = role_loop.Role(Claims(keeper, 'worker', ['train'], ['none']), lambda *_: None)
  with pytest.raises(members.Changed):
    role.is_finished_when_idle()
  fact = module(SHARED, 3)
  registry.put([fact])
  schedule.schedule(keeper, [fact])
  assert fact[:3] in [fact[:3] for fact in registry.unscheduled()], 'it would have left out the path of press'
  grown = members.grow(keeper)
  schedule.advance(grown)
  assert fact[:3] not in [fact[:3] for fact in registry.unscheduled()]


def test_one_who_leaves_takes_part_in_nothing_and_nobody_waits_for_it(keeper):
  registry = keeper.registry
  registry.add_tasks([NewTask('outer', SHARED, 3, 'waiting')])
  running = registry.claim('worker-clinic', ['train'], ['0'])
  members.remove(keeper, 'clinic')
  with pytest.raises(Lost):
    registry.complete(running, [checkpoint(0, 2)])
  grown = members.grow(keeper)
  assert grown.members.until == {0: 2} and grown.members.left == ('clinic',)
  assert [grown.active_paths(phase).tolist() for phase in (1, 2)] == [[True, True], [False, True]]
  schedule.advance(grown)  # what follows from the fact
  assert [task['key'] for task in registry.tasks('ready', 'train')] == ['1']
  assert [task['number'] for task in registry.tasks('ready', 'outer')] == [3], 'it is woken'
  assert outer_weights.module_weights(grown, SHARED, 2).keys() == {'1'}
  assert outer_weights.module_weights(grown, SHARED, 1).keys() == {'0', '1'}
  # A worker may have taken the outer step of its own module before the decision, and a replay takes it afterwards.
  before, after = (outer_weights.module_weights(island, 'own/1', 2) for island in (keeper, grown))
  assert before == after and before['1'] not in (0.5, 1.0), 'and it is no power of two, by which all are divided'
  registry.add_tasks([NewTask('train', '0', 3)])  # by a process that did not know
  schedule.advance(grown)
  assert [task['key'] for task in registry.tasks('ready', 'train')] == ['1']


def test_a_worker_of_one_who_left_ends(keeper, caplog):
  members.remove(keeper, 'clinic')
  island = dataclasses.replace(members.grow(keeper), owner='clinic')
  process = roles.Process('worker', '', 30.0, owner='clinic')
  assert roles.serve_until_end(island, process, None, None) is island, 'without a task'
  assert roles.owner_workdir.has_ended_early(island)
  assert 'clinic has left this run: its store keeps its text and states; its worker ends' in caplog.text


def test_an_owner_that_leaves_before_its_text_is_read_is_not_waited_for(tmp_path):
  owners_run.write_text(tmp_path)
  with one_process.one_device():
    island = OwnersRun(tmp_path, owners_run.settings(tmp_path)).begin()
  facts = [Fact('prepared', '', 0, '', '', {}), *(module(key, 0) for key in island.all_modules())]
  island.registry.complete(island.registry.claim('keeper', ['prepare']), facts)
  schedule.advance(island)
  island.registry.put([text_fact('court', 1)])
  schedule.advance(island)
  assert not island.registry.tasks('ready', 'train')
  members.remove(island, 'clinic')
  schedule.advance(members.grow(island))
  assert [task['key'] for task in island.registry.tasks('ready', 'train')] == ['1']
  one_process.close(island)


@pytest.mark.parametrize('decide', [members.begin, members.remove], ids=['begin', 'remove'])
def test_a_decision_that_is_cut_off_has_changed_nothing(keeper, decide, monkeypatch):
  registry = keeper.registry
  members.add(keeper, 'press')
  grown = members.grow(keeper)
  registry.add_tasks([NewTask('train', '2', 2), NewTask('outer', SHARED, 3)])
  running = registry.claim('an executor', ['outer'])
  count = registry.count_members()

  def killed(*_):
    raise SystemExit

  with monkeypatch.context() as patch, pytest.raises(SystemExit):
    patch.setattr(fact_rows, 'insert', killed)
    decide(grown, 'press')
  assert registry.count_members() == count
  assert registry.tasks('ready', 'train')
  registry.heartbeat(running)
  decide(grown, 'press')
  with pytest.raises(Lost):
    registry.heartbeat(running)
  if decide is members.begin:
    before = registry.facts('began')
    registry.put([module(SHARED, 3)])
    decide(grown, 'press')
    assert registry.facts('began') == before, 'decided once'


def test_what_cannot_work_is_an_error(keeper):
  for action, name, message in (
    (members.add, 'court', 'court is an owner of this run already: these are clinic, court'),
    (members.remove, 'press', 'press is no owner of this run: these are clinic, court'),
  ):
    with pytest.raises(ValueError, match=message):
      action(keeper, name)
  members.remove(keeper, 'court')
  for action, name, message in (
    (members.remove, 'court', 'court has left this run already'),
    (members.add, 'court', 'court has left this run: an owner who comes back needs another name'),
    (members.remove, 'clinic', 'clinic is the last owner of this run: stop its processes instead'),
  ):
    with pytest.raises(ValueError, match=message):
      action(keeper, name)
  keeper.registry.put([Fact('finished', '', 0, '', '', {})])
  for action in (members.add, members.remove):
    with pytest.raises(ValueError, match='this run is finished'):
      action(keeper, 'press')


def test_runs_that_cannot_change_are_named_with_the_reason(tmp_path):
  s = owners_run.settings(tmp_path)
  owners.check_changes(s, is_join=True)
  pooled = owners_run.changed(s, data=dict(own_text=False))
  streamed = owners_run.changed(s, outer=dict(stream='on'))
  behind = dataclasses.replace(s, grid=(('a', 2), ('owner', owners_run.OWNERS)))
  alone = dataclasses.replace(s, grid=(('owner', ('clinic',)),))
  for wrong, message in (
    (pooled, 'all text is in one place'),
    (streamed, 'levels leave one by one within a phase'),
    (behind, "'owner' comes after 'a'"),
    (alone, 'has one owner, clinic'),
  ):
    with pytest.raises(ValueError, match=message):
      owners.check_changes(wrong, is_join=True)
  owners.check_changes(behind, is_join=False)


def test_settings_with_joined_owners_are_those_of_the_config_with_more_names(tmp_path):
  s = owners_run.settings(tmp_path)
  grown = owners.join(s, ('press', 'state'))
  assert dict(grown.grid) == {'owner': ('clinic', 'court', 'press', 'state')}
  assert owners.before_joins(grown, ('press', 'state')) == s == owners.join(s, ())


def test_a_workdir_may_have_the_first_owners_that_joined(tmp_path):
  s = owners_run.settings(tmp_path)
  publishing.write_json(tmp_path / 'config.json', settings_lib.recorded(owners.join(s, ('press',))))
  local_config.keep(tmp_path, s, joined=('press', 'state'))
  with pytest.raises(InputError, match='grid'):  # of a run that nobody has joined
    local_config.keep(tmp_path, s)
