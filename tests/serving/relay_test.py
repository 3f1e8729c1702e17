"""Requests to engines that answer, fail, break off or have no room; load, retries, and what the client gets to see."""

import asyncio
import contextlib
import errno
import json
import resource
import socket
import time

import pytest
import scripted_engine
from scripted_engine import good

from dipaco_jax.serving import engine_pool, relay as relay_lib
from dipaco_jax.serving.engine_pool import EnginePool
from dipaco_jax.serving.engines_file import Engine, Engines
from dipaco_jax.serving.openai_api import ApiError
from dipaco_jax.serving.route_api import Part
from dipaco_jax.serving.route_metrics import Metrics

EVENTS = [b'data: {"a": 1}\n\n', b'data: {"a": 2}\n\n', b'data: [DONE]\n\n']


class Client:
  """What a client of the relay gets; `gone` makes it hang up."""

  def __init__(self, relay):
    self.relay, self.messages, self.gone = relay, [], asyncio.Event()

  async def ask(self, *paths: int, parts=None, **fields):
    async def receive():
      await self.gone.wait()
      return {'type': 'http.disconnect'}

    async def send(message):
      self.messages.append(message)

    parts = parts or [Part(paths or (0,), (0,), {'prompt': 'fox'} | fields)]
    scope = {'headers': [(b'x-request-id', b'9'), (b'authorization', b'Bearer ours'), (b'cookie', b'c')]}
    await self.relay('completions', parts, scope, receive, send)
    return self

  @property
  def status(self) -> int:
    return self.messages[0]['status']

  @property
  def headers(self) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in self.messages[0]['headers']}

  @property
  def body(self) -> bytes:
    return b''.join(message['body'] for message in self.messages[1:])

  @property
  def ended(self) -> bool:
    return not self.messages[-1].get('more_body', False)


@contextlib.asynccontextmanager
async def relayed(*engines: Engine, timeout_s: float = 10):
  metrics = Metrics()
  async with relay_lib.open_session(timeout_s) as session:
    pool = EnginePool(Engines(engines, False), session, metrics)
    await pool.start()
    relay = relay_lib.Relay(pool, metrics, timeout_s)
    relay.metrics = metrics
    try:
      yield relay
    finally:
      pool.close()


async def answered_again(relay):
  """Waits for an engine that was out, and asks it."""
  async with asyncio.timeout(5):
    while not relay.pool.ready_paths:
      await asyncio.sleep(0.01)
  assert (await Client(relay).ask()).status == 200


def engines_of(scripted, path: int = 0, api_key: str = '') -> list[Engine]:
  return [Engine(path, engine.url, '', api_key) for engine in scripted]


def engines_of_paths(scripted, first: int = 0) -> list[Engine]:
  """One for each path from `first` on."""
  return [Engine(first + i, engine.url, '', '') for i, engine in enumerate(scripted)]


def test_an_answer_is_passed_on_with_the_path_and_without_what_is_not_ours_to_tell():
  async def main():
    async with scripted_engine.running(good) as engines, relayed(*engines_of(engines, 3, api_key='theirs')) as relay:
      client = await Client(relay).ask(3, top_k=5)
      assert client.status == 200 and json.loads(client.body) == {'port': engines[0].port, 'model': 'm'}
      assert client.headers == {
        'content-type': 'application/json', 'x-request-id': '7', 'dipaco-path': '3',
        'content-length': str(len(client.body)),
      }  # fmt: skip
      assert engines[0].asked == [{'prompt': 'fox', 'top_k': 5, 'model': 'm'}]
      head = engines[0].heads[-1].decode().lower()
      assert 'authorization: bearer theirs\r\n' in head and 'x-request-id: 9\r\n' in head and 'cookie' not in head
      assert client.ended and not relay.open

  asyncio.run(main())


