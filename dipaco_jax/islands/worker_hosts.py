"""A worker with several hosts [3]: the first claims and publishes tasks; the others train what it sends them.

All hosts run the same programs in the same order, and their collectives keep them in step. If one host fails or is
preempted, all end, and the first releases its tasks, or their leases expire. The launcher has to restart them.
"""

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dipaco_jax.processes import stopping

BARRIER_MS = 10 * 24 * 3600 * 1000  # a phase may last for days; if the first host dies, jax.distributed ends the others
LEAVE_S = 10  # after a signal, for the first host to end this one
MESSAGES, LEAVING = 'dipaco/messages', 'dipaco/leaving'


class Hosts:
  """The processes of this worker, joined by jax.distributed; a single process sends nothing and waits for nobody."""

  def __init__(self):
    self.is_alone, self.is_first = jax.process_count() == 1, jax.process_index() == 0
    self.count = 0  # of messages
    self.num_decided = 0
    if self.is_first and not self.is_alone:
      threading.Thread(target=self._wait_for_leaving, daemon=True).start()

  def broadcast(self, message: dict[str, Any]):
    """Sends a message to the other hosts, after the `barrier` that ended the one before."""
    if not self.is_alone:
      _client().key_value_set(f'{MESSAGES}/{self.count}', json.dumps(message))
      self.count += 1

  def receive(self) -> dict[str, Any]:
    """Waits for the first host's next message."""
    message = _awaited(f'{MESSAGES}/{self.count}')
    self.count += 1
    return json.loads(message)

  def barrier(self):
    """Waits until all hosts are done with the message: nothing of it can fail any more."""
    if not self.is_alone:
      _client().wait_at_barrier(f'{MESSAGES}/{self.count}/done', BARRIER_MS)
      if self.is_first:
        _client().key_value_delete(f'{MESSAGES}/{self.count - 1}')

  def share(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the first host's arrays; the others give arrays of the same names, shapes and dtypes."""
    if self.is_alone:
      return dict(arrays)
    from jax.experimental import multihost_utils

    return {name: np.asarray(x) for name, x in multihost_utils.broadcast_one_to_all(dict(arrays)).items()}

  def decide(self, what: bool) -> bool:
    """Returns the first host's `what`, on all hosts."""
    if self.is_alone:
      return what
    key = f'{MESSAGES}/{self.count - 1}/{self.num_decided}'  # deleted with the message, see `barrier`
    self.num_decided += 1
    if self.is_first:
      _client().key_value_set(key, json.dumps(what))
      return what
    return json.loads(_awaited(key))

  @contextlib.contextmanager
  def ending_together(self) -> Iterator[None]:
    """Ends the process at any error in here, for the others would wait for it; their collectives then end them too."""
    try:
      yield
    except BaseException:
      if self.is_alone:
        raise
      logging.exception('a host of this worker ends')
      os._exit(1)

  def _wait_for_leaving(self):
    """Waits for another host's preemption, and ends this one as if it were its own."""
    _awaited(LEAVING)
    os.kill(os.getpid(), signal.SIGTERM)


def pass_on_sigterm(number: int) -> bool:
  """Tells the first host of a SIGTERM and waits for it to end this one; returns whether the signal was a SIGTERM."""
  if number == signal.SIGTERM:
    stopping.call_later(LEAVE_S, os._exit, 128 + number)
    with contextlib.suppress(Exception):  # another host has told it
      _client().key_value_set(LEAVING, 'yes')
  return number == signal.SIGTERM


def _awaited(key: str) -> str:
  """Waits for a key's value, one second at a time: no signal is seen inside the client."""
  while True:
    try:
      return _client().blocking_key_value_get(key, 1000)
    except jax.errors.JaxRuntimeError as e:
      if not any(status in str(e) for status in ('DEADLINE_EXCEEDED', 'CANCELLED')):
        raise


def _client():
  import orbax.checkpoint as ocp

  return ocp.multihost.get_jax_distributed_client()
