"""The router of a run as an HTTP server in front of engines: OpenAI's completions and chat, health and metrics."""

import asyncio
import contextlib
import dataclasses
import functools
import socket
from collections.abc import AsyncIterator, Callable, Collection, Sequence

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from dipaco_jax.core.errors import InputError
from dipaco_jax.inference.batched_router import BatchedRouter
from dipaco_jax.serving import connections, http_app, http_messages, relay, route_api
from dipaco_jax.serving.engine_pool import EnginePool
from dipaco_jax.serving.engines_file import Engines
from dipaco_jax.serving.http_lifecycle import Lifecycle
from dipaco_jax.serving.openai_api import ApiError
from dipaco_jax.serving.route_api import ApiParser, Asked
from dipaco_jax.serving.route_metrics import Metrics
from dipaco_jax.storage import seals


@dataclasses.dataclass(eq=False)
class RouteServer:
  parser: ApiParser
  router: BatchedRouter | None  # None: there is one path
  engines: Engines
  started: Callable[[], None]  # called once requests can be answered
  most_open: int  # requests at one time
  timeout_s: float  # that an engine may take for a piece of an answer
  grace_s: float  # that answers may still take after a signal
  api_key: str  # that requests to /v1 must bring; '': none
  hosts: Collection[str] | None = None  # names in the header Host that are answered; None: all

  def __post_init__(self):
    self.metrics = Metrics()
    self.lifecycle = Lifecycle(self.num_open, lambda why: self.relay.end(why), self.grace_s)
    self._read_or_routed = 0  # requests, before the relay has them

  def run(self, listener: socket.socket, limits: connections.Limits, access_log: bool) -> int:
    """Serves until a signal; returns the exit status."""
    return self.lifecycle.run(http_app.make_app(self), listener, limits, access_log)

  def served(self) -> tuple[str, int]:
    return self.parser.name, self.parser.num_paths

  @contextlib.asynccontextmanager
  async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
    async with relay.open_session(self.timeout_s) as session:
      self.pool = EnginePool(self.engines, session, self.metrics)
      self.relay = relay.Relay(self.pool, self.metrics, self.timeout_s)
      async with self.lifecycle.listening(self.metrics.connections):
        await self.pool.start()
        self.started()
        yield
      self.pool.close()

  async def complete(self, request: Request) -> ASGIApp:
    """POST /v1/completions."""
    return await self._relayed(request, 'completions', self.parser.completion)

  async def chat(self, request: Request) -> ASGIApp:
    """POST /v1/chat/completions."""
    return await self._relayed(request, 'chat/completions', self.parser.chat)

  async def _relayed(self, request: Request, endpoint: str, parse: Callable[[bytes], Asked]) -> ASGIApp:
    if self.lifecycle.signal:
      raise ApiError(503, 'the server stops')
    self._check_room(1)
    self._read_or_routed += 1
    try:
      body = await http_messages.read_body(request)
      with self.metrics.route_s.time():
        asked = await http_messages.parse(parse, body)
        ranks = await asyncio.gather(*(self._ranked(asked, text) for text in asked.texts))
        parts = route_api.deal(asked, ranks)
    finally:
      self._read_or_routed -= 1
    self._check_room(len(parts))
    return functools.partial(self.relay, endpoint, parts)

  def num_open(self) -> int:
    """Returns how many requests are open; one of several prompts is as many as there are engines that are asked."""
    return self._read_or_routed + sum(self.relay.open.values())

  def _check_room(self, count: int):
    """Raises ApiError if this number of additional requests is too large, unless they are the only ones."""
    if (num_open := self.num_open()) and num_open + count > self.most_open:
      raise ApiError(429, f'{num_open} requests are open already, of {self.most_open}: try again')

  async def _ranked(self, asked: Asked, text: str | Sequence[int]) -> tuple[int, ...]:
    """Returns the paths whose engines may get a text, the best first; raises ApiError."""
    if asked.path is not None or not self.router:
      return (asked.path or 0,)
    try:
      scores = await self.router.scores(text)
    except seals.Damaged:  # a fault of the server's
      raise
    except InputError as e:
      raise ApiError(400, str(e), 'messages' if 'messages' in asked.values else 'prompt') from e
    return self._open_paths(scores)

  def _open_paths(self, scores: np.ndarray) -> tuple[int, ...]:
    """Returns the best path, or with a fallback all paths that have an engine, the best first."""
    ready = self.pool.ready_paths
    ranked = [int(path) for path in np.argsort(-scores, kind='stable')]
    open_paths = [path for path in ranked if path in ready] if self.engines.nearest else []
    return tuple(open_paths) or (ranked[0],)

  async def health(self, request: Request) -> Response:
    """GET /health: 200 while texts of some path can be answered; which paths have no engine is listed."""
    without = sorted({*range(self.parser.num_paths)} - (ready := self.pool.ready_paths))
    state = 'stopping' if self.lifecycle.signal else 'no engine' if not ready else 'degraded' if without else 'ready'
    status = 200 if state in ('ready', 'degraded') else 503
    return JSONResponse({'status': state, 'paths_without_engine': without}, status)
