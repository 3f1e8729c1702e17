"""A run as an HTTP server: OpenAI's completions API, health and metrics.

An event loop has the connections, and the driver's thread the engine: the loop hands requests over, and is told what is
new of their texts after every turn of the engine. Who hangs up frees the places of their texts.
"""

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import prometheus_client as prometheus
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dipaco_jax.inference import connections, openai_api, seldom
from dipaco_jax.inference.engine_thread import Driver, Metrics, News, Ticket
from dipaco_jax.inference.generation import Engine
from dipaco_jax.inference.openai_api import Asked, Refused
from dipaco_jax.training import stopping

BODY_BYTES = 2**21
SMALL_BYTES = 2**14  # of a body, for which the others can wait
BODY_S = 30  # for a body to come
CLOSE_S = 2  # for connections to end when all is said
HUNG_UP = 499  # what the metrics count where nobody waits for the answer
EVENTS = [(b'content-type', b'text/event-stream; charset=utf-8'), (b'cache-control', b'no-cache')]
ROUTES = 'POST /v1/completions, GET /v1/models, GET /health and GET /metrics'
NO_KEY = 'the key is missing or wrong: send the header Authorization: Bearer KEY, as DIPACO_API_KEY has it here'
FAILED = 'the server has failed at this request; its log says how'


