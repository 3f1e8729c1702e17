"""Whatever a worker with a valid token tries: one line each, and no trace but a counter.

    tasks        of other paths and roles; held by others; another fence; two claims of one task; too many
    facts        of other kinds, paths, phases; with other objects, digests, metadata; of tasks not claimed; replayed
    objects      of others: read, written, listed, deleted, replaced; too large, too short, truncated, of other shapes
                 and dtypes, with NaN; without a task; with another digest; names that lead elsewhere
    HTTP         no token, an expired one, a revoked one, two; two lengths, no length, chunks without end, huge headers,
                 slow bodies, 1,000 requests at once; JSON that nests, is too large, or has numbers without end

The database's rows and the workdir's files are the same before and after each of these.
"""

import concurrent.futures
import hashlib
import math
import socket
import urllib.parse

import gateways
import island_fixtures
import numpy as np
import one_process
import pytest
import repository
import slow

from dipaco_jax.storage import tensors

one_device = island_fixtures.one_device
OTHERS = 'objects/paths/0/2-low-{}.safetensors'


class World:
  """One gateway for all attacks: an attacker may train path 0, holds its task, and has put its objects."""

  def __init__(self, gateway, island, folder):
    self.gateway, self.island, self.folder = gateway, island, folder
    self.token = gateway.tokens.add('attacker', [0], 1)
    self.link = gateways.gateway_link.Link(gateway.address, self.token, patience_s=1)
    gateway.links.append(self.link)
    self.worker = gateways.island_of(island, self.link)
    self.victim = gateway.worker('victim', [2])
    self.task = self.worker.registry.claim('', ['train'])
    self.other = self.victim.registry.claim('', ['train'])
    [self.fact] = gateways.train(self.worker, self.task)
    [self.others] = gateways.train(self.victim, self.other)
    third = gateway.worker('third', [3])
    task = third.registry.claim('', ['train'])
    third.registry.complete(task, gateways.train(third, task))  # facts that are there, and of another path
    self.held = {'task': self.task.id, 'fence': self.task.fence}

  def post(self, route: str, body, **headers) -> tuple[int, str]:
    return gateways.request(
      self.gateway, 'POST', f'/v1/{route}', self.token, body, Content_Type='application/json', **headers
    )

  def put(self, name: str, data: bytes, sha256: str = '', **headers) -> tuple[int, str]:
    sha256 = sha256 or hashlib.sha256(data).hexdigest()
    path = f'/v1/objects/{urllib.parse.quote(name)}?sha256={sha256}'
    return gateways.request(self.gateway, 'PUT', path, self.token, data, **headers)

  def complete(self, *facts, **held) -> tuple[int, str]:
    return self.post('complete', self.held | {'facts': list(map(list, facts))} | held)

  def meta(self, **changed):
    return self.fact._replace(meta=self.fact.meta | changed)

  def object(self, data: bytes, level: str = 'low', path: int = 0) -> str:
    """The name of an object with these bytes."""
    return f'objects/paths/0/{path}-{level}-{hashlib.sha256(data).hexdigest()[:16]}.safetensors'

  def message(self, change=lambda arrays: None, level: str = 'low') -> bytes:
    """What the path sends of a level, changed."""
    [of] = [of for of in self.island.layout.levels if of.name == level]
    arrays = gateways.arrays(self.island.level_shapes(of), 3.0)
    changed = change(arrays) or arrays
    return bytes(tensors.to_bytes(changed))


@pytest.fixture(scope='module')
def world(one_device, tmp_path_factory):
  folder = tmp_path_factory.mktemp('attacked')
  config = tmp_path_factory.mktemp('config')
  island = one_process.Machine(one_process.two_phases(config), {}).island(folder)
  gateways.begin_training(island)
  most = gateways.GENEROUS._replace(body_s=1.0, json_bytes=1 << 16)
  with gateways.running(island, folder, most) as gateway:
    yield World(gateway, island, folder)
  one_process.close(island)


@pytest.fixture(autouse=True)
def no_trace(world):
  """All is as it was, and something was counted."""
  before, counts = gateways.snapshot(world.gateway, world.folder), world.gateway.counts()
  yield
  assert gateways.snapshot(world.gateway, world.folder) == before
  assert world.gateway.counts() != counts or not counts


def is_one_line(answer: tuple[int, str], *statuses: int) -> bool:
  status, error = answer
  assert status in statuses, answer
  return bool(error) and '\n' not in error and 'Traceback' not in error and '/tmp' not in error and len(error) < 200


# -- tasks


