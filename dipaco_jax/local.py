"""Runs all roles of an islands run on this machine, and restarts those that die or stall.

    python -m dipaco_jax.local --config=tiny --workdir=runs/islands --workers=4

Ctrl-C stops all of them and loses nothing; the same command continues. Flags that are not listed here, such as
--config.train.phases=8, are passed on to the roles.
"""

from __future__ import annotations  # types are of modules that load JAX, which --help does without

import argparse
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
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TextIO

from dipaco_jax.command_line import command, config_file, worker_devices
from dipaco_jax.config import settings
from dipaco_jax.core import errors, printable
from dipaco_jax.processes import stopping
from dipaco_jax.registry import registry_url
from dipaco_jax.storage import object_store, remedies, user_modules

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
  """Lines that overwrite themselves on a terminal; elsewhere the first line, and those of excluded paths, once each."""

  def __init__(self, stream: TextIO):
    self.stream = stream
    self.height = 0
    self.last = set[str]()
    self.terminal = stream.isatty() and os.environ.get('TERM') != 'dumb'

  def show(self, lines: list[str]):
    if not self.terminal:
      from dipaco_jax.islands import status_table

      seen = status_table.EXCLUDED, status_table.SUSPENDED
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
    self, role: str, number: int, count: int, command: list[str], logs: pathlib.Path,
    env: Mapping[str, str] = types.MappingProxyType({}),
  ):  # fmt: skip
    self.name, self.env = f'{role}-{number}', env  # `env`: variables that it has beside ours
    self.command = [*command, f'--name={self.name}', f'--parent={os.getpid()}']
    self.command += ['--role=worker', '--backup'] if role == 'backup' else [f'--role={role}']
    self.command += [f'--share={number}/{count}'] if role == 'outer' else []
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
    if self.process.poll() is not None or silent_s < longest_s:
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


