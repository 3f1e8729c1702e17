"""Runs all of an islands run but its workers on this machine, and prints the line with which other machines join.

    python -m dipaco_jax.hub --config=tiny --workdir=runs/home

The registry is a file in the workdir, and a gateway stands in front of it: another machine needs this package and the
line that is printed, and no database, bucket or config. Only the gateway's port has to be reachable, at this machine.
Ctrl-C stops all processes here and loses nothing; other machines wait for ten minutes. The same command continues with
the same address and the same tokens. Flags that are not listed here, such as --config.train.phases=8, are passed on to
the roles.
"""

import argparse
import contextlib
import ipaddress
import os
import pathlib
import shlex
import socket
import sys
import time
import urllib.parse
from typing import Any, NamedTuple

from dipaco_jax.command_line import command, config_file, listener, supervision, worker_devices
from dipaco_jax.config import extension, owners, settings as settings_lib
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import stopping
from dipaco_jax.registry import registry_url
from dipaco_jax.storage import gateway_link, object_store, remedies, user_modules

PROGRAM = 'hub.py'
PORT = 8443
ELSEWHERE = ('192.0.2.1', '2001:db8::1')  # addresses for examples: the way there is that of the default route
FAREWELL_S, LAST_ANSWERS_S = 60.0, 5.0  # for other machines to hear that the run has ended, and to ask how


class Hub(NamedTuple):
  """What is known before any process is started."""

  options: argparse.Namespace
  rest: list[str]  # options of the roles
  settings: settings_lib.Settings
  local: pathlib.Path  # the workdir
  url: str  # of the registry


