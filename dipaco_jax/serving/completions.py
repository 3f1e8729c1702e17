"""Completions of texts and chats: a request is handed to the engine's thread, and answered whole or as a stream.

When a client disconnects, its texts' rows are freed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from dipaco_jax.serving import http_messages, openai_api
from dipaco_jax.serving.engine_thread import Delta, EngineThread, PendingRequest
from dipaco_jax.serving.openai_api import ApiError, CompletionRequest


class Completions:
  def __init__(self, engine_thread: EngineThread, max_waiting: int):
    """Rejects requests that would make more than `max_waiting` texts wait for their first token."""
    self.engine_thread, self.max_waiting = engine_thread, max_waiting
    self.open: set[PendingRequest] = set()

  def end(self, error: ApiError):
    for pending in self.open:
      pending.deltas.put_nowait(error)

  async def answer(self, request: CompletionRequest, scope: Scope, receive: Receive, send: Send):
    """Sends all texts in one body when they are finished."""
    async with self._deltas(request, receive) as deltas:
      last = {delta.choice: delta async for delta in deltas}
    texts = [request.format.whole(prefix + last[index].piece) for index, prefix in enumerate(request.prefixes)]
    choices = [
      openai_api.choice_object(index, text, last[index].paths, last[index].finished)
      | openai_api.scores_object(last[index].scores, request.num_scores)
      for index, text in enumerate(texts)
    ]
    usage = openai_api.usage_object(request.prompt_tokens, sum(delta.num_tokens for delta in last.values()))
    name, kind = openai_api.new_id(request.format.id_prefix), request.format.whole_object
    body = openai_api.completion_object(name, kind, request.model, choices) | {'usage': usage}
    await JSONResponse(body)(scope, receive, send)

  async def stream(self, request: CompletionRequest, scope: Scope, receive: Receive, send: Send):
    """Sends texts as events while they grow; what fails before the first event is answered as any other error."""
    started, end = False, http_messages.EVENTS_END
    async with self._deltas(request, receive) as deltas:
      try:
        async for chunk in _chunks(request, deltas):
          if not started:
            await send({'type': 'http.response.start', 'status': 200, 'headers': http_messages.EVENT_HEADERS})
            started = True
          await send({'type': 'http.response.body', 'body': http_messages.event(chunk), 'more_body': True})
      except (ApiError, ClientDisconnect) as e:
        if not started:
          raise
        end = http_messages.event(e.body) if isinstance(e, ApiError) else b''
    await send({'type': 'http.response.body', 'body': end})

  @contextlib.asynccontextmanager
  async def _deltas(self, request: CompletionRequest, receive: Receive) -> AsyncIterator[AsyncIterator[Delta]]:
    """Submits a request, yields its deltas, and cancels unfinished texts at the end of the block."""
    num_waiting = self.engine_thread.num_waiting
    if num_waiting + len(request.requests) > self.max_waiting:
      raise ApiError(429, f'{num_waiting} of at most {self.max_waiting} texts are waiting already: try again')
    pending = PendingRequest(request)
    self.open.add(pending)
    self.engine_thread.submit(pending)
    watch = asyncio.create_task(_watch(receive, pending))
    try:
      yield _until_finished(pending)
    finally:
      watch.cancel()
      self.open.discard(pending)
      self.engine_thread.cancel(pending)


async def _watch(receive: Receive, pending: PendingRequest):
  """Waits for the client to hang up."""
  await http_messages.watch(receive)
  pending.deltas.put_nowait(ClientDisconnect())


async def _until_finished(pending: PendingRequest) -> AsyncIterator[Delta]:
  num_left = len(pending.request.requests)
  while num_left:
    delta = await pending.deltas.get()
    if isinstance(delta, Exception):
      raise delta
    if delta.finished not in ('', 'stop', 'length'):
      raise ApiError(500, http_messages.FAILED)
    num_left -= bool(delta.finished)
    yield delta


async def _chunks(request: CompletionRequest, deltas: AsyncIterator[Delta]) -> AsyncIterator[dict[str, Any]]:
  """Yields the objects of a stream: those of each delta, and at the end the usage if requested."""
  name = openai_api.new_id(request.format.id_prefix)
  kind = request.format.piece_object
  model = request.model
  prefixes, num_tokens = dict(enumerate(request.prefixes)), 0
  no_usage = {'usage': None} if request.include_usage else {}
  async for delta in deltas:
    is_first = delta.choice in prefixes
    piece = prefixes.pop(delta.choice, '') + delta.piece
    scores = openai_api.scores_object(delta.scores, request.num_scores) if is_first else {}
    for text, finished in request.format.pieces(piece, is_first, delta.finished):
      choice = openai_api.choice_object(delta.choice, text, delta.paths, finished) | scores
      scores = {}  # only with the first piece of a text
      yield openai_api.completion_object(name, kind, model, [choice]) | no_usage
    num_tokens += delta.num_tokens if delta.finished else 0
  if request.include_usage:
    usage = openai_api.usage_object(request.prompt_tokens, num_tokens)
    yield openai_api.completion_object(name, kind, model, []) | {'usage': usage}
