"""Several processes of one job, joined by jax.distributed: they start together, and where one ends all do."""

import contextlib
import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import NoReturn

from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import job_watch, stopping, time_use

BARRIER_MS = 7 * 24 * 3_600_000
HEARTBEAT_S = (
  60  # of silence, after which JAX ends the others; job_watch.py notices sooner, but not a process that hangs
)
WATCH_KEY = 'dipaco_jax/job_watch'
OPTIONS = '--coordinator=HOST:PORT, --num_processes=N and --process_id=K'
GONE = 69  # exit status where another process is gone; JAX's own is 134
GONE_WORDS = re.compile('gloo|coordination|heartbeat', re.IGNORECASE)  # in errors of libraries when another is gone


def join(coordinator: str | None, num_processes: int | None, process_id: int | None):
  """Starts jax.distributed with these arguments, or with those that Cloud TPU provides."""
  import jax

  if (devices := _num_cpu_devices()) > 1:
    os.environ.setdefault('PJRT_NPROC', str(max(os.cpu_count() or 1, 4 * devices)))
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM, and keep it to itself
  try:
    jax.distributed.initialize(
      coordinator,
      num_processes,
      process_id,
      # In a job of Slurm or MPI, JAX would always take one device of each host.
      cluster_detection_method='deactivate' if coordinator else None,
      heartbeat_timeout_seconds=HEARTBEAT_S,
    )
  except ValueError as e:
    if coordinator:
      raise
    raise InputError(f'--distributed: the other processes are unknown: give {OPTIONS}') from e
  _watch_job()


_watch: job_watch.JobWatch | None = None  # where this process watches the others
_leaving = threading.Lock()  # held by the first thread that notices that another process is gone


def _watch_job():
  """Ends this process with one line and status GONE as soon as another one has ended.

  Where the first process cannot be reached on a port of its choice, only JAX's heartbeats remain.
  """
  global _watch
  from jax._src import distributed  # what it was given, or Cloud TPU has provided, is nowhere public before devices are

  state = distributed.global_state
  if state.num_processes == 1:
    return
  if state.process_id == 0:
    _watch, port, token = job_watch.listen(_end_without)
    say(WATCH_KEY, f'{port} {token}')
  else:
    named_port, token = hear(WATCH_KEY).split()
    with contextlib.suppress(OSError):
      host = (state.coordinator_address or '').rpartition(':')[0].strip('[]')
      _watch = job_watch.connect(host, int(named_port), token, state.process_id, _end_without)
  stopping.add_last_words(lambda status: _watch.say_bye() if _watch and status != GONE else None)


def _end_without(index: int):
  _leave_gone(f'process {index}')


def _leave_gone(what: str) -> NoReturn:
  """Ends this process with one line; of several threads that notice, the first one's."""
  if not _leaving.acquire(blocking=False):
    threading.Event().wait()
  stopping.leave(GONE, f'another process of the run is gone ({what}): start all of them again')


def _num_cpu_devices() -> int:
  """Returns the number of devices that a CPU will show as, before JAX is initialized.

  Each device needs threads of the runtime, which has one per core: one may wait for other devices in a collective while
  another waits to enqueue more work. With too few threads, all may wait for each other.
  """
  import jax

  flags = re.findall(r'--xla_force_host_platform_device_count=(\d+)', os.environ.get('XLA_FLAGS', ''))
  return max(jax.config.values['jax_num_cpu_devices'], int(flags[-1]) if flags else 1)


@contextlib.contextmanager
def together() -> Iterator[None]:
  """Ends this process at once if the block fails: a normal exit would wait for others, which wait for it."""
  try:
    yield
  except BaseException as e:
    if not joined():
      raise
    end_if_another_is_gone(e)
    tell(e)
    stopping.leave(status(e))


@contextlib.contextmanager
def ending() -> Iterator[None]:
  """Ends the process after the block, with its status, without waiting for threads."""
  code, lost_output = 0, ''
  _open_closed_streams()
  try:
    yield
    if joined():
      if _watch:
        _watch.is_ending = True
      sys.modules['jax'].distributed.shutdown()  # together with the others
      if _watch:
        _watch.stop()
  except BaseException as e:
    code = status(e)
    lost_output = stopping.output_error('\n') if isinstance(e, OSError) and e.errno == errno.ENOSPC else ''
    if not lost_output:
      tell(e)
  stopping.leave(code, lost_output)


