"""Stands between workers and a run of islands: they need one https address and one token, and no database or bucket.

    python -m dipaco_jax.gateway --workdir=PLACE                              serves until it is stopped
    python -m dipaco_jax.gateway --workdir=PLACE add --name=court-1 --owner=court --days=30
    python -m dipaco_jax.gateway --workdir=PLACE list
    python -m dipaco_jax.gateway --workdir=PLACE revoke --name=court-1

PLACE is the workdir of a run that has begun. `add` prints a token for one worker, or for several that may do the same;
only its sha256 is kept. A worker needs nothing but two variables:

    DIPACO_GATEWAY=https://HOST:8443#sha256=... DIPACO_TOKEN=file:PATH python -m dipaco_jax.main --role=worker

Exit status: 0 done, 2 wrong options or input, 75 the database or the bucket does not answer.
"""

import contextlib
import functools
import ipaddress
import logging
import os
import sys

from absl import flags

from dipaco_jax.command_line import command, listener as listener_lib
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import stopping
from dipaco_jax.registry.__main__ import find_url
from dipaco_jax.storage import user_modules

ACTIONS = 'serve', 'add', 'list', 'revoke'
FLAGS = flags.FLAGS


def check_options():
  """Raises InputError if options make no sense together."""
  if not FLAGS.workdir:
    raise InputError('name a run with --workdir=DIR')
  if bool(FLAGS.cert) != bool(FLAGS.key):
    raise InputError('--cert and --key are the files of one certificate: give both, or none for one of our own')
  if FLAGS.http and not (FLAGS.behind_proxy or _is_loopback(FLAGS.host)):
    raise InputError(
      f'--http with --host={FLAGS.host} would let tokens travel in the clear: leave out --http, or use '
      '--host=127.0.0.1, or add --behind_proxy if a proxy on the way here encrypts them'
    )
  if not 0 <= FLAGS.port < 2**16:
    raise InputError(f'--port={FLAGS.port} should be from 0 to {2**16 - 1}; 0 means any free port')
  for name in (
    'lease_s',
    'requests_per_s',
    'gib_per_day',
    'max_json_kib',
    'request_s',
    'max_connections',
    'max_claims',
  ):
    if not (FLAGS[name].value or 0) > 0:
      raise InputError(f'--{name}={FLAGS[name].value} should be above 0')


def _is_loopback(host: str) -> bool:
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'


def open_run(url: str):
  """Returns the registry of a run that has begun, and its config's fact. Raises InputError if none has."""
  from dipaco_jax.registry import database, registry as registry_lib

  file = database.sqlite_file(url)
  if file and not file.exists():
    raise InputError(f'there is no registry {file}: start a role of the run first, such as its monitor')
  registry = registry_lib.Registry(url, FLAGS.lease_s, patience_s=20)
  for config in registry.facts('config'):
    return registry, config
  registry.close()
  raise InputError(f'no run has begun in {registry.name}: start a role of the run first, such as its monitor')


# -- tokens


