"""A run whose text stays with two owners, in one process: a keeper and a worker of each owner take turns."""

import contextlib
import dataclasses
import json
import pathlib

import gateways
import numpy as np
import one_process
from one_process import LEASE_S

from dipaco_jax.config import owners, settings as settings_lib
from dipaco_jax.islands import (
  behind_gateway,
  evaluator,
  island,
  members,
  monitor,
  outer_executor,
  owner_facts,
  owner_workdir as owner_workdir,
  registration,
  role_loop,
  roles,
  schedule,
  state_facts,
  worker,
)
from dipaco_jax.islands.claims import Claims
from dipaco_jax.islands.held_states import HeldStates
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.registry import registry
from dipaco_jax.storage import object_store

LETTERS = {'public': 'abcdefghijklmnopqrstuvwxyz', 'clinic': 'aeiouyc', 'court': 'bcdfgklmnprst', 'press': 'aehmnortw'}
OWNERS = 'clinic', 'court'
LEVELS = (('shared', 'embed|final|block_0', ()), ('own', 'block_1', ('owner',)))
TURNS = 400  # of which a run needs fewer


def write_text(folder: pathlib.Path, documents: int = 60) -> None:
  """Writes the public text, and that of each owner, whose words have letters of their own."""
  folder.mkdir(exist_ok=True)
  for number, (name, letters) in enumerate(LETTERS.items()):
    rng = np.random.default_rng(number)
    for split in ('train', 'validation') if name == 'public' else ('train',):
      texts = [
        ' '.join(''.join(rng.choice(list(letters), rng.integers(2, 6))) for _ in range(rng.integers(20, 60)))
        for _ in range(documents)
      ]
      lines = [json.dumps({'text': f'{text}.', 'domain': name}) + '\n' for text in texts]
      (folder / f'{name}-{split}.jsonl').write_text(''.join(lines))


def own_file(folder: pathlib.Path, owner: str) -> pathlib.Path:
  """An owner's text."""
  return folder / f'{owner}-train.jsonl'


def settings(folder: pathlib.Path, **sections) -> settings_lib.Settings:
  """Of a run without pretraining, as the keeper and all owners have them."""
  train, validation = (str(folder / f'public-{split}.jsonl') for split in ('train', 'validation'))
  values = {
    'data': dict(source='files', train=(train,), validation=(validation,), holdout_fraction=0.1, own_text=True),
    'tokenizer': dict(vocab_size=300),
    'model': dict(width=16, num_layers=2, num_heads=2, head_dim=8, mlp_dim=24, seq_len=64),
    'pretrain': dict(steps=0, batch_size=4),
    'train': dict(phases=2, steps_per_phase=4, batch_size=4, steps_per_dispatch=2, max_holdout_rows=64),
    'inner': dict(learning_rate=0.01, warmup_steps=2),
    'routing': dict(method='owner'),
    'evaluate': dict(samples=0),
    'checkpoint': dict(every_steps=1000, state_every_phases=1),
    'metrics': dict(sinks=()),
  }
  for section, fields in sections.items():
    values[section] = values.get(section, {}) | fields
  return settings_lib.from_dict({'grid': {'owner': OWNERS}, 'levels': LEVELS} | values)


class Member:
  """A process of the run: the keeper, which does all that is not an owner's, or an owner's worker."""

  def __init__(self, run: 'OwnersRun', owner: str = ''):
    self.owner, self.island = owner, run.begin(owner)
    self.run = run
    self.worker = worker.Worker(HeldStates(run.store(owner) / 'held' if owner else None, owner))
    if self.worker.held.folder:
      self.worker.held.folder.mkdir(parents=True, exist_ok=True)
    self.begin(run)

  def begin(self, run: 'OwnersRun'):
    """Begins to take tasks, with the owners of its island."""
    owner = self.owner
    keeps = ('prepare', 'outer', 'finish') if run.settings.data.own_text else one_process.KINDS
    kinds = worker.OWNERS_KINDS if owner else keeps
    keys = owner_facts.claim_keys(self.island) if owner else None
    self.collector = monitor.Collector(self.island)
    self.executor = outer_executor.Executor(run.place / 'scratch')
    self.role = role_loop.Role(Claims(self.island, 'all', kinds, keys, bool(owner), holder=owner), self.perform)

  def perform(self, of: island.Island, task, lease):
    if task.kind in ('outer', 'finish'):
      return (self.executor if task.kind == 'outer' else evaluator).perform(of, task, lease)
    if task.kind in worker.TRAIN:
      lease.fetch = self.role.claims.fetcher.submit(self.worker.fetch, of, task)
    return self.worker.perform(of, task, lease)

  def turn(self) -> bool:
    """Does a task, if there is one."""
    try:
      lease = self.role.claims.next()
      if not lease:
        members.heed(self.island)
    except members.Changed:
      return self.grow()
    if lease:
      self.role.work(lease)
      self.role.settle(0)
      state_facts.publish_aside(self.island, self.worker.held, self.worker.line)
    if not self.owner and self.island.registry.facts('prepared'):
      self.collector.collect(monitor.frontier(self.island) - monitor.GENERATIONS)
    return bool(lease)

  def grow(self) -> bool:
    """Continues with the owners that have joined or left, as a role does."""
    for pool in (self.role.claims.fetcher, self.role.publisher):
      pool.shutdown(wait=True)
    self.island = members.grow(self.island)
    self.run.use_programs(self.island)
    self.begin(self.run)
    return True

  def close(self):
    """Ends as a process that is killed, but for its threads."""
    pools = self.role.claims.fetcher, self.role.publisher, self.worker.scheduler
    for pool in (*pools, self.island.weights.reader, self.island.weights.kept.writer):
      pool.shutdown(wait=True, cancel_futures=True)
    one_process.close(self.island)


