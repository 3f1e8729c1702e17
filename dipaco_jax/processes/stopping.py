"""Stopping of a process by signals: it ends within seconds, whatever its threads are doing.

In a command, a thread receives the signals, wherever the main thread is: in an import, in a callback that would swallow
an exception, or in XLA's compiler. It ends the process at once, because a workdir is consistent at every moment, unless
a handler responds to the signal, for instance to save first. A second signal always ends the process at once.

In a user's own program, which must not be ended, a signal raises an exception in the main thread instead.
"""

import contextlib
import ctypes
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from dipaco_jax.core.errors import Unavailable, parting
from dipaco_jax.processes import display

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # of prctl(2)
TRY_AGAIN = 75  # exit status where errors.Unavailable is the cause
LAST_WORDS_S = 1.0  # time for remaining output, which may have no reader any more

Answer = Callable[[int], bool]  # whether the process continues for now; called by the thread of signals


def write(text: str, stream: TextIO | None = None, end: str = '\n'):
  """Prints a text at once, by default on stderr; ignores a stream that is closed."""
  with contextlib.suppress(OSError, ValueError):  # a broken pipe, a closed terminal, a full disk
    print(text, file=stream or sys.stderr, end=end, flush=True)


def say(message: str):
  """Prints a line on stderr in place of its progress; ignores a closed one."""
  write(f'{display.STDERR.cleared}dipaco_jax: {message}')


_last_words = list[Callable[[int], object]]()


@contextlib.contextmanager
def last_words(write: Callable[[int], object]) -> Iterator[None]:
  """Calls `write(status)` where the process ends at once within the block; it has LAST_WORDS_S, and may not raise."""
  add_last_words(write)
  try:
    yield
  finally:
    _last_words.remove(write)


def add_last_words(write: Callable[[int], object]):
  """Calls `write(status)` where the process ends at once, as `last_words` does, from now on."""
  _last_words.append(write)


def leave(status: int, message: str = '') -> NoReturn:
  """Ends the process at once, without waiting for threads or running exit handlers."""
  with contextlib.suppress(RuntimeError):  # no thread can be started any more
    call_later(LAST_WORDS_S, os._exit, status)
  for write in _last_words:
    write(status)
  if message:
    say(message)
  if lost_output := output_error():
    status = status or 1
    if not message:
      say(lost_output)
  with contextlib.suppress(OSError, ValueError, AttributeError):
    sys.stderr.flush()
  os._exit(status)


def output_error(more: str = '') -> str:
  """Returns why standard output cannot be written, as on a full disk; '' if it can, or if nobody reads it.

  Prints `more`, because an unbuffered stream has forgotten what it could not write.
  """
  try:
    sys.stdout.write(more)
    sys.stdout.flush()
  except (BrokenPipeError, ValueError, AttributeError):  # nobody reads it, or it is closed
    return ''
  except OSError as e:
    return f'standard output: {e.strerror}; print to a place that can be written'
  return ''


@contextlib.contextmanager
def closing(limit_s: float) -> Iterator[contextlib.ExitStack]:
  """Closes all registered objects at the end of the block, even if some fail.

  After an error, a command's process ends if closing takes longer than `limit_s`.
  """

  def overdue(error: Exception):
    reason = parting(error) if isinstance(error, Unavailable) else ''  # which say all
    logging.error('what was open could not be closed in %g s', limit_s, exc_info=None if reason else error)
    if _listening:
      leave(TRY_AGAIN if reason else 1, reason)

  with contextlib.ExitStack() as after, contextlib.ExitStack() as opened:
    try:
      yield opened
    except Exception as e:
      after.callback(call_later(limit_s, overdue, e).cancel)
      raise


def call_later(seconds: float, function: Callable, *args: Any) -> threading.Timer:
  """Calls a function after some seconds, in a thread that keeps no process from ending."""
  timer = threading.Timer(seconds, function, args)
  timer.daemon = True
  timer.start()
  return timer


