"""What our HTTP servers answer alike: their models, health and metrics, beside the POST routes that each has."""

import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol

import prometheus_client as prometheus
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dipaco_jax.inference import http_messages, openai_api


class Metrics(Protocol):
  registry: prometheus.CollectorRegistry
  requests: prometheus.Counter  # by status


def make_app(
  posts: Mapping[str, Callable[[Request], Awaitable[Any]]],
  served: Callable[[], tuple[str, int]],
  health: Callable[[Request], Awaitable[Response]],
  metrics: Metrics,
  api_key: str,
  hosts: Collection[str] | None,
  lifespan: Any,
) -> Starlette:
  """Makes the app of a server.

  Args:
    posts: endpoints by path, to which requests are counted.
    served: returns the model's name and its number of paths; raises ApiError where it cannot be asked yet.
    health: the endpoint of /health.
    api_key: that requests to /v1 must bring; '': none.
    hosts: names in the header Host that are answered; None: all.
    lifespan: Starlette's.
  """
  created = int(time.time())

  async def list_models(request: Request) -> Response:
    return JSONResponse(openai_api.model_list(*served(), created))

  async def retrieve_model(request: Request) -> Response:
    name = request.path_params['name']
    openai_api.named_path(*served(), name)
    return JSONResponse(openai_api.model_object(name, created))

  async def export_metrics(request: Request) -> Response:
    return Response(prometheus.generate_latest(metrics.registry), media_type=prometheus.CONTENT_TYPE_LATEST)

  def count(path: str, status: int):
    if path in posts:
      metrics.requests.labels(status).inc()

  routes = [
    *(Route(path, endpoint, methods=['POST']) for path, endpoint in posts.items()),
    Route('/v1/models', list_models),
    Route('/v1/models/{name:path}', retrieve_model),
    Route('/health', health),
    Route('/metrics', export_metrics),
  ]
  words = f'{", ".join(f"POST {path}" for path in posts)}, GET /v1/models, GET /health and GET /metrics'
  return Starlette(
    routes=routes,
    middleware=[Middleware(http_messages.guarded, api_key=api_key, hosts=hosts, count=count)],
    exception_handlers=http_messages.error_handlers(words),
    lifespan=lifespan,
  )