def test_tasks_of_other_paths_and_roles_are_not_there(world):
  for kinds, keys in ((['train'], ['2', '3']), (['outer', 'prepare', 'finish', 'evaluate', 'reroute'], None)):
    assert world.worker.registry.claim('', kinds, keys) is None


@pytest.mark.parametrize('route', ['heartbeat', 'complete', 'reopen'])
@pytest.mark.parametrize('which', ['task of another', 'another fence', 'no such task'])
def test_only_a_claimed_task_is_held(route, which, world):
  other = {'task': world.other.id, 'fence': world.other.fence}
  held = {
    'task of another': other,
    'another fence': world.held | {'fence': 99},
    'no such task': {'task': 9999, 'fence': 1},
  }
  body = {'facts': [list(world.fact)], 'named': ['train', '0', 0]}
  assert is_one_line(world.post(route, held[which] | body), 409)


def test_the_task_of_another_is_not_released(world):
  body = {'task': world.other.id, 'fence': world.other.fence, 'error': ''}
  assert world.post('release', body)[0] == 200


@pytest.mark.parametrize('named', [('train', '2', 0), ('ship', '2', 0), ('outer', 'low/0', 1), ('finish', '', 0)])
def test_tasks_that_do_not_follow_cannot_be_asked_for(named, world):
  assert is_one_line(world.post('ask', {'named': list(named), 'holder': ''}), 403)


def test_a_task_that_is_not_due_is_not_added(world):
  for number in (0, 1):
    assert world.post('ask', {'named': ['train', '0', number], 'holder': 'x'})[0] == 200
  assert is_one_line(world.post('ask', {'named': ['train', '0', 2**31 - 1], 'holder': ''}), 422)
  assert world.post('ask', {'named': ['ship', '0', 0], 'holder': 'x'})[0] == 200


# -- facts


@pytest.mark.parametrize('kind', ['withdrawn', 'secrets', 'module ', '', 'CONFIG'])
def test_facts_of_other_kinds_are_not_read(kind, world):
  body = {'kind': kind, 'keys': None, 'number': None, 'at_least': 0, 'at_most': None}
  assert is_one_line(world.post('facts', body), 403)


@pytest.mark.parametrize('kind', ['checkpoint', 'piece', 'state', 'evaluation', 'excluded'])
def test_facts_of_other_paths_are_not_read(kind, world):
  assert world.island.registry.facts('checkpoint', ['3'], 0)
  assert world.worker.registry.facts(kind, ['1', '2', '3']) == world.worker.registry.facts(kind) == []
  assert world.worker.registry.newest(kind, keys=['2']) == {}


FORGED = {
  'nothing': lambda w: [],
  'of another path': lambda w: [w.fact._replace(key='2')],
  'of another phase': lambda w: [w.fact._replace(number=1)],
  'of another kind': lambda w: [w.fact._replace(kind='module')],
  'two': lambda w: [w.fact, w.fact],
  'beside a module': lambda w: [w.fact, w.fact._replace(kind='module', key='low/0', number=1)],
  'beside the end of the run': lambda w: [w.fact, w.fact._replace(kind='finished', key='', number=0)],
  'beside an exclusion of another': lambda w: [w.fact, w.fact._replace(kind='excluded', key='2')],
  'excluded without saying so': lambda w: [w.fact, w.fact._replace(kind='excluded')],
  'an evaluation that is not due': lambda w: [w.fact, w.fact._replace(kind='evaluation', meta={'loss': 0})],
  'without objects': lambda w: [w.meta(objects={})],
  'without a level': lambda w: [w.meta(objects={'low': w.fact.meta['objects']['low']})],
  'with the objects of another': lambda w: [w.meta(objects=w.others.meta['objects'])],
  'with an object that is not there': lambda w: [w.meta(objects=renamed(w, 'f' * 64))],
  'with another digest': lambda w: [w.meta(objects=renamed(w, w.fact.meta['objects']['low'][1][:16] + 'f' * 48))],
  'with the base in place of an object': lambda w: [w.meta(objects=renamed(w, 'f' * 64, 'registry.db'))],
  'with objects that are no list': lambda w: [w.meta(objects='x')],
  'without rows': lambda w: [w.fact._replace(meta={k: v for k, v in w.fact.meta.items() if k != 'rows'})],
  'with steps after the phase': lambda w: [w.meta(rows=[[10**6, 5.0, 1.0, 0.01, 2, 0]])],
  'with rows that nobody can read': lambda w: [w.meta(rows=[['x']])],
  'with a time that is no number': lambda w: [w.meta(ended='soon')],
  'with an infinite time': lambda w: [w.meta(busy_s=1e308)],
  'with a holder that is code': lambda w: [w.meta(holder="'; DROP TABLE dipaco_facts; --")],
  'with an exclusion of many lines': lambda w: [w.meta(excluded='a\nb', objects={})],
  'with seconds of nothing': lambda w: [w.meta(seconds={'x': 1})],
  'that is no list': lambda w: 7,
  'of other types': lambda w: [[1, 2, 3, 4, 5, 6]],
}  # fmt: skip


