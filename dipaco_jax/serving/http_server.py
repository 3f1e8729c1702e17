"""A run as an HTTP server: OpenAI's completions and chat completions, a page to try them, health and metrics.

The connections belong to an event loop, the engine to a thread: the loop passes requests to the thread, and gets new
text after every turn of the engine.
"""

import asyncio
import contextlib
import dataclasses
import functools
import socket
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dipaco_jax.data.chat_template import ChatTemplate
from dipaco_jax.inference.engine import Engine
from dipaco_jax.serving import chat_api, connections, http_app, http_messages, openai_api, page
from dipaco_jax.serving.completions import Completions
from dipaco_jax.serving.engine_thread import EngineThread, Metrics
from dipaco_jax.serving.http_lifecycle import CLOSE_S, Lifecycle
from dipaco_jax.serving.openai_api import ApiError


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
  chat_template: ChatTemplate | None = None
  hosts: Collection[str] | None = None  # names in the header Host that are answered; None: all

  def __post_init__(self):
    self.metrics = Metrics()
    self.engine_thread = EngineThread(self.load_engine, self.metrics)
    self.metrics.waiting.set_function(lambda: self.engine_thread.num_waiting)
    self.completions = Completions(self.engine_thread, self.max_waiting)
    self.model: openai_api.ServedModel | None = None  # until the engine is ready
    self.description: dict[str, Any] = {}  # of the grid; from then on
    self.lifecycle = Lifecycle(lambda: len(self.completions.open), self.completions.end, self.grace_s)

  def run(self, listener: socket.socket, limits: connections.Limits, access_log: bool) -> int:
    """Serves until a signal; returns the exit status. Raises what ended the engine's thread."""
    status = self.lifecycle.run(self.make_app(), listener, limits, access_log)
    self.engine_thread.thread.join(CLOSE_S)
    if self.engine_thread.failure:
      raise self.engine_thread.failure
    return status

  def make_app(self) -> Starlette:
    return http_app.make_app(self, [Route('/', page.show), Route('/v1/grid', self.grid)])

  @contextlib.asynccontextmanager
  async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
    async with self.lifecycle.listening(self.metrics.connections):
      self.engine_thread.start(asyncio.get_running_loop(), self._changed)
      yield
    self.engine_thread.close()

  def _changed(self):
    """Begins to answer when the engine is ready; ends when it has failed."""
    if self.engine_thread.failure:
      self.lifecycle.end(ApiError(500, http_messages.FAILED))
    elif not self.lifecycle.signal:
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
      self.description = page.describe(engine, self.model, self.chat_template)
      self.started()

  async def complete(self, request: Request) -> ASGIApp:
    """POST /v1/completions."""
    model, body = self._ready_model(), await http_messages.read_body(request)
    parsed = await http_messages.parse(model.parse, body)
    return functools.partial(self.completions.stream if parsed.stream else self.completions.answer, parsed)

  async def chat(self, request: Request) -> ASGIApp:
    """POST /v1/chat/completions."""
    model, body = self._ready_model(), await http_messages.read_body(request)
    # In a thread, because even a short template may take a second.
    parsed = await asyncio.to_thread(chat_api.parse, model, self.chat_template, body)
    return functools.partial(self.completions.stream if parsed.stream else self.completions.answer, parsed)

  async def grid(self, request: Request) -> Response:
    """GET /v1/grid."""
    self._ready_model()
    return JSONResponse(self.description)

  async def health(self, request: Request) -> Response:
    state = 'stopping' if self.lifecycle.signal else 'ready' if self.model else 'loading'
    return JSONResponse({'status': state}, 200 if state == 'ready' else 503)

  def served(self) -> tuple[str, int]:
    model = self._ready_model()
    return model.name, model.num_paths

  def _ready_model(self) -> openai_api.ServedModel:
    if self.lifecycle.signal or not self.model:
      raise ApiError(503, 'the server stops' if self.lifecycle.signal else 'the server is loading: try again')
    return self.model