def _open_closed_streams():
  """Opens the null device for standard streams that are closed, so that no file gets their numbers and their text."""
  for name, mode in (('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w')):
    if getattr(sys, name) is None:
      setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))  # of the closed numbers, the lowest first


def status(error: BaseException) -> int:
  """Returns the exit status of a process that ends with this error."""
  if isinstance(error, BrokenPipeError):
    return 128 + signal.SIGPIPE  # as any tool whose output is piped into `head`
  code = error.code if isinstance(error, SystemExit) else 1
  return code if isinstance(code, int) else int(code is not None)


def tell(error: BaseException):
  """Prints an uncaught error as Python does, if stderr is still open."""
  with contextlib.suppress(OSError, ValueError):
    if isinstance(error, SystemExit) and isinstance(error.code, str):
      print(error.code, file=sys.stderr)
    elif not isinstance(error, (SystemExit, BrokenPipeError)):
      print(printable.redacted(''.join(traceback.format_exception(error))), end='', file=sys.stderr)


def joined() -> bool:
  """Returns whether this process is one of several."""
  jax = sys.modules.get('jax')  # it is slow to import, and was not if there is no job
  return jax is not None and jax.distributed.is_initialized()


def end_if_another_is_gone(error: BaseException):
  """Ends this process with one line and status GONE where an error says that another is gone; before a wait for it."""
  theirs = isinstance(error, (RuntimeError, ValueError)) and not isinstance(error, InputError)
  if joined() and theirs and GONE_WORDS.search(str(error)):
    _leave_gone(str(error).splitlines()[0])


def barrier(name: str):
  """Waits until all processes of a job are here, through the coordinator: threads may call it, and no device waits.

  A name serves once. It may take as long as the longest stage: a process that dies ends it for the others.
  """
  import jax

  if jax.process_count() > 1:
    import orbax.checkpoint as ocp

    with time_use.doing(time_use.WAIT):
      ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=BARRIER_MS)


def any_process(flag: bool, occasion: str) -> bool:
  """Returns whether `flag` is true on any process of a job. All call it, once for each occasion; no device waits."""
  import jax

  if jax.process_count() == 1:
    return flag
  import orbax.checkpoint as ocp

  client = ocp.multihost.get_jax_distributed_client()
  if flag:
    client.key_value_set(f'{occasion}/{jax.process_index()}', 'yes')
  barrier(occasion)  # all answers have arrived
  return bool(client.key_value_dir_get(f'{occasion}/'))


def exchange(text: str, occasion: str) -> list[str]:
  """Returns the texts of all processes of a job, in their order. All call it, and `forget` it after a later barrier."""
  import jax

  if jax.process_count() == 1:
    return [text]
  say(f'{occasion}/{jax.process_index()}', text)
  barrier(occasion)
  return [hear(f'{occasion}/{k}') for k in range(jax.process_count())]


def forget(occasion: str):
  """Removes this process's text of an `exchange` from the coordinator, once all have read it."""
  import jax

  if jax.process_count() > 1:
    unsay(f'{occasion}/{jax.process_index()}')


def say(key: str, text: str):
  """Tells the other processes of a job; a key serves once."""
  import orbax.checkpoint as ocp

  ocp.multihost.get_jax_distributed_client().key_value_set(key, text)


def hear(key: str) -> str:
  """Waits for what a process says; ends this one where another is gone."""
  import orbax.checkpoint as ocp

  try:
    return ocp.multihost.get_jax_distributed_client().blocking_key_value_get(key, BARRIER_MS)
  except Exception as e:
    end_if_another_is_gone(e)
    raise


def unsay(key: str):
  """Removes a message from the coordinator's memory."""
  import orbax.checkpoint as ocp

  ocp.multihost.get_jax_distributed_client().key_value_delete(key)


def is_first() -> bool:
  """Returns whether this is the process that writes for all of a job."""
  jax = sys.modules.get('jax')
  return jax is None or jax.process_index() == 0
