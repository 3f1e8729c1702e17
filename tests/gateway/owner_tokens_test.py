"""Owners' workers behind a gateway: what their tokens allow, and what the gateway does not try to read."""

import dataclasses
import hashlib
import json

import gateways
import one_process
import owners_run
import pytest
from owners_run import OWNERS, OwnersRun

from dipaco_jax.core.errors import InputError
from dipaco_jax.islands import (
  audit_facts,
  audit_oversight,
  behind_gateway,
  members,
  own_levels,
  owner_facts,
  owner_store,
  schedule,
  state_facts,
  suspensions,
  withdrawals,
)
from dipaco_jax.islands.guard import Gone
from dipaco_jax.islands.island import OWN_TEXT, Island
from dipaco_jax.registry.registry import Fact, NewTask
from dipaco_jax.storage import object_store

DIGEST = 'ab' * 32
LONG_S = 300  # of a lease that does not end on a busy machine


class World:
  """A run that is prepared, as far as facts are concerned, and a worker of each owner behind one gateway."""

  def __init__(self, run: OwnersRun, keeper: Island, gateway: gateways.Running):
    self.run, self.keeper, self.gateway = run, keeper, gateway
    self.tokens, self.workers = {}, dict[str, Island]()
    for path, owner in enumerate(OWNERS):
      self.tokens[owner] = gateway.tokens.add(owner, [path], 1, owner)
      link = gateways.gateway_link.Link(gateway.address, self.tokens[owner], patience_s=30)
      gateway.links.append(link)
      self.workers[owner] = gateways.island_of(keeper, link)

  def court_worker(self, name: str):
    """The registry of another worker with the court's token, which calls itself so."""
    link = gateways.gateway_link.Link(self.gateway.address, self.tokens['court'], patience_s=30)
    self.gateway.links.append(link)
    link.name = name
    return gateways.GatewayRegistry(link)

  def post(self, route: str, body, owner: str = 'court') -> tuple[int, str]:
    return gateways.request(self.gateway, 'POST', f'/v1/{route}', self.tokens[owner], body)

  def put(self, name: str, data: bytes) -> tuple[int, str]:
    path = f'/v1/objects/{name}?sha256={hashlib.sha256(data).hexdigest()}'
    return gateways.request(self.gateway, 'PUT', path, self.tokens['court'], data)

  def read_texts(self):
    """Completes the tasks of all owners' text that are open."""
    for path, owner in enumerate(OWNERS):
      if task := self.workers[owner].registry.claim('', [OWN_TEXT]):
        self.workers[owner].registry.complete(task, [text_fact(owner, path)])

  def train(self, key: str, x: float = 1.0) -> Fact:
    """Trains the first phase of a path; returns its checkpoint."""
    worker = self.workers[OWNERS[int(key)]]
    task = worker.registry.claim('', ['train'], [key])
    worker.registry.complete(task, trained(worker, task, x))
    [checkpoint] = self.keeper.registry.facts('checkpoint', [key], 0)
    return checkpoint


def text_fact(owner: str, path: int, digest: str = DIGEST, **sizes) -> Fact:
  """The fact of an owner's text."""
  about = {'tokens': 100 * (1 + path), 'documents': 7, 'holdout_targets': 20, 'sha256': digest} | sizes
  meta = {'paths': {str(path): about}, 'trees': {'shards/0': digest}}
  return Fact(OWN_TEXT, owner, 0, '', hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest(), meta)


def trained(worker: Island, task, x: float = 1.0) -> list[Fact]:
  """The facts of a task of training: the checkpoint names no object of a level that stays with its owner."""
  [checkpoint] = gateways.train(worker, task, x)
  own, path, version = [], int(task.key), task.number + 1
  for key in worker.own_modules(path):
    sha256 = hashlib.sha256(f'{key} {x}'.encode()).hexdigest()
    name = f'objects/modules/{version}/{key}-{sha256[:16]}.safetensors'
    own.append(Fact('module', key, version, name, sha256, {'started': 1.0, 'ended': 2.0}))
  objects = checkpoint.meta['objects']
  return [gateways.schedule.checkpoint_fact(path, task.number, objects, checkpoint.meta, own_modules=own), *own]


