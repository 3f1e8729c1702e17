"""A request on its way to an engine, and the answer on its way back, as it comes.

What has not yielded a byte is asked of another engine when one fails. A client that hangs up ends the engine's work.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from dipaco_jax.serving import http_messages, route_api
from dipaco_jax.serving.engine_pool import EnginePool, Remote, explain, read_body
from dipaco_jax.serving.openai_api import ApiError
from dipaco_jax.serving.route_api import Part
from dipaco_jax.serving.route_metrics import Metrics

CONNECT_S = 5.0
KEPT_S = 2.0  # idle connections to engines; uvicorn, which many of them are, keeps them for 5
OUT = {401: "it rejects the router's key", 403: "it rejects the router's key"} | {
  status: f'it answered with status {status}' for status in (502, 503, 504)
}
FULL = 429
STATUSES = range(200, 600)  # that an answer may have; uvicorn knows no others
MAX_ANSWER_BYTES = 2**25  # of an answer that is no stream, which is kept whole
PATH = b'dipaco-path'  # the header that names the path of an answer
PASSED = {name.lower(): name.lower().encode() for name in ('Content-Type', 'Cache-Control', 'X-Request-Id')}
TO_ENGINES = (b'x-request-id', b'traceparent', b'tracestate')
NONSENSE = -1  # why an engine failed, where it gave no status
BROKEN = 'the engine failed during its answer'
ERRORS = (aiohttp.ClientError, OSError, TimeoutError)
NO_FILES = (errno.EMFILE, errno.ENFILE)


class Failed(Exception):
  """An engine gave nothing, for a reason that is a status, NONSENSE or 0; another may."""


class Answer(NamedTuple):
  status: int
  headers: list[tuple[bytes, bytes]]
  path: int
  first: bytes  # of the body: all of it, unless it is a stream
  rest: AsyncIterator[bytes] | None  # of a stream


class Reuse:
  """Whether a connection had been used before: then the engine may just have closed it for being idle."""

  is_so = False


def open_session(timeout_s: float) -> aiohttp.ClientSession:
  """Returns a client; engines may take `timeout_s` for each piece of an answer."""
  trace = aiohttp.TraceConfig()

  async def note(session, context, params):
    if context.trace_request_ctx:
      context.trace_request_ctx.is_so = True

  trace.on_connection_reuseconn.append(note)
  return aiohttp.ClientSession(
    connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
    timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=timeout_s),
    auto_decompress=False,
    headers={'Accept-Encoding': 'identity'},
    cookie_jar=aiohttp.DummyCookieJar(),
    trace_configs=[trace],
  )


class Relay:
  def __init__(self, pool: EnginePool, metrics: Metrics, timeout_s: float):
    """Engines may take `timeout_s` until an answer begins, and as long again for the rest of one that is no stream."""
    self.pool = pool
    self.metrics = metrics
    self.timeout_s = timeout_s
    self.open: dict[asyncio.Task, int] = {}  # with how many engines each asks
    self.ended: ApiError | None = None  # why open requests were ended

  def end(self, error: ApiError):
    self.ended = error
    for work in self.open:
      work.cancel()

  async def __call__(self, endpoint: str, parts: Sequence[Part], scope: Scope, receive: Receive, send: Send):
    """Answers a request, as an ASGI app. `endpoint` is the path that follows an engine's URL."""
    headers = {name.decode(): value.decode('latin-1') for name, value in scope['headers'] if name in TO_ENGINES}
    response = _Response(send)
    loop = asyncio.get_running_loop()
    work = loop.create_task(self._answer(endpoint, parts, headers, response))
    gone = loop.create_task(http_messages.watch(receive))
    self.open[work] = len(parts)
    try:
      await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
      if work.done():
        await self._result(work, response)
      elif not response.started:
        raise ClientDisconnect
    finally:
      gone.cancel()
      work.cancel()
      del self.open[work]

  async def _result(self, work: asyncio.Task, response: '_Response'):
    """Tells the client what ended the work, if it did not end well."""
    error = (self.ended or ApiError(500, http_messages.FAILED)) if work.cancelled() else work.exception()
    if error is None:
      return
    if not response.started:
      raise error
    if isinstance(error, ERRORS):
      error = ApiError(502, BROKEN)
    await response.fail(error)

  async def _answer(
    self, endpoint: str, parts: Sequence[Part], headers: Mapping[str, str], response: '_Response'
  ) -> None:
    if len(parts) > 1:
      return await self._answer_in_parts(endpoint, parts, headers, response)
    async with self._asked(endpoint, parts[0], headers) as answer:
      self._count(parts[0], answer)
      await response.send(answer, str(answer.path))

  async def _answer_in_parts(
    self, endpoint: str, parts: Sequence[Part], headers: Mapping[str, str], response: '_Response'
  ):
    async def whole(part: Part) -> Answer:
      async with self._asked(endpoint, part, headers) as answer:
        self._count(part, answer)
        return answer

    tasks = [asyncio.get_running_loop().create_task(whole(part)) for part in parts]
    try:
      answers = await asyncio.gather(*tasks)
    finally:
      for task in tasks:
        task.cancel()
    paths = {i: answer.path for part, answer in zip(parts, answers, strict=True) for i in part.prompts}
    if not (last := next((answer for answer in answers if answer.status != 200), None)):
      try:
        last = answers[0]._replace(first=route_api.merge(parts, [answer.first for answer in answers]), rest=None)
      except ValueError as e:
        logging.warning('answers of engines were not completions: %s', e)
        raise ApiError(502, 'the answer of an engine was not a completion') from e
    await response.send(last, ','.join(str(paths[i]) for i in sorted(paths)))

  def _count(self, part: Part, answer: Answer):
    self.metrics.routed.labels(answer.path).inc(len(part.prompts))

  @contextlib.asynccontextmanager
  async def _asked(self, endpoint: str, part: Part, headers: Mapping[str, str]) -> AsyncIterator[Answer]:
    """Gives the answer of the first engine that has one; raises ApiError if none has."""
    failures = set[int]()
    for count, remote in enumerate(self._candidates(part.paths)):
      self.metrics.retries.inc(min(count, 1))
      async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(self.pool.serving(remote))
        try:
          answer = await self._ask(stack, remote, endpoint, part.values, headers)
        except Failed as e:
          failures.add(e.args[0])
          continue
        yield answer
        return
    where = f'path {part.paths[0]}' if len(part.paths) == 1 else 'any path'
    if FULL in failures:
      raise ApiError(429, f'no engine of {where} has room: try again')
    if NONSENSE in failures:
      raise ApiError(502, f'an engine of {where} sent an answer that is not valid HTTP, or too large')
    raise ApiError(503, f'no engine of {where} answers: try again')

  def _candidates(self, paths: Sequence[int]) -> Iterator[Remote]:
    tried: set[Remote] = set()
    for path in paths:
      while remote := next((remote for remote in self.pool.ready(path) if remote not in tried), None):
        tried.add(remote)
        yield remote

  async def _ask(
    self, stack: contextlib.AsyncExitStack, remote: Remote, endpoint: str, values: Any, headers: Mapping[str, str]
  ) -> Answer:
    """Returns an engine's answer once the body has begun; raises Failed, or ApiError if it takes too long."""
    body = json.dumps(values | {'model': remote.model}).encode()
    headers = {'Content-Type': 'application/json', **headers, **remote.headers}
    try:
      async with asyncio.timeout(self.timeout_s):  # of all: an engine may send `100 Continue` again and again
        response = await self._post(f'{remote.engine.url}/{endpoint}', body, headers)
      await stack.enter_async_context(response)
      self._check_status(remote, response.status)
      is_stream = response.content_type == 'text/event-stream'
      async with asyncio.timeout(self.timeout_s):
        first = await (response.content.readany() if is_stream else read_body(response, MAX_ANSWER_BYTES))
      if is_stream and not first:
        raise aiohttp.ClientPayloadError('it ended a stream before the first event')
    except aiohttp.ConnectionTimeoutError as e:
      self.pool.take_out(remote, explain(e))
      raise Failed(0) from e
    except TimeoutError as e:  # aiohttp's, too
      self.pool.take_out(remote, explain(e))
      raise ApiError(504, 'the engine did not answer in time') from e
    except ERRORS as e:
      if _lacks_files(e):  # of ours, not of the engine
        raise ApiError(429, 'the router has no file left for a connection: try again') from e
      self.pool.take_out(remote, explain(e))
      is_nonsense = isinstance(e, aiohttp.ClientPayloadError | aiohttp.ClientResponseError)
      raise Failed(NONSENSE if is_nonsense else 0) from e
    self.pool.answered(remote, response.status)
    given = {name: response.headers[name] for name in PASSED if name in response.headers}
    passed = [(PASSED[name], value.encode(errors='surrogateescape')) for name, value in given.items()]
    rest = response.content.iter_any() if is_stream else None
    return Answer(response.status, passed, remote.engine.path, first, rest)

  def _check_status(self, remote: Remote, status: int):
    """Raises Failed if an answer of this status is none that a client gets."""
    if status not in STATUSES:
      self.pool.take_out(remote, f'it answered with status {status}, which HTTP does not have')
      raise Failed(NONSENSE)
    if why := OUT.get(status):
      self.pool.take_out(remote, why)
      raise Failed(status)
    if status == FULL:
      raise Failed(FULL)

  async def _post(self, url: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
    ask: dict[str, Any] = {'data': body, 'headers': headers, 'allow_redirects': False}
    reuse = Reuse()
    try:
      return await self.pool.session.post(url, trace_request_ctx=reuse, **ask)
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
      if not reuse.is_so:
        raise
      return await self.pool.session.post(url, **ask)


def _lacks_files(error: BaseException) -> bool:
  """Whether this process, or machine, can open no more files; of a name that is looked up, the error may say else."""
  if getattr(error, 'errno', None) in NO_FILES:
    return True
  try:
    os.close(os.open(os.devnull, os.O_RDONLY))
  except OSError as e:
    return e.errno in NO_FILES
  return False


class _Response:
  """What the client gets."""

  def __init__(self, send: Send):
    self._send = send
    self.started = False
    self._tail = b''  # of what was sent

  async def send(self, answer: Answer, path: str):
    headers = [*answer.headers, (PATH, path.encode())]
    if answer.rest is None:
      headers.append((b'content-length', str(len(answer.first)).encode()))
    self.started = True
    await self._send({'type': 'http.response.start', 'status': answer.status, 'headers': headers})
    if answer.rest is not None:
      await self._piece(answer.first)
      async for piece in answer.rest:
        await self._piece(piece)
    await self._send({'type': 'http.response.body', 'body': answer.first if answer.rest is None else b''})

  async def _piece(self, piece: bytes):
    self._tail = (self._tail + piece[-4:])[-4:]
    await self._send({'type': 'http.response.body', 'body': piece, 'more_body': True})

  async def fail(self, error: BaseException):
    """Ends a stream with an event of the error, if it is between two events; else the connection breaks off."""
    if isinstance(error, ApiError) and self._tail.endswith((b'\n\n', b'\r\n\r\n')):
      await self._send({'type': 'http.response.body', 'body': http_messages.event(error.body)})
      return
    if not isinstance(error, ApiError):
      raise error