class OwnersRun:
  """The place that all share, the owners' stores, and what is compiled."""

  def __init__(self, folder: pathlib.Path, s: settings_lib.Settings, programs: dict | None = None):
    self.folder, self.settings, self.place = folder, s, folder / 'shared'
    self.programs = {} if programs is None else programs
    self.gateways: dict[str, gateways.Running] = {}  # of owners whose workers are behind one

  def store(self, owner: str) -> pathlib.Path:
    return self.folder / f'store-{owner}'

  def join(self, owner: str) -> island.Island:
    """A worker behind a gateway that has just begun."""
    gateway, globs = self.gateways[owner], (str(own_file(self.folder, owner)),)
    name = f'{owner}-{len(gateway.links)}'
    gateway.desks.follow_members()
    grown = gateway.desks.island.layout.grid
    link = gateway.link(name, owners.paths_of(grown, owner), owner=owner)
    link.patience_s = 60  # on a busy machine
    run = behind_gateway.open_run(link, '', behind_gateway.Own('', globs, str(self.store(owner))))
    process = roles.Process('worker', '', LEASE_S, globs=globs, store=str(self.store(owner)))
    return behind_gateway.make_island(run, process)

  def begin(self, owner: str = '', place: pathlib.Path | None = None) -> island.Island:
    """A process that has just begun, maybe with its store in another place; all share one set of programs."""
    if owner in self.gateways and not place:
      return self.join(owner)
    workdir = place or (self.store(owner) if owner else self.place)
    workdir.mkdir(parents=True, exist_ok=True)
    self.place.mkdir(exist_ok=True)
    facts = registry.Registry(f'sqlite:///{self.place}/registry.db', LEASE_S)
    storage = object_store.open_storage(str(self.place))
    run_id = registration.settle(facts, storage, self.settings, workdir)
    run = run_lib.unattended(workdir, roles.on_own_devices(self.settings))
    made = members.make_island(run, facts, storage, f'worker-{owner}' if owner else 'keeper')
    self.use_programs(made)
    if not owner:
      return made
    store = object_store.open_storage(str(workdir))
    return roles.join_owner(made, owner, (str(own_file(self.folder, owner)),), store, run_id)

  def of_grid(self, of: island.Island) -> dict:
    """Returns the programs of an island's grid, which owners that join make larger."""
    grid = of.run.settings.grid
    return self.programs if grid == self.settings.grid else self.programs.setdefault(grid, {})

  def use_programs(self, of: island.Island):
    """Gives an island what others have compiled."""
    of.run.__dict__.update({name: x for name, x in self.of_grid(of).items() if isinstance(name, str)})

  def keep_programs(self, of: island.Island):
    """Keeps what a process has compiled for those that begin later."""
    for name in ('model', 'programs', 'base_programs'):
      if name in of.run.__dict__:
        self.of_grid(of).setdefault(name, of.run.__dict__[name])

  def to(self, kind: str, members: list[Member], key: str | None = None, number: int | None = None) -> None:
    """Takes turns until there is a fact of a kind, maybe of this key and number."""
    for _ in range(TURNS):
      for member in members:
        self.use_programs(member.island)
        is_idle = not member.turn()
        self.keep_programs(member.island)
        if is_idle:
          schedule.advance(member.island)
        if members[0].island.registry.facts(kind, None if key is None else [key], number):
          return
    raise AssertionError(f'no {kind} after {TURNS} turns')

  def outcome(self) -> dict[str, str]:
    """{fact: sha256} of all that the run has come to; of texts, whose digests are keyed by stores, their sizes."""
    facts = registry.Registry(f'sqlite:///{self.place}/registry.db')
    found = [fact for kind in ('own_text', 'module', 'evaluation', 'checkpoint') for fact in facts.facts(kind)]
    facts.close()
    texts = {f'own_text {fact.key}': str(owner_facts.sizes(fact)) for fact in found if fact.kind == 'own_text'}
    return texts | {f'{fact.kind} {fact.key} {fact.number}': fact.sha256 for fact in found if fact.kind != 'own_text'}

  @contextlib.contextmanager
  def behind_gateway(self, *names: str):
    """Workers of these owners that begin in the block are behind one gateway."""
    keeper = self.begin()
    with gateways.running(keeper, self.folder) as gateway:
      self.gateways = dict.fromkeys(names, gateway)
      yield
      self.gateways = {}
    one_process.close(keeper)

  @contextlib.contextmanager
  def members(self, names=OWNERS):
    """The keeper and a worker of each owner."""
    members = [Member(self, owner) for owner in ('', *names)]
    try:
      yield members
    finally:
      for member in members:
        with contextlib.suppress(Exception):
          member.close()


def changed(s: settings_lib.Settings, **sections) -> settings_lib.Settings:
  """The settings with other fields in sections."""
  return dataclasses.replace(s, **{n: dataclasses.replace(getattr(s, n), **f) for n, f in sections.items()})


def pooled(folder: pathlib.Path, keeper: pathlib.Path, **sections) -> settings_lib.Settings:
  """Of one job on the text of all owners in one place, with the keeper's tokenizer and validation text."""
  train = tuple(str(own_file(folder, owner)) for owner in OWNERS)
  data = dict(train=train, validation=(str(folder / 'pooled-validation.jsonl'),), own_text=False)
  s = changed(settings(folder, **sections), tokenizer=dict(model_file=str(keeper / 'tokenizer.model')))
  return changed(s, data=data)