def renamed(world, sha256: str, name: str = '') -> dict:
  name = name or f'objects/paths/0/0-low-{sha256[:16]}.safetensors'
  return world.fact.meta['objects'] | {'low': [name, sha256]}


@pytest.mark.parametrize('what', FORGED)
def test_forged_facts_are_rejected(what, world):
  facts = FORGED[what](world)
  body = facts if isinstance(facts, int) else [list(fact) for fact in facts]
  assert is_one_line(world.post('complete', world.held | {'facts': body}), 422)


@pytest.mark.parametrize('kind', ['checkpoint', 'config', 'finished', 'withdrawn', 'excluded', 'module', 'state'])
def test_no_fact_is_put_without_a_task(kind, world):
  assert is_one_line(world.post('put', {'facts': [list(world.fact._replace(kind=kind, key='low/0'))]}), 403)


def test_a_worker_cannot_end_the_run(world):
  assert world.post('put', {'facts': [list(world.fact._replace(kind='diverged', key=''))]})[0] == 200


def test_a_state_without_a_checkpoint_is_rejected(world):
  meta = {'objects': [['objects/states/0/0-0-' + 'f' * 16 + '.safetensors', 'f' * 64]], 'checkpoint': 'f' * 64}
  fact = world.fact._replace(kind='state', uri='', sha256='f' * 64, meta=meta)
  assert is_one_line(world.post('put', {'facts': [list(fact)]}), 422)


@pytest.mark.parametrize(
  'named', [('checkpoint', '0', 0), ('state', '2', 0), ('module', 'low/0', 0), ('config', '', 0)]
)
def test_nothing_is_withdrawn_at_the_word_of_a_worker(named, world):
  assert is_one_line(world.post('revoke', {'named': list(named)}), 403)


# -- objects


def readable_by_others(world) -> str:
  return world.others.meta['objects']['low'][0]


@pytest.mark.parametrize('name', [
  'registry.db', 'registry.id', 'config.json', 'gateway/key.pem', 'sequences/train.array_record', 'routing/0/train.npy',
  'shards/0/2/train.array_record', 'shards/0/../0/2/train.array_record', 'base/../registry.db',
  'objects/paths/0/2-low-0123456789abcdef.safetensors', 'objects/states/2/0-0-0123456789abcdef.safetensors',
  'objects/outer/1/low/0-0123456789abcdef.safetensors', 'objects/modules/1/low/1-0123456789abcdef.safetensors',
  '/etc/passwd', '..', '.', '', 'base/', 'base', 'stages/..%2f..%2fregistry.db', 'base//params.safetensors', 'base/\0',
  'base/%2e%2e/registry.db', 'shards/0/0/..\\..\\registry.db', 'objects', 'objects/', 'BASE/params.safetensors',
])  # fmt: skip
def test_what_a_token_may_not_read_is_not_read(name, world):
  for quoted in (name.replace('\0', '%00').replace('\\', '%5c'), urllib.parse.quote(name, safe='')):
    answer = gateways.request(world.gateway, 'GET', f'/v1/objects/{quoted}', world.token)
    assert is_one_line(answer, 403, 404)
  assert is_one_line(world.post('exists', {'object': name}), 403, 422)


def test_the_object_of_another_is_not_read(world):
  answer = gateways.request(world.gateway, 'GET', f'/v1/objects/{readable_by_others(world)}', world.token)
  assert is_one_line(answer, 403)


@pytest.mark.parametrize('method', ['DELETE', 'PATCH', 'OPTIONS', 'POST', 'TRACE', 'LIST', 'COPY'])
def test_objects_are_not_listed_or_deleted(method, world):
  name = world.fact.meta['objects']['low'][0]
  for path in (f'/v1/objects/{name}', '/v1/objects', '/v1/objects/', '/'):
    assert is_one_line(gateways.request(world.gateway, method, path, world.token), 404, 405)


def shaped(arrays):
  return {name: x.reshape(-1)[:-1] for name, x in arrays.items()}


