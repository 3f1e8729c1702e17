"""Published states of paths: facts `state (path, phase)`, each with several objects [3].

Uploads of states may take many phases, and messages have priority: a state is written in parts, and no part is begun
while a message is being sent. Only the newest state of each path waits to be sent.
"""

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dipaco_jax.islands import audit_facts, path_state, screening_facts, withdrawals
from dipaco_jax.islands.guard import Gone, guarding
from dipaco_jax.islands.held_states import HeldStates
from dipaco_jax.islands.island import OBJECTS, STATE as STATE, STATES, Island
from dipaco_jax.islands.path_state import Arrays
from dipaco_jax.registry.registry import Fact
from dipaco_jax.storage import retry, tensors

UNDRAWN = 2  # states after which the monitor may not have drawn audits yet
# A message that comes while a part is on its way shares the line with it: parts are small beside messages.
PARTS = 64  # how many, unless they are smaller or larger than these
SMALLEST_PART = 2**18  # bytes
LARGEST_PART = 2**23  # bytes
BYTES = 'bytes'  # name of the one array of a part
KEPT = 2  # states of a path in its owner's store, the newest
LOOK_S, LOOK_AGAIN_S = 1.0, 20.0  # between looks for states to publish, and after an error


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


def publish(island: Island, checkpoint: Fact, state: Arrays, wait: Callable[[], None] = lambda: None):
  """Publishes the state that a path carries after the phase of this checkpoint, unless it is published.

  Calls `wait` before each part, and stops at the end of the run.
  """
  standing = island.registry.facts(STATE, [checkpoint.key], checkpoint.number)
  if any(fact.meta.get('checkpoint') == checkpoint.sha256 for fact in standing):
    return
  screening_facts.heed(island)  # or the checkpoint may have been withdrawn
  objects = []
  for i, part in enumerate(in_parts(state)):
    wait()
    objects.append(island.write_object(f'{STATES}/{checkpoint.key}/{checkpoint.number}-{i}', part))
    if island.registry.facts('finished'):  # the monitor may have looked for leftovers before this object was written
      island.storage.delete(objects[-1][0])
      return
  about = {'worker': island.name, 'checkpoint': checkpoint.sha256, 'objects': objects}
  fact = Fact(STATE, checkpoint.key, checkpoint.number, '', digest(objects), about)
  withdrawals.put(island, [fact])
  island.registry.mark_scheduled([fact])  # nothing follows from it
  if island.owner:
    _forget_older(island, checkpoint.key)


def _forget_older(island: Island, path: str):
  """Deletes the states of an owner's path but the newest, and those from which open audits begin.

  The monitor does so for other paths, and cannot reach the owner's store.
  """
  folder = f'{OBJECTS}/{STATES}/{path}'
  phases = {name: name.removeprefix(f'{folder}/').partition('-')[0] for name in island.storage.names(folder)}
  ordered = sorted({int(phase) for phase in phases.values() if phase.isdecimal()})
  oldest = min([*ordered[-KEPT:], *_beginnings_of_audits(island, path, ordered)], default=0)
  for name, phase in phases.items():
    if phase.isdecimal() and int(phase) < oldest:
      island.storage.delete(name)


def _beginnings_of_audits(island: Island, path: str, states: Sequence[int]) -> list[int]:
  """Returns the phases of the states from which audits of a path begin: those that are open, and may be drawn yet."""
  if not audit_facts.is_on(island):
    return []
  audited = [row['number'] for row in audit_facts.open_tasks(island) if row['key'] == path]
  before = [max((state for state in states if state < phase), default=0) for phase in audited]
  return [*states[-KEPT - UNDRAWN :], *before]


def digest(objects: list[list[str]]) -> str:
  """Returns the digest of the fact that names these objects, each [name, sha256]."""
  return hashlib.sha256(json.dumps(objects).encode()).hexdigest()


def in_parts(state: Arrays) -> Iterator[Arrays]:
  """Cuts the bytes of a state into parts."""
  data = np.frombuffer(tensors.to_bytes(state), np.uint8)
  size = min(max(-(-data.size // PARTS), SMALLEST_PART), LARGEST_PART)
  return ({BYTES: data[begin : begin + size]} for begin in range(0, data.size, size))


def whole(parts: Sequence[Arrays]) -> Arrays:
  """Returns the state of these parts."""
  return tensors.from_bytes(np.concatenate([part[BYTES] for part in parts]).data)


def read(island: Island, checkpoint: Fact) -> Arrays | None:
  """Returns the state after the phase of this checkpoint, or None if no readable one is published."""
  for fact in island.registry.facts(STATE, [checkpoint.key], checkpoint.number):
    if fact.meta.get('checkpoint') == checkpoint.sha256:
      try:
        with guarding(f'the state of path {checkpoint.key} after phase {checkpoint.number + 1}'):
          state = whole([island.read_object(*each) for each in fact.meta['objects']])
          path_state.check_carried(state, island.shapes, island.inner_shapes)
          return state
      except Gone as e:
        withdrawals.withdraw(island, fact, e)
  return None


@contextlib.contextmanager
def publishing(island: Island, held: HeldStates, line: Line) -> Iterator[None]:
  """Publishes the states that are put aside, in a thread, until the end of the block."""

  def look():
    try:
      publish_aside(island, held, line)
    except Exception as e:
      logging.warning('a state was not published, and will be retried: %s', e)
      over.wait(LOOK_AGAIN_S)

  over = threading.Event()
  with retry.every(LOOK_S, 'publishing states', look):
    try:
      yield
    finally:
      over.set()


def publish_aside(island: Island, held: HeldStates, line: Line):
  """Publishes the states that a holder has put aside, the oldest first; forgets those that nobody needs."""
  for key in held.aside():
    checkpoints = island.registry.facts('checkpoint', [str(key.path)], key.phase)
    if not checkpoints:
      continue  # its fact is on its way
    if checkpoints[0].sha256.startswith(key.digest) and (state := held.read_aside(key)) is not None:
      publish(island, checkpoints[0], state, line.wait_behind)
    held.drop_aside(key)