def test_the_engine_with_the_fewest_open_requests_is_next():
  async def main():
    release = asyncio.Event()

    async def slow(engine, body, writer):
      await release.wait()
      await good(engine, body, writer)

    async with scripted_engine.running(slow, slow, slow) as engines, relayed(*engines_of(engines)) as relay:
      asks = [asyncio.create_task(Client(relay).ask()) for _ in range(9)]
      async with asyncio.timeout(5):
        while sum(len(engine.asked) for engine in engines) < 9:
          await asyncio.sleep(0.01)
      assert [len(engine.asked) for engine in engines] == [3, 3, 3]
      release.set()
      await asyncio.gather(*asks)
      await Client(relay).ask()  # in turns where nobody has anything to do
      assert sorted(len(engine.asked) for engine in engines) == [3, 3, 4]

  asyncio.run(main())


async def closes(engine, body, writer):
  writer.close()


async def unavailable(engine, body, writer):
  scripted_engine.whole(writer, {}, 503)


async def refuses_key(engine, body, writer):
  scripted_engine.whole(writer, {}, 401)


async def no_events(engine, body, writer):
  await scripted_engine.stream(writer, [])


async def half_a_body(engine, body, writer):
  writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"x"')
  writer.close()


@pytest.mark.parametrize('bad', [closes, unavailable, refuses_key, no_events, half_a_body], ids=lambda f: f.__name__)
def test_what_has_not_yielded_a_byte_is_asked_of_another_engine(bad, caplog):
  async def main():
    async with scripted_engine.running(bad, good) as engines, relayed(*engines_of(engines)) as relay:
      for _ in range(3):
        client = await Client(relay).ask()
        assert client.status == 200 and json.loads(client.body)['port'] == engines[1].port
      assert len(engines[0].asked) == (2 if bad is closes else 1)  # once more: its connection was not new
      assert relay.metrics.retries._value.get() == 1
      assert f'{engines[0].url} of path 0 is out: ' in caplog.text

  asyncio.run(main())


def test_an_engine_that_is_out_comes_back_when_it_answers(monkeypatch):
  monkeypatch.setattr(engine_pool, 'FIRST_S', 0.02)

  async def main():
    async with scripted_engine.running(unavailable) as engines, relayed(*engines_of(engines)) as relay:
      engine = engines[0]
      with pytest.raises(ApiError, match='no engine of path 0 answers') as found:
        await Client(relay).ask()
      assert found.value.status == 503 and not relay.pool.ready_paths
      engine.models = None
      await asyncio.sleep(0.3)
      assert not relay.pool.ready_paths
      probes = len(engine.heads)
      assert 2 < probes < 8  # at growing intervals
      engine.script, engine.models = good, ['m']
      await answered_again(relay)

  asyncio.run(main())


def test_an_engine_that_is_killed_and_started_again_is_used_again(monkeypatch):
  monkeypatch.setattr(engine_pool, 'FIRST_S', 0.02)

  async def main():
    async with scripted_engine.running(good) as engines, relayed(*engines_of(engines)) as relay:
      await Client(relay).ask()
      await engines[0].stop()
      with pytest.raises(ApiError, match='no engine of path 0 answers'):
        await Client(relay).ask()
      await engines[0].start(engines[0].port)
      await answered_again(relay)

  asyncio.run(main())


def test_a_connection_that_the_engine_closed_for_being_idle_is_nobodys_failure(caplog):
  async def closes_behind(engine, body, writer):
    if len(engine.asked) == 2:
      writer.close()  # as if it had been closed just as we asked
    else:
      await good(engine, body, writer)

  async def main():
    async with scripted_engine.running(closes_behind) as engines, relayed(*engines_of(engines)) as relay:
      for _ in range(3):
        assert (await Client(relay).ask()).status == 200
      assert len(engines[0].asked) == 4 and 'is out' not in caplog.text

  asyncio.run(main())


