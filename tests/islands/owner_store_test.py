"""An owner's store: what is in it, whose it is, which tasks and errors are an owner's."""

import json
import pathlib

import numpy as np
import one_process
import owners_run
import pytest
from owners_run import OWNERS, OwnersRun

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.islands import (
  hand_over,
  monitor,
  owner_facts,
  owner_store,
  role_loop,
  roles,
  schedule,
  state_facts,
  worker,
)
from dipaco_jax.islands.claims import Claims
from dipaco_jax.islands.held_states import HeldStates
from dipaco_jax.islands.island import OWN_TEXT, Gone
from dipaco_jax.islands.worker_hosts import Hosts
from dipaco_jax.registry.registry import Fact, NewTask
from dipaco_jax.storage import object_store

LEVELS = frozenset({'own'})
PRIVATE = (
  'sequences/0/train.array_record', 'sequences.index.json', 'shards/0', 'shards/0/1/train.array_record',
  'shards/0.index.json', 'routing/0/train.npy', 'objects/states/1/3-0-aa.safetensors',
  'objects/modules/1/own/1-aa.safetensors', 'objects/outer/2/own/1-aa.safetensors',
  'objects/differences/2/own/0-aa.safetensors',
)  # fmt: skip
PUBLIC = (
  'base/params.safetensors', 'stages/tokenize.json', 'tokenizer.model', 'validation_text.json', 'config.json',
  'objects/modules/0/own-aa.safetensors', 'objects/modules/1/shared/shared-aa.safetensors',
  'objects/paths/0/1-shared-aa.safetensors', 'objects/outer/1/shared/shared-aa.safetensors',
)  # fmt: skip
MAY_LEAVE = 'objects/paths/0/1-shared-aa.safetensors', 'objects/paths/0/1.17-shared-aa.safetensors'


@pytest.fixture
def run(tmp_path) -> OwnersRun:
  owners_run.write_text(tmp_path)
  with one_process.one_device():
    yield OwnersRun(tmp_path, owners_run.settings(tmp_path))


@pytest.fixture
def court(run, monkeypatch):
  """A worker's process; the run is prepared, as far as facts are concerned."""
  monkeypatch.setattr(owners_run, 'LEASE_S', 60)  # on a busy machine no task is claimed twice
  made = run.begin('court')
  modules = [Fact('module', key, 0, 'objects/modules/0/x-aa.safetensors', 'aa', {}) for key in made.all_modules()]
  facts = [Fact('prepared', '', 0, '', '', {}), *modules]
  made.registry.complete(made.registry.claim('keeper', ['prepare']), facts)
  schedule.schedule(made, facts)
  yield made
  one_process.close(made)


@pytest.fixture
def storage(tmp_path) -> owner_store.OwnerStorage:
  shared, store = (object_store.open_storage(str(tmp_path / name)) for name in ('shared', 'store'))
  return owner_store.OwnerStorage(shared, store, owners_run.settings(tmp_path))


def test_text_states_and_modules_of_one_path_are_in_the_store(storage):
  for name in PRIVATE:
    assert owner_store.is_private(name, LEVELS), name
    assert storage.of(name) is storage.to(name) is storage.store
  storage.write('shards/0/meta.json', b'{}')
  assert storage.store.exists('shards/0/meta.json') and not storage.shared.exists('shards/0/meta.json')


def test_all_else_is_in_the_shared_place_and_only_messages_are_written_there(storage):
  for name in PUBLIC:
    assert not owner_store.is_private(name, LEVELS), name
    assert storage.of(name) is storage.shared
    if name not in MAY_LEAVE:
      with pytest.raises(PermissionError, match='would leave the store of its owner'):
        storage.write(name, b'')
  assert storage.shared.names('') == []


def test_messages_of_levels_that_a_path_has_alone_do_not_leave(storage):
  for name in MAY_LEAVE:
    assert storage.to(name) is storage.shared
    with pytest.raises(PermissionError):
      storage.to(name.replace('shared', 'own'))


def test_training_waits_for_the_text_of_all_owners(court):
  registry = court.registry
  assert {task['key'] for task in registry.tasks('ready', OWN_TEXT)} == {*OWNERS}
  assert schedule.waits(court) == {'the text of clinic, court': [0, 1]}
  assert 'no worker reads the text of clinic: start one on its machines' in monitor.stuck(court)
  with pytest.raises(OSError, match='the text of clinic, court is not there yet'):
    owner_facts.weights(court)
  for path, owner in enumerate(OWNERS):
    assert not registry.tasks('ready', 'train')
    task = registry.claim('one', [OWN_TEXT], [owner])
    fact = Fact(OWN_TEXT, owner, 0, '', owner, {'paths': {str(path): {'tokens': 100 * (1 + path)}}})
    registry.complete(task, [fact])
    schedule.schedule(court, [fact])
  assert [task['key'] for task in registry.tasks('ready', 'train')] == ['0', '1']
  weights = owner_facts.weights(court)(0)
  assert weights.tolist() == pytest.approx([2 / 3, 4 / 3]), 'as the text of one place has them [2.7]'