def parse_options() -> tuple[argparse.Namespace, list[str]]:
  usage = 'dipaco local --config=CONFIG --workdir=PLACE [OPTION ...]; --help lists all options'
  parser = argparse.ArgumentParser(
    usage=usage, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument(
    '--config', required=True, help='Config file, or name of an included config, as for dipaco train.'
  )
  parser.add_argument(
    '--workdir',
    required=True,
    help='Folder of the run, created if it does not exist, or s3://BUCKET/... or gs://BUCKET/...',
  )
  parser.add_argument(
    '--registry',
    help='Registry: postgresql://..., sqlite:////FILE or file:PATH of a file with its URL. By default, '
    'DIPACO_REGISTRY or else a file in the workdir.',
  )
  parser.add_argument(
    '--workers', type=int, help='Number of processes that train. By default, one per GPU, or 2 without GPUs.'
  )
  parser.add_argument(
    '--backups',
    type=int,
    default=0,
    help='Number of additional workers, for tasks that other workers abandon or are late with. Default: 0.',
  )
  parser.add_argument(
    '--lease_s',
    type=float,
    default=30,
    help='Seconds without a heartbeat after which a task goes to another process. Default: 30.',
  )
  parser.add_argument('--outers', type=int, default=1, help='Number of processes that make outer steps. Default: 1.')
  parser.add_argument('--evaluators', type=int, default=1, help='Number of processes that evaluate. Default: 1.')
  options, rest = parser.parse_known_args()
  check_numbers(parser, options)
  if unknown := config_file.split(rest)[0]:
    parser.error(f'{printable.redacted(unknown[0])}: there is no such option')
  return options, rest


def check_numbers(parser: argparse.ArgumentParser, options: argparse.Namespace):
  """Exits with status 2 where an option has a number that it cannot have."""
  for name in ('workers', 'outers', 'evaluators'):
    if (number := getattr(options, name)) is not None and number < 1:
      parser.error(f'--{name}={number}: give 1 or more')
  if options.backups < 0:
    parser.error(f'--backups={options.backups}: give 0 or more')
  if options.lease_s <= 0:
    parser.error(f'--lease_s={options.lease_s}: give a time above 0')


def check(options: argparse.Namespace, rest: list[str]) -> str:
  """Returns the registry's URL; raises InputError if that, the config or the text cannot be used, and OSError."""
  from dipaco_jax.data import corpus
  from dipaco_jax.islands import roles
  from dipaco_jax.pipeline import tokenize_stage

  values = config_file.read(options.config, config_file.split(rest)[1], options.workdir)
  s = user_modules.admit_own(settings.from_dict(values), options.workdir)
  has_begun = object_store.open_storage(options.workdir).exists(remedies.ISLANDS_MARK)
  if not has_begun:  # else its text may be gone
    corpus.check_readable(s.data)
    tokenize_stage.check_input(s)
  return roles.check(options.registry, '')


def main() -> int:
  """Runs all roles; returns the exit status. Prints one line for errors that the user can fix or wait for."""
  sys.path.append(os.getcwd())  # where the roles, which `python -m` starts, find modules of the user's
  try:
    options, rest = parse_options()
    options.workers, devices = worker_devices.assign(
      options.workers, options.backups, worker_devices.environments(os.environ)
    )
    return run(options, rest, check(options, rest), devices)
  except Exception as e:
    if not (message_and_status := command.ending(e)):
      raise
    message, status = message_and_status
    stopping.write(f'local.py: {message}')
    return status


def run(options: argparse.Namespace, rest: list[str], url: str, devices: list[worker_devices.Environment]) -> int:
  """Starts all roles, and supervises them; returns the exit status. Raises InputError, Unavailable.

  `devices`: the variables that select the device of each worker, and then of each backup.
  """
  from dipaco_jax.islands import held_states, kept_arrays, roles
  from dipaco_jax.registry import registry

  local = roles.make_local_place(options.workdir)
  url = url or registry_url.in_folder(local)
  logs = local / 'logs'
  logs.mkdir(parents=True, exist_ok=True)
  os.environ[registry_url.VARIABLE] = url  # of the roles, too: others may read their command lines
  argv = [sys.executable, '-m', 'dipaco_jax.main', f'--config={options.config}', f'--workdir={options.workdir}']
  argv += [f'--lease_s={options.lease_s}', *rest]
  counts = {'monitor': 1, 'outer': options.outers, 'evaluator': options.evaluators, 'worker': options.workers}
  counts['backup'] = options.backups
  remaining, running = iter(devices), list[Role]()
  try:
    with interruptible():
      roles.check_place(object_store.open_storage(options.workdir), local, url)
      resumed = roles.resume(options.workdir, url)
      for role, count in counts.items():
        for i in range(count):
          env = next(remaining) if role in ('worker', 'backup') else worker_devices.CPU
          running.append(Role(role, i, count, argv, logs, env))
      status = supervise(running, registry.Registry(url, options.lease_s), resumed)
  except Stopped as e:
    stopping.write('local.py: stopped; run the same command to resume')
    status = 128 + e.number
  finally:
    stop(running)
  if status == 0:
    held_states.remove_free(local)  # what workers held that were stopped here
    kept_arrays.end(local)
  return status


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


def supervise(running: list[Role], facts: registry.Registry, resumed: int = 0) -> int:
  """Supervises until the run is finished or diverges; returns the exit status."""
  from dipaco_jax.islands import status_table
  from dipaco_jax.reports import headline

  screen, silence = Screen(sys.stderr), Silence(facts)
  while True:
    silent_s = silence.by_role()
    for role in running:
      if message := role.kill_stalled(silent_s.get(role.name, math.inf), STALLED * facts.lease_s):
        screen.close()
        stopping.write(f'local.py: {message}')
    running = without_suspended(running, facts)
    if trouble := next(filter(None, (role.restart() for role in running)), ''):
      stopping.write(f'local.py: {trouble}')
      return 2 if 'ended with status 2:' in trouble else 1
    screen.show(status_table.lines(facts))
    if finished := facts.facts('finished'):
      screen.close()
      if finished[0].meta['perplexity'] is None:
        status = diverged(errors.NO_PERPLEXITY)
      else:
        stopping.write('\n'.join(headline.outcome(finished[0].meta)), sys.stdout)
        status = 0
      wait([role for role in running if role.name.startswith('monitor')], CLEANING_S)
      return status
    if ended := facts.facts('diverged', [''])[resumed:]:
      screen.close()
      wait(running, CLEANING_S)
      return diverged(ended[-1].meta['why'])
    time.sleep(PAUSE_S)


def without_suspended(running: list[Role], facts: registry.Registry) -> list[Role]:
  """Returns the roles without workers that have ended because they are suspended, unless no other worker is left."""
  from dipaco_jax.islands import suspensions

  ended = [role for role in running if role.process.poll() == 2]
  suspended = suspensions.current(facts, [role.name for role in ended]) if ended else {}
  left = [role for role in running if role.name not in suspended]
  if len(left) == len(running) or not any(role.name.startswith('worker') for role in left):
    return running
  for name, suspension in suspended.items():
    stopping.write(f'local.py: {name} is suspended, and not restarted: {suspension.meta["why"]}')
  return left


def diverged(why: str) -> int:
  """Prints why, as `main` does; returns the exit status."""
  stopping.write(f'local.py: {why}; {command.AFTER_DIVERGENCE}')
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


if __name__ == '__main__':
  stopping.leave(main())
