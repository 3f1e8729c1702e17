"""Limits of connections and of waiting for clients, neither of which uvicorn has, and of lines in the log.

A client that connects has to send a whole request within seconds, and then to read the answer; otherwise it is
disconnected. When all connections are taken, those that have waited longest for their client are closed, so that a
client that sends its request at once is always served. Each place in the program may log a limited number of lines per
minute, so that no client can fill the log.
"""

import asyncio
import heapq
import logging
import resource
import time
from typing import NamedTuple

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dipaco_jax.core.errors import InputError

IDLE = 256  # connections without a request, on top of all that can be answered at one time
BACKLOG = 128  # asyncio accepts all of them in one turn
TURNS = 4  # between accepting one and closing another in its place
FILES = 64  # that the rest of the process may have open
SWEEP_S = 1.0
BURST, PERIOD_S = 10, 60.0  # lines of log from a place in the code
AWAITED = {'head': 'the head of a request', 'body': 'the body of a request', 'answer': 'an answer to be read'}


class Limits(NamedTuple):
  """How many connections there may be, and how long clients may take."""

  most: int  # connections
  head_s: float = 10.0  # for the head of a request to come, after the answer to the one before
  body_s: float = 40.0  # for its body; the server itself rejects it sooner, with an error
  answer_s: float = 30.0  # in which nothing of an answer is read


class Protocol(H11Protocol):
  """uvicorn's protocol, with a clock that measures the waiting for its client."""

  limits: Limits

  def connection_made(self, transport):
    super().connection_made(transport)
    self.is_cut, self.since = False, self.loop.time()
    self.state: tuple = ()
    open_connections = [other for other in self.connections if isinstance(other, Protocol) and not other.is_cut]
    if len(open_connections) > self.limits.most:
      logging.warning('all %d connections are taken: the ones idle longest are closed', self.limits.most)
      idle = (other for other in open_connections if other.awaited())
      for other in heapq.nsmallest(1 + self.limits.most // 16, idle, key=lambda other: other.since):
        other.cut()

  def awaited(self) -> str:
    """Returns what the server waits for: an 'answer' to be read, a 'head' or 'body' to arrive, or '' for nothing."""
    if self.flow.write_paused or self.transport.is_closing():
      return 'answer'
    return {h11.IDLE: 'head', h11.SEND_BODY: 'body'}.get(self.conn.their_state, '')

  def cut_if_overdue(self, now: float):
    """Cuts the client off where the same has been waited for too long."""
    awaited = self.awaited()
    state = awaited, self.cycle, self.transport.get_write_buffer_size() if awaited == 'answer' else 0
    if state != self.state:
      self.state, self.since = state, now
    elif awaited and now - self.since > (most_s := getattr(self.limits, f'{awaited}_s')):
      logging.warning('a client is cut off: the server waited for %s for %g s', AWAITED[awaited], most_s)
      self.cut()

  def cut(self):
    self.is_cut = True
    self.transport.abort()


def protocol_with(limits: Limits) -> type[Protocol]:
  return type('LimitedProtocol', (Protocol,), {'limits': limits})


async def watch(connections: set):
  """Checks all connections every second, until it is cancelled."""
  while True:
    await asyncio.sleep(SWEEP_S)
    now = asyncio.get_running_loop().time()
    for connection in list(connections):
      connection.cut_if_overdue(now)


def reserve_descriptors(most: int):
  """Raises the limit of open files for `most` connections; raises InputError if the system does not allow it."""
  need = most + TURNS * BACKLOG + FILES
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if hard != resource.RLIM_INFINITY and hard < need:
    raise InputError(f'{need} files may have to be open, and {hard} can be: raise ulimit -n, or lower --max_waiting')
  if soft != resource.RLIM_INFINITY and soft < need:
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


class RateLimit(logging.Filter):
  """Passes BURST warnings in PERIOD_S from each place in the code; the next period's first counts those dropped."""

  def __init__(self, clock=time.monotonic):
    super().__init__()
    self.clock = clock
    self.seen: dict[tuple[str, int], tuple[float, int]] = {}  # (when its period began, lines since) of a place

  def filter(self, record: logging.LogRecord) -> bool:
    if record.levelno < logging.WARNING:
      return True
    now, place = self.clock(), (record.pathname, record.lineno)
    began, count = self.seen.get(place, (now, 0))
    if now - began > PERIOD_S:
      if count > BURST:
        record.msg, record.args = f'{record.getMessage()} (and {count - BURST} times more before)', ()
      began, count = now, 0
    self.seen[place] = began, count + 1
    return count < BURST


def limit_log():
  """Limits the lines that all handlers of the root logger write."""
  for handler in logging.getLogger().handlers:
    handler.addFilter(RateLimit())