class Server:
  """The loop's side."""

  def __init__(
    self, make: Callable[[], Engine], model: Callable[[Engine], openai_api.Model], started: Callable[[], None],
    max_waiting: int, grace_s: float, api_key: str, limits: connections.Limits,
  ):  # fmt: skip
    """
    Args:
      make: loads the run; called by the engine's thread.
      started: called when requests are answered.
      max_waiting: texts that have no token yet.
      grace_s: after a signal, for answers to come to their ends.
      api_key: without which nothing of /v1 is answered; '': with any.
      limits: of connections.
    """
    self.make_model, self.started = model, started
    self.max_waiting, self.grace_s, self.api_key, self.limits = max_waiting, grace_s, api_key, limits
    self.metrics = Metrics()
    self.driver = Driver(make, self.metrics)
    self.metrics.waiting.set_function(lambda: self.driver.num_waiting)
    self.model: openai_api.Model | None = None  # when it is ready
    self.signal = 0  # that stops it
    self.open: set[Ticket] = set()
    self.created = int(time.time())
    self.app = Starlette(
      routes=[
        Route('/v1/completions', self.completions, methods=['POST']),
        Route('/v1/models', self.models),
        Route('/v1/models/{name:path}', self.one_model),
        Route('/health', self.health),
        Route('/metrics', self.measured),
      ],
      middleware=[Middleware(self._guarded)],
      exception_handlers={Refused: _refused, HTTPException: _lost, ClientDisconnect: _nobody, Exception: _failed},
      lifespan=self._lifespan,
    )

  def run(self, listener: socket.socket, access_log: bool) -> int:
    """Until a signal; its exit status. Raises what ended the engine's thread."""
    seldom.install()
    config = uvicorn.Config(
      self.app, http=connections.limited(self.limits), backlog=connections.BACKLOG, loop='asyncio', ws='none',
      lifespan='on', log_config=None, access_log=access_log, server_header=False, timeout_graceful_shutdown=CLOSE_S,
    )  # fmt: skip
    self.uvicorn = uvicorn.Server(config)
    self.uvicorn.run([listener])
    self.driver.thread.join(CLOSE_S)
    if self.driver.failure:
      raise self.driver.failure
    return 128 + self.signal

  @contextlib.asynccontextmanager
  async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
      loop.add_signal_handler(number, self._stop, number)  # uvicorn's own are there by now
    self.driver.start(loop, self._changed)
    there = self.uvicorn.server_state.connections
    self.metrics.connections.set_function(lambda: len(there))
    watch = loop.create_task(connections.watch(there))
    yield
    watch.cancel()
    self.driver.close()

  def _changed(self):
    """The engine is ready, or has failed."""
    if self.driver.failure:
      self._end(Refused(500, FAILED))
    elif not self.signal:
      self.model = self.make_model(self.driver.engine)
      self.started()

  def _stop(self, number: int):
    if self.signal:
      os._exit(128 + number)
    self.signal = number
    if self.open:
      words = f'{len(self.open)} answers come to their ends, in {self.grace_s:g} s at most; once more ends at once'
      stopping.say(f'stopping: {words}')
    self._drain = asyncio.get_running_loop().create_task(self._finish())  # kept: the loop itself forgets tasks

  async def _finish(self):
    until = time.monotonic() + self.grace_s
    while self.open and time.monotonic() < until:
      await asyncio.sleep(0.02)
    self._end(Refused(503, 'the server stops'))

  def _end(self, why: Refused):
    for ticket in self.open:
      ticket.news.put_nowait(why)
    logging.getLogger('uvicorn.error').setLevel(logging.CRITICAL + 1)  # who does not read is left, with no more words
    self.uvicorn.should_exit = True

  async def completions(self, request: Request) -> ASGIApp:
    """POST /v1/completions."""
    model, body = self._ready(), await _body(request)
    asked = model.parse(body) if len(body) < SMALL_BYTES else await asyncio.to_thread(model.parse, body)
    return functools.partial(self._stream if asked.stream else self._answer, asked)

  async def models(self, request: Request) -> Response:
    """GET /v1/models."""
    model = self._ready()
    names = [model.name, *(f'{model.name}/path-{path}' for path in range(model.num_paths))]
    return JSONResponse({'object': 'list', 'data': [openai_api.model(name, self.created) for name in names]})

  async def one_model(self, request: Request) -> Response:
    """GET /v1/models/NAME."""
    name = request.path_params['name']
    self._ready().path(name)
    return JSONResponse(openai_api.model(name, self.created))

  async def health(self, request: Request) -> Response:
    """GET /health."""
    state = 'stopping' if self.signal else 'ready' if self.model else 'loading'
    return JSONResponse({'status': state}, 200 if state == 'ready' else 503)

  async def measured(self, request: Request) -> Response:
    """GET /metrics."""
    text = prometheus.generate_latest(self.metrics.registry)
    return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

  def _ready(self) -> openai_api.Model:
    if self.signal or not self.model:
      raise Refused(503, 'the server stops' if self.signal else 'the server is loading: try again')
    return self.model

  async def _answer(self, asked: Asked, scope: Scope, receive: Receive, send: Send):
    async with self._news(asked, receive) as news:
      ended = {new.choice: new async for new in news}
    choices = [
      openai_api.choice(index, prefix + ended[index].piece, ended[index].paths, ended[index].finished)
      for index, prefix in enumerate(asked.prefixes)
    ]
    usage = openai_api.usage(asked.prompt_tokens, sum(new.num_tokens for new in ended.values()))
    await JSONResponse(_completion(asked, _new_id(), choices) | {'usage': usage})(scope, receive, send)

  async def _stream(self, asked: Asked, scope: Scope, receive: Receive, send: Send):
    """As events; what fails before the first of them is an error like others."""
    started, end = False, b'data: [DONE]\n\n'
    async with self._news(asked, receive) as news:
      try:
        async for chunk in _chunks(asked, news):
          if not started:
            await send({'type': 'http.response.start', 'status': 200, 'headers': EVENTS})
            started = True
          await send({'type': 'http.response.body', 'body': _event(chunk), 'more_body': True})
      except (Refused, ClientDisconnect) as e:
        if not started:
          raise
        end = _event(e.body) if isinstance(e, Refused) else b''
    await send({'type': 'http.response.body', 'body': end})

  @contextlib.asynccontextmanager
  async def _news(self, asked: Asked, receive: Receive) -> AsyncIterator[AsyncIterator[News]]:
    """What comes of a request, until it is finished, or left: then it is cancelled."""
    if self.driver.num_waiting + len(asked.requests) > self.max_waiting:
      raise Refused(429, f'{self.driver.num_waiting} texts wait already, of {self.max_waiting} that may: try again')
    ticket = Ticket(asked)
    self.open.add(ticket)
    self.driver.submit(ticket)
    watch = asyncio.create_task(_watch(receive, ticket))
    try:
      yield _until_finished(ticket)
    finally:
      watch.cancel()
      self.open.discard(ticket)
      self.driver.cancel(ticket)

  def _guarded(self, app: ASGIApp) -> ASGIApp:
    """Looks at the key, and counts."""

    async def guarded(scope: Scope, receive: Receive, send: Send):
      if scope['type'] != 'http' or not scope['path'].startswith('/v1/'):
        return await app(scope, receive, send)
      status = HUNG_UP

      async def counted(message: Message):
        nonlocal status
        status = message.get('status', status)
        await send(message)

      inner = app if self._knows(scope) else _error(Refused(401, NO_KEY, code='invalid_api_key'))
      try:
        await inner(scope, receive, counted)
      except Exception:
        status = 500  # which is answered farther out
        raise
      finally:
        if scope['path'] == '/v1/completions':
          self.metrics.requests.labels(status).inc()

    return guarded

  def _knows(self, scope: Scope) -> bool:
    given = dict(scope['headers']).get(b'authorization', b'')
    return not self.api_key or hmac.compare_digest(given, f'Bearer {self.api_key}'.encode())