def test_errors_are_passed_on_and_end_an_engine_only_where_there_is_another():
  async def fails(engine, body, writer):
    scripted_engine.whole(writer, {'error': 'x'}, 500)

  async def main():
    async with scripted_engine.running(fails) as engines, relayed(*engines_of(engines)) as relay:
      for _ in range(5):
        client = await Client(relay).ask()
        assert client.status == 500 and json.loads(client.body) == {'error': 'x'}
      assert relay.pool.ready_paths == {0}
    async with scripted_engine.running(fails, good) as engines, relayed(*engines_of(engines)) as relay:
      statuses = [(await Client(relay).ask()).status for _ in range(12)]
      assert statuses.count(500) == engine_pool.ERRORS and len(engines[1].asked) == 12 - engine_pool.ERRORS

  asyncio.run(main())


def test_a_full_engine_stays_and_another_is_asked():
  async def full(engine, body, writer):
    scripted_engine.whole(writer, {}, 429)

  async def main():
    async with scripted_engine.running(full, good) as engines, relayed(*engines_of(engines)) as relay:
      assert [(await Client(relay).ask()).status for _ in range(4)] == [200] * 4
      assert len(relay.pool.ready(0)) == 2
      engines[1].script = full
      with pytest.raises(ApiError, match='no engine of path 0 has room: try again') as found:
        await Client(relay).ask()
      assert found.value.status == 429

  asyncio.run(main())


def test_the_next_path_is_taken_where_the_best_has_no_engine_that_answers():
  async def main():
    async with scripted_engine.running(closes, good) as engines, relayed(*engines_of_paths(engines, 1)) as relay:
      client = await Client(relay).ask(1, 2)
      assert client.status == 200 and client.headers['dipaco-path'] == '2'

  asyncio.run(main())


def test_a_stream_comes_as_it_is():
  async def streams(engine, body, writer):
    await scripted_engine.stream(writer, EVENTS)

  async def main():
    async with scripted_engine.running(streams) as engines, relayed(*engines_of(engines)) as relay:
      client = await Client(relay).ask(stream=True)
      pieces = [message['body'] for message in client.messages[1:] if message['body']]
      assert b''.join(pieces) == b''.join(EVENTS) and len(pieces) > 1 and client.ended
      assert client.headers['content-type'] == 'text/event-stream' and 'content-length' not in client.headers

  asyncio.run(main())


@pytest.mark.parametrize('at_boundary', [True, False])
def test_a_stream_that_breaks_off_ends_in_an_error(at_boundary):
  async def breaks(engine, body, writer):
    await scripted_engine.stream(writer, EVENTS[:1] + ([] if at_boundary else [b'data: {"a"']), ends=False)

  async def main():
    async with scripted_engine.running(breaks) as engines, relayed(*engines_of(engines)) as relay:
      client = await Client(relay).ask(stream=True)
      assert client.status == 200 and client.ended == at_boundary  # else uvicorn closes the connection
      last = client.body.split(b'\n\n')[-2 if at_boundary else -1]
      assert (b'the engine failed during its answer' in last) == at_boundary and b'DONE' not in client.body

  asyncio.run(main())


def test_a_client_that_hangs_up_ends_the_engines_work():
  closed = []

  async def endless(engine, body, writer):
    try:
      await scripted_engine.stream(writer, EVENTS[:1] * 10_000)
    except ConnectionError:
      closed.append(time.monotonic())
      raise

  async def main():
    async with scripted_engine.running(endless) as engines, relayed(*engines_of(engines)) as relay:
      client = Client(relay)
      task = asyncio.create_task(client.ask(stream=True))
      while len(client.messages) < 5:
        await asyncio.sleep(0.01)
      client.gone.set()
      await task
      async with asyncio.timeout(5):
        while not closed:
          await asyncio.sleep(0.01)
      assert not relay.open and relay.pool.ready(0)[0].num_open == 0

  asyncio.run(main())


