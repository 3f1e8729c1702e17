"""What our HTTP servers answer alike: their models, health and metrics, beside the POST routes that each has."""

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import prometheus_client as prometheus
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dipaco_jax.serving import http_messages, openai_api


class Metrics(Protocol):
  registry: prometheus.CollectorRegistry
  requests: prometheus.Counter  # by status


class HttpServer(Protocol):
  """The parts of a server's app."""

  @property
  def metrics(self) -> Metrics: ...

  @property
  def api_key(self) -> str:
    """The key that requests to /v1 must bring; '' if none is needed."""

  @property
  def hosts(self) -> Collection[str] | None:
    """Names in the header Host that are answered; None answers all."""

  def served(self) -> tuple[str, int]:
    """Returns the model's name and its number of paths; raises ApiError while it cannot be asked yet."""

  async def complete(self, request: Request) -> Any:
    """Answers POST /v1/completions."""

  async def chat(self, request: Request) -> Any:
    """Answers POST /v1/chat/completions."""

  async def health(self, request: Request) -> Response:
    """Answers GET /health."""

  def lifespan(self, app: Starlette) -> AbstractAsyncContextManager[None]:
    """Runs around the serving of requests, as Starlette calls it."""


def make_app(server: HttpServer, more_routes: Sequence[Route] = ()) -> Starlette:
  """Makes the app of a server, with further GET routes of its own; POST requests are counted by status."""
  posts: dict[str, Callable[[Request], Awaitable[Any]]] = {
    '/v1/completions': server.complete,
    '/v1/chat/completions': server.chat,
  }

  async def export_metrics(request: Request) -> Response:
    return Response(prometheus.generate_latest(server.metrics.registry), media_type=prometheus.CONTENT_TYPE_LATEST)

  def count(path: str, status: int):
    if path in posts:
      server.metrics.requests.labels(status).inc()

  routes = [
    *(Route(path, endpoint, methods=['POST']) for path, endpoint in posts.items()),
    *_model_routes(server.served),
    Route('/health', server.health),
    Route('/metrics', export_metrics),
    *more_routes,
  ]
  gets = ['/v1/models', *(route.path for route in more_routes), '/health']
  endpoints = ', '.join([*(f'POST {path}' for path in posts), *(f'GET {path}' for path in gets)]) + ' and GET /metrics'
  return Starlette(
    routes=routes,
    middleware=[Middleware(http_messages.guarded, api_key=server.api_key, hosts=server.hosts, count=count)],
    exception_handlers=http_messages.error_handlers(endpoints),
    lifespan=server.lifespan,
  )


def _model_routes(served: Callable[[], tuple[str, int]]) -> list[Route]:
  created = int(time.time())

  async def list_models(request: Request) -> Response:
    return JSONResponse(openai_api.model_list(*served(), created))

  async def retrieve_model(request: Request) -> Response:
    name = request.path_params['name']
    openai_api.named_path(*served(), name)
    return JSONResponse(openai_api.model_object(name, created))

  return [Route('/v1/models', list_models), Route('/v1/models/{name:path}', retrieve_model)]
