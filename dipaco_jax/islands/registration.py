"""How a process of islands registers its run, or finds that registry, place and machine have another."""

import logging
import pathlib
import secrets
from collections.abc import Mapping
from typing import Any

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.islands import local_config, members
from dipaco_jax.registry import registry_url
from dipaco_jax.registry.registry import Conflict, Fact, NewTask, Registry
from dipaco_jax.reports import run_report
from dipaco_jax.storage.object_store import Storage
from dipaco_jax.storage.remedies import ISLANDS_MARK


def settle(registry: Registry, storage: Storage, settings: settings_lib.Settings, local: pathlib.Path) -> str:
  """Registers the run and its first task; returns the run's id.

  The place has the id too: the monitors of two registries would each delete the other's objects. Raises InputError
  where the registry, this machine or the place has another run.
  """
  about: dict[str, Any] = {'config': settings_lib.recorded(settings), 'id': secrets.token_hex(8)}
  about['versions'] = run_report.versions() | {'dipaco_jax source': run_report.source_digest()}
  if not registry.facts('config'):
    # Asked again: meanwhile another process of this run may have registered it, and marked the place after that.
    if storage.exists(ISLANDS_MARK) and not registry.facts('config'):
      raise InputError(registry_url.explain_unknown(storage.url))
    local_config.check(local, settings)
  try:
    registry.put([Fact('config', '', 0, '', settings_lib.digest(settings), about)])
  except Conflict as e:
    differences = local_config.changes(settings_lib.of_run(registry.facts('config')[0].meta['config']), settings)
    raise InputError(f'--registry is that of a run with another config ({differences}): use another database') from e
  [fact] = registry.facts('config')
  check_versions(fact.meta['versions'], about['versions'], settings.other_code)
  if registry.facts('prepared') and not storage.exists(ISLANDS_MARK):  # all would be made again there
    advice = 'check --workdir, or whether it is mounted'
    raise InputError(f'{storage.url} has no data of the run in this --registry: {advice}')
  local_config.keep(local, settings, joined=members.read(registry).joined)
  if storage.agree(ISLANDS_MARK, run_id := fact.meta['id'].encode()) != run_id:
    raise InputError(registry_url.explain_unknown(storage.url))
  registry.add_tasks([NewTask('prepare', '', 0)])
  return fact.meta['id']


def check_versions(begun: Mapping[str, str], here: Mapping[str, str], other_code: str):
  """Logs a warning where a run was begun with other code than there is here, or raises InputError.

  Args:
    begun: versions and the digest of the source, as the run's first process had them.
    here: the same of this process.
    other_code: 'warn' or 'reject', as the run's config says.
  """
  unlike = [f'{name} {was[:16]}' for name, was in begun.items() if here.get(name) != was]
  if not unlike:
    return
  message = f'this run was begun with {", ".join(unlike)}, which differs here'
  if other_code == 'reject':
    raise InputError(f"{message}, and its config.other_code is 'reject': install those versions")
  logging.warning('%s: the last bits of results may depend on which process does which task', message)