def audited(task, checkpoint: Fact, **changed) -> Fact:
  """The fact of an audit that has found other values than the court's."""
  about = {'worker': 'court', 'levels': ['shared'], 'differing': [], 'phases': [0], 'started': 1.0, 'ended': 2.0}
  meta = {'checkpoint': checkpoint.sha256, 'equal': False, 'digest': DIGEST, 'difference': {'shared': 0.5}}
  return Fact(audit_facts.FACT_OF[task.kind], task.key, task.number, '', '', meta | about | changed)


@pytest.fixture
def world(tmp_path, monkeypatch):
  monkeypatch.setattr(owners_run, 'LEASE_S', LONG_S)
  with one_process.one_device():
    run = OwnersRun(tmp_path, owners_run.settings(tmp_path, train=dict(phases=1)))
    keeper = run.begin()
    gateways.begin_training(keeper)
    with gateways.running(keeper, tmp_path) as gateway:
      yield World(run, keeper, gateway)
    one_process.close(keeper)


def test_training_begins_when_all_texts_are_read_and_others_learn_numbers_of_tokens_alone(world):
  court, clinic = world.workers['court'].registry, world.workers['clinic'].registry
  task = court.claim('', [OWN_TEXT, 'train', 'evaluate'])
  assert (task.kind, task.key, task.owner) == (OWN_TEXT, 'court', 'court') and not court.claim('', [OWN_TEXT])
  court.complete(task, [text_fact('court', 1)])
  assert court.claim('', ['train']) is None, 'the text of the clinic is missing'
  clinic.complete(clinic.claim('', [OWN_TEXT]), [text_fact('clinic', 0)])
  assert court.claim('', ['train'], ['0']) is None and court.claim('', ['train']).key == '1'
  [mine, own] = world.workers['court'].registry.facts(OWN_TEXT)
  assert own.meta == world.keeper.registry.facts(OWN_TEXT, ['court'])[0].meta
  assert mine.meta == {'paths': {'0': {'tokens': 100}}} and mine.sha256 == '', 'of others, tokens alone'
  direct = owner_facts.weights(world.keeper)(0)
  assert owner_facts.weights(world.workers['court'])(0).tolist() == direct.tolist()


def test_what_is_in_a_store_is_not_read_by_the_gateway(world):
  """States, and modules of single paths: facts of them are accepted, and withdrawn at the word of their owner."""
  world.read_texts()
  checkpoint, court = world.train('1'), world.workers['court']
  assert [fact.key for fact in world.keeper.registry.facts('module', number=1)] == court.own_modules(1)
  objects = [[f'objects/states/1/0-0-{DIGEST[:16]}.safetensors', DIGEST]]
  about = {'worker': 'court', 'checkpoint': checkpoint.sha256, 'objects': objects}
  state = Fact('state', '1', 0, '', state_facts.digest(objects), about)
  court.registry.put([state])
  assert world.keeper.registry.facts('state') == [state]
  withdrawals.withdraw(court, state, Gone('x', 'the store has lost it'))
  assert not world.keeper.registry.facts('state')


def test_a_task_is_opened_again_at_the_word_of_its_owner_and_the_first_result_stays(world):
  world.read_texts()
  first, court = world.train('1'), world.workers['court']
  world.train('0')
  world.keeper.registry.add_tasks([gateways.schedule.NewTask('evaluate', '1', 1)])
  held = court.registry.claim('', ['evaluate'])
  for kind, key in (('train', '1'), (OWN_TEXT, 'court'), ('train', '0'), (OWN_TEXT, 'clinic')):
    court.registry.reopen(held, kind, key, 0)
    is_own = key in ('1', 'court')
    assert bool(world.keeper.registry.tasks('ready', kind)) == is_own
    if is_own:
      task = court.registry.claim('', [kind])
      court.registry.complete(task, trained(court, task, 2.0) if kind == 'train' else [text_fact('court', 1)])
  stands = [fact for fact in world.keeper.registry.facts('checkpoint') if fact.key == '1']
  assert stands == [first], 'that nobody here can read a module of it is no reason'


