"""The roles of an islands run [3]; each is one process, and any number of them may come and go.

    DIPACO_REGISTRY=URL python -m dipaco_jax.main --config=... --workdir=PLACE --role=ROLE

    worker      trains paths
    outer       makes outer steps
    evaluator   evaluates hold-outs and contributions, and makes the report
    monitor     adds tasks that a killed process should have added, collects garbage, reports what is stuck

PLACE is a folder that all processes share, or s3://... or gs://...; URL is the URL of a database that all can reach.
One process per role is enough, in any order. A role ends when the run is finished, or with status 65 if it has
diverged.
"""

import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import secrets
import shutil
import socket
import tempfile
from typing import Any

import jax

from dipaco_jax.buckets import bucket_lock
from dipaco_jax.config import owners, settings as settings_lib
from dipaco_jax.core import errors
from dipaco_jax.core.errors import Diverged, InputError
from dipaco_jax.data import corpus
from dipaco_jax.islands import (
  all_roles,
  audit_facts,
  auditor,
  decisions,
  evaluator,
  hand_over,
  held_states,
  inner_phase,
  kept_arrays,
  members,
  monitor,
  outer_executor,
  owner_facts,
  owner_store,
  owner_workdir,
  registration,
  screening_facts,
  shared_stages,
  state_facts,
  worker,
)
from dipaco_jax.islands.claims import Backup, Claims
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.module_weights import ModuleWeights
from dipaco_jax.islands.role_loop import Perform, Role
from dipaco_jax.islands.worker_hosts import Hosts
from dipaco_jax.pipeline import inputs, own_text_stage, run as run_lib, tokenize_stage
from dipaco_jax.registry import database, registry_url
from dipaco_jax.registry.registry import Registry
from dipaco_jax.storage import files, lock
from dipaco_jax.storage.object_store import Storage, open_storage
from dipaco_jax.storage.remedies import ISLANDS_MARK
from dipaco_jax.telemetry import metrics_server, profiling

ROLES = (*monitor.ROLES, 'monitor')


def check_settings(settings: settings_lib.Settings):
  """Raises InputError for what islands cannot do."""
  if settings.outer.lost:
    raise InputError(
      f'config.outer.lost={settings.outer.lost} is for runs in one process: islands lose no outer gradients'
    )


@dataclasses.dataclass(frozen=True)
class Process:
  """A process of an islands run."""

  role: str  # one of ROLES
  workdir: str  # the place that all processes share, a folder or the URL of a bucket
  lease_s: float  # how long a claim lasts without a heartbeat
  url: str | None = None  # of the registry; None or '' for a file in the workdir
  name: str = ''  # '' for its role, host and process id
  share: str = ''  # 'i/n', for an outer executor: which modules it takes before others
  is_backup: bool = False  # whether this worker takes only abandoned tasks and those of stragglers
  only_prepares: bool = False  # whether this worker trains nothing, and takes only tasks that read all text
  resumes: bool = True  # whether it resumes a run that has diverged, or False if its parent has done so
  metrics: metrics_server.MetricsServer | None = None  # the server of this role's metrics for Prometheus
  profiler: profiling.Profiler = profiling.NONE  # of the inner steps of a worker
  owner: str = ''  # whose worker this is, if text stays with its owners
  globs: tuple[str, ...] = ()  # files of the owner's text
  store: str = ''  # the owner's own place, a folder or the URL of a bucket
  replay: str = ''  # facts.json of another run, whose decisions this one follows, or its registry
  has_all_roles: bool = False  # whether this worker does the work of all other roles, too


