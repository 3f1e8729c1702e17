"""Supervision of the processes that `local`, `hub` and `join` start: restarts, stalls, a live table, the end.

A process that dies is started again, and one that has stalled is killed first. All have ended when the command ends.
"""

from __future__ import annotations  # types are of modules that load JAX, which --help does without

import contextlib
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from dipaco_jax.command_line import command
from dipaco_jax.core import errors
from dipaco_jax.processes import stopping

if TYPE_CHECKING:
  from dipaco_jax.registry import registry

PAUSE_S = 1.0
CLEANING_S = 30  # for the monitor to clean after the end, and for all roles to end where the run has diverged
STALLED = 10  # leases without a sign of life, after which a role is killed; its task went to another after one
AWAY_S = 10  # between two answers of the registry: it was away, or this process was, and no role could be heard
FAILURES = 5  # within a minute, of one role: another start would fail too
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
  """A signal has asked for the end; no Exception, which somebody might swallow on the way."""

  def __init__(self, number: int):
    self.number = number


class Screen:
  """Lines that overwrite themselves on a terminal; elsewhere the first line, and some others, whenever they change."""

  def __init__(self, stream: TextIO):
    self.stream = stream
    self.height = 0
    self.last = set[str]()
    self.terminal = stream.isatty() and os.environ.get('TERM') != 'dumb'

  def show(self, lines: list[str]):
    if not self.terminal:
      from dipaco_jax.islands import status_table

      seen = status_table.OWNERS, status_table.EXCLUDED, status_table.SUSPENDED
      important = [lines[0], *(line for line in lines if line.startswith(seen))]
      for line in important:
        if line not in self.last:
          stopping.write(line, self.stream)
      self.last = {*important}
      return
    size = shutil.get_terminal_size()
    shown = [line[: size.columns - 1] for line in lines[: size.lines - 1]]
    up = f'\x1b[{self.height}F' if self.height else ''
    stopping.write(up + ''.join(f'{line}\x1b[K\n' for line in shown) + '\x1b[J', self.stream, end='')
    self.height = len(shown)

  def close(self):
    self.height = 0


class Role:
  """A supervised process in one role."""

  def __init__(
    self, name: str, command: Sequence[str], logs: pathlib.Path, env: Mapping[str, str] = types.MappingProxyType({}),
    is_heard: bool = True,
  ):  # fmt: skip
    """Starts it. `env`: variables that it has beside ours; `is_heard`: whether it gives signs of life."""
    self.name, self.env, self.is_heard = name, env, is_heard
    self.command = [*command, f'--parent={os.getpid()}']
    self.log = logs / f'{self.name}.log'
    self.starts: list[float] = []
    self.process = self.start()

  def start(self) -> subprocess.Popen:
    self.starts = [t for t in self.starts if time.monotonic() - t < 60] + [time.monotonic()]
    self.log.parent.mkdir(exist_ok=True)  # somebody may have removed it
    with open(self.log, 'ab') as log:
      return subprocess.Popen(
        self.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        env=os.environ | dict(self.env),
      )  # fmt: skip

  def kill_stalled(self, silent_s: float, longest_s: float) -> str:
    """Kills the process where it was silent for `longest_s` since its start; returns a message, or ''."""
    silent_s = min(silent_s, time.monotonic() - self.starts[-1])
    if not self.is_heard or self.process.poll() is not None or silent_s < longest_s:
      return ''
    os.killpg(self.process.pid, signal.SIGKILL)
    self.process.wait()
    return f'{self.name} did not respond for {silent_s:.0f} s: it is restarted'

  def restart(self) -> str:
    """Starts the process again where it died; returns why it does not, or ''."""
    status = self.process.poll()
    if status in (None, 0, command.DIVERGED):
      return ''
    if status == 2 or len(self.starts) > FAILURES:
      return f'{self.name} ended with status {status}: {last_line(self.log)} (all of it is in {self.log})'
    self.process = self.start()
    return ''


def role_command(command: Sequence[str], role: str, number: int, count: int) -> tuple[str, list[str]]:
  """Returns the name and the command of the process of this number, of `count` in a role."""
  name = f'{role}-{number}'
  options = ['--role=worker', '--backup'] if role == 'backup' else [f'--role={role}']
  options += [f'--share={number}/{count}'] if role == 'outer' else []
  return name, [*command, f'--name={name}', *options]


class Silence:
  """Measures how long roles have been silent, not counting times when they could not be heard."""

  def __init__(self, facts: registry.Registry):
    self.facts = facts
    self.since = self.asked = time.time()  # not monotonic: that stands still while the machine sleeps

  def by_role(self) -> dict[str, float]:
    """Seconds by name, for roles that were ever heard; at most since the registry answers without a gap."""
    roles, now = self.facts.roles(), time.time()
    if now - self.asked > AWAY_S:
      self.since = now
    self.asked = now
    return {role['name']: min(role['silent_s'], now - self.since) for role in roles}