def poisoned(arrays):
  next(iter(arrays.values())).reshape(-1)[-1] = np.nan


WRONG = {
  'other shapes': lambda w: w.message(shaped),
  'other dtypes': lambda w: w.message(lambda arrays: {name: x.astype(np.float64) for name, x in arrays.items()}),
  'other names': lambda w: w.message(lambda arrays: {f'{name}x': x for name, x in arrays.items()}),
  'one array more': lambda w: w.message(lambda arrays: arrays | {'z': np.zeros(8, np.float32)}),
  'one array less': lambda w: w.message(lambda arrays: dict([*arrays.items()][1:])),
  'NaN': lambda w: w.message(poisoned),
  'truncated': lambda w: w.message()[:-1],
  'oversized': lambda w: w.message() + b'x',
  'no arrays': lambda w: b'x' * len(w.message()),
  'a header without end': lambda w: b'\xff' * 8 + w.message()[8:],
  'a bomb as header': lambda w: (len(w.message()) - 8).to_bytes(8, 'little') + b'[' * (len(w.message()) - 8),
  'empty': lambda w: b'',
}  # fmt: skip


@pytest.mark.parametrize('what', WRONG)
def test_objects_that_are_not_what_their_names_say_are_rejected(what, world):
  data = WRONG[what](world)
  assert is_one_line(world.put(world.object(data), data), 422)


PLACES = {
  'another path': lambda w, data: w.object(data, path=2),
  'a task that is not claimed': lambda w, data: w.object(data).replace('paths/0/', 'paths/1/'),
  'a piece': lambda w, data: w.object(data).replace('paths/0/0-', 'paths/0/0.1-'),
  'another level': lambda w, data: w.object(data, 'ends'),
  'no level': lambda w, data: w.object(data, 'nothing'),
  'a module': lambda w, data: w.object(data).replace('paths/0/0-low', 'modules/1/low/0'),
  'the base': lambda w, data: w.object(data).replace('paths/0/0-low', 'modules/0/low'),
  'an outer state': lambda w, data: w.object(data).replace('paths/0/0-low', 'outer/1/low/0'),
  'a state': lambda w, data: w.object(data).replace('paths/0/0-low', 'states/0/0-0'),
  'a file': lambda w, data: 'config.json',
  'another digest': lambda w, data: w.object(b'other'),
  'outside': lambda w, data: '../../' + w.object(data),
  'encoded': lambda w, data: '%2e%2e/' + w.object(data),
}  # fmt: skip


@pytest.mark.parametrize('what', PLACES)
def test_objects_are_written_only_under_the_names_of_a_claimed_task(what, world):
  data = world.message()
  name = PLACES[what](world, data)
  sha256 = hashlib.sha256(data).hexdigest()
  assert is_one_line(world.put(name, data), 403, 409, 422)
  assert is_one_line(world.post('offer', {'object': name, 'size': len(data), 'sha256': sha256}), 403, 409, 422)
  assert is_one_line(
    world.post('commit', {'object': name, 'size': len(data), 'sha256': sha256, 'ticket': 'a' * 32}), 403, 409, 422
  )


def test_an_object_with_another_digest_than_it_says_is_rejected(world):
  data = world.message()
  said = hashlib.sha256(data).hexdigest()[:16] + 'f' * 48
  assert is_one_line(world.put(world.object(data), data, said), 422)


def test_an_object_that_is_there_is_not_replaced(world):
  name, sha256 = world.fact.meta['objects']['low']
  data = bytes(world.island.storage.fetch(name))
  assert world.put(name, data)[0] == 200
  assert is_one_line(world.put(name, data, sha256[:16] + 'f' * 48), 422)


# -- HTTP


@pytest.mark.parametrize('what', ['none', 'unknown', 'expired', 'revoked', 'short', 'long', 'basic'])
def test_without_a_valid_token_nothing_is_answered(what, world):
  name = f'{what}-one'
  token = world.gateway.tokens.add(name, None, -1 if what == 'expired' else 1)
  if what == 'revoked':
    world.gateway.tokens.revoke(name)
  given = {'none': '', 'unknown': 'x' * 43, 'short': 'x', 'long': 'x' * 5000}.get(what, token)
  headers = {'Authorization': 'Basic eDp4'} if what == 'basic' else {}
  for route in world.gateway.desks.routes:
    assert is_one_line(gateways.request(world.gateway, 'POST', f'/v1/{route}', given, {}, **headers), 401)
  assert is_one_line(gateways.request(world.gateway, 'GET', '/v1/objects/base.index.json', given, **headers), 401)