def run_role(process: Process, settings: settings_lib.Settings) -> dict[str, Any]:
  """Works in a role until the run is finished, and returns its last fact, with the perplexity.

  `settings` are the same in all its processes. Of a worker's hosts, the others than the first return {}.

  Raises InputError if another config began this run, or the database or the place cannot be used; Diverged.
  """
  hosts, role = Hosts(), process.role
  if role != 'worker' and not hosts.is_alone:
    raise InputError(f'--distributed is for workers, of several hosts; --role={role} is one process')
  url = process.url or registry_url.in_folder(local_place(process.workdir))
  joined = members.joined_so_far(url) if process.owner and settings.data.own_text else ()
  check_owner(process, hosts, owners.join(settings, joined))
  storage = open_storage(process.workdir)
  local = make_store(process.store) if process.store else make_local_place(process.workdir)
  own = on_own_devices(settings)
  run = run_lib.unattended(local, own, own.mesh.data, process.profiler)
  check_place(storage, local_place(process.workdir), url)
  registry = Registry(url, process.lease_s)
  run_id = registration.settle(registry, storage, settings, local)
  if role == 'worker' and hosts.is_first and not process.owner:
    inputs.check_inputs(local, settings, keeps=False)
  decided = decisions.follow(registry, process.replay, settings)
  island = members.make_island(run, registry, storage, process.name or default_name(process))
  island = dataclasses.replace(island, decisions=decided)
  if process.owner:
    island = join_owner(island, process.owner, process.globs, open_storage(process.store), run_id)
  if not hosts.is_first:
    inner_phase.follow(island, hosts)
    return {}
  resumed = screening_facts.resume(island) if process.resumes else screening_facts.times_resumed(registry)
  return live(dataclasses.replace(island, resumed=resumed), process, hosts, run_id)


def live(island: Island, process: Process, hosts: Hosts, run_id: str) -> dict[str, Any]:
  """Works in a role until the run is finished, and returns its last fact. Raises Diverged."""
  local, life = island.run.workdir, f'{run_id}-{island.resumed}'
  kept = kept_arrays.begin(island.storage, local, life)
  island = dataclasses.replace(island, weights=ModuleWeights(kept))
  try:
    island = serve_until_end(island, process, hosts, local / 'scratch' / life)
  except Diverged as e:
    hosts.broadcast({'diverged': str(e)})
    raise
  hosts.broadcast({})
  if owner_workdir.has_ended_early(island):
    kept.close()
    return {}
  if process.owner:
    owner_workdir.complete(island)
  kept.close()
  for role in ROLES if process.has_all_roles else (process.role,):
    tidy(role, local)
  return outcome(island.registry)


def check_owner(process: Process, hosts: Hosts, settings: settings_lib.Settings):
  """Raises InputError, before any work, if an owner's worker cannot begin with its options, text and store."""
  owner_store.check_options(process.owner, process.globs, process.store, settings)
  if not process.owner:
    return
  if not hosts.is_alone:
    raise InputError('--distributed is for workers of text in one place: leave it out with --owner')
  if process.is_backup:
    raise InputError('--backup copies the tasks of others: leave it out with --owner')
  store = open_storage(process.store)
  if process.workdir:  # else a gateway has it
    owner_store.check_apart(open_storage(process.workdir), store)
  owner_store.check_free(store, local_place(process.store))
  if not store.exists(owner_store.MARK):
    own_text_stage.check(settings, own_text_stage.Text(process.owner, process.globs))


def join_owner(island: Island, owner: str, globs: tuple[str, ...], store: Storage, run_id: str) -> Island:
  """Returns a process as a worker of an owner, with the owner's store. Raises InputError if that is of another run."""
  owner_store.settle(store, run_id, owner)
  storage: Any = owner_store.OwnerStorage(island.storage, store, island.run.settings)
  members.add_text_task(island, owner)
  return dataclasses.replace(island, storage=storage, owner=owner, own_globs=globs)


def default_name(process: Process) -> str:
  """Returns the name of a process: an owner's tells nothing of the owner's machines."""
  where = f'{process.owner}-{secrets.token_hex(4)}' if process.owner else f'{socket.gethostname()}-{os.getpid()}'
  return f'{process.role}-{where}'


def outcome(registry: Registry) -> dict[str, Any]:
  """Returns the last fact of a run that is finished; raises Diverged if it has no perplexity."""
  [finished] = registry.facts('finished')
  if finished.meta['perplexity'] is None:
    raise Diverged(errors.NO_PERPLEXITY)
  return finished.meta


