"""A run as an HTTP server: OpenAI's completions API, health and metrics.

The connections belong to an event loop, the engine to a thread: the loop hands requests over, and gets what is new in
their texts after every turn of the engine.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import json
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
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

from dipaco_jax.inference import connections, openai_api
from dipaco_jax.inference.completions import FAILED, Completions
from dipaco_jax.inference.engine import Engine
from dipaco_jax.inference.engine_thread import EngineThread, Metrics
from dipaco_jax.inference.openai_api import ApiError
from dipaco_jax.training import stopping

MAX_BODY_BYTES = 2**21
SMALL_BODY_BYTES = 2**14  # so few are parsed at once: others can wait as long
BODY_S = 30  # for a body to come
CLOSE_S = 2  # for connections to end after the last answer
CLIENT_CLOSED = 499  # nginx's status for a client that closed the connection
ROUTES = 'POST /v1/completions, GET /v1/models, GET /health and GET /metrics'
NO_KEY = 'the key is missing or wrong: send the header Authorization: Bearer KEY, as DIPACO_API_KEY has it here'


@dataclasses.dataclass(eq=False)
class Server:
  """The server's routes, and its states: loading, ready, stopping."""

  name: str  # of the model
  load_engine: Callable[[], Engine]  # loads the run; called by the engine's thread
  started: Callable[[], None]  # called once requests can be answered
  reroute_every: int  # W of requests that name neither it nor a path
  max_waiting: int  # texts that may wait for their first token
  grace_s: float  # that answers may still take after a signal
  api_key: str  # that requests to /v1 must bring; '': none

  def __post_init__(self):
    self.metrics = Metrics()
    self.engine_thread = EngineThread(self.load_engine, self.metrics)
    self.metrics.waiting.set_function(lambda: self.engine_thread.num_waiting)
    self.completions = Completions(self.engine_thread, self.max_waiting)
    self.model: openai_api.ServedModel | None = None  # until the engine is ready
    self.signal = 0  # the number of the one that stops it
    self.created = int(time.time())

  def run(self, listener: socket.socket, limits: connections.Limits, access_log: bool) -> int:
    """Serves until a signal; returns the exit status. Raises what ended the engine's thread."""
    connections.limit_log()
    options: Any = {'loop': 'asyncio', 'ws': 'none', 'lifespan': 'on', 'log_config': None, 'server_header': False}
    options |= {'backlog': connections.BACKLOG, 'timeout_graceful_shutdown': CLOSE_S, 'access_log': access_log}
    config = uvicorn.Config(self._app(), http=connections.protocol_with(limits), **options)
    self.uvicorn = uvicorn.Server(config)
    self.uvicorn.run([listener])
    self.engine_thread.thread.join(CLOSE_S)
    if self.engine_thread.failure:
      raise self.engine_thread.failure
    return 128 + self.signal

  def _app(self) -> Starlette:
    return Starlette(
      routes=[
        Route('/v1/completions', self.complete, methods=['POST']),
        Route('/v1/models', self.list_models),
        Route('/v1/models/{name:path}', self.retrieve_model),
        Route('/health', self.health),
        Route('/metrics', self.export_metrics),
      ],
      middleware=[Middleware(self._guard)],
      exception_handlers=dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), _answer_error),
      lifespan=self._lifespan,
    )

  @contextlib.asynccontextmanager
  async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
      loop.add_signal_handler(number, self._stop, number)  # uvicorn's own are there by now
    self.engine_thread.start(loop, self._changed)
    clients = self.uvicorn.server_state.connections
    self.metrics.connections.set_function(lambda: len(clients))
    watch = loop.create_task(connections.watch(clients))
    yield
    watch.cancel()
    self.engine_thread.close()

  def _changed(self):
    """Begins to answer when the engine is ready; ends when it has failed."""
    if self.engine_thread.failure:
      self._end(ApiError(500, FAILED))
    elif not self.signal:
      engine = self.engine_thread.engine
      self.model = openai_api.ServedModel(
        name=self.name,
        num_paths=engine.run.layout.grid.num_paths,
        max_length=engine.max_length,
        tokenizer=engine.run.tokenizer,
        check_request=engine.check_request,
        reroute_every=self.reroute_every,
        max_texts=self.max_waiting,
      )
      self.started()

  def _stop(self, number: int):
    if self.signal:
      os._exit(128 + number)
    self.signal = number
    if num_open := len(self.completions.open):
      stopping.say(f'stopping: {num_open} answers may finish, within {self.grace_s:g} s; a second signal ends at once')
    self._drain = asyncio.get_running_loop().create_task(self._finish())  # kept: the loop itself forgets tasks

  async def _finish(self):
    until = time.monotonic() + self.grace_s
    while self.completions.open and time.monotonic() < until:
      await asyncio.sleep(0.02)
    self._end(ApiError(503, 'the server stops'))

  def _end(self, why: ApiError):
    self.completions.end(why)
    logging.getLogger('uvicorn.error').setLevel(logging.CRITICAL + 1)  # no line for each client that does not read
    self.uvicorn.should_exit = True

  async def complete(self, request: Request) -> ASGIApp:
    """POST /v1/completions."""
    model, body = self._ready_model(), await _read_body(request)
    parsed = model.parse(body) if len(body) < SMALL_BODY_BYTES else await asyncio.to_thread(model.parse, body)
    return functools.partial(self.completions.stream if parsed.stream else self.completions.answer, parsed)

  async def list_models(self, request: Request) -> Response:
    model = self._ready_model()
    names = [model.name, *(f'{model.name}/path-{path}' for path in range(model.num_paths))]
    return JSONResponse({'object': 'list', 'data': [openai_api.model_object(name, self.created) for name in names]})

  async def retrieve_model(self, request: Request) -> Response:
    name = request.path_params['name']
    self._ready_model().path(name)
    return JSONResponse(openai_api.model_object(name, self.created))

  async def health(self, request: Request) -> Response:
    state = 'stopping' if self.signal else 'ready' if self.model else 'loading'
    return JSONResponse({'status': state}, 200 if state == 'ready' else 503)

  async def export_metrics(self, request: Request) -> Response:
    return Response(prometheus.generate_latest(self.metrics.registry), media_type=prometheus.CONTENT_TYPE_LATEST)

  def _ready_model(self) -> openai_api.ServedModel:
    if self.signal or not self.model:
      raise ApiError(503, 'the server stops' if self.signal else 'the server is loading: try again')
    return self.model

  def _guard(self, app: ASGIApp) -> ASGIApp:
    """Wraps the app: requests to /v1 need the key, and answers to completions are counted by status."""

    async def guarded(scope: Scope, receive: Receive, send: Send):
      if scope['type'] != 'http' or not scope['path'].startswith('/v1/'):
        return await app(scope, receive, send)
      status = CLIENT_CLOSED

      async def counted(message: Message):
        nonlocal status
        status = message.get('status', status)
        await send(message)

      given = dict(scope['headers']).get(b'authorization', b'')
      is_authorized = not self.api_key or hmac.compare_digest(given, f'Bearer {self.api_key}'.encode())
      inner = app if is_authorized else _error_response(ApiError(401, NO_KEY, code='invalid_api_key'))
      try:
        await inner(scope, receive, counted)
      except Exception:
        status = 500  # Starlette answers it outside of this
        raise
      finally:
        if scope['path'] == '/v1/completions':
          self.metrics.requests.labels(status).inc()

    return guarded


