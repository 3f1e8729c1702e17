"""Runs all roles of an islands run on this machine, and restarts those that die or stall.

    python -m dipaco_jax.local --config=tiny --workdir=runs/islands --workers=4

Ctrl-C stops all of them and loses nothing; the same command continues. Flags that are not listed here, such as
--config.train.phases=8, are passed on to the roles.
"""

import argparse
import os
import sys

from dipaco_jax.command_line import command, config_file, supervision, worker_devices
from dipaco_jax.config import settings
from dipaco_jax.core import printable
from dipaco_jax.processes import stopping
from dipaco_jax.registry import registry_url
from dipaco_jax.storage import object_store, user_modules


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
  parser.add_argument(
    '--replay',
    default='',
    help='facts.json of a finished run, or its registry. The run is computed again by its decisions, and compared.',
  )
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
  from dipaco_jax.islands import roles

  values = config_file.read(options.config, config_file.split(rest)[1], options.workdir)
  s = user_modules.admit_own(settings.from_dict(values), options.workdir)
  roles.check_sources(options.workdir, s, options.replay)
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
  argv += [f'--lease_s={options.lease_s}', *([f'--replay={options.replay}'] if options.replay else []), *rest]
  counts = {'monitor': 1, 'outer': options.outers, 'evaluator': options.evaluators, 'worker': options.workers}
  counts['backup'] = options.backups
  remaining, running = iter(devices), list[supervision.Role]()
  try:
    with supervision.interruptible():
      roles.check_place(object_store.open_storage(options.workdir), local, url)
      resumed = roles.resume(options.workdir, url)
      for role, count in counts.items():
        for i in range(count):
          env = next(remaining) if role in ('worker', 'backup') else worker_devices.CPU
          name, role_argv = supervision.role_command(argv, role, i, count)
          running.append(supervision.Role(name, role_argv, logs, env))
      status = supervision.supervise(running, registry.Registry(url, options.lease_s), resumed)
  except supervision.Stopped as e:
    stopping.write('local.py: stopped; run the same command to resume')
    status = 128 + e.number
  finally:
    supervision.stop(running)
  if status == 0:
    held_states.remove_free(local)  # what workers held that were stopped here
    kept_arrays.end(local)
  return status


if __name__ == '__main__':
  stopping.leave(main())
