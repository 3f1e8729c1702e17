"""Trains on this machine for the run of a hub, which has printed this line.

    python -m dipaco_jax.join 'https://HOST:8443#sha256=FINGERPRINT' --token=TOKEN

Starts a worker for each GPU, or one on a CPU, restarts those that die, and ends when the run is finished. Ctrl-C hands
the tasks back; the same command joins again. A token on a command line can be seen by other users of this machine for
a moment: with --token=file:PATH, or with DIPACO_TOKEN in the environment, it cannot.
Exit status: 0 the run is finished; 2 wrong options, fingerprint or token; 65 training diverged; 75 the hub has not
answered for ten minutes; 130 stopped by Ctrl-C.
"""

import argparse
import contextlib
import datetime
import email.utils
import json
import logging
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from dipaco_jax.command_line import command, gateway_worker, supervision, worker_devices
from dipaco_jax.core import printable
from dipaco_jax.core.errors import Away, InputError
from dipaco_jax.processes import stopping
from dipaco_jax.storage import gateway_link

PROGRAM = 'join.py'
START_PATIENCE_S = 60.0  # with a hub that was never reached, as its address may be wrong
CONNECT_S = 10.0  # for the first connection
PAUSE_S = 2.0
SKEW_S = 60.0  # between the clocks of this machine and the hub
CLOSING_S, OWNERS_CLOSING_S = 30.0, 600.0  # for workers to end after the run; an owner's write their modules


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
  usage = "dipaco join 'https://HOST:PORT#sha256=FINGERPRINT' --token=TOKEN [OPTION ...]; --help lists all options"
  parser = argparse.ArgumentParser(
    usage=usage, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument(
    'address', nargs='?', help='Address that the hub has printed, in quotes. By default, DIPACO_GATEWAY.'
  )
  parser.add_argument(
    '--token', help='Token that the hub has printed, or file:PATH of a file with it. By default, DIPACO_TOKEN.'
  )
  parser.add_argument('--workers', type=int, help='Number of workers. By default, one per GPU, or 1 without GPUs.')
  parser.add_argument(
    '--name',
    default='',
    help="Name of this machine in the run. By default, the machine's own, or for an owner random digits.",
  )
  parser.add_argument(
    '--data', default='', help="Globs of an owner's text, separated by commas, where text stays with its owners."
  )
  parser.add_argument('--store', default='', help='Folder or bucket of that owner, which nobody else can read.')
  options = parser.parse_args(argv)
  if options.workers is not None and options.workers < 1:
    parser.error(f'--workers={options.workers}: give 1 or more')
  return options


def hide_token(argv: Sequence[str]):
  """Starts this command again with the token in its environment, if it was on the command line; returns otherwise.

  Other users can see the arguments of a process, and not its environment.
  """
  options = parse_options(argv)
  if not options.token:
    return
  kept, follows = list[str](), False
  for argument in argv:
    if not follows and not argument.startswith('--token='):
      kept += [argument] if argument != '--token' else []
    follows = argument == '--token'
  env = os.environ | {gateway_link.TOKEN: options.token}
  os.execve(sys.executable, [sys.executable, '-m', 'dipaco_jax.join', *kept], env)


def check(options: argparse.Namespace) -> gateway_link.Link:
  """Returns the link to the hub, and names it for the workers. Raises InputError if options are wrong."""
  if options.address:
    os.environ[gateway_link.GATEWAY] = options.address
  if not os.environ.get(gateway_link.GATEWAY):
    raise InputError('give the address that the hub has printed, in quotes, as https://HOST:8443#sha256=...')
  if not os.environ.get(gateway_link.TOKEN):
    raise InputError('--token is missing: give the token that the hub has printed, or --token=file:PATH')
  if options.name and not re.fullmatch(r'[A-Za-z0-9._-]{1,40}', options.name):
    name = printable.name(options.name)
    raise InputError(f'--name={name}: use letters, digits, ".", "-" and "_", 40 at most')
  link = gateway_link.from_environment()
  assert link
  return link


# -- the hub, from here


def reach(address: gateway_link.Address, patience_s: float):
  """Waits until the hub's port can be reached; raises Away if it cannot for so long."""
  deadline = time.monotonic() + patience_s
  has_said = False
  while True:
    try:
      socket.create_connection((address.host, address.port), CONNECT_S).close()
      return
    except OSError as e:
      if time.monotonic() > deadline:
        fix = 'check that the hub runs, its --address, and the firewalls on the way'
        raise Away(f'{address.url} cannot be reached ({e.strerror or e}): {fix}') from e
      if not has_said:
        stopping.write(
          f'{PROGRAM}: {address.url} cannot be reached yet ({e.strerror or e}): trying for {patience_s:.0f} s'
        )
      has_said = True
    time.sleep(1)


def measure_skew(link: gateway_link.Link) -> float:
  """Returns the seconds by which the clock of this machine is ahead of the hub's."""

  def ask() -> str:
    headers = {'Content-Type': 'application/json'}
    with link.open('POST', '/v1/hello', json.dumps({}).encode(), headers) as answer:
      answer.read_whole(gateway_link.BLOCK)
      return answer.headers.get('Date', '')

  date = link.retry(ask)
  with contextlib.suppress(ValueError):
    return time.time() - email.utils.parsedate_to_datetime(date).timestamp()
  return 0.0


def describe_skew(skew_s: float) -> str:
  """Returns a warning if the clocks differ much, or ''. Leases are by the hub's clock, but times of tasks are not."""
  if abs(skew_s) < SKEW_S:
    return ''
  by, way = datetime.timedelta(seconds=round(abs(skew_s))), 'ahead of' if skew_s > 0 else 'behind'
  return (
    f"the clock of this machine is {by} {way} the hub's: training is not affected, but times in the report will be "
    'wrong; set it, for instance with `sudo timedatectl set-ntp true`'
  )


class View:
  """The progress of a run, as the hub tells it."""

  def __init__(self, registry: Any, url: str, patience_s: float = gateway_link.PATIENCE_S):
    from dipaco_jax.config import settings as settings_lib

    self.registry, self.url, self.patience_s = registry, url, patience_s
    [config] = registry.facts('config')
    settings = settings_lib.of_run(config.meta['config'])
    self.run_id: str = config.meta['id']
    self.paths = list(range(settings.num_paths)) if registry.paths is None else registry.paths
    self.phases = settings.train.phases
    self.heard = time.monotonic()
    self.line = ''

  def outcome(self) -> dict[str, Any] | None:
    """Asks the hub; returns the last fact of a run that is finished. Raises Away if it does not answer for long."""
    try:
      finished = self.registry.facts('finished')
      self.line = self.describe()
      self.heard = time.monotonic()
    except Away as e:
      if time.monotonic() - self.heard > self.patience_s:
        raise
      self.line = f'{e}: waiting for it, for {self.patience_s:.0f} s'
      return None
    return finished[0].meta if finished else None

  def describe(self) -> str:
    """Returns a line on how far the run is."""
    if not self.registry.facts('prepared'):
      return 'waiting for the hub to prepare the run'
    newest = self.registry.newest('checkpoint')
    done = sum(newest.get(str(path), -1) + 1 for path in self.paths)
    of_paths = f'{len(self.paths)} paths' if len(self.paths) > 1 else 'one path'
    return f'{done} of {len(self.paths) * self.phases} phases of {of_paths} are trained'


# -- the workers


def main() -> int:
  """Joins a run; returns the exit status. Prints one line for errors that the user can fix or wait for."""
  sys.path.append(os.getcwd())
  try:
    hide_token(sys.argv[1:])
    options = parse_options(sys.argv[1:])
    command.quiet()
    return run(options, check(options))
  except Exception as e:
    if not (message_and_status := command.ending(e)):
      raise
    message, status = message_and_status
    stopping.write(f'{PROGRAM}: {printable.redacted(message)}')
    return status


def run(options: argparse.Namespace, link: gateway_link.Link) -> int:
  """Starts workers, and supervises them until the run is finished; returns the exit status."""
  from dipaco_jax.registry import gateway_registry

  running = list[supervision.Role]()
  try:
    with supervision.interruptible():
      patience_s = gateway_link.PATIENCE_S if has_joined(options.store) else START_PATIENCE_S
      reach(link.address, patience_s)
      link.patience_s = patience_s
      if warning := describe_skew(measure_skew(link)):
        stopping.write(f'{PROGRAM}: {warning}')
      view = View(gateway_registry.GatewayRegistry(link), link.address.url)
      if not view.outcome() or lacks_model(options, view.registry.owner):
        name = name_process(options.name, view.registry.owner)
        running += start_workers(options, name, gateway_link.make_folder(link.address, view.run_id) / 'logs')
      link.patience_s = 0
      logging.getLogger().setLevel(logging.ERROR)  # `view` shows that the hub is away
      status = supervise(running, view)
  except supervision.Stopped as e:
    stopping.write(f'{PROGRAM}: stopped, and tasks are handed back; run the same command to join again')
    return 128 + e.number
  finally:
    supervision.stop(running)
  if status == 0 and view.registry.owner and not lacks_model(options, view.registry.owner):
    stopping.write(supervision.next_of_owner(options.store, view.registry.owner), sys.stdout)
  return status


def has_joined(store: str) -> bool:
  """Returns whether an owner has joined with this store before, so that the hub's address is right."""
  if not store:
    return False
  from dipaco_jax.storage import object_store, remedies

  return object_store.open_storage(store).exists(remedies.OWNERS_MARK)


def lacks_model(options: argparse.Namespace, owner: str) -> bool:
  """Returns whether an owner's store is not a workdir yet, as of one whose worker was stopped before it wrote that."""
  if not owner or not options.store:
    return False
  from dipaco_jax.storage import object_store, remedies

  return not object_store.open_storage(options.store).exists(remedies.POINTERS)


def name_process(given: str, owner: str) -> str:
  """Returns the name of this process in the run, as others of this machine may have joined, too.

  By default, that of an owner tells nothing of the owner's machine.
  """
  if owner:
    return f'{given}-{secrets.token_hex(4)}' if given else secrets.token_hex(4)
  host = re.sub(r'[^A-Za-z0-9._-]', '-', given or socket.gethostname())[:40] or 'joined'
  return f'{host}-{os.getpid()}'


def start_workers(options: argparse.Namespace, name: str, logs: Any) -> list[supervision.Role]:
  """Starts a worker on each device."""
  available = worker_devices.environments(os.environ)
  count, devices = worker_devices.assign(options.workers or (None if available else 1), 0, available)
  logs.mkdir(parents=True, exist_ok=True)
  argv = [sys.executable, '-m', 'dipaco_jax.main', '--role=worker']
  argv += [f'--{name}={value}' for name in ('data', 'store') if (value := getattr(options, name))]
  named = [f'{name}-{i}' for i in range(count)]
  assert all(map(gateway_worker.NAME.fullmatch, named))
  return [
    supervision.Role(each, [*argv, f'--name={each}'], logs, env) for each, env in zip(named, devices, strict=True)
  ]


def supervise(running: list[supervision.Role], view: View) -> int:
  """Supervises until the run is finished or diverges; returns the exit status. Raises Away."""
  screen = supervision.Screen(sys.stderr)
  while True:
    outcome = view.outcome()
    screen.show([view.line, *(f'{role.name}: {supervision.last_line(role.log)}' for role in running)])
    statuses = [role.process.poll() for role in running]
    if command.DIVERGED in statuses or (outcome and outcome['perplexity'] is None):
      stopping.write(f'{PROGRAM}: training has diverged; join again when the hub has resumed it')
      return command.DIVERGED
    if outcome:
      supervision.wait(running, OWNERS_CLOSING_S if view.registry.owner else CLOSING_S)
      failed = [role for role in running if role.process.poll() not in (None, 0)] if view.registry.owner else []
      if failed:
        role = failed[0]
        stopping.write(f'{PROGRAM}: {role.name}: {supervision.last_line(role.log)} (all of it is in {role.log})')
        return max(1, role.process.returncode)
      return supervision.tell_outcome(outcome, PROGRAM)
    if statuses and not any(status != 0 for status in statuses):
      tell_what_a_worker_heard(running[0], view.url)
      return 0
    if (status := supervision.restart(running, PROGRAM)) is not None:
      return status
    time.sleep(PAUSE_S)


def tell_what_a_worker_heard(worker: supervision.Role, url: str):
  """Prints the outcome that a worker was told before the hub left, or why the worker has ended before the run."""
  text = worker.log.read_text(errors='replace')
  outcome = text.rfind(f'{url}: finished')
  stopping.write(text[outcome:].strip() if outcome >= 0 else supervision.last_line(worker.log), sys.stdout)


if __name__ == '__main__':
  stopping.leave(main())