def test_requests_that_are_open_when_the_server_stops_get_an_error():
  async def main():
    async def slow(engine, body, writer):
      if body.get('stream'):
        await scripted_engine.stream(writer, EVENTS[:1] * 10_000)
      await asyncio.sleep(60)

    async with scripted_engine.running(slow) as engines, relayed(*engines_of(engines)) as relay:
      streamed, waiting = Client(relay), Client(relay)
      tasks = [asyncio.create_task(streamed.ask(stream=True)), asyncio.create_task(waiting.ask())]
      while len(streamed.messages) < 5 or len(engines[0].asked) < 2:
        await asyncio.sleep(0.01)
      relay.end(ApiError(503, 'the server stops'))
      await tasks[0]
      assert b'the server stops' in streamed.body.split(b'\n\n')[-2] and streamed.ended
      with pytest.raises(ApiError, match='the server stops'):
        await tasks[1]

  asyncio.run(main())


def test_an_engine_that_hangs_is_given_up():
  async def hangs(engine, body, writer):
    await asyncio.sleep(60)

  async def main():
    async with scripted_engine.running(hangs) as engines, relayed(*engines_of(engines), timeout_s=0.1) as relay:
      with pytest.raises(ApiError, match='did not answer in time') as found:
        await Client(relay).ask()
      assert found.value.status == 504 and not relay.pool.ready_paths

  asyncio.run(main())


async def continues(engine, body, writer):
  while not writer.is_closing():
    writer.write(b'HTTP/1.1 100 Continue\r\n\r\n')
    await writer.drain()
    await asyncio.sleep(0.01)


async def drips(engine, body, writer):
  writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n')
  while not writer.is_closing():
    writer.write(b' ')
    await writer.drain()
    await asyncio.sleep(0.01)


@pytest.mark.parametrize('slow', [continues, drips])
def test_an_engine_that_sends_without_an_end_is_given_up(slow):
  async def main():
    async with scripted_engine.running(slow) as engines, relayed(*engines_of(engines), timeout_s=0.2) as relay:
      async with asyncio.timeout(5):
        with pytest.raises(ApiError, match='did not answer in time') as found:
          await Client(relay).ask()
      assert found.value.status == 504 and not relay.pool.ready_paths

  asyncio.run(main())


async def large(engine, body, writer):
  writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n')
  with contextlib.suppress(ConnectionError):
    for _ in range(400):
      writer.write(b'10000\r\n%b\r\n' % (b' ' * 2**16))
      await writer.drain()
    writer.write(b'0\r\n\r\n')  # so that nothing but its size is wrong


async def status_99(engine, body, writer):
  writer.write(b'HTTP/1.1 099 X\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}')


async def status_600(engine, body, writer):
  scripted_engine.whole(writer, {}, 600)


async def no_http(engine, body, writer):
  writer.write(b'SMTP hello\r\n\r\n')


@pytest.mark.parametrize('bad', [large, status_99, status_600, no_http])
def test_nonsense_of_an_engine_is_status_502_or_another_engines_answer(bad, monkeypatch):
  monkeypatch.setattr(relay_lib, 'MAX_ANSWER_BYTES', 2**20)

  async def main():
    async with scripted_engine.running(bad) as engines, relayed(*engines_of(engines)) as relay:
      with pytest.raises(ApiError) as found:
        await Client(relay).ask()
      assert found.value.status == 502 and not relay.pool.ready_paths
    async with scripted_engine.running(bad, good) as engines, relayed(*engines_of(engines)) as relay:
      assert [(await Client(relay).ask()).status for _ in range(2)] == [200, 200]

  asyncio.run(main())


def test_odd_bytes_in_a_header_of_an_engine_come_as_they_are():
  async def odd(engine, body, writer):
    head = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-request-id: \xff\r\ncontent-length: 2\r\n\r\n{}'
    writer.write(head)

  async def main():
    async with scripted_engine.running(odd) as engines, relayed(*engines_of(engines)) as relay:
      assert (b'x-request-id', b'\xff') in (await Client(relay).ask()).messages[0]['headers']

  asyncio.run(main())