def test_a_gateway_that_runs_serves_an_owner_that_joins_and_tells_all_others(world):
  world.read_texts()
  court = world.workers['court']
  assert court.registry.claim('', ['evaluate']) is None and court.registry.members == 0
  members.add(world.keeper, 'press')
  link = world.gateway.link('press', [2], owner='press')
  press = members.grow(gateways.island_of(world.keeper, link))
  assert press.members.joined == ('press',) and press.layout.grid.num_paths == 3
  with pytest.raises(InputError, match='does not allow'):
    court.registry.add_tasks([NewTask(OWN_TEXT, 'press', 0)])
  assert press.registry.claim('', [OWN_TEXT]) is None
  members.add_text_task(press, 'press')
  press.registry.complete(press.registry.claim('', [OWN_TEXT]), [text_fact('press', 2)])
  assert world.keeper.registry.facts('began', ['press'])[0].meta == {'since': 0}
  world.gateway.desks.advance()
  assert press.registry.claim('', ['train']).key == '2'
  assert court.registry.claim('', ['evaluate']) is None
  with pytest.raises(members.Changed):
    members.heed(court)
  assert members.grow(court).members == members.grow(press).members


def test_an_evaluation_by_the_owner_is_a_fact(world):
  world.keeper.registry.add_tasks([gateways.schedule.NewTask('evaluate', path, 1) for path in '01'])
  court = world.workers['court'].registry
  task = court.claim('', ['evaluate'])
  assert task.key == '1' and court.claim('', ['evaluate']) is None
  fact = own_levels.evaluation_fact(1, 1, 4.25, 20.0)
  court.complete(task, [fact])
  assert world.keeper.registry.facts('evaluation') == [fact]


def test_a_text_gets_new_digests_when_its_store_was_lost_and_never_other_sizes(world):
  world.read_texts()
  court = world.workers['court'].registry
  again = world.keeper.registry.claim('court', ['train'], ['1'])
  world.keeper.registry.reopen(again, OWN_TEXT, 'court', 0)
  task = court.claim('', [OWN_TEXT])
  body = {'task': task.id, 'fence': task.fence, 'facts': [list(text_fact('court', 1, tokens=999))]}
  assert world.post('complete', body)[0] == 422
  new = text_fact('court', 1, 'cd' * 32)
  court.complete(task, [new])
  assert [fact.sha256 for fact in world.keeper.registry.facts(OWN_TEXT, ['court'])] == [new.sha256]


def test_the_key_of_a_store_is_made_once_and_notes_the_fact_that_it_replaces(tmp_path):
  store = object_store.open_storage(str(tmp_path))
  key = owner_store.take_key(store, '')
  assert owner_store.take_key(store, 'a fact') == key and len(key.secret) == 64 and not key.replaces
  (tmp_path / owner_store.KEY).unlink()
  other = owner_store.take_key(store, 'a fact')
  assert other.secret != key.secret and other.replaces == 'a fact'
  (tmp_path / owner_store.KEY).write_text('[]')
  with pytest.raises(InputError, match=r'own_text.key is damaged: remove it'):
    owner_store.take_key(store, '')


