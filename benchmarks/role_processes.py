"""Processes of roles, which a benchmark starts, waits for and stops."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

STOP_S = 30  # for a process to end after SIGTERM


@contextlib.contextmanager
def processes() -> Iterator[list[subprocess.Popen]]:
  """Yields a list; the processes that are put into it are stopped at the end."""
  running: list[subprocess.Popen] = []
  try:
    yield running
  finally:
    for process in running:
      process.send_signal(signal.SIGTERM)
    for process in running:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
      process.kill()
      process.wait()


def wait(running: Sequence[subprocess.Popen], is_so: Callable[[], bool], patience_s: float, pause_s: float = 0.5):
  """Waits until a condition holds. Raises RuntimeError if a process ends before, or nothing gets on."""
  until = time.monotonic() + patience_s
  while not is_so():
    if time.monotonic() > until or any(process.poll() is not None for process in running):
      raise RuntimeError('a role has ended, or none gets on')
    time.sleep(pause_s)