class Signals:
  """The handler of SIGINT, SIGTERM and SIGHUP; see `listening` and `interrupting`."""

  def __init__(self, leave: Callable[[int], object]):
    """`leave` is called with the number of a signal that nobody answers, and of a second one."""
    self.received = 0  # the number of the last one
    self._leave = leave
    self._answer: Answer = lambda number: False

  @contextlib.contextmanager
  def answered(self, answer: Answer) -> Iterator[None]:
    """Calls `answer` on the first signal within the block."""
    before, self._answer = self._answer, answer
    try:
      yield
    finally:
      self._answer = before

  @contextlib.contextmanager
  def graceful(self, has_news: Callable[[], bool]) -> Iterator[None]:
    """Defers signals to the end of the block while there is something to save; a signal only sets `received` then.

    Raises KeyboardInterrupt at the end of the block, where nobody has looked since.
    """

    def answer(number: int) -> bool:
      if news := has_news():
        message = 'stopping: saving the training so far; a second signal ends at once'
        threading.Thread(target=say, args=(message,), daemon=True).start()  # a pipe that nobody reads may hold it up
      return news

    with self.answered(answer):
      yield
    if self.received:
      raise KeyboardInterrupt

  def requested(self) -> bool:
    return bool(self.received)

  def leave(self):
    """Leaves as the signal that was received asks, or as Ctrl-C."""
    self._leave(self.received or signal.SIGINT)

  def hear(self, number: int):
    """Answers a signal, or leaves."""
    again, self.received = self.requested(), number
    if again or not self._answer(number):
      self.leave()


_listening: Signals | None = None  # signals are the process's


@contextlib.contextmanager
def listening(message: str = '') -> Iterator[Signals]:
  """Handles signals in a thread while the block of a command runs; the main thread enters it.

  Nested blocks share the handler. `message` is printed where a signal ends the process.
  """
  global _listening
  if _listening:
    yield _listening
    return
  _listening = signals = Signals(lambda number: leave(128 + number, message))
  reading, writing = os.pipe()
  os.set_blocking(writing, False)
  before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
  threading.Thread(target=_read, args=(reading, signals.hear), name='signals', daemon=True).start()
  try:
    with _handled(lambda *_: None):  # Python's own part of a handler has nothing to do
      yield signals
  finally:
    signal.set_wakeup_fd(before)
    os.close(writing)  # which ends the thread
    _listening = None


def run_process(command: Sequence[str], **options) -> int:
  """Runs another process, with options of `subprocess.Popen`, and returns its exit status; for the main thread.

  Signals are passed on, each once: the process has a group of its own, which Ctrl-C does not reach. This one ends when
  the other has; at a second signal at once. On Linux the other does not outlive this one, however it ends.
  """
  started = list[subprocess.Popen]()

  def pass_on(number: int) -> bool:
    for process in started:
      process.send_signal(number)
    return bool(started)

  with listening() as signals, last_words(lambda status: pass_on(signal.SIGTERM)), signals.answered(pass_on):
    first = _ends_with_its_parent()  # one system call, which needs no lock of another thread's
    started.append(subprocess.Popen(command, process_group=0, preexec_fn=first, **options))  # noqa: PLW1509
    status = started[0].wait()
    if signals.requested():
      signals.leave()
  return status


def follow_parent(parent: int):
  """Ends this process after its parent, in a thread."""
  threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()


def end_with_parent(parent: int):
  """Waits until the parent of this process has ended, and ends it, too."""
  while os.getppid() == parent:
    time.sleep(1)
  os.kill(os.getpid(), signal.SIGTERM)


def _ends_with_its_parent() -> Callable[[], object] | None:
  """Returns a function that has a new process killed when its parent ends, or None if the system cannot do that."""
  if sys.platform != 'linux':
    return None
  return functools.partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)


def _read(numbers: int, hear: Callable[[int], None]):
  """Reads the numbers of signals from the pipe that the system writes them to, until it is closed."""
  while heard := os.read(numbers, 1):
    if heard[0] in NUMBERS:
      hear(heard[0])
  os.close(numbers)


@contextlib.contextmanager
def interrupting(message: str = '') -> Iterator[Signals]:
  """Handles signals while the block of another's program runs: they raise an exception in the main thread.

  SIGINT ends the block with KeyboardInterrupt, which says `message`; SIGTERM and SIGHUP, which ask the program to end,
  with SystemExit. In another thread than the main one signals stay the program's.
  """

  def interrupt(number: int):
    raise KeyboardInterrupt

  signals = Signals(interrupt)
  is_main = threading.current_thread() is threading.main_thread()
  with _handled(lambda number, _: signals.hear(number)) if is_main else contextlib.nullcontext():
    try:
      yield signals
    except KeyboardInterrupt:
      if not signals.requested():
        raise
      if signals.received == signal.SIGINT:
        raise KeyboardInterrupt(message) from None
      raise SystemExit(128 + signals.received) from None


def heard() -> list[int]:
  """Returns the signals that end a command: of a terminal's end only where that is not to be outlived (nohup)."""
  return [n for n in NUMBERS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


@contextlib.contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
  """Sets a handler of signals while the block runs."""
  before = {number: signal.signal(number, handler) for number in heard()}
  try:
    yield
  finally:
    for number, theirs in before.items():
      signal.signal(number, theirs)