def tidy(role: str, local: pathlib.Path):
  """Removes the files of a finished run on this machine."""
  kept_arrays.end(local)
  if role in ('outer', 'monitor'):
    shutil.rmtree(local / 'scratch', ignore_errors=True)  # sums of modules that others have finished
  if role in ('worker', 'monitor'):
    held_states.remove_free(local)  # what this worker held, and those that are gone


def serve_until_end(island: Island, process: Process, hosts: Hosts, scratch: pathlib.Path) -> Island:
  """Serves until the run is finished, or its owner has left; returns the island with the owners of the end."""
  while island.owner not in island.members.left:
    try:
      serve(island, process, hosts, scratch / str(island.members.num_facts))  # sums of other paths do not count
      return members.grow(island) if island.run.settings.data.own_text else island
    except members.Changed:
      before, island = island.members, members.grow(island)
      members.log_changes(before, island.members)
  return island


def serve(island: Island, process: Process, hosts: Hosts, scratch: pathlib.Path):
  """Serves until the run is finished; `scratch` is the folder of sums that wait for other contributions."""
  if process.role == 'monitor':
    with monitor.saying_stopped(island):
      monitor.watch(island)
  elif process.role == 'outer':
    keys = island.all_modules()[part_named(process.share)] if process.share else None
    island.weights.kept.versions = 1  # an outer step needs the version before alone, and makes the next
    island.weights.kept.memory_bytes = int(held_states.MEMORY_SHARE * held_states.machine_memory())
    claims = Claims(island, process.role, outer_executor.KINDS, keys)
    work(process, claims, outer_executor.Executor(scratch).perform)
  elif process.role == 'evaluator':
    kinds = evaluator.KEEPERS_KINDS if island.run.settings.data.own_text else evaluator.KINDS
    work(process, Claims(island, process.role, kinds), evaluator.perform)
  elif process.only_prepares:
    work(process, Claims(island, process.role, shared_stages.KINDS), shared_stages.perform)
  else:
    serve_worker(island, process, hosts, scratch)


def serve_worker(island: Island, process: Process, hosts: Hosts, scratch: pathlib.Path):
  """Trains until the run is finished, and answers other workers that ask for states that this one holds."""
  kinds: tuple[str, ...] = worker.KINDS if hosts.is_alone else worker.TRAIN
  if (keys := owner_facts.claim_keys(island)) is not None:
    kinds = worker.OWNERS_KINDS if island.owner else ('prepare',)
  line = state_facts.Line()
  with contextlib.ExitStack() as stack:
    held = stack.enter_context(held_states.slot(island.run.workdir))
    stack.enter_context(hand_over.answering(island, held))
    stack.enter_context(state_facts.publishing(island, held, line))
    island.weights.kept.memory_bytes = held.memory_bytes
    own_worker = worker.Worker(held, hosts, line)
    pool = Backup(island, kinds, held.holder) if process.is_backup else None
    fetches = dict.fromkeys(worker.TRAIN, own_worker.fetch)
    audits = audit_facts.Queue(island, held.holder) if audit_facts.is_on(island) else None
    perform: Perform = own_worker.perform
    if process.has_all_roles:
      check = stack.enter_context(all_roles.watched(island))
      kinds += all_roles.KINDS
      perform = all_roles.checked(all_roles.perform(perform, outer_executor.Executor(scratch).perform), check)
    claims = Claims(island, process.role, kinds, keys, keys is not None, fetches, pool, held.holder, audits)
    work(process, claims, auditor.Auditor(hosts).beside(perform))


def work(process: Process, claims: Claims, perform: Perform):
  """Performs the tasks that a process claims until the run is finished."""
  role = Role(claims, perform)
  if process.metrics:
    process.metrics.read = role.read_metrics
  role.serve()