def test_a_worker_claims_tasks_of_its_owner_alone(court, run):
  registry = court.registry
  registry.add_tasks([NewTask(kind, path, 0) for kind in ('train', 'evaluate', hand_over.SHIP) for path in '01'])
  keys = owner_facts.claim_keys(court)
  assert keys == ['court', '1']
  claims = Claims(court, 'worker', worker.OWNERS_KINDS, keys, only_keys=True)
  claims.last_busy -= 1e6  # it has found nothing for long, and others may be gone
  taken = []
  while lease := claims.next():
    taken.append((lease.task.kind, lease.task.key))
    claims.last_busy -= 1e6
  claims.fetches = {'train': lambda of, task: None}
  claims.work_s, claims.fetch_s = 1.0, 1.0
  claims.claim_ahead(0.0)
  assert claims.next() is None, 'nor ahead of time'
  claims.release_all()
  for held in claims.leases.values():
    held.close()
  assert sorted(taken) == [('evaluate', '1'), (OWN_TEXT, 'court'), ('train', '1')]
  hand_over.answer(court, HeldStates(None, 'court'))
  assert registry.is_done(hand_over.SHIP, '1', 0) and not registry.is_done(hand_over.SHIP, '0', 0)
  keeper = run.begin()
  assert owner_facts.claim_keys(keeper) == [''], "tasks that are nobody's"
  one_process.close(keeper)


def test_others_are_told_the_kind_of_an_error_alone(court):
  role = role_loop.Role(Claims(court, 'worker', worker.OWNERS_KINDS, ['court'], only_keys=True), lambda *_: None)
  for error in (ValueError('/home/court/secret.txt: the accused'), Gone('shards/0', 'file:///home/court')):
    lease = role.claims.next()
    try:
      with role.failing(lease):
        raise error
    except ValueError:
      pass
    [task] = [task for task in court.registry.tasks('ready', OWN_TEXT) if task['key'] == 'court']
    assert task['error'] == type(error).__name__


def test_a_name_tells_nothing_of_the_machine():
  process = roles.Process('worker', 'runs/x', 30.0, owner='court')
  assert roles.default_name(process).startswith('worker-court-')
  assert roles.socket.gethostname() not in roles.default_name(process)
  assert roles.socket.gethostname() in roles.default_name(roles.Process('worker', 'runs/x', 30.0))


def check(run: OwnersRun, s: settings_lib.Settings | None = None, **options) -> None:
  values = {'owner': 'court', 'globs': (str(owners_run.own_file(run.folder, 'court')),)} | options
  store = values.pop('store', str(run.folder / 'a-store'))
  process = roles.Process('worker', str(run.place), 30.0, store=store, **values)
  roles.check_owner(process, Hosts(), s or run.settings)


WRONG = {
  'unknown owner': (
    {'owner': 'press'},
    '--owner=press: this run has the owners clinic, court; to join the run, ask its keeper for',
  ),
  'no text': ({'globs': ()}, "--data is missing: name the text of court, as --data='my/"),
  'no store': ({'store': ''}, '--store is missing: name a folder or a bucket of court'),
  'a store in the workdir': ({'store': 'shared/store'}, 'should be apart: name another store'),
  'the workdir as store': ({'store': 'shared'}, 'should be apart: name another store'),
  'the workdir in the store': ({'store': '.'}, 'should be apart: name another store'),
  'a store with other files': ({'store': 'mine'}, r'mine contains other files \(letters.txt\): name a folder of its'),
  'no such text': ({'globs': ('no-such-*.txt',)}, 'no-such'),
  'a backup': ({'is_backup': True}, '--backup copies the tasks of others: leave it out with --owner'),
}


def test_options_that_do_not_fit_are_errors_before_any_work(run, monkeypatch):
  monkeypatch.chdir(run.folder)
  (run.folder / 'mine').mkdir()
  (run.folder / 'mine' / 'letters.txt').write_text('mine')
  before = {*run.folder.rglob('*')}
  for options, message in WRONG.values():
    with pytest.raises(ValueError, match=message):
      check(run, **options)
    assert {*run.folder.rglob('*')} == before, 'nothing is written'


def test_options_that_fit_are_none(run):
  check(run)
  check(run, owner='', globs=(), store='')
  pooled = owners_run.changed(run.settings, data=dict(own_text=False))
  with pytest.raises(ValueError, match=r'--owner=court: the text of this config is in one place; set config.data.own'):
    check(run, pooled)


def test_a_store_is_of_one_owner_in_one_run(tmp_path):
  store = object_store.open_storage(str(tmp_path))
  owner_store.settle(store, 'a1', 'court')
  owner_store.settle(store, 'a1', 'court')
  for run_id, owner in (('b2', 'court'), ('a1', 'clinic')):
    with pytest.raises(ValueError, match='is that of court in run a1: name another store'):
      owner_store.settle(store, run_id, owner)
  pathlib.Path(tmp_path / owner_store.MARK).write_text(json.dumps([]))
  with pytest.raises(ValueError, match='is that of another run: name another store'):
    owner_store.settle(store, 'a1', 'court')


@pytest.mark.parametrize('fraction, kept', [(0.0, [6, 7]), (0.5, [2, 3, 4, 5, 6, 7])])
def test_the_newest_states_stay_in_a_store_and_those_from_which_open_audits_begin(fraction, kept, court):
  audited = one_process.with_settings(court, audit=dict(fraction=fraction))
  court.registry.add_tasks([NewTask('audit', '1', 3), NewTask('audit', '0', 1)])
  for phase in range(8):
    state_facts.publish(audited, Fact('checkpoint', '1', phase, '', f'{phase}' * 64, {}), {'x': np.ones(1, 'f')})
  names = court.storage.names('objects/states/1')
  assert sorted(int(name.rpartition('/')[2].partition('-')[0]) for name in names) == kept