def test_an_owners_worker_needs_its_token_its_text_and_its_store(world, tmp_path):
  own, s = behind_gateway.Own, world.run.settings
  registry = world.workers['court'].registry
  letters = tmp_path / 'letters.jsonl'
  letters.write_text((json.dumps({'text': 'bcd fgk ' * 50}) + '\n') * 9)
  globs, store = (str(letters),), str(tmp_path / 'store')
  assert behind_gateway.check_own(registry, s, own('court', globs, store)) == 'court'
  pooled = owners_run.changed(s, data=dict(own_text=False))
  assert behind_gateway.check_own(registry, pooled, own()) == ''
  nobody = gateways.island_of(world.keeper, world.gateway.link('nobody')).registry
  for of, settings, given, message in (
    (registry, s, own('clinic', globs, store), '--owner=clinic: the token is that of court'),
    (nobody, pooled, own('clinic'), '--owner=clinic: the token is for no owner'),
    (registry, s, own('', (), store), '--data is missing: name the text of court'),
    (registry, s, own('', globs), '--store is missing: name a folder or a bucket of court'),
    (nobody, s, own('', globs, store), 'DIPACO_TOKEN: the text of this run stays with its owners, and this token has'),
    (registry, pooled, own('', globs), '--data is for runs whose text stays with its owners'),
    (registry, pooled, own('', (), store), '--store is for runs whose text stays with its owners'),
  ):
    with pytest.raises(InputError, match=message):
      behind_gateway.check_own(of, settings, given)
  with pytest.raises(InputError, match='the text of this run stays with its owners'):
    nobody.claim('', ['train'])
  assert not (tmp_path / 'store').exists(), 'nothing is written'


# -- what an owner's token is not for

FORGED = {
  'of another owner': lambda fact: fact._replace(key='clinic'),
  'of another path': lambda fact: fact._replace(meta=text_fact('court', 0).meta),
  'with a negative size': lambda fact: text_fact('court', 1, tokens=-1),
  'with a size that is no integer': lambda fact: text_fact('court', 1, tokens=1.5),
  'with a boolean': lambda fact: text_fact('court', 1, documents=True),
  'with a huge size': lambda fact: text_fact('court', 1, tokens=2**60),
  'with another entry': lambda fact: text_fact('court', 1, words='x'),
  'with a digest that is none': lambda fact: text_fact('court', 1, 'x'),
  'without trees': lambda fact: fact._replace(meta={'paths': fact.meta['paths']}),
  'with other trees': lambda fact: fact._replace(meta=fact.meta | {'trees': {'base': DIGEST}}),
  'with another sha256': lambda fact: fact._replace(sha256=DIGEST),
  'with an object': lambda fact: fact._replace(uri='registry.db'),
  'that is an evaluation': lambda fact: own_levels.evaluation_fact(1, 1, 4.0, 2.0),
}


def test_forged_facts_of_texts_are_rejected(world):
  task = world.workers['court'].registry.claim('', [OWN_TEXT])
  fact, held = text_fact('court', 1), {'task': task.id, 'fence': task.fence}
  for what, forge in FORGED.items():
    for facts in ([forge(fact)], [fact, forge(fact)], []):
      status, error = world.post('complete', held | {'facts': [list(each) for each in facts]})
      assert status == 422 and '\n' not in error, what
  assert not world.keeper.registry.facts(OWN_TEXT)
  assert world.post('complete', held | {'facts': [list(fact)]})[0] == 200


def test_what_is_of_another_owner_is_neither_claimed_read_nor_written(world):
  world.read_texts()
  world.train('0')
  world.keeper.registry.add_tasks([gateways.schedule.NewTask('evaluate', '0', 1)])
  court = world.workers['court'].registry
  held = court.claim('', ['train'])
  before = gateways.snapshot(world.gateway, world.run.place)
  for kinds, keys in (([OWN_TEXT], ['clinic']), (['evaluate', 'train'], ['0']), (['prepare', 'finish', 'outer'], None)):
    assert court.claim('', kinds, keys) is None
  for kind in ('checkpoint', 'excluded', 'state', 'evaluation', 'piece'):
    assert court.facts(kind) == []
  assert {fact.key for fact in court.facts('module')} == {'shared/shared', 'own/1'}
  for name in ('objects/paths/0/0-shared-aa.safetensors', f'objects/modules/1/own/0-{DIGEST[:16]}.safetensors'):
    assert world.post('exists', {'object': name})[0] == 403
  data = b'x' * 100
  digits = hashlib.sha256(data).hexdigest()[:16]
  for name in ('states/1/0-0', 'modules/1/own/1', 'states/0/0-0', 'paths/0/0-shared', 'paths/0/1-own'):
    status, error = world.put(f'objects/{name}-{digits}.safetensors', data)
    assert status in (403, 409, 422) and '\n' not in error, 'what stays in a store is not written here'
  for kind, key in ((OWN_TEXT, 'clinic'), ('train', '0')):
    named = {'task': held.id, 'fence': held.fence, 'named': [kind, key, 0]}
    assert world.post('reopen', named)[0] == 200, 'and does nothing'
  for path in ('0', 'clinic'):
    assert world.post('revoke', {'named': ['state', path, 0]})[0] == 403
  assert gateways.snapshot(world.gateway, world.run.place) == before