def test_a_list_of_models_without_an_end_is_not_read_to_the_end():
  sent = list[int]()

  async def main():
    async def answer(reader, writer):
      await reader.readuntil(b'\r\n\r\n')
      writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n')
      with contextlib.suppress(ConnectionError):
        for _ in range(400):
          writer.write(b' ' * 2**16)
          await writer.drain()
          sent.append(2**16)
      writer.close()

    async with await asyncio.start_server(answer, '127.0.0.1', 0) as server:
      port = server.sockets[0].getsockname()[1]
      async with relayed(Engine(0, f'http://127.0.0.1:{port}/v1', '', '')) as relay:
        assert not relay.pool.ready_paths

  asyncio.run(main())
  assert 2**16 <= sum(sent) < 2**24, 'the kernel buffers a part of the 25 MiB'


def test_parts_of_a_request_are_asked_at_one_time_and_one_error_is_the_answer():
  async def by_prompt(engine, body, writer):
    choices = [{'index': i, 'text': prompt} for i, prompt in enumerate(body['prompt'])]
    usage = {'prompt_tokens': 1, 'completion_tokens': 1, 'total_tokens': 2}
    scripted_engine.whole(writer, {'choices': choices, 'usage': usage})

  async def bad(engine, body, writer):
    scripted_engine.whole(writer, {'error': 'x'}, 400)

  parts = [Part((0,), (0, 2), {'prompt': ['a', 'c']}), Part((1,), (1,), {'prompt': ['b']})]

  async def main():
    async with scripted_engine.running(by_prompt, by_prompt) as engines, relayed(*engines_of_paths(engines)) as relay:
      client = await Client(relay).ask(parts=parts)
      assert [choice['text'] for choice in json.loads(client.body)['choices']] == ['a', 'b', 'c']
      assert client.headers['dipaco-path'] == '0,1,0'
      engines[1].script = bad
      client = await Client(relay).ask(parts=parts)
      assert client.status == 400 and json.loads(client.body) == {'error': 'x'}
      engines[1].script = good
      with pytest.raises(ApiError, match='was not a completion'):
        await Client(relay).ask(parts=parts)

  asyncio.run(main())


@pytest.mark.parametrize(
  'listed, expected',
  [(['x'], 'x'), (['run', 'run/path-0', 'run/path-1'], 'run/path-1'), (['a', 'b'], 2), ([], 0), (None, 'no models')],
)
def test_the_model_of_an_engine_is_the_only_one_that_it_lists(listed, expected):
  data = b'{"no": 1}' if listed is None else json.dumps({'data': [{'id': name} for name in listed]}).encode()
  if isinstance(expected, str) and listed:
    assert engine_pool.only_model(data, 1) == expected
  else:
    with pytest.raises(ValueError, match=f'{expected}.*set "model" in engines.json'):
      engine_pool.only_model(data, 1)


def test_a_router_without_files_for_connections_leaves_engines_alone(monkeypatch):
  async def main():
    release = asyncio.Event()

    async def slow(engine, body, writer):
      await release.wait()
      await good(engine, body, writer)

    async with scripted_engine.running(slow) as engines, relayed(*engines_of(engines)) as relay:
      first = asyncio.create_task(Client(relay).ask())  # takes the connection that is there
      async with asyncio.timeout(5):
        while not engines[0].asked:
          await asyncio.sleep(0.01)
      monkeypatch.setattr(socket, 'socket', without_files)
      with pytest.raises(ApiError) as error:
        await Client(relay).ask()
      monkeypatch.undo()
      assert error.value.status == 429 and relay.pool.ready_paths == {0}
      release.set()
      assert (await first).status == 200

  def without_files(*args, **options):
    raise OSError(errno.EMFILE, 'Too many open files')

  asyncio.run(main())


def test_an_error_that_hides_the_lack_of_files_is_seen_through():
  """A resolver says of it that there is no such name."""
  hidden = socket.gaierror(socket.EAI_NONAME, 'Name or service not known')
  assert not relay_lib._lacks_files(hidden)
  before = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
  try:
    assert relay_lib._lacks_files(hidden)
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
