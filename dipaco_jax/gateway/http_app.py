"""The gateway over HTTP: who asks, how much, and what for; the desks answer in threads.

Each request carries its token. It is looked up first, before the body is read. Errors are one line of JSON and say
nothing of the inside. Each is counted by its cause.
"""

import asyncio
import contextlib
import functools
import json
import logging
import pathlib
import socket
from collections.abc import AsyncIterator, Callable
from concurrent import futures
from typing import Any

import prometheus_client as prometheus
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dipaco_jax.core import errors, json_text
from dipaco_jax.core.errors import InputError
from dipaco_jax.gateway import tokens
from dipaco_jax.gateway.desks import Desks
from dipaco_jax.gateway.limits import Meter
from dipaco_jax.gateway.refusals import Refused, malformed
from dipaco_jax.gateway.requests import Caller, is_sha256
from dipaco_jax.gateway.together import Together
from dipaco_jax.serving import connections
from dipaco_jax.serving.http_lifecycle import Lifecycle
from dipaco_jax.storage.backends import Bucket

THREADS, HEAVY_THREADS = 6, 2  # and two that answer together: SQLite has one writer, PostgreSQL nine connections
TOKENS_PAUSE_S, HEARTBEATS_PAUSE_S = 0.005, 0.03  # in which others join: no worker waits for a heartbeat
CHUNK = 1 << 20
SIGNED_S = 3600
HEAVY = ('complete', 'commit', 'put', 'revoke', 'reopen')
FAILED = Refused(500, 'failed', 'the gateway failed on this request; its log has the error')
AWAY = Refused(503, 'away', 'the registry or the storage does not answer')


