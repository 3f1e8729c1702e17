"""What our HTTP servers do alike with requests and errors: bodies are read whole, keys checked, errors are OpenAI's."""

import asyncio
import hmac
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dipaco_jax.serving import http_hosts
from dipaco_jax.serving.openai_api import ApiError

MAX_BODY_BYTES = 2**21
SMALL_BODY_BYTES = 2**14  # so few are parsed at once: others can wait as long
BODY_S = 30  # for a body to come
CLIENT_CLOSED = 499  # nginx's status for a client that closed the connection
EVENT_HEADERS = [(b'content-type', b'text/event-stream; charset=utf-8'), (b'cache-control', b'no-cache')]
EVENTS_END = b'data: [DONE]\n\n'
FAILED = 'the server failed on this request; its log has the error'
NO_KEY = (
  'the key is missing or wrong: send the header Authorization: Bearer KEY, with the DIPACO_API_KEY of this server'
)

T = TypeVar('T')


def event(body: Mapping[str, Any]) -> bytes:
  """Returns an event of a stream."""
  return f'data: {json.dumps(body, ensure_ascii=False)}\n\n'.encode()


async def watch(receive: Receive):
  """Waits for the client to hang up."""
  while (await receive())['type'] != 'http.disconnect':
    pass


async def read_body(request: Request) -> bytes:
  """Reads the body; raises ApiError if it is too large, does not come in time, or is not JSON by its header."""
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
    raise ApiError(408, f'the body did not arrive within {BODY_S} s') from e
  return b''.join(parts)


async def parse(parser: Callable[[bytes], T], body: bytes) -> T:
  """Parses a body, in a thread if it is large."""
  return parser(body) if len(body) < SMALL_BODY_BYTES else await asyncio.to_thread(parser, body)


def error_handlers(routes: str) -> dict[Any, Any]:
  """Returns Starlette's handlers of errors in routes. `routes` lists the existing routes in words."""

  async def answer(request: Request, error: Exception) -> Response:
    """Answers an error; uvicorn then logs it unless it is of the first three kinds."""
    if isinstance(error, ApiError):
      return error_response(error)
    if isinstance(error, HTTPException):  # Starlette's 404 and 405
      message = f'there is no {request.method} {request.url.path}: there are {routes}'
      return error_response(ApiError(error.status_code, message), error.headers)
    if isinstance(error, ClientDisconnect):
      return Response(status_code=CLIENT_CLOSED)
    return error_response(ApiError(500, FAILED))

  return dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), answer)


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
  headers = {'Retry-After': '1'} if error.status in (429, 503) else headers
  # In ASCII: an error may quote half a surrogate pair of the request, which has no UTF-8.
  return Response(json.dumps(error.body), error.status, headers, 'application/json')


def guarded(app: ASGIApp, api_key: str, hosts: Collection[str] | None, count: Callable[[str, int], None]) -> ASGIApp:
  """Wraps an app.

  Args:
    api_key: that requests to /v1 need, if there is one.
    hosts: names in the header Host that are answered, as `http_hosts.is_allowed` has them; None: all.
    count: gets the path and the status of each request to /v1.
  """

  async def guard(scope: Scope, receive: Receive, send: Send):
    if scope['type'] != 'http':
      return await app(scope, receive, send)
    if odd := _odd_host(scope, hosts):
      problem = f'this server does not accept requests for the host {odd[:80]!r}: add it to --allowed_hosts'
      return await error_response(ApiError(403, problem))(scope, receive, send)
    if not scope['path'].startswith('/v1/'):
      return await app(scope, receive, send)
    status = CLIENT_CLOSED

    async def counted(message: Message):
      nonlocal status
      status = message.get('status', status)
      await send(message)

    given = dict(scope['headers']).get(b'authorization', b'')
    is_authorized = not api_key or hmac.compare_digest(given, f'Bearer {api_key}'.encode())
    inner = app if is_authorized else error_response(ApiError(401, NO_KEY, code='invalid_api_key'))
    try:
      await inner(scope, receive, counted)
    except Exception:
      status = 500  # Starlette answers it outside of this
      raise
    finally:
      count(scope['path'], status)

  return guard


def _odd_host(scope: Scope, hosts: Collection[str] | None) -> str:
  """Returns the name that a request asks and that is not allowed, or '' if there is none."""
  given = [value.decode('latin-1') for name, value in scope['headers'] if name == b'host']
  return '' if hosts is None else next((host for host in given if not http_hosts.is_allowed(host, hosts)), '')
