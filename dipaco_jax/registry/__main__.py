"""Checks, backs up or rebuilds the registry of an islands run.

    python -m dipaco_jax.registry --workdir=DIR check     reads all of the registry and the newest backup
    python -m dipaco_jax.registry --workdir=DIR backup    writes a backup now, as the monitor does from time to time
    python -m dipaco_jax.registry --workdir=DIR rebuild   restores a lost or damaged registry from the newest backup

DIR is the workdir of the run, a folder, s3:// or gs://; backups are in its folder registry_backups. Stop all roles
before `rebuild` and start them again after it. Work since the backup is repeated, with the same result. A damaged
SQLite file is kept as registry.db.damaged; in PostgreSQL, the tables are dropped and created again in one transaction.
Exit status: 0 done, or the registry is intact; 2 the registry or its backup needs attention, as one line explains; 75
the database or the bucket does not answer.
"""

import contextlib
import functools
import pathlib
import sys

from absl import flags

from dipaco_jax.command_line import bucket_copy, command
from dipaco_jax.core.errors import InputError
from dipaco_jax.registry import registry_url
from dipaco_jax.storage import object_store

ACTIONS = 'check', 'backup', 'rebuild'


def find_url(workdir: str, option: str | None) -> str:
  """Returns the URL of the registry: the given one, or that of the file in a workdir that is a folder."""
  if url := registry_url.given(option):
    return url
  if '://' in workdir:
    raise InputError(f'--workdir={workdir} is in a bucket: name its --registry, or set {registry_url.VARIABLE}')
  return registry_url.in_folder(pathlib.Path(workdir))


def check(url: str, storage: object_store.Storage) -> str:
  """Returns a line on a registry that is whole. Raises InputError if it, or its newest backup, is not."""
  from dipaco_jax.registry import registry_backup

  run_id = registry_backup.read_id(storage)
  if fault := registry_backup.find_fault(url, run_id):
    raise InputError(f'{fault}: stop all roles and run this command with `rebuild` in place of `check`')
  return f'the registry is intact; newest backup: {registry_backup.read_newest(storage, run_id).describe()}'


def back_up(url: str, storage: object_store.Storage) -> str:
  """Writes a backup; returns a line on it. Raises InputError if the registry is not whole."""
  from dipaco_jax.registry import registry, registry_backup

  if fault := registry_backup.find_fault(url, registry_backup.read_id(storage)):
    raise InputError(f'{fault}: there is nothing to back up')
  with contextlib.closing(registry.Registry(url, patience_s=registry_backup.PATIENCE_S, reads_only=True)) as facts:
    return f'written: {storage.url_of(registry_backup.write(facts, storage))}'


def rebuild(url: str, storage: object_store.Storage) -> str:
  """Restores the registry; returns a line about the backup that was used."""
  from dipaco_jax.registry import registry_backup

  return f'rebuilt from {registry_backup.rebuild(url, storage).describe()}; start the roles again'


def main(actions: list[str]):
  if not flags.FLAGS.workdir:
    raise InputError('name a run with --workdir=DIR')
  if len(actions) != 1:
    raise InputError(f'say what to do: one of {", ".join(ACTIONS)}, as --workdir={flags.FLAGS.workdir} check')
  act = {'check': check, 'backup': back_up, 'rebuild': rebuild}[actions[0]]
  place = flags.FLAGS.workdir.rstrip('/') or '/'
  url = find_url(place, flags.FLAGS.registry)
  print(act(url, object_store.open_storage(place, bucket_copy.START_PATIENCE_S)))


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'Workdir of the run: a folder, s3://BUCKET/... or gs://BUCKET/...')
  flags.DEFINE_string(
    'registry',
    None,
    'Registry: postgresql://..., sqlite:////FILE or file:PATH. By default, DIPACO_REGISTRY or else '
    'registry.db in the workdir.',
  )
  chosen = [word for word in sys.argv[1:] if word in ACTIONS]
  sys.argv[1:] = [word for word in sys.argv[1:] if word not in ACTIONS]
  command.run(functools.partial(main, chosen))