class Server:
  """Routes, limits and counters of a gateway."""

  def __init__(self, desks: Desks, meter: Meter, started: Callable[[], None], grace_s: float):
    self.desks, self.meter, self.started = desks, meter, started
    self.metrics = prometheus.CollectorRegistry()
    names = ('route', 'cause')
    self.requests = prometheus.Counter('dipaco_gateway_requests', 'Requests by outcome.', names, registry=self.metrics)
    self.open_connections = prometheus.Gauge('dipaco_gateway_connections', 'Open connections.', registry=self.metrics)
    self.num_open = 0
    self.pool = futures.ThreadPoolExecutor(THREADS, 'desk')
    self.heavy_pool = futures.ThreadPoolExecutor(HEAVY_THREADS, 'check')
    self.pools = [self.pool, self.heavy_pool, *(futures.ThreadPoolExecutor(1, name) for name in ('token', 'lease'))]
    self.callers = Together(self.pools[-2], desks.find_callers, TOKENS_PAUSE_S)
    self.heartbeats = Together(self.pools[-1], desks.tasks.heartbeats, HEARTBEATS_PAUSE_S)
    self.lifecycle = Lifecycle(lambda: self.num_open, lambda _: None, grace_s)

  def run(
    self, listener: socket.socket, limits: connections.Limits, tls: tuple[pathlib.Path, pathlib.Path] | None,
    access_log: bool = False,
  ) -> int:  # fmt: skip
    """Serves until a signal; returns the exit status. `tls`: files of the certificate and its key."""
    return self.lifecycle.run(self.app(), listener, limits, access_log, tls)

  @contextlib.asynccontextmanager
  async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
    async with self.lifecycle.listening(self.open_connections):
      self.started()
      yield
    for pool in self.pools:
      pool.shutdown(wait=False, cancel_futures=True)

  def app(self) -> Starlette:
    """Makes the app."""
    routes = [
      *(Route(f'/v1/{name}', self.guarded(name, self.post), methods=['POST']) for name in self.desks.routes),
      Route('/v1/objects/{name:path}', self.guarded('get', self.get), methods=['GET']),
      Route('/v1/objects/{name:path}', self.guarded('objects', self.put_object), methods=['PUT']),
    ]
    handlers: Any = {404: self.unknown, 405: self.unknown}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self.lifespan)
    app.router.redirect_slashes = False
    return app

  async def unknown(self, request: Request, error: Exception) -> Response:
    """Answers a request for what does not exist."""
    self.requests.labels('none', 'unknown').inc()
    return error_response(Refused(404, 'unknown', 'there is no such request'))

  def guarded(self, route: str, endpoint: Callable) -> Callable:
    """Wraps an endpoint: checks the token and the limits before it, counts and answers errors."""

    async def guard(request: Request) -> Response:
      self.num_open += 1
      try:
        if self.num_open > self.meter.limits.most_open:
          raise Refused(503, 'crowded', 'too many requests are open: try again')
        response = await endpoint(route, request, await self.authenticate(request))
        self.requests.labels(route, 'ok').inc()
        return response
      except ClientDisconnect:
        self.requests.labels(route, 'disconnected').inc()
        return Response(status_code=499)
      except Exception as e:
        refused = to_refused(e)
        if refused is FAILED:
          logging.exception('a request for %s failed', route)
        self.requests.labels(route, refused.cause).inc()
        return error_response(refused)
      finally:
        self.num_open -= 1

    return guard

  async def authenticate(self, request: Request) -> Caller:
    """Returns who asks. Raises Refused."""
    given = request.headers.getlist('authorization')
    scheme, _, token = given[0].partition(' ') if len(given) == 1 else ('', '', '')
    digest = tokens.digest(token)
    if not self.meter.may_ask(digest):
      raise Refused(429, 'failures', 'too many requests without a valid token: try again later')
    if scheme != 'Bearer' or not 20 <= len(token) <= 200:
      self.meter.fail()
      raise Refused(401, 'no_token', 'send one header Authorization: Bearer TOKEN')
    try:
      caller = await self.callers.ask(token)
    except Refused:
      self.meter.fail(digest)
      raise
    self.meter.succeed(digest)
    self.meter.request(caller.token.name)
    return caller

  async def post(self, route: str, request: Request, caller: Caller) -> Response:
    """Answers a request in JSON."""
    body = await self.read_json(request)
    self.meter.transfer(caller.token.name, int(request.headers['content-length']))
    named = self.desks.named(caller, body)
    if route == 'heartbeat':
      answer = await self.heartbeats.ask((named, body))
    else:
      pool = self.heavy_pool if route in HEAVY else self.pool
      answer = await self.in_thread(pool, self.desks.routes[route], named, body)
    data = json.dumps(answer).encode()
    self.meter.transfer(caller.token.name, len(data))
    return Response(data, media_type='application/json')

  async def get(self, route: str, request: Request, caller: Caller) -> Response:
    """Answers with an object's bytes, or with the URL at which the bucket has them."""
    objects = self.desks.objects
    name = objects.readable(caller, request.path_params['name'])
    size, chunks = await self.in_thread(self.pool, objects.open, name)
    self.meter.transfer(caller.token.name, size)
    backend = self.desks.island.storage.backend
    if isinstance(backend, Bucket):
      chunks.close()
      url = await self.in_thread(self.pool, backend.sign, 'GET', name, SIGNED_S)
      return Response(b'{}', headers={'X-Object-URL': url}, media_type='application/json')
    return StreamingResponse(chunks, headers={'Content-Length': str(size)}, media_type='application/octet-stream')

  async def put_object(self, route: str, request: Request, caller: Caller) -> Response:
    """Takes an object in, aside until it is whole and checked."""
    objects, name = self.desks.objects, request.path_params['name']
    size, sha256 = content_length(request), request.query_params.get('sha256', '')
    if not is_sha256(sha256):
      raise malformed('the parameter sha256 is missing or malformed')
    await self.in_thread(self.pool, objects.allow, caller, name, size, sha256)
    self.meter.transfer(caller.token.name, size)
    file = objects.new_file()
    try:
      with await asyncio.to_thread(open, file, 'wb') as f:
        async for part in self.parts(request, size):
          await asyncio.to_thread(f.write, part)
      await self.in_thread(self.heavy_pool, objects.accept, name, sha256, file)
    finally:
      file.unlink(missing_ok=True)
    return Response(b'{}', media_type='application/json')

  async def read_json(self, request: Request) -> dict[str, Any]:
    """Reads a JSON object. Raises Refused if it is too large, late, or no JSON object."""
    size = content_length(request)
    if size > self.meter.limits.json_bytes:
      raise Refused(413, 'too_large', f'the request is larger than {self.meter.limits.json_bytes} bytes')
    data = b''.join([part async for part in self.parts(request, size)])
    try:
      body = json_text.parse(data)
    except ValueError:
      raise malformed('the request is no JSON') from None
    if not isinstance(body, dict):
      raise malformed('the request is no JSON object')
    return body

  async def parts(self, request: Request, size: int) -> AsyncIterator[bytes]:
    """Yields the body of a request. Raises Refused where it does not come in time, or is not as long as it said."""
    received, stream = 0, request.stream()
    while True:
      try:
        async with asyncio.timeout(self.meter.limits.body_s):
          part = await anext(stream)
      except StopAsyncIteration:
        break
      except TimeoutError:
        raise Refused(408, 'late', f'nothing of the request arrived for {self.meter.limits.body_s:g} s') from None
      received += len(part)
      if received > size:
        raise malformed('the request is longer than its Content-Length')
      if part:
        yield part
    if received != size:
      raise malformed('the request is shorter than its Content-Length')

  async def in_thread(self, pool: futures.Executor, work: Callable, *args) -> Any:
    """Returns what a function returns, called in a thread of a pool."""
    return await asyncio.get_running_loop().run_in_executor(pool, functools.partial(work, *args))


def content_length(request: Request) -> int:
  """Returns the length of a request's body. Raises Refused if it does not say it."""
  given = request.headers.getlist('content-length')
  if len(given) != 1 or not given[0].isdecimal() or 'transfer-encoding' in request.headers or len(given[0]) > 15:
    raise Refused(411, 'no_length', 'send one header Content-Length, and no Transfer-Encoding')
  return int(given[0])


def to_refused(error: Exception) -> Refused:
  """Returns the answer that an error becomes; FAILED for one that nobody expects."""
  if isinstance(error, Refused):
    return error
  if isinstance(error, FileNotFoundError):
    return Refused(404, 'missing', 'there is no such object')
  if isinstance(error, errors.Unavailable) or errors.disk_is_full(error):
    logging.warning('%s', error)
    return AWAY
  if isinstance(error, InputError):  # of the registry, which somebody has to mend
    logging.error('%s', error)
    return AWAY
  return FAILED


def error_response(refused: Refused) -> Response:
  """Returns the response of an error: one line of JSON."""
  headers = {'Connection': 'close'} | ({'Retry-After': '1'} if refused.status in (429, 503) else {})
  return Response(json.dumps({'error': str(refused)}), refused.status, headers, 'application/json')