def parse_options() -> tuple[argparse.Namespace, list[str]]:
  usage = 'dipaco hub --config=CONFIG --workdir=DIR [OPTION ...]; --help lists all options'
  parser = argparse.ArgumentParser(
    usage=usage, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument(
    '--config', required=True, help='Config file, or name of an included config, as for dipaco train.'
  )
  parser.add_argument(
    '--workdir', required=True, help='Folder of the run on this machine, created if it does not exist.'
  )
  parser.add_argument(
    '--address',
    default='',
    help="This machine's name or address for the others, with :PORT if that is forwarded from another one. "
    'By default, the address with which this machine reaches other networks.',
  )
  parser.add_argument('--port', type=int, default=PORT, help=f'Port to listen at. Default: {PORT}.')
  parser.add_argument('--host', default='0.0.0.0', help='Address to listen at. By default, all of this machine.')
  parser.add_argument('--workers', type=int, default=0, help='Number of processes that train here. Default: 0.')
  parser.add_argument(
    '--new_tokens', action='store_true', help='Whether to make new tokens, and print the lines to join with them.'
  )
  parser.add_argument('--days', type=float, default=90, help='Days for which new tokens are valid. Default: 90.')
  parser.add_argument(
    '--lease_s',
    type=float,
    default=30,
    help='Seconds without a heartbeat after which a task goes to another process. Default: 30.',
  )
  options, rest = parser.parse_known_args()
  if unknown := config_file.split(rest)[0]:
    parser.error(f'{printable.redacted(unknown[0])}: there is no such option')
  check_numbers(parser, options)
  return options, rest


def check_numbers(parser: argparse.ArgumentParser, options: argparse.Namespace):
  """Exits with status 2 where an option has a number that it cannot have."""
  if not 0 < options.port < 2**16:
    parser.error(f'--port={options.port}: give a number from 1 to {2**16 - 1}; other machines come back to this port')
  if options.workers < 0:
    parser.error(f'--workers={options.workers}: give 0 or more')
  for name in ('days', 'lease_s'):
    if not getattr(options, name) > 0:
      parser.error(f'--{name}={getattr(options, name)}: give a number above 0')


def check(options: argparse.Namespace, rest: list[str]) -> Hub:
  """Raises InputError if the config, the text, the workdir or the port cannot be used, before any work."""
  try:
    from dipaco_jax.gateway import gateway_server  # noqa: F401
  except ModuleNotFoundError as e:
    raise InputError(f'{e.name} is missing, which the gateway needs: pip install "dipaco_jax[gateway]"') from e
  from dipaco_jax.data import corpus
  from dipaco_jax.islands import roles
  from dipaco_jax.pipeline import tokenize_stage

  if '://' in options.workdir:
    fix = 'name a folder, or start `local` and `gateway` as docs/gateway.md shows'
    raise InputError(f'--workdir={options.workdir} should be on this machine: {fix}')
  printable.check_name('--workdir', options.workdir, 4096)
  own_url(options)
  values = config_file.read(options.config, config_file.split(rest)[1], options.workdir)
  settings = user_modules.admit_own(settings_lib.from_dict(values), options.workdir)
  check_settings(settings, options.workers)
  storage = object_store.open_storage(options.workdir)
  if not storage.exists(remedies.ISLANDS_MARK):  # else its text may be gone
    corpus.check_readable(settings.data)
    tokenize_stage.check_input(settings)
  check_port(options)
  local = roles.make_local_place(options.workdir)
  return Hub(options, rest, settings, local, registry_url.in_folder(local))


def check_settings(settings: settings_lib.Settings, workers: int):
  """Raises InputError for what machines that join cannot do."""
  from dipaco_jax.islands import roles

  roles.check_settings(settings)
  if settings.data.own_text and workers:
    fix = 'leave out --workers'
    raise InputError(f'--workers={workers}: the text of this run stays with its owners, whose machines train; {fix}')
  if settings.audit.fraction and not workers and not settings.data.own_text:
    fix = 'add --workers=1 or more, which audit the others'
    raise InputError(f'config.audit.fraction={settings.audit.fraction}: machines that join audit nobody; {fix}')
  for field, reference in extension.references(settings).items():
    fix = 'train with `local`, and --role=worker on other machines'
    raise InputError(f'config.{field}={reference!r}: machines that join execute no code that a config names; {fix}')


def check_port(options: argparse.Namespace):
  """Raises InputError if the port cannot be listened at."""
  try:
    listener.listen(options.host, options.port).close()
  except InputError as e:
    why = str(e).partition('; choose')[0]
    raise InputError(f'{why}; stop what listens there, or choose another --port') from e


# -- the address and the tokens


def own_url(options: argparse.Namespace) -> str:
  """Returns the URL by which others reach this machine. Raises InputError if --address is none."""
  given = options.address or find_address()
  with contextlib.suppress(ValueError):
    given = f'[{given}]' if ipaddress.ip_address(given).version == 6 else given
  try:
    parts = urllib.parse.urlsplit(f'https://{given}')
    netloc = given if parts.port else f'{given}:{options.port}'
    return gateway_link.parse_address(f'https://{netloc}').url
  except (ValueError, InputError) as e:
    raise InputError(f'--address={given}: give the name or the address of this machine, as 192.168.1.5') from e


def find_address() -> str:
  """Returns the address with which this machine reaches other networks, without sending anything, or its name."""
  for family, other in zip((socket.AF_INET, socket.AF_INET6), ELSEWHERE, strict=True):
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
      s.connect((other, 9))
      return s.getsockname()[0]
  return socket.gethostname()


def is_only_here(url: str) -> bool:
  """Returns whether the host of a URL is an address that only this machine reaches."""
  host = urllib.parse.urlsplit(url).hostname or ''
  try:
    return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
  except (OSError, ValueError):
    return gateway_link.is_loopback(host)


def make_tokens(hub: Hub, members: owners.Members, again: bool) -> list[tuple[str, str]]:
  """Makes the tokens that are missing, or `again` all of them; returns them as (owner, token)."""
  from dipaco_jax.gateway import first_tokens

  return first_tokens.make(hub.url, hub.settings, members, hub.options.days, again)


class Newcomers:
  """Prints the lines of owners that join while the run trains, each with a token of its own."""

  def __init__(self, hub: Hub, facts: Any, address: str):
    self.hub, self.facts, self.address = hub, facts, address
    self.known = facts.count_members()

  def greet(self) -> bool:
    """Looks for owners that have joined since the last look; returns whether it has printed anything."""
    from dipaco_jax.islands import members

    if (known := self.facts.count_members()) == self.known:
      return False
    self.known = known
    tokens = make_tokens(self.hub, members.read(self.facts), again=False)
    print_tokens(self.hub, self.address, tokens)
    return bool(tokens)


def print_lines(hub: Hub, address: str, tokens: list[tuple[str, str]]):
  """Prints the lines with which other machines join."""
  if is_only_here(address):
    stopping.write(f'{PROGRAM}: {address.partition("#")[0]} leads to this machine alone: set --address for others')
  if not tokens:
    stopping.write(
      f'{PROGRAM}: machines that have joined come back by themselves, with the tokens that they have; tokens are shown '
      'once: stop this, and start it with --new_tokens for new lines'
    )
  print_tokens(hub, address, tokens)


def print_tokens(hub: Hub, address: str, tokens: list[tuple[str, str]]):
  """Prints a line for each token."""
  for owner, token in tokens:
    on = f"on {owner}'s machines" if owner else 'on any other machine'
    stopping.write(f'{PROGRAM}: paste this line {on}; keep it as you would a password, it is shown once:')
    own = " --data='TEXT/*.txt' --store=DIR" if hub.settings.data.own_text else ''
    stopping.write(f'python -m dipaco_jax.join {shlex.quote(address)} --token={token}{own}', sys.stdout)


# -- the processes


def main() -> int:
  """Runs the hub; returns the exit status. Prints one line for errors that the user can fix or wait for."""
  sys.path.append(os.getcwd())  # where the roles, which `python -m` starts, find modules of the user's
  try:
    options, rest = parse_options()
    command.quiet()
    available = worker_devices.environments(os.environ)
    _, devices = worker_devices.assign(options.workers, 0, available)
    return run(check(options, rest), devices or available[:1] or [{}])
  except Exception as e:
    if not (message_and_status := command.ending(e)):
      raise
    message, status = message_and_status
    stopping.write(f'{PROGRAM}: {message}')
    return status


def run(hub: Hub, devices: list[worker_devices.Environment]) -> int:
  """Starts all processes, and supervises them; returns the exit status. Raises InputError, Unavailable.

  `devices`: the variables that select the device of each worker, or of the one that only prepares.
  """
  from dipaco_jax.islands import held_states, kept_arrays, members, registration, roles
  from dipaco_jax.registry import registry

  os.environ[registry_url.VARIABLE] = hub.url
  for name in (gateway_link.GATEWAY, gateway_link.TOKEN):  # of another run, which this machine may have joined
    os.environ.pop(name, None)
  storage, running = object_store.open_storage(hub.options.workdir), list[supervision.Role]()
  try:
    with supervision.interruptible():
      roles.check_place(storage, hub.local, hub.url)
      resumed = roles.resume(hub.options.workdir, hub.url)
      facts = registry.Registry(hub.url, hub.options.lease_s)
      registration.settle(facts, storage, hub.settings, hub.local)
      address = f'{own_url(hub.options)}#sha256={fingerprint(hub)}'
      newcomers = Newcomers(hub, facts, address)
      tokens = make_tokens(hub, members.read(facts), hub.options.new_tokens)
      running += start_roles(hub, devices)
      wait_for_gateway(hub.options, running[0])
      print_lines(hub, address, tokens)
      status = supervision.supervise(running, facts, resumed, PROGRAM, newcomers.greet)
      if status in (0, command.DIVERGED):
        say_farewell(facts, {role.name for role in running})
  except supervision.Stopped as e:
    stopping.write(f'{PROGRAM}: stopped; run the same command to resume')
    status = 128 + e.number
  finally:
    supervision.stop(running)
  if status == 0:
    held_states.remove_free(hub.local)  # what workers held that were stopped here
    kept_arrays.end(hub.local)
  return status


def fingerprint(hub: Hub) -> str:
  """Returns the fingerprint of the gateway's certificate, made on the first start."""
  from dipaco_jax.gateway import certificates

  return certificates.fingerprint(certificates.keep(certificates.make_folder(hub.local))[0])


def start_roles(hub: Hub, devices: list[worker_devices.Environment]) -> list[supervision.Role]:
  """Starts a process in each role, the gateway, and the workers of this machine, or one that only prepares."""
  options, logs = hub.options, hub.local / 'logs'
  logs.mkdir(parents=True, exist_ok=True)
  python = [sys.executable, '-m']
  argv = [*python, 'dipaco_jax.main', f'--config={options.config}', f'--workdir={options.workdir}']
  argv += [f'--lease_s={options.lease_s}', *hub.rest]
  of_gateway = [*python, 'dipaco_jax.gateway', f'--workdir={options.workdir}', f'--lease_s={options.lease_s}']
  of_gateway += [f'--host={options.host}', f'--port={options.port}']
  others = [supervision.role_command(argv, role, 0, 1) for role in ('monitor', 'outer', 'evaluator')]
  only = [] if options.workers else ['--only_prepare']
  workers = [supervision.role_command([*argv, *only], 'worker', i, len(devices)) for i in range(len(devices))]
  return [
    supervision.Role('gateway-0', of_gateway, logs, worker_devices.CPU, is_heard=False),
    *(supervision.Role(*named, logs, worker_devices.CPU) for named in others),
    *(supervision.Role(*named, logs, env) for named, env in zip(workers, devices, strict=True)),
  ]


def wait_for_gateway(options: argparse.Namespace, gateway: supervision.Role):
  """Waits until the gateway can be reached, or has ended."""
  host = {'0.0.0.0': '127.0.0.1', '::': '::1'}.get(options.host, options.host)
  while gateway.process.poll() is None:
    with contextlib.suppress(OSError), socket.create_connection((host, options.port), 1):
      return
    time.sleep(0.2)


def say_farewell(facts: Any, own: set[str]):
  """Waits until the workers of other machines have heard that the run has ended, for a minute at most."""
  from dipaco_jax.islands import status_table

  deadline = time.monotonic() + FAREWELL_S
  has_said = False
  while time.monotonic() < deadline:
    others = [role['name'] for role in facts.roles() if role['name'] not in own and status_table.is_alive(role)]
    if not others:
      break
    if not has_said:
      stopping.write(f'{PROGRAM}: waiting for {", ".join(map(printable.name, others))} to hear of the end')
    has_said = True
    time.sleep(supervision.PAUSE_S)
  if any(role['name'] not in own for role in facts.roles()):
    time.sleep(LAST_ANSWERS_S)


if __name__ == '__main__':
  stopping.leave(main())
