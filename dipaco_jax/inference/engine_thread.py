"""The thread that an engine belongs to, between the server's event loop and JAX; and what is measured there."""

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
from dipaco_jax.inference.generation import Engine
from dipaco_jax.inference.openai_api import Asked

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
  """For Prometheus."""

  def __init__(self):
    prometheus.disable_created_metrics()
    self.registry = registry = prometheus.CollectorRegistry()
    counter = functools.partial(prometheus.Counter, registry=registry)
    gauge = functools.partial(prometheus.Gauge, registry=registry)
    histogram = functools.partial(prometheus.Histogram, registry=registry)
    self.requests = counter('dipaco_requests', 'for completions, by HTTP status; 499: hung up', ['status'])
    self.prompt_tokens = counter('dipaco_prompt_tokens', 'read')
    self.completion_tokens = counter('dipaco_completion_tokens', 'written')
    self.waiting = gauge('dipaco_waiting_texts', 'that have no token yet')
    self.active = gauge('dipaco_active_texts', 'that grow')
    self.connections = gauge('dipaco_connections', 'of clients')
    self.paths = gauge('dipaco_paths_loaded', 'in memory')
    self.batch = histogram('dipaco_batch_texts', 'that grew together', buckets=(1, 2, 4, 8, 16, 32, 64, 128))
    self.first = histogram('dipaco_first_token_seconds', 'from a request to a first token', buckets=SECONDS)
    self.each = histogram('dipaco_token_seconds', 'of each token behind the first', buckets=SECONDS)


class News(NamedTuple):
  """What is new of a text."""

  choice: int
  piece: str
  finished: str
  paths: tuple[int, ...]
  num_tokens: int  # written so far


class Ticket:
  """The texts of one request on their way."""

  def __init__(self, asked: Asked):
    self.asked, self.since = asked, time.monotonic()
    self.news: asyncio.Queue[News | Exception] = asyncio.Queue()
    self.texts: dict[int, Text] = {}  # not finished; the engine's thread alone looks at them
    self.first: dict[int, float] = {}  # when each had its first token


class Driver:
  """The thread that the engine, and so JAX, belongs to; what has no underscore is for the loop's thread."""

  def __init__(self, make: Callable[[], Engine], metrics: Metrics):
    self.make, self.metrics = make, metrics
    self.failure: BaseException | None = None  # that ended the thread
    self.closed = False  # by the loop, which will not hear of more
    self.engine: Engine  # there when `changed` is called
    self.thread = threading.Thread(target=self._main, daemon=True)
    self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    self._tickets: list[Ticket] = []
    self._submitted = self._begun = 0  # texts; the one is written by the loop's thread, the other by this

  @property
  def num_waiting(self) -> int:
    return self._submitted - self._begun

  def start(self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None]):
    """`changed` is called in the loop when the engine is ready, and when the thread has failed."""
    self._loop, self._changed = loop, changed
    self.thread.start()

  def submit(self, ticket: Ticket):
    self._submitted += len(ticket.asked.requests)
    self._inbox.put(functools.partial(self._start, ticket))

  def cancel(self, ticket: Ticket):
    """Nothing happens where it is finished."""
    self._inbox.put(functools.partial(self._cancel, ticket))

  def close(self):
    self.closed = True
    self._inbox.put(None)

  def _main(self):
    try:
      engine = self.engine = self.make()
      self._loop.call_soon_threadsafe(self._changed)
      while not self.closed:
        while not (engine.busy and self._inbox.empty()):
          if (what := self._inbox.get()) is None:
            return
          what()
        while self._turn(engine.admit):
          pass
        self._turn(self._advance)
    except BaseException as e:
      if not self.closed:
        self.failure = e
        self._loop.call_soon_threadsafe(self._changed)

  def _start(self, ticket: Ticket):
    ticket.texts = {index: self.engine.start(request) for index, request in enumerate(ticket.asked.requests)}
    self._tickets.append(ticket)
    self.metrics.prompt_tokens.inc(ticket.asked.prompt_tokens)

  def _cancel(self, ticket: Ticket):
    for text in ticket.texts.values():
      self.engine.cancel(text)
    self._tell()

  def _turn(self, turn: Callable[[], bool]) -> bool:
    """Of the engine, and tells what is new; whether there is more of its kind. What fails ends its own texts."""
    try:
      more = turn()
    except Exception:
      logging.exception('a request failed')
      if not any(text.finished == 'error' for ticket in self._tickets for text in ticket.texts.values()):
        raise
      more = True
    self._tell()
    return more

  def _advance(self) -> bool:
    if num_texts := self.engine.advance():
      self.metrics.batch.observe(num_texts)
    return False  # others have their turn

  def _tell(self):
    news = []
    for ticket in self._tickets:
      for index, text in list(ticket.texts.items()):
        num_tokens = len(text.tokens) - len(text.request.tokens)
        if index not in ticket.first and (num_tokens or text.finished):
          self._count_first(ticket, index)
        piece = text.transcript.take(bool(text.finished)) if ticket.asked.stream or text.finished else ''
        if text.finished:
          del ticket.texts[index]
          self._count_all(ticket.first[index], num_tokens)
        if piece or text.finished:
          news.append((ticket, News(index, piece, text.finished, tuple(text.paths), num_tokens)))
    self._tickets = [ticket for ticket in self._tickets if ticket.texts]
    if news:
      self._loop.call_soon_threadsafe(_hand_out, news)
    self.metrics.active.set(sum(batch.count for batch in self.engine.batches.values()) + len(self.engine.moving))
    self.metrics.paths.set(len(self.engine.paths))

  def _count_first(self, ticket: Ticket, index: int):
    self._begun += 1
    ticket.first[index] = time.monotonic()
    self.metrics.first.observe(ticket.first[index] - ticket.since)

  def _count_all(self, first: float, num_tokens: int):
    self.metrics.completion_tokens.inc(num_tokens)
    if num_tokens > 1:
      self.metrics.each.observe((time.monotonic() - first) / (num_tokens - 1))


def _hand_out(news: list[tuple[Ticket, News]]):
  for ticket, new in news:
    ticket.news.put_nowait(new)
