"""Connections to a server: so many, and none may keep it waiting for ever; uvicorn alone sets no limit to either.

Who connects owes a request, whole and soon, and reads the answer. Who does not is cut off; and where all places are
taken, those who have owed for longest make room, so that who asks at once is always heard.
"""

import asyncio
import heapq
import logging
import resource
from typing import NamedTuple

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dipaco_jax.core.errors import InputError

IDLE = 256  # connections that have no request, beside all that can be answered at one time
BACKLOG = 128  # of which asyncio accepts all in a turn
TURNS = 4  # between accepting one and closing another in its place
FILES = 64  # that the rest of the process may have open
SWEEP_S = 1.0


class Limits(NamedTuple):
  """What a client may do to us."""

  most: int  # connections
  head_s: float = 10.0  # for the head of a request to come, behind the answer to the one before
  body_s: float = 40.0  # for its body, which the server itself refuses sooner and in words
  answer_s: float = 30.0  # in which nothing of an answer is read


class Protocol(H11Protocol):
  """uvicorn's, which knows what its client owes."""

  limits: Limits

  def connection_made(self, transport):
    super().connection_made(transport)
    self.is_cut, self.since = False, self.loop.time()
    self.state: tuple = ()
    there = [other for other in self.connections if isinstance(other, Protocol) and not other.is_cut]
    if len(there) > self.limits.most:
      logging.warning('all %d connections are taken: those that have owed a request for longest end', self.limits.most)
      owing = (other for other in there if other.owes())
      for other in heapq.nsmallest(1 + self.limits.most // 16, owing, key=lambda other: other.since):
        other.cut()

  def owes(self) -> str:
    """What the server waits for: that an 'answer' is read, a 'head' or a 'body' to come; '' where the client waits."""
    if self.flow.write_paused or self.transport.is_closing():
      return 'answer'
    return {h11.IDLE: 'head', h11.SEND_BODY: 'body'}.get(self.conn.their_state, '')

  def look(self, now: float):
    """Cuts the client off where it has owed the same for too long."""
    owes = self.owes()
    state = owes, self.cycle, self.transport.get_write_buffer_size() if owes == 'answer' else 0
    if state != self.state:
      self.state, self.since = state, now
    elif owes and now - self.since > (most_s := getattr(self.limits, f'{owes}_s')):
      logging.warning('a client is cut off: the server waited for %s for %g s', WORDS[owes], most_s)
      self.cut()

  def cut(self):
    self.is_cut = True
    self.transport.abort()


WORDS = {'head': 'the head of a request', 'body': 'the body of a request', 'answer': 'an answer to be read'}


def limited(limits: Limits) -> type[Protocol]:
  """For uvicorn."""
  return type('Limited', (Protocol,), {'limits': limits})


async def watch(connections: set):
  """Looks at all of them, until it is cancelled."""
  while True:
    await asyncio.sleep(SWEEP_S)
    now = asyncio.get_running_loop().time()
    for connection in list(connections):
      connection.look(now)


def have_descriptors(most: int):
  """For so many connections; raises InputError where the system has not as many for this process."""
  need = most + TURNS * BACKLOG + FILES
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if hard != resource.RLIM_INFINITY and hard < need:
    raise InputError(f'{need} files may have to be open, and {hard} can be: see to ulimit -n, or lower --max_waiting')
  if soft != resource.RLIM_INFINITY and soft < need:
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
