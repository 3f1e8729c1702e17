"""Clients that never finish, on real sockets, are disconnected and make room for others."""

import asyncio
import concurrent.futures
import contextlib
import logging
import resource
import socket
import threading
import time

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dipaco_jax.serving import connections

LIMITS = connections.Limits(24, head_s=0.5, body_s=1.2, answer_s=0.8)
GET = b'GET /health HTTP/1.1\r\nHost: here\r\n\r\n'
POST = b'POST /body HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\n\r\n'


async def body(request):
  return Response(str(len(await request.body())))


async def stream(request):
  return StreamingResponse(b'x' * 65_536 for _ in range(1000))


async def health(request):
  return JSONResponse({})


@pytest.fixture(scope='module')
def address():
  """Of a server, with little patience."""
  routes = [Route('/health', health), Route('/body', body, methods=['POST']), Route('/stream', stream)]
  config = uvicorn.Config(
    Starlette(routes=routes),
    http=connections.protocol_with(LIMITS),
    lifespan='off',
    log_config=None,
    timeout_graceful_shutdown=1,
  )
  server, listener = uvicorn.Server(config), socket.create_server(('127.0.0.1', 0))

  async def serve():
    watch = asyncio.create_task(connections.watch(server.server_state.connections))
    await server.serve([listener])
    watch.cancel()

  thread = threading.Thread(target=lambda: asyncio.run(serve()))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(connections, 'SWEEP_S', 0.05)
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join()


def connect(address, data: bytes = b'') -> socket.socket:
  client = socket.create_connection(address, 5)
  client.sendall(data)
  return client


def is_healthy(address) -> bool:
  with connect(address, GET) as client:
    return client.recv(1000).startswith(b'HTTP/1.1 200 OK')


def ends_within(client: socket.socket, seconds: float, drip: bytes = b'') -> bool:
  """Whether the server ends it, though a byte comes now and then."""
  until = time.monotonic() + seconds
  client.settimeout(0.05)
  while time.monotonic() < until:
    try:
      if not client.recv(1000):
        return True
    except TimeoutError:
      with contextlib.suppress(OSError):
        client.sendall(drip)
    except ConnectionError:
      return True
  return False


UNFINISHED = [  # what comes at once, and then now and then
  (b'', b''),
  (b'GET /health HTTP/1.1\r\n', b''),
  (b'GET /health HTTP/1.1\r\nX: ', b'x'),
  (GET, b'G'),  # behind an answer
  (POST, b''),
  (POST.replace(b'9', b'999'), b'x'),
  (POST.replace(b'POST /body', b'GET /health').replace(b'9', b'999'), b'x'),  # a body that nobody waits for
]


def test_a_client_that_does_not_finish_its_request_is_cut_off(address):
  def ends(began, drip):
    with connect(address, began) as client:
      return ends_within(client, 4, drip)

  with concurrent.futures.ThreadPoolExecutor(len(UNFINISHED)) as pool:
    assert all(pool.map(ends, *zip(*UNFINISHED, strict=True)))


def test_a_client_that_does_not_read_is_cut_off(address):
  with connect(address, b'GET /stream HTTP/1.1\r\nHost: here\r\n\r\n') as client:
    time.sleep(2)  # kernel's buffers fill, and the server's; then nothing moves for longer than it waits
    got = 0
    with contextlib.suppress(ConnectionError):
      while data := client.recv(1 << 20):
        got += len(data)
    assert got < 65_536_000


def test_a_client_that_reads_slowly_is_served(address):
  with connect(address, b'GET /stream HTTP/1.1\r\nHost: here\r\n\r\n') as client:
    got, until = 0, time.monotonic() + 1.6  # twice as long as nobody may read
    while time.monotonic() < until:
      got += len(client.recv(1 << 20))
      time.sleep(0.05)
    while got < 65_536_000 and (data := client.recv(1 << 22)):
      got += len(data)
    assert got >= 65_536_000


def test_a_body_that_comes_in_time_is_read(address):
  with connect(address, POST) as client:
    for byte in b'123456789':
      client.sendall(bytes([byte]))
      time.sleep(0.02)
    assert client.recv(1000).endswith(b'9')


def test_many_idle_clients_make_room_for_one_that_asks(address, caplog):
  with contextlib.ExitStack() as stack:
    attackers = [stack.enter_context(connect(address, b'GET /health HTTP/1.1\r\n')) for _ in range(100)]
    assert all(is_healthy(address) for _ in range(50))
    assert 'all 24 connections are taken' in caplog.text
    assert ends_within(attackers[0], 0.01)


def test_too_few_descriptors_are_an_error_that_names_the_fix(monkeypatch):
  monkeypatch.setattr(resource, 'getrlimit', lambda which: (256, 300))
  with pytest.raises(ValueError, match=r'676 files may have to be open, and 300 can be: .* lower --max_waiting'):
    connections.reserve_descriptors(100)


@pytest.fixture
def log():
  """(logger, lines that it has shown, its clock)."""
  shown, clock = [], [0.0]
  handler = logging.Handler()
  handler.emit = lambda record: shown.append(record.getMessage())
  handler.addFilter(connections.RateLimit(lambda: clock[0]))
  logger = logging.Logger('test')  # noqa: LOG001 (one of the test's own)
  logger.addHandler(handler)
  return logger, shown, clock


def test_one_place_cannot_fill_the_log(log):
  logger, shown, clock = log
  for i in range(10_001):
    clock[0] = 0.0 if i < 10_000 else connections.PERIOD_S + 1
    logger.warning('trouble %d', i)
  few = [f'trouble {i}' for i in range(connections.BURST)]
  assert shown == [*few, f'trouble 10000 (and {10_000 - connections.BURST} times more before)']


def test_other_places_and_lines_below_warning_are_shown(log):
  logger, shown, _ = log
  for i in range(100):
    logger.warning('trouble')
    logger.info('request %d', i)
  logger.warning('other trouble')
  assert len(shown) == connections.BURST + 100 + 1 and shown[-1] == 'other trouble'
