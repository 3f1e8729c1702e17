"""The thread that an engine, and so JAX, belongs to: requests come from the server's event loop, and deltas go back."""

import asyncio
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import prometheus_client as prometheus

from dipaco_jax.inference.batch import Text
from dipaco_jax.inference.engine import Engine
from dipaco_jax.serving.openai_api import CompletionRequest

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Delta(NamedTuple):
  choice: int
  piece: str
  finished: str
  paths: tuple[int, ...]  # that have written so far: the last one wrote the end of the piece
  num_tokens: int  # written so far
  scores: tuple[float, ...] = ()  # the router's for each path, if it made the first choice


class PendingRequest:
  """A request whose texts are not all finished."""

  def __init__(self, request: CompletionRequest):
    self.request, self.since = request, time.monotonic()
    self.deltas: asyncio.Queue[Delta | Exception] = asyncio.Queue()
    self.texts: dict[int, Text] = {}  # not finished; only the engine's thread reads them
    self.first_token_at: dict[int, float] = {}


class Metrics:
  def __init__(self):
    prometheus.disable_created_metrics()
    self.registry = registry = prometheus.CollectorRegistry()
    counter = functools.partial(prometheus.Counter, registry=registry)
    gauge = functools.partial(prometheus.Gauge, registry=registry)
    histogram = functools.partial(prometheus.Histogram, registry=registry, buckets=SECONDS)
    description = 'Requests for completions by HTTP status (499: the client disconnected).'
    self.requests = counter('dipaco_requests', description, ['status'])
    self.prompt_tokens = counter('dipaco_prompt_tokens', 'Prompt tokens read.')
    self.completion_tokens = counter('dipaco_completion_tokens', 'Tokens written.')
    self.waiting = gauge('dipaco_waiting_texts', 'Texts that have no token yet.')
    self.active = gauge('dipaco_active_texts', 'Texts that are growing.')
    self.connections = gauge('dipaco_connections', 'Open connections.')
    self.paths = gauge('dipaco_paths_loaded', 'Paths in memory.')
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    self.batch = histogram('dipaco_batch_texts', 'Texts that grew in one dispatch.', buckets=sizes)
    self.first_token_s = histogram('dipaco_first_token_seconds', 'Seconds from a request to its first token.')
    self.token_s = histogram('dipaco_token_seconds', 'Seconds per token after the first.')


class EngineThread:
  """Runs an engine in a thread of its own, which calls the private methods; the event loop calls the public ones."""

  def __init__(self, load_engine: Callable[[], Engine], metrics: Metrics):
    self.load_engine, self.metrics = load_engine, metrics
    self.failure: BaseException | None = None  # that ended the thread
    self.closed = False  # set by the loop, which no longer listens
    self.engine: Engine  # from the first call of `changed` on
    self.thread = threading.Thread(target=self._main, daemon=True)
    self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    self._pending: list[PendingRequest] = []
    self._num_submitted = self._num_begun = 0  # texts; the loop's thread writes the first, this thread the second

  @property
  def num_waiting(self) -> int:
    return self._num_submitted - self._num_begun

  def start(self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None]):
    """Starts the thread; `changed` is called in the loop when the engine is ready, and when the thread has failed."""
    self._loop, self._changed = loop, changed
    self.thread.start()

  def submit(self, pending: PendingRequest):
    """Starts the texts of a request; its queue gets their deltas."""
    self._num_submitted += len(pending.request.requests)
    self._inbox.put(functools.partial(self._start, pending))

  def cancel(self, pending: PendingRequest):
    self._inbox.put(functools.partial(self._cancel, pending))

  def close(self):
    self.closed = True
    self._inbox.put(None)

  def _main(self):
    try:
      engine = self.engine = self.load_engine()
      self._loop.call_soon_threadsafe(self._changed)
      while not self.closed:
        while not (engine.busy and self._inbox.empty()):
          if (action := self._inbox.get()) is None:
            return
          action()
        while self._turn(engine.admit):
          pass
        self._turn(self._advance)
    except BaseException as e:
      if not self.closed:
        self.failure = e
        self._loop.call_soon_threadsafe(self._changed)

  def _start(self, pending: PendingRequest):
    pending.texts = {index: self.engine.start(request) for index, request in enumerate(pending.request.requests)}
    self._pending.append(pending)
    self.metrics.prompt_tokens.inc(pending.request.prompt_tokens)

  def _cancel(self, pending: PendingRequest):
    for text in pending.texts.values():
      self.engine.cancel(text)
    self._send_deltas()

  def _turn(self, turn: Callable[[], bool]) -> bool:
    """Runs one turn of the engine, whose errors end their own texts only; returns whether another may follow."""
    try:
      more = turn()
    except Exception:
      logging.exception('a request failed')
      if not any(text.finished == 'error' for pending in self._pending for text in pending.texts.values()):
        raise
      more = True
    self._send_deltas()
    return more

  def _advance(self) -> bool:
    if num_texts := self.engine.advance():
      self.metrics.batch.observe(num_texts)
    return False  # the inbox and new texts come first

  def _send_deltas(self):
    deltas = [(pending, delta) for pending in self._pending for delta in self._deltas(pending)]
    self._pending = [pending for pending in self._pending if pending.texts]
    if deltas:
      self._loop.call_soon_threadsafe(_put_deltas, deltas)
    self.metrics.active.set(sum(batch.count for batch in self.engine.batches.values()) + len(self.engine.moving))
    self.metrics.paths.set(len(self.engine.paths))

  def _deltas(self, pending: PendingRequest) -> list[Delta]:
    """Returns the new text of a request, and forgets its finished texts."""
    deltas = []
    for index, text in list(pending.texts.items()):
      if index not in pending.first_token_at and (text.num_new or text.finished):
        self._num_begun += 1
        pending.first_token_at[index] = time.monotonic()
        self.metrics.first_token_s.observe(pending.first_token_at[index] - pending.since)
      piece = text.transcript.take(bool(text.finished)) if pending.request.stream or text.finished else ''
      if text.finished:
        del pending.texts[index]
        self.metrics.completion_tokens.inc(text.num_new)
        if text.num_new > 1:
          seconds = time.monotonic() - pending.first_token_at[index]
          self.metrics.token_s.observe(seconds / (text.num_new - 1))
      if piece or text.finished:
        paths = tuple(text.paths[: text.num_writers])
        deltas.append(Delta(index, piece, text.finished, paths, text.num_new, text.scores))
    return deltas


def _put_deltas(deltas: list[tuple[PendingRequest, Delta]]):
  for pending, delta in deltas:
    pending.deltas.put_nowait(delta)