def test_a_worker_without_an_owner_reads_no_files_of_text(world):
  world.keeper.storage.write('validation_text.json', b'[]')
  assert world.workers['court'].storage.exists('validation_text.json')
  token = world.gateway.tokens.add('nobody', None, 1)
  for name in ('validation_text.json', 'tokenizer.model'):
    status, _ = gateways.request(world.gateway, 'POST', '/v1/exists', token, {'object': name})
    assert status == 403


def test_what_an_owner_trains_is_audited_by_its_other_workers_alone(world):
  """A court that accuses others than those who have trained the phase is rejected; one of its workers is suspended."""
  world.read_texts()
  checkpoint, registry = world.train('1'), world.keeper.registry
  world.train('0')
  registry.add_tasks([NewTask(audit_facts.AUDIT, key, 0) for key in '01'])
  audits, (court, second, third) = audit_facts.KINDS, map(world.court_worker, ('', 'second', 'third'))
  for each in (second, world.workers['clinic'].registry):
    each.beat('', 'worker', {})
  assert [row['key'] for row in audit_oversight.without_workers(world.keeper)] == ['0']
  assert court.claim('', audits) is None and second.claim('', audits, holder='disk-1') is None, 'it has trained it'
  assert second.tasks('ready', 'audit') == [{'kind': 'audit', 'key': '1', 'number': 0}]
  assert not second.tasks('ready', 'train'), 'of all other tasks, a worker sees its own'
  task = second.claim('', audits)
  assert (task.kind, task.key, task.owner) == (audit_facts.AUDIT, '1', 'court/second')
  assert third.claim('', audits) is None, "path 0 is the clinic's"
  for wrong in ({'worker': 'clinic'}, {'digest': 'no'}, {'levels': 'own'}, {'equal': 1}, {'started': None}):
    with pytest.raises(InputError, match='an audit says what was compared'):
      second.complete(task, [audited(task, checkpoint, **wrong)])
  second.complete(task, [audited(task, checkpoint, text='letters', by='somebody else')])
  [fact] = registry.facts(audit_facts.AUDITED)
  assert fact.meta['by'] == 'court/second' and 'text' not in fact.meta and second.claim('', audits) is None
  task = third.claim('', audits)
  third.complete(task, [audited(task, checkpoint)])
  assert [*suspensions.current(registry)] == ['court']
  with pytest.raises(InputError, match='suspended'):
    court.claim('', audits)


def test_a_worker_behind_a_gateway_leaves_the_draw_and_the_end_of_audits_to_others(world):
  world.read_texts()
  world.train('1')
  court = world.workers['court']
  settings = owners_run.changed(court.run.settings, audit=dict(fraction=1.0))
  schedule.advance(dataclasses.replace(court, run=dataclasses.replace(court.run, settings=settings)))
  assert not world.keeper.registry.tasks(kind=audit_facts.AUDIT)


def test_an_audit_that_an_owner_gives_up_is_closed(world):
  world.read_texts()
  checkpoint = world.train('1')
  world.keeper.registry.add_tasks([NewTask(audit_facts.AUDIT, '1', 0)])
  second = world.court_worker('second')
  task = second.claim('', audit_facts.KINDS)
  second.complete(task, [audited(task, checkpoint, equal=None, closed='it cannot be computed: ValueError')])
  [fact] = world.keeper.registry.facts(audit_facts.AUDITED)
  assert fact.meta['equal'] is None and fact.meta['closed'] == 'it cannot be computed: ValueError'