def add(url: str):
  """Adds a token and prints it."""
  from dipaco_jax.algorithm.grid import Grid
  from dipaco_jax.config import owners, settings as settings_lib
  from dipaco_jax.gateway import tokens as tokens_lib
  from dipaco_jax.islands import decisions, members

  if not FLAGS.name:
    raise InputError('--name is missing: the name of the worker, as the run will know it')
  if not FLAGS.days > 0:
    raise InputError(f'--days={FLAGS.days} should be above 0')
  registry, config = open_run(url)
  settings = owners.join(settings_lib.of_run(config.meta['config']), members.read(registry).joined)
  is_replay = bool(registry.facts(decisions.REPLAY))
  registry.close()
  if is_replay:
    raise InputError('this run is a replay, which workers behind a gateway cannot follow: start them with --replay')
  paths = parse_paths(FLAGS.paths, settings.num_paths)
  if settings.data.own_text and not FLAGS.owner:
    names = ', '.join(owners.names(Grid(settings.grid)))
    raise InputError(f'--owner is missing: the text of this run stays with its owners, {names}')
  if FLAGS.owner:
    if FLAGS.paths is not None:
      raise InputError('--owner and --paths both say which paths a token is for: give one of them')
    grid = Grid(settings.grid)
    if FLAGS.owner not in (known := owners.names(grid)):
      fix = f'add others with python -m dipaco_jax.owners --workdir={FLAGS.workdir} add'
      raise InputError(f'--owner={FLAGS.owner}: the owners of this run are {", ".join(known)}; {fix} {FLAGS.owner}')
    paths = owners.paths_of(grid, FLAGS.owner)
  with contextlib.closing(tokens_lib.Tokens(url)) as tokens:
    print(tokens.add(FLAGS.name, paths, FLAGS.days, FLAGS.owner or ''))
  stopping.say('this token is shown once: keep it in a file, and give it to nobody but that worker')


def parse_paths(given: list[str] | None, num_paths: int) -> list[int] | None:
  """Parses --paths; None for all. Raises InputError."""
  if given is None:
    return None
  if not given or not all(x.isdecimal() and int(x) < num_paths for x in given):
    raise InputError(f'--paths={",".join(given)}: give numbers of paths from 0 to {num_paths - 1}, as --paths=0,1')
  return sorted({*map(int, given)})


def list_tokens(url: str):
  """Prints a line for each token."""
  from dipaco_jax.gateway import tokens as tokens_lib

  open_run(url)[0].close()
  with contextlib.closing(tokens_lib.Tokens(url)) as tokens:
    lines = [tokens_lib.describe(token, now) for token, now in tokens.list()]
  print('\n'.join(lines) if lines else 'there are no tokens: add one with `add --name=NAME`')


def revoke(url: str):
  """Revokes a token."""
  from dipaco_jax.gateway import tokens as tokens_lib

  if not FLAGS.name:
    raise InputError('--name is missing: the name of the token to revoke; `list` shows all')
  open_run(url)[0].close()
  with contextlib.closing(tokens_lib.Tokens(url)) as tokens:
    tokens.revoke(FLAGS.name)
  print(f'{FLAGS.name} is revoked')


# -- the server


def serve(url: str) -> int:
  """Serves until a signal; returns the exit status."""
  if FLAGS.parent:
    stopping.follow_parent(FLAGS.parent)
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # accelerators of this machine are the workers'
  command.quiet()
  try:
    from dipaco_jax.gateway import certificates, desks as desks_lib, gateway_server, tokens as tokens_lib
  except ModuleNotFoundError as e:
    raise InputError(f'{e.name} is missing, which the gateway needs: pip install "dipaco_jax[gateway]"') from e
  from dipaco_jax.islands import roles

  user_modules.trust(FLAGS.trust_modules)
  registry, config = open_run(url)
  island = gateway_server.make_island(FLAGS.workdir, registry, config)
  folder = certificates.make_folder(roles.local_place(FLAGS.workdir))
  tls = gateway_server.find_tls(folder, FLAGS.cert, FLAGS.key, FLAGS.http)
  tokens = tokens_lib.Tokens(url)
  desks = desks_lib.Desks(island, tokens, desks_lib.make_aside(folder), FLAGS.max_claims)
  desks.objects.tidy()
  listener = listener_lib.listen(FLAGS.host, FLAGS.port)
  address = gateway_server.address(listener, tls)

  def say_ready():
    if not any(token.state(now) == 'valid' for token, now in tokens.list()):
      logging.warning('there is no valid token: add one with `add --name=NAME`')
    stopping.say(f'ready; workers need DIPACO_GATEWAY={address}')

  server = gateway_server.make_server(desks, gateway_limits(), say_ready, FLAGS.metrics_port)
  most = gateway_server.connection_limits(FLAGS.max_connections, FLAGS.request_s)
  with contextlib.closing(tokens), contextlib.closing(registry), desks.looking_around():
    return server.run(listener, most, tls)


