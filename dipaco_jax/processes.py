"""Several processes of one job, joined by jax.distributed: they start together, and where one ends all do."""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator

from dipaco_jax import checks

HEARTBEAT_S = 60  # of silence, after which a process counts as dead, and the runtime ends the others
GONE = 69  # exit status where another process is gone; the runtime's own is 134
OF_ANOTHER = re.compile('gloo|coordination|heartbeat', re.IGNORECASE)  # what libraries say of it


def join(coordinator: str | None, num_processes: int | None, process_id: int | None):
  """Starts jax.distributed: by these, or by what Cloud TPU says of itself."""
  import jax

  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM, and keep it to itself
  jax.distributed.initialize(coordinator, num_processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_S)


@contextlib.contextmanager
def together() -> Iterator[None]:
  """What fails in here ends this process at once: at its leisure it would wait for others, who wait for it."""
  try:
    yield
  except BaseException as e:
    if not joined():
      raise
    end_if_another_is_gone(e)
    if not isinstance(e, SystemExit):
      traceback.print_exception(e)
    leave((e.code or 0) if isinstance(e, SystemExit) else 1)


def joined() -> bool:
  """Whether this process is one of several."""
  jax = sys.modules.get('jax')  # it is slow to import, and was not if there is no job
  return jax is not None and jax.distributed.is_initialized()


def end_if_another_is_gone(error: BaseException):
  """One line and status GONE where an error says that; before anything else waits for that process."""
  theirs = isinstance(error, (RuntimeError, ValueError)) and not checks.is_input_error(error)
  if joined() and theirs and OF_ANOTHER.search(str(error)):
    words = str(error).splitlines()[0]
    print(f'dipaco_jax: another process of the run is gone ({words}): start all of them again', file=sys.stderr)
    leave(GONE)


def leave(status):
  """Ends the process without what is done at exit."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)