def resume(workdir: str, url: str) -> int:
  """Resumes a run that has diverged, for processes about to begin; returns how often it has been resumed."""
  with contextlib.closing(Registry(url)) as registry:
    for config in registry.facts('config'):
      run = run_lib.unattended(local_place(workdir), settings_lib.of_run(config.meta['config']))
      screening_facts.resume(members.make_island(run, registry, open_storage(workdir), 'resume'))
    return screening_facts.times_resumed(registry)


def check(url: str | None, share: str) -> str:
  """Returns the registry's URL, or '' for a registry in the workdir, without creating anything.

  Raises InputError if the URL or the share cannot be used.
  """
  part_named(share)
  if named := registry_url.given(url):
    database.connect(named).dispose()
  return named


def check_sources(workdir: str, settings: settings_lib.Settings, replay: str):
  """Raises InputError, before anything is written, if the text or the decisions of a replay cannot be used; OSError."""
  if replay:
    decisions.read(replay, settings)
  if not open_storage(workdir).exists(ISLANDS_MARK):  # else the text may be gone
    corpus.check_readable(settings.data)
    tokenize_stage.check_input(settings)


def part_named(share: str) -> slice:
  """Parses 'i/n': returns which of all modules the i-th of n executors takes first. Raises InputError."""
  i, _, n = share.partition('/')
  if share and not (i.isdecimal() and n.isdecimal() and int(i) < int(n)):
    raise InputError(f'--share={share}: write i/n, i from 0 to n - 1')
  return slice(int(i), None, int(n)) if share else slice(0)


def local_place(workdir: str) -> pathlib.Path:
  """Returns the folder of a run's files on this machine: the workdir itself, if it is a folder."""
  local_file = open_storage(workdir).local_path('here')
  name = hashlib.sha256(workdir.encode()).hexdigest()[:16]
  return local_file.parent if local_file else pathlib.Path(tempfile.gettempdir()) / f'dipaco_jax-{name}'


def make_store(store: str) -> pathlib.Path:
  """Makes the local place of an owner's store; a folder that is new is for this user alone."""
  made = make_local_place(store, 0o700)
  if made.stat().st_mode & 0o077:
    logging.warning('--store=%s: other users of this machine can read the text in it: chmod 700 %s', store, made)
  return made


def make_local_place(workdir: str, mode: int = 0o777) -> pathlib.Path:
  """Makes `local_place`; `mode` is that of a new folder which is the place itself.

  Raises InputError if it is no folder, or another user may have written into it, or can.
  """
  place = local_place(workdir)
  if open_storage(workdir).local_path('here'):
    if place.is_file():
      raise InputError(f'--workdir={workdir} is a file: name a folder')
    place.mkdir(mode, parents=True, exist_ok=True)
  else:
    files.make_private_folder(place, 'TMPDIR')
  return place


def check_place(storage: Storage, local: pathlib.Path, url: str):
  """Raises InputError, before a registry is made, where it would be a second one, or where `main` is running."""
  is_bucket = storage.local_path('') is None
  holder = bucket_lock.holder(storage) if is_bucket else lock.owner(local)  # first: islands hold it after their mark
  has_run, file = storage.exists(ISLANDS_MARK), database.sqlite_file(url)
  if holder is not None and not has_run:
    pid, host, started = (holder.get(name, '?') for name in ('pid', 'host', 'started'))
    message = f'{storage.url} is in use by `main`, process {pid} on {host} since {started}'
    raise InputError(f'{message}: stop that first, and islands continue from there, or leave out --role')
  if has_run and file and not file.exists():
    raise InputError(f'there is no registry {file}, but {registry_url.explain_unknown(storage.url)}')


def on_own_devices(s: settings_lib.Settings) -> settings_lib.Settings:
  """Returns settings for one path on this process's devices: as many of them as divide its batches."""
  sizes = [*s.batch_sizes('train').values(), *s.batch_sizes('pretrain').values()]
  data = s.mesh.data or max(d for d in range(1, jax.device_count() + 1) if all(size % d == 0 for size in sizes))
  return dataclasses.replace(s, mesh=dataclasses.replace(s.mesh, data=data))