def gateway_limits():
  """Returns the limits that the flags say."""
  from dipaco_jax.gateway import limits

  return limits.Limits(
    requests_per_s=FLAGS.requests_per_s,
    failures_per_s=20.0,
    bytes_per_day=FLAGS.gib_per_day * 2**30,
    json_bytes=int(FLAGS.max_json_kib * 2**10),
    body_s=FLAGS.request_s,
    most_open=FLAGS.max_connections,
  )


def main(actions: list[str]) -> int | None:
  if len(actions) > 1:
    raise InputError(f'say one of {", ".join(ACTIONS)}, as --workdir={FLAGS.workdir} list')
  action = actions[0] if actions else 'serve'
  check_options()
  printable.check_name('--workdir', FLAGS.workdir, 4096)
  url = find_url(FLAGS.workdir.rstrip('/') or '/', FLAGS.registry)
  return {'serve': serve, 'add': add, 'list': list_tokens, 'revoke': revoke}[action](url)


def define_flags():
  flags.DEFINE_string('workdir', None, 'Workdir of the run: a folder, s3://BUCKET/... or gs://BUCKET/...')
  about = 'Registry of the run: postgresql://..., sqlite:////FILE or file:PATH. By default, DIPACO_REGISTRY or else '
  flags.DEFINE_string('registry', None, f'{about}registry.db in the workdir.')
  flags.DEFINE_string('name', None, 'Name of the token: the identity of its worker in the run.')
  flags.DEFINE_string(
    'owner', None, 'With `add`: owner whose paths the token is for, a name of the grid. Default: all.'
  )
  flags.DEFINE_list('paths', None, 'With `add`: numbers of the paths that the token is for, as 0,1. Default: all.')
  flags.DEFINE_float('days', 30.0, 'With `add`: days for which the token is valid.')
  flags.DEFINE_string('host', '0.0.0.0', 'Address to listen at; 0.0.0.0 means all addresses of this machine.')
  flags.DEFINE_integer('port', 8443, 'Port to listen at; 0 means any free port.')
  flags.DEFINE_string('cert', None, 'File of a certificate in PEM. By default, one that is made on the first start.')
  flags.DEFINE_string('key', None, "File of the certificate's key in PEM.")
  flags.DEFINE_bool('http', False, 'Whether to serve without TLS, at an address of this machine or behind a proxy.')
  flags.DEFINE_bool('behind_proxy', False, 'Whether a proxy encrypts all connections to a server with --http.')
  flags.DEFINE_float('lease_s', 30.0, 'Seconds without a heartbeat after which a task goes to another worker.')
  flags.DEFINE_float('requests_per_s', 50.0, 'Requests a second that a token may send on average.')
  flags.DEFINE_float('gib_per_day', 1024.0, 'GiB a day that a token may send and receive.')
  flags.DEFINE_float('max_json_kib', 1024.0, 'KiB that the body of a request may have, without objects.')
  flags.DEFINE_float('request_s', 40.0, 'Seconds within which the body of a request, or its next part, has to come.')
  flags.DEFINE_integer('max_connections', 2048, 'Connections and open requests at one time.')
  flags.DEFINE_integer('max_claims', 64, 'Tasks that the workers with one token may hold at one time.')
  flags.DEFINE_integer('metrics_port', None, 'Port on this machine at which Prometheus reads counters of requests.')
  flags.DEFINE_integer('parent', None, 'Process id of the parent. This process ends when its parent has ended.')
  command.define_trust()


if __name__ == '__main__':
  define_flags()
  chosen = [word for word in sys.argv[1:] if word in ACTIONS]
  sys.argv[1:] = [word for word in sys.argv[1:] if word not in ACTIONS]
  command.run(functools.partial(main, chosen))
