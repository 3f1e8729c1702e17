"""A worker of several hosts [3]: the first has tasks and leases, and publishes; the others train with it, as it says.

All run the same programs in the same order, and their collectives hold them together. They fail together too: where one
fails or is preempted, all end, and the first hands its tasks back, or their leases run out. Whoever started the
processes starts them again.
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

LONG_MS = 10 * 24 * 3600 * 1000  # without a word from the first host; if it dies, we are ended
LEAVE_S = 10  # after a signal, for the first to end us
SAID, LEAVING = 'dipaco/said', 'dipaco/leaving'


class Hosts:
  """The processes of this worker, joined by jax.distributed; for one alone, nothing is to be done."""

  def __init__(self):
    self.alone, self.first = jax.process_count() == 1, jax.process_index() == 0
    self.count = 0  # of words
    if self.first and not self.alone:
      threading.Thread(target=self._heed, daemon=True).start()

  def say(self, words: dict[str, Any]):
    """To the others, once all have come to `meet` after the words before."""
    if not self.alone:
      _client().key_value_set(f'{SAID}/{self.count}', json.dumps(words))
      self.count += 1

  def hear(self) -> dict[str, Any]:
    """What the first says next."""
    words = _awaited(f'{SAID}/{self.count}')
    self.count += 1
    return json.loads(words)

  def meet(self):
    """All have come to the end of what the first said: there is nothing more that could fail."""
    if not self.alone:
      _client().wait_at_barrier(f'{SAID}/{self.count}/done', LONG_MS)
      if self.first:
        _client().key_value_delete(f'{SAID}/{self.count - 1}')

  def share(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The first host's arrays; the others give arrays of the same names, shapes and dtypes."""
    if self.alone:
      return dict(arrays)
    from jax.experimental import multihost_utils

    return {name: np.asarray(x) for name, x in multihost_utils.broadcast_one_to_all(dict(arrays)).items()}

  @contextlib.contextmanager
  def together(self) -> Iterator[None]:
    """Where one fails in here, the others would wait for it: it ends, and so all do."""
    try:
      yield
    except BaseException:
      if self.alone:
        raise
      logging.exception('a host of this worker ends')
      os._exit(1)

  def _heed(self):
    """One of the others is preempted: the first goes as if it were itself."""
    _awaited(LEAVING)
    os.kill(os.getpid(), signal.SIGTERM)


def leaving(number: int) -> bool:
  """Tells the first, whose end is ours too; whether that is to come."""
  if number == signal.SIGTERM:
    late = threading.Timer(LEAVE_S, os._exit, (128 + number,))
    late.daemon = True
    late.start()
    with contextlib.suppress(Exception):  # another has told it
      _client().key_value_set(LEAVING, 'yes')
  return number == signal.SIGTERM


def _awaited(key: str) -> str:
  """Its value, as soon as there is one. Looks up now and then: a signal is not seen inside the client."""
  while True:
    try:
      return _client().blocking_key_value_get(key, 1000)
    except jax.errors.JaxRuntimeError as e:
      if not any(status in str(e) for status in ('DEADLINE_EXCEEDED', 'CANCELLED')):
        raise


def _client():
  import orbax.checkpoint as ocp

  return ocp.multihost.get_jax_distributed_client()