async def _read_body(request: Request) -> bytes:
  """Reads the body; raises ApiError where it is too large, does not come in time, or is not JSON by its header."""
  if request.headers.get('content-type', '').partition(';')[0].strip().lower() != 'application/json':
    raise ApiError(415, 'the body should be JSON: send the header Content-Type: application/json')
  parts, size = [], 0
  try:
    async with asyncio.timeout(BODY_S):
      async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
          raise ApiError(413, f'the body is larger than {MAX_BODY_BYTES} bytes: send fewer prompts at one time')
  except TimeoutError as e:
    raise ApiError(408, f'the body did not come in {BODY_S} s') from e
  return b''.join(parts)


async def _answer_error(request: Request, error: Exception) -> Response:
  """Answers what a route raises; uvicorn then logs it unless it is of the first three kinds."""
  if isinstance(error, ApiError):
    return _error_response(error)
  if isinstance(error, HTTPException):  # Starlette's 404 and 405
    words = f'there is no {request.method} {request.url.path}: there are {ROUTES}'
    return _error_response(ApiError(error.status_code, words), error.headers)
  if isinstance(error, ClientDisconnect):
    return Response(status_code=CLIENT_CLOSED)
  return _error_response(ApiError(500, FAILED))


def _error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
  headers = {'Retry-After': '1'} if error.status in (429, 503) else headers
  # In ASCII: an error may quote half a surrogate pair of the request, which has no UTF-8.
  return Response(json.dumps(error.body), error.status, headers, 'application/json')