def last_line(file: pathlib.Path) -> str:
  lines = file.read_text(errors='replace').strip().splitlines() if file.exists() else []
  return lines[-1] if lines else ''


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
  """Raises Stopped if a signal comes, even while the block waits, for instance for a registry.

  After the block, signals have no effect, because roles are being stopped.
  """

  def interrupt(number: int, frame: object):
    raise Stopped(number)

  for number in SIGNALS:
    signal.signal(number, interrupt)
  try:
    yield
  finally:
    for number in SIGNALS:
      signal.signal(number, signal.SIG_IGN)


def supervise(
  running: list[Role], facts: registry.Registry, resumed: int = 0, program: str = 'local.py',
  look: Callable[[], bool] = lambda: False,
) -> int:  # fmt: skip
  """Supervises until the run is finished or diverges; returns the exit status.

  `look` is called again and again, and returns whether it has printed anything.
  """
  from dipaco_jax.islands import status_table

  screen, silence = Screen(sys.stderr), Silence(facts)
  while True:
    silent_s = silence.by_role()
    for role in running:
      if message := role.kill_stalled(silent_s.get(role.name, math.inf), STALLED * facts.lease_s):
        screen.close()
        stopping.write(f'{program}: {message}')
    running = without_suspended(running, facts, program)
    if (status := restart(running, program)) is not None:
      return status
    if look():
      screen.close()
    screen.show(status_table.lines(facts))
    if finished := facts.facts('finished'):
      screen.close()
      status = tell_outcome(finished[0].meta, program)
      wait([role for role in running if role.name.startswith('monitor')], CLEANING_S)
      return status
    if ended := facts.facts('diverged', [''])[resumed:]:
      screen.close()
      wait([role for role in running if role.is_heard], CLEANING_S)
      return diverged(ended[-1].meta['why'], program)
    time.sleep(PAUSE_S)


def without_suspended(running: list[Role], facts: registry.Registry, program: str) -> list[Role]:
  """Returns the roles without workers that have ended because they are suspended, unless no other worker is left."""
  from dipaco_jax.islands import suspensions

  ended = [role for role in running if role.process.poll() == 2]
  suspended = suspensions.current(facts, [role.name for role in ended]) if ended else {}
  left = [role for role in running if role.name not in suspended]
  if len(left) == len(running) or not any(role.name.startswith('worker') for role in left):
    return running
  for name, suspension in suspended.items():
    stopping.write(f'{program}: {name} is suspended, and not restarted: {suspension.meta["why"]}')
  return left


def restart(running: list[Role], program: str) -> int | None:
  """Restarts what has died; returns an exit status, and says why, if that does not help."""
  if not (trouble := next(filter(None, (role.restart() for role in running)), '')):
    return None
  stopping.write(f'{program}: {trouble}')
  return 2 if 'ended with status 2:' in trouble else 1


def tell_outcome(outcome: Mapping[str, Any], program: str) -> int:
  """Prints how a run has ended, by the metadata of its last fact; returns the exit status."""
  from dipaco_jax.reports import headline

  if outcome['perplexity'] is None:
    return diverged(errors.NO_PERPLEXITY, program)
  stopping.write('\n'.join(headline.outcome(outcome)), sys.stdout)
  if problem := describe_differing(outcome):
    stopping.write(f'{program}: {problem}')
    return 1
  return 0


def describe_differing(outcome: Mapping[str, Any]) -> str:
  """Says which modules a replay computed otherwise, by the metadata of its last fact (islands/decisions.py), or ''."""
  if not (differing := outcome.get('differing')):
    return ''
  (key, version), n = differing[0], len(differing)
  versions = f'{n} version{"s" * (n > 1)} of modules differ{"s" * (n == 1)}'
  return f'{versions} from those of the run, first {key} in version {version}: the report says more'


def next_of_owner(store: str, owner: str) -> str:
  """Says what the owner of a store can do with it at the end."""
  return f'next: python -m dipaco_jax.generate --workdir={store} --path={owner} --prompt=TEXT'


def diverged(why: str, program: str) -> int:
  """Prints why, as `main` does; returns the exit status."""
  stopping.write(f'{program}: {why}; {command.AFTER_DIVERGENCE}')
  return command.DIVERGED


def stop(running: list[Role]):
  """Sends SIGTERM to all, which hand back their tasks, and SIGKILL to those that do not end."""
  for role in running:
    if role.process.poll() is None:
      os.killpg(role.process.pid, signal.SIGTERM)
  for role in wait(running, 10):
    os.killpg(role.process.pid, signal.SIGKILL)


def wait(running: list[Role], seconds: float) -> list[Role]:
  """Waits until these have ended; returns those that have not."""
  deadline, left = time.monotonic() + seconds, []
  for role in running:
    try:
      role.process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
      left.append(role)
  return left
