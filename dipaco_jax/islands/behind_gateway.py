"""A worker behind a gateway: it has one address and one token, and learns all else from there (dipaco_jax/gateway).

Its registry and its storage are requests to the gateway; everything after that is as for any worker. Where text stays
with its owners, the token says whose worker it is, and the owner's store is opened directly.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from dipaco_jax.config import extension, owners, settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.islands import local_config, members, registration, roles, screening_facts
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.worker_hosts import Hosts
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.registry.gateway_registry import GatewayRegistry
from dipaco_jax.registry.registry import Fact, Registry
from dipaco_jax.registry.worker_registry import WorkerRegistry
from dipaco_jax.reports import run_report
from dipaco_jax.storage import gateway_link
from dipaco_jax.storage.gateway_link import Link
from dipaco_jax.storage.gateway_objects import Gateway
from dipaco_jax.storage.object_store import PATIENCE_S, Storage, open_storage

SHARD = re.compile(r'shards/\d+/(\d+)/.*')  # a file of one path's


class Run(NamedTuple):
  """A run as a gateway describes it."""

  settings: settings_lib.Settings
  registry: WorkerRegistry
  storage: Storage
  local: pathlib.Path  # the folder of this worker's files, for this run alone
  id: str
  name: str  # of this worker
  owner: str = ''  # of the text that stays with its owner


class Own(NamedTuple):
  """What an owner's worker is told beside its token."""

  owner: str = ''  # the token's, or not given
  globs: tuple[str, ...] = ()  # files of the owner's text
  store: str = ''  # the owner's own place, a folder or the URL of a bucket


def open_run(link: Link, name: str, own: Own) -> Run:
  """Returns the run behind a gateway. Raises InputError if the token is not valid, or this code cannot train the run.

  `name`: of this process, beside the name of its token.
  """
  link.name = name
  registry = GatewayRegistry(link)
  [config] = registry.facts('config')
  settings = settings_lib.of_run(config.meta['config'])
  check(settings, config)
  joined = members.read(registry).joined
  owner = check_own(registry, owners.join(settings, joined), own)
  storage = Storage(link.address.url, Gateway(link), PATIENCE_S)
  if registry.paths is not None and not owner:
    storage.reads = reader(registry.paths)
  local = roles.make_store(own.store) if owner else gateway_link.make_folder(link.address, config.meta['id'])
  local_config.keep(local, settings, '--store' if owner else 'TMPDIR', joined)
  return Run(settings, registry, storage, local, config.meta['id'], registry.name, owner)


def check_own(registry: GatewayRegistry, settings: settings_lib.Settings, own: Own) -> str:
  """Returns the owner whose worker this is, '' if text is in one place. Raises InputError before any work."""
  if own.owner not in ('', registry.owner):
    of_token = f'that of {registry.owner}' if registry.owner else 'for no owner'
    raise InputError(f'--owner={own.owner}: the token is {of_token}; leave out --owner, or use a token of that owner')
  if not settings.data.own_text:
    if own.globs or own.store:
      option = '--data' if own.globs else '--store'
      raise InputError(f'{option} is for runs whose text stays with its owners: the text of this run is in one place')
    return ''
  if not registry.owner:
    fix = 'ask the keeper of the run for a token that was added with --owner=NAME'
    raise InputError(f'DIPACO_TOKEN: the text of this run stays with its owners, and this token has no owner; {fix}')
  process = roles.Process('worker', '', registry.lease_s, owner=registry.owner, globs=own.globs, store=own.store)
  roles.check_owner(process, Hosts(), settings)
  return registry.owner


def check(settings: settings_lib.Settings, config: Fact):
  """Raises InputError if this process cannot train a run: it names code of its own, or wants other versions."""
  roles.check_settings(settings)
  for field, reference in extension.references(settings).items():
    raise InputError(
      f'the run of this gateway has config.{field}={reference!r}: a worker behind a gateway executes no modules that '
      'a config names; train this run with --config, --workdir and --registry'
    )
  here = run_report.versions() | {'dipaco_jax source': run_report.source_digest()}
  registration.check_versions(config.meta['versions'], here, settings.other_code)


def reader(paths: list[int]) -> Callable[[str], bool]:
  """Returns a function that says which files of trees a worker with these paths reads: of shards, its own."""

  def reads(name: str) -> bool:
    match = SHARD.fullmatch(name)
    return not match or int(match[1]) in paths

  return reads


def serve(run: Run, process: roles.Process) -> dict[str, Any]:
  """Trains paths until the run is finished, and returns its last fact. Raises Diverged."""
  process = dataclasses.replace(process, owner=run.owner)
  island = make_island(run, process)
  resumed = screening_facts.times_resumed(island.registry)
  return roles.live(dataclasses.replace(island, resumed=resumed), process, Hosts(), run.id)


def make_island(run: Run, process: roles.Process) -> Island:
  """Returns a worker's island. Its registry makes the calls of `WorkerRegistry`, and a worker makes no others."""
  own = roles.on_own_devices(run.settings)
  own_run = run_lib.unattended(run.local, own, own.mesh.data, process.profiler)
  island = members.make_island(own_run, cast(Registry, run.registry), run.storage, run.name)
  return join(island, run, process.globs, process.store) if run.owner else island


def join(island: Island, run: Run, globs: tuple[str, ...], store: str) -> Island:
  """Returns the island of an owner's worker, which has the owner's store."""
  return roles.join_owner(island, run.owner, globs, open_storage(store), run.id)