def raw(world, text: bytes, wait_s: float = 6.0) -> bytes:
  """The answer to bytes, until the connection is closed."""
  with socket.create_connection(('127.0.0.1', world.gateway.port), timeout=wait_s) as connection:
    received = b''
    try:
      connection.sendall(text.replace(b'TOKEN', world.token.encode()))
      while part := connection.recv(1 << 16):
        received += part
    except (ConnectionError, TimeoutError):
      pass
  return received


HEAD = b'POST /v1/hello HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer TOKEN\r\nConnection: close\r\n'
TRICKS = {
  'two lengths': (HEAD + b'Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}', b' 400 '),
  'a length and chunks': (HEAD + b'Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n', b' 411 '),
  'no length': (HEAD + b'\r\n', b' 411 '),
  'a length below zero': (HEAD + b'Content-Length: -1\r\n\r\n', b' 400 '),
  'a length without end': (HEAD + b'Content-Length: ' + b'9' * 20 + b'\r\n\r\n', b' 4'),
  'chunks without end': (HEAD + b'Transfer-Encoding: chunked\r\n\r\n' + b'1\r\nx\r\n' * 1000, b' 411 '),
  'a header without end': (HEAD + b'X: ' + b'x' * (1 << 18), b''),
  'headers without end': (HEAD + b'X: x\r\n' * (1 << 15), b''),
  'two tokens': (HEAD + b'Authorization: Bearer TOKEN\r\nContent-Length: 2\r\n\r\n{}', b' 401 '),
  'a body that does not come': (HEAD + b'Content-Length: 100\r\n\r\n{', b' 408 '),
  'a request in a request': (HEAD + b'Content-Length: 2\r\n\r\n{}POST /v1/claim HTTP/1.1\r\n\r\n', b' 200 '),
  'no HTTP': (b'\x16\x03\x01' + b'\0' * 200, b' 400 '),
}  # fmt: skip


@pytest.mark.parametrize('what', TRICKS)
def test_tricks_with_headers(what, world):
  text, expected = TRICKS[what]
  answer = raw(world, text)
  assert expected in answer[:40] and answer.count(b'HTTP/1.1') <= 1 and b'Traceback' not in answer
  assert world.worker.registry.claim('', ['prepare']) is None  # it still answers


BOMBS = {
  'brackets': b'[' * 60_000,
  'objects': b'{"a":' * 10_000,
  'a number without end': b'{"task": ' + b'9' * 50_000 + b'}',
  'too large': b'{"x": "' + b'x' * (1 << 16) + b'"}',
  'no object': b'[1]',
  'no JSON': b'\xff\xfe',
  'nothing': b'',
  'half a character': b'{"kind": "\\ud800", "keys": null, "number": null, "at_least": 0, "at_most": null}',
  'NaN': b'{"task": NaN, "fence": Infinity}',
  'a null': b'null',
}  # fmt: skip


@pytest.mark.parametrize('what', BOMBS)
@pytest.mark.parametrize('route', ['facts', 'complete', 'claim'])
def test_json_that_is_a_bomb(route, what, world):
  assert is_one_line(world.post(route, BOMBS[what]), 403, 413, 422)


@pytest.mark.parametrize('count', slow.but([100, 1000], 1000))
def test_many_requests_at_once_are_answered(count, world):
  def ask(_):
    return gateways.request(world.gateway, 'POST', '/v1/hello', world.token, {})[0]

  with concurrent.futures.ThreadPoolExecutor(100) as pool:
    statuses = [*pool.map(ask, range(count))]
  assert {*statuses} <= {200, 503} and statuses.count(200) > 0.9 * count


def test_replayed_requests_change_nothing(world):
  body = world.held | {'facts': [list(world.fact._replace(key='2'))]}
  answers = [world.post('complete', body) for _ in range(3)]
  assert all(is_one_line(answer, 422) for answer in answers)


def count_cases(test) -> int:
  marks = [mark for mark in getattr(test, 'pytestmark', []) if mark.name == 'parametrize']
  return math.prod(len(mark.args[1]) for mark in marks)


def test_the_table_of_the_page_has_all_cases(world):
  page = (repository.ROOT / 'docs' / 'gateway.md').read_text()
  rows = page.partition('| what is tried |')[2].partition('\n\n')[0].splitlines()[2:]
  tests = [value for name, value in globals().items() if name.startswith('test_')]
  assert sum(int(row.split('|')[2]) for row in rows) == sum(map(count_cases, tests)) - 1
  assert world.post('hello', {})[0] == 200  # counted, as what each test here asks is