async def _body(request: Request) -> bytes:
  """All of it; raises Refused where it is too large, or does not come, or is of another type."""
  if request.headers.get('content-type', '').partition(';')[0].strip().lower() != 'application/json':
    raise Refused(415, 'the body should be JSON: send the header Content-Type: application/json')
  parts, size = [], 0
  try:
    async with asyncio.timeout(BODY_S):
      async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > BODY_BYTES:
          raise Refused(413, f'the body is larger than {BODY_BYTES} bytes: send fewer prompts at one time')
  except TimeoutError as e:
    raise Refused(408, f'the body did not come in {BODY_S} s') from e
  return b''.join(parts)


async def _watch(receive: Receive, ticket: Ticket):
  """Until the client hangs up."""
  while (await receive())['type'] != 'http.disconnect':
    pass
  ticket.news.put_nowait(ClientDisconnect())


async def _until_finished(ticket: Ticket) -> AsyncIterator[News]:
  left = len(ticket.asked.requests)
  while left:
    new = await ticket.news.get()
    if isinstance(new, Exception):
      raise new
    if new.finished not in ('', 'stop', 'length'):
      raise Refused(500, FAILED)
    left -= bool(new.finished)
    yield new


async def _chunks(asked: Asked, news: AsyncIterator[News]) -> AsyncIterator[dict[str, Any]]:
  """The bodies of a stream."""
  name, prefixes, num_tokens = _new_id(), dict(enumerate(asked.prefixes)), 0
  no_usage = {'usage': None} if asked.include_usage else {}
  async for new in news:
    piece = prefixes.pop(new.choice, '') + new.piece
    yield _completion(asked, name, [openai_api.choice(new.choice, piece, new.paths, new.finished)]) | no_usage
    num_tokens += new.num_tokens if new.finished else 0
  if asked.include_usage:
    yield _completion(asked, name, []) | {'usage': openai_api.usage(asked.prompt_tokens, num_tokens)}


def _completion(asked: Asked, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
  created = int(time.time())
  return {'id': name, 'object': 'text_completion', 'created': created, 'model': asked.model, 'choices': choices}


def _new_id() -> str:
  return f'cmpl-{uuid.uuid4().hex}'


def _event(body: dict[str, Any]) -> bytes:
  return f'data: {json.dumps(body, ensure_ascii=False)}\n\n'.encode()


def _error(why: Refused) -> Response:
  headers = {'Retry-After': '1'} if why.status in (429, 503) else None
  # In ASCII: what a request is blamed for may be no text that has a UTF-8.
  return Response(json.dumps(why.body), why.status, headers, 'application/json')


async def _refused(request: Request, why: Exception) -> Response:
  assert isinstance(why, Refused)
  return _error(why)


async def _lost(request: Request, why: Exception) -> Response:
  """404 and 405, which are Starlette's."""
  assert isinstance(why, HTTPException)
  response = _error(Refused(why.status_code, f'there is no {request.method} {request.url.path}: there are {ROUTES}'))
  response.headers.update(why.headers or {})
  return response


async def _nobody(request: Request, why: Exception) -> Response:
  return Response(status_code=HUNG_UP)


async def _failed(request: Request, why: Exception) -> Response:
  """Behind this, uvicorn logs what was raised."""
  return _error(Refused(500, FAILED))
