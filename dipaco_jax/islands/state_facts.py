"""States of paths that are published: facts `state (path, phase)`, each of several objects [3].

Their uploads may take many phases, and are behind all messages on the line: a state is written in parts, and none is
begun while a message is on its way. Of each path, the newest state alone waits for the line.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator

from dipaco_jax.islands.held_states import HeldStates
from dipaco_jax.islands.island import STATES, Gone, Island
from dipaco_jax.islands.path_state import Arrays
from dipaco_jax.islands.registry import Conflict, Fact
from dipaco_jax.storage import retry

STATE = 'state'  # kind of the facts
# Of a part, 3 s at 20 Mbit/s, or of one array: for so long a message that comes then shares the line.
PART_BYTES = 2**23
LOOK_S = 1.0  # between looks for what is to be published; they read memory alone


class Line:
  """Lets messages go before states, for any number of threads."""

  def __init__(self):
    self._messages, self._changed = 0, threading.Condition()

  @contextlib.contextmanager
  def message(self) -> Iterator[None]:
    """Marks the block as one that sends messages."""
    with self._changed:
      self._messages += 1
    try:
      yield
    finally:
      with self._changed:
        self._messages -= 1
        self._changed.notify_all()

  def wait_behind(self):
    """Waits until no message is on its way."""
    with self._changed:
      self._changed.wait_for(lambda: not self._messages)


def publish(island: Island, made: Fact, state: Arrays, wait: Callable[[], None] = lambda: None):
  """Publishes what a path takes along after the phase of this checkpoint; calls `wait` before each part.

  Stops at the end of the run.
  """
  objects = []
  for i, part in enumerate(in_parts(state)):
    wait()
    objects.append(island.write_object(f'{STATES}/{made.key}/{made.number}-{i}', part))
    if island.registry.facts('finished'):  # the monitor has maybe looked for what is left over before this was there
      island.storage.delete(objects[-1][0])
      return
  digest = hashlib.sha256(json.dumps(objects).encode()).hexdigest()
  about = {'worker': island.name, 'checkpoint': made.sha256, 'objects': objects}
  fact = Fact(STATE, made.key, made.number, '', digest, about)
  island.registry.put([fact])
  island.registry.mark_scheduled([fact])  # nothing follows from it


def in_parts(state: Arrays) -> Iterator[Arrays]:
  """Splits a state into parts of about PART_BYTES, by whole arrays."""
  sizes = itertools.accumulate(x.nbytes for x in state.values())
  ends = (max(0, size - 1) // PART_BYTES for size in sizes)
  for _, group in itertools.groupby(zip(ends, state.items(), strict=True), lambda pair: pair[0]):
    yield dict(item for _, item in group)


def read(island: Island, made: Fact) -> Arrays | None:
  """Returns the state after the phase of this checkpoint, None where none is published, or it is damaged."""
  for fact in island.registry.facts(STATE, [made.key], made.number):
    objects = fact.meta.get('objects', [[fact.uri, fact.sha256]] if fact.uri else [])
    if objects and fact.meta['checkpoint'] == made.sha256:
      try:
        return {name: x for each in objects for name, x in island.read_object(*each).items()}
      except Gone as e:  # no task makes it again
        logging.warning('%s', e)
  return None


@contextlib.contextmanager
def publishing(island: Island, held: HeldStates, line: Line) -> Iterator[None]:
  """Publishes the states that are put aside, in a thread, until the end of the block."""

  def look():
    try:
      publish_aside(island, held, line)
    except Exception as e:
      logging.warning('a state was not published, and will be tried again: %s', e)

  with retry.every(LOOK_S, look):
    yield


def publish_aside(island: Island, held: HeldStates, line: Line):
  """Publishes the states that a holder has put aside, the oldest first; forgets those that nobody needs."""
  for key in held.aside():
    made = island.registry.facts('checkpoint', [str(key.path)], key.phase)
    if not made:
      continue  # its fact is on its way
    if made[0].sha256.startswith(key.digest) and not island.registry.facts(STATE, [str(key.path)], key.phase):
      state = held.read_aside(key)
      try:
        if state is not None:
          publish(island, made[0], state, line.wait_behind)
      except Conflict as e:
        logging.warning('path %d: another has published another state: %s', key.path, e)
    held.drop_aside(key)
