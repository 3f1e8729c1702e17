"""The protocol of islands without arrays: many processes, one at a time, whoever a seed draws; some die anywhere.

Registry, storage, scheduling, the return of what is gone and the monitor's collection are the real ones. What tasks
make are digests of all that went into them: a run that has taken anything else than it should ends with another one.
`pytest tests/islands/protocol_test.py -n0 -s --slow --protocol_runs=300` plays more of them.
"""

import collections
import contextlib
import functools
import os
import pathlib
import random
import shutil
import threading
import types

import desk_link
import digest_tasks
import pytest
import slow
import sqlalchemy as sa
from digest_tasks import PERFORM, held_by, publish_states

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import Diverged
from dipaco_jax.gateway import fact_checks, object_checks
from dipaco_jax.islands import claims, island, lineage, messages, monitor, path_state, role_loop, schedule, withdrawals
from dipaco_jax.islands.screening_facts import heed, resume
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.registry import registry
from dipaco_jax.registry.registry import Fact, NewTask
from dipaco_jax.registry.registry_schema import TASKS
from dipaco_jax.storage import object_store, publishing

KINDS = {
  'worker-0': ('prepare', 'train', 'reroute'),
  'worker-1': ('prepare', 'train', 'reroute'),
  'outer-0': ('outer',),
  'outer-1': ('outer',),
  'evaluator-0': ('evaluate', 'finish'),
  'monitor-0': (),
}
SPEEDS = 1, 1, 1, 0.3, 0.02  # relative; the last is as good as stopped
STEPS = 1, 2, 4, 8, 16, 32, 64  # between one turn and another, of a process
FAULTS = {'killed': 0.05, 'expired': 0.1, 'damaged': 0.02, 'disk_lost': 0.02}  # for each turn
FAULTY_TURNS, MOST_TURNS = 600, 20_000
SHARED = (('ends', 'embed|final', ()), ('low', 'block_0', ('a',)), ('high', 'block_1', ('b',)))
APART = (('low', 'embed|final|block_0', ('a',)), ('own', 'block_1', ('a', 'b')))
ALONE = (('all', '.*', ('a', 'b')),)
ROUNDS = dict(method='discriminative', router_fraction=0.2, rounds=1, phases_per_round=2)
RUNS = {
  'all paths': (SHARED, dict(train=dict(phases=4), checkpoint=dict(state_every_phases=1))),
  'seldom published': (SHARED, dict(train=dict(phases=7), checkpoint=dict(state_every_phases=3))),
  'drawn': (SHARED, dict(train=dict(phases=6, paths_per_phase=1, early_stopping=False))),
  'drawn apart': (APART, dict(train=dict(phases=6, paths_per_phase=1))),
  'rounds': (SHARED, dict(train=dict(phases=5), routing=ROUNDS)),
  'apart': (APART, dict(train=dict(phases=6), checkpoint=dict(state_every_phases=2))),
  'alone': (ALONE, dict(train=dict(phases=4), checkpoint=dict(state_every_phases=2))),
  'apart, rounds': (APART, dict(train=dict(phases=5), routing=ROUNDS, checkpoint=dict(state_every_phases=3))),
  'drawn apart, rounds': (
    APART,
    dict(train=dict(phases=6, paths_per_phase=1), routing=ROUNDS, checkpoint=dict(state_every_phases=2)),
  ),
}


class Killed(SystemExit):
  """The process is gone."""


class Process:
  """One role's life, in a thread that stands still but for its turns, of a few steps each."""

  def __init__(self, world: 'World', name: str):
    self.world, self.name, self.speed = world, name, world.draw.choice(SPEEDS)
    self.go, self.rests = threading.Semaphore(0), threading.Semaphore(0)
    self.dead = self.over = False
    self.steps = 0  # that are left of this turn
    self.error: BaseException | None = None
    self.island = world.island(name, self.step)
    self.thread = threading.Thread(target=self.live, daemon=True)
    self.thread.start()

  def step(self):
    """Waits for the next turn, where this one is over."""
    self.steps -= 1
    if self.steps < 0 and not self.dead:
      self.rests.release()
      self.go.acquire()
    if self.dead:
      raise Killed

  def turn(self):
    """Some steps; fewer, if it comes to its end."""
    self.rests.acquire()
    self.steps = self.world.draw.choice(STEPS)
    self.go.release()
    self.rests.acquire()
    self.rests.release()

  def kill(self):
    self.dead = True
    self.go.release()
    self.thread.join()

  def live(self):
    try:
      self.step()
      watch(self.island) if self.name.startswith('monitor') else serve(self.island, KINDS[self.name])
    except (Killed, Diverged):
      pass
    except BaseException as e:
      self.error = e
    self.over = True
    self.island.registry.close()
    self.rests.release()


def watch(of: island.Island):
  """As monitor.watch, without its pauses."""
  collector = monitor.Collector(of)
  while not schedule.is_finished(of):
    heed(of)
    schedule.advance(of)
    collector.collect(monitor.frontier(of) - monitor.GENERATIONS)
  collector.collect(of.run.settings.train.phases)
  collector.finish()


def serve(of: island.Island, kinds):
  """As role_loop.Role.serve, in one thread."""
  found = claims.Claims(of, 'any', kinds, holder=held_by(of).holder)
  found.hold = lambda claim: claim()  # a task, whose lease nobody renews
  role = role_loop.Role(found, lambda *_: None)
  while True:
    heed(of)
    if not (task := found.claim()):
      if schedule.is_finished(of):
        return
      schedule.advance(of)
      continue
    release = functools.partial(of.registry.release, task, False)
    lease = types.SimpleNamespace(task=task, about={}, close=lambda: None, release=release)
    try:
      publish_states(of)
      if facts := PERFORM[task.kind](of, task):
        schedule.schedule(of, withdrawals.complete(of, task, facts))
    except registry.Lost:
      pass
    except island.Later as e:
      role.send_back(lease, e)


# -- what befalls them


class World:
  """One run, and the dice."""

  def __init__(self, place: pathlib.Path, name: str, draw: random.Random, behind_gateway: tuple[str, ...] = ()):
    self.behind_gateway = behind_gateway  # names of workers that have a gateway instead of the registry
    levels, sections = RUNS[name]
    self.place, self.draw = place, draw
    self.settings = settings_lib.from_dict({
      'grid': {'a': 2, 'b': 2}, 'levels': levels, 'tokenizer': {'vocab_size': 300},
      'model': {'width': 16, 'num_layers': 2, 'num_heads': 2, 'head_dim': 8, 'mlp_dim': 24, 'seq_len': 64},
    } | sections)  # fmt: skip
    publishing.write_json(place / 'stages' / 'tokenize.json', {'result': {'vocab_size': 300}})
    self.run = run_lib.unattended(place, self.settings)
    self.counts: collections.Counter[str] = collections.Counter()
    self.facts = self.island('world', lambda: None).registry
    self.facts.add_tasks([NewTask('prepare', '', 0)])
    self.processes = [Process(self, name) for name in KINDS]

  def island(self, name: str, step) -> island.Island:
    """As a process sees the run; a step ends before and after whatever it does to what others see."""
    facts = registry.Registry(f'sqlite:///{self.place}/registry.db', lease_s=3600)
    place = object_store.open_storage(str(self.place))
    resumed = resume(island.Island(self.run, facts, place, name))

    def stepwise(real):
      def call(*args, **options):
        step()
        found = real(*args, **options)
        step()
        return found

      return call

    for method in ('transact', 'change', 'returned', 'rows'):
      setattr(facts._db, method, stepwise(getattr(facts._db, method)))
    place.retry = stepwise(place.retry)
    made = island.Island(self.run, facts, place, name, resumed)
    return desk_link.behind(made, name, self.place / 'aside' / name) if name in self.behind_gateway else made

  def to_the_end(self, faults: bool) -> Fact:
    for turn in range(MOST_TURNS):
      if found := self.facts.facts('finished'):
        self.counts['turns'] += turn
        return found[0]
      if faults and turn < FAULTY_TURNS:
        for fault, likely in FAULTS.items():
          if self.draw.random() < likely:
            getattr(self, fault)()
      self.give_a_turn()
      if turn > FAULTY_TURNS and turn % 20 == 0:
        self.expired()
      for process in self.processes if turn > FAULTY_TURNS else ():
        process.speed = 1
    raise AssertionError(f'it does not end: {self.facts.counts()}, {self.facts.tasks("ready")}')

  def give_a_turn(self):
    [process] = self.draw.choices(self.processes, [p.speed for p in self.processes])
    process.turn()
    if process.over:
      assert not process.error, repr(process.error)
      self.replace(process)

  def replace(self, process: Process):
    self.processes[self.processes.index(process)] = Process(self, process.name)

  def killed(self):
    process = self.draw.choice(self.processes)
    process.kill()
    assert not process.error, repr(process.error)
    self.replace(process)
    self.counts['killed'] += 1

  def expired(self):
    """The lease of a task, be its owner alive or not."""
    if running := self.facts.tasks('running'):
      task = self.draw.choice(running)['id']
      self.facts._db.change(sa.update(TASKS).where(TASKS.c.id == task).values(lease=1.0), {})
      self.counts['expired'] += 1

  def damaged(self):
    """An object is gone, or has another bit."""
    if files := [file for file in (self.place / island.OBJECTS).rglob('*.safetensors') if file.name[0] != '.']:
      file = self.draw.choice(sorted(files)[-20:])
      with contextlib.suppress(FileNotFoundError):
        self.draw.choice([pathlib.Path.unlink, lambda f: f.write_bytes(b'x' + f.read_bytes())])(file)
      self.counts['damaged'] += 1

  def disk_lost(self):
    """A worker's, with the states that it holds."""
    shutil.rmtree(self.place / 'held' / self.draw.choice(['worker-0', 'worker-1']), ignore_errors=True)
    self.counts['disk lost'] += 1

  def restored(self, objects: pathlib.Path):
    """The store, to a copy that was made earlier; with new disks of the workers."""
    for process in [process for process in self.processes if process.name.startswith('worker')]:
      process.kill()
      self.replace(process)
    shutil.rmtree(self.place / 'held', ignore_errors=True)
    shutil.rmtree(self.place / island.OBJECTS)
    shutil.copytree(objects, self.place / island.OBJECTS)

  def end(self):
    """All go on to their ends, the stopped too; the monitor comes once more."""
    for process in self.processes:
      while not process.over:
        process.turn()
      assert not process.error, repr(process.error)
    watch(self.island('last', lambda: None))

  def check(self, finished: Fact):
    """Nothing is open, and no object is left that nobody needs."""
    assert {state for states in self.facts.counts().values() for state in states} == {'done'}, self.facts.counts()
    best, of = finished.meta['best'], self.island('end', lambda: None)
    versions = {self.settings.train.phases, *best}
    kept = {f.uri for f in self.facts.facts('module') if f.number in versions and of.is_chosen(f, best)}
    of.registry.close()
    left = set(object_store.open_storage(str(self.place)).names(island.OBJECTS))
    assert left <= kept and (left == kept or self.counts['damaged'])
    self.counts['replayed'] += sum(fact.meta.get('replayed', 0) for fact in self.facts.facts('checkpoint'))


def play(
  place: pathlib.Path, name: str, seed: int, faults: bool, behind_gateway: tuple[str, ...] = ()
) -> tuple[str, collections.Counter[str]]:
  """The digest of a run, and what befell it."""
  world = World(place, name, random.Random(seed), behind_gateway)
  finished = world.to_the_end(faults)
  world.end()
  world.check(finished)
  world.facts.close()
  world.run.metrics.close()
  return finished.sha256, world.counts


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
  """No machine dies here."""
  monkeypatch.setattr(os, 'fsync', lambda handle: None)
  for module, name in ((path_state, 'check_carried'), (messages, 'check_shapes')):
    monkeypatch.setattr(module, name, lambda *_: None)  # digests are not shaped as arrays of models are


@pytest.mark.slow  # quickly: lineage_test.py, of states that are kept
def test_a_store_that_is_restored_to_an_earlier_moment_ends_with_the_same_digest(tmp_path):
  expected, _ = play(tmp_path / 'undisturbed', 'seldom published', 0, faults=False)
  world, copy = World(tmp_path / 'run', 'seldom published', random.Random(1)), tmp_path / 'copy'

  def play_until(phase: int):
    while len(world.facts.facts('checkpoint', number=phase)) < world.settings.num_paths:
      world.give_a_turn()

  play_until(1)
  shutil.copytree(world.place / island.OBJECTS, copy)
  play_until(4)
  world.restored(copy)
  assert world.to_the_end(faults=False).sha256 == expected
  world.end()
  world.facts.close()
  world.run.metrics.close()


@pytest.mark.slow  # quickly: withdrawals_test.py
@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('name', ['all paths', 'seldom published'])
def test_workers_that_compute_otherwise_agree_on_one_result(name, seed, tmp_path, monkeypatch):
  monkeypatch.setattr(digest_tasks, 'OTHERWISE', {'worker-0'})
  monkeypatch.setitem(FAULTS, 'damaged', 0.05)
  world = World(tmp_path, name, random.Random(seed))
  finished = world.to_the_end(faults=True)
  world.end()
  of = world.island('again', lambda: None)
  assert digest_tasks.finish(of, None)[0].sha256 == finished.sha256
  of.registry.close()
  print(f'{dict(world.counts)}, withdrawn: {[fact.key for fact in world.facts.facts("withdrawn")]}')
  world.facts.close()
  world.run.metrics.close()


# What is hard about the slow ones is in `drawn apart, rounds` too.
@pytest.mark.parametrize('name', slow.but(RUNS, *(name for name in RUNS if name != 'alone')))
def test_ends_with_the_same_digest(name, tmp_path, request, monkeypatch):
  if not request.config.getoption('--slow'):
    monkeypatch.setitem(globals(), 'FAULTY_TURNS', 150)
  expected, counts = play(tmp_path / 'undisturbed', name, 0, faults=False)
  for seed in range(request.config.getoption('--protocol_runs')):
    found, befell = play(tmp_path / str(seed), name, seed, faults=True)
    counts += befell
    assert found == expected, seed
  print(f'{name}: {dict(counts)}')


@pytest.fixture
def digests_pass(monkeypatch):
  """A gateway takes digests for objects and facts of a model; a worker with direct access prepares."""
  monkeypatch.setattr(object_checks, 'of_name', lambda of, name, size: object_checks.Expected(b'', size))
  monkeypatch.setattr(object_checks, 'check', lambda *_: None)
  monkeypatch.setattr(fact_checks, 'metadata', lambda given, worker: {'rows': []} | dict(given) | {'worker': worker})
  monkeypatch.setattr(fact_checks, 'NEEDED_OF_MODULE', frozenset())
  monkeypatch.setattr(lineage, 'is_finite', lambda arrays: True)
  monkeypatch.setitem(KINDS, 'preparer-0', ('prepare', 'reroute'))


@pytest.mark.slow  # quickly: gateway/worker_calls_test.py
@pytest.mark.parametrize('name', RUNS)
def test_workers_behind_a_gateway_end_with_the_same_digest(name, tmp_path, request, digests_pass):
  expected, counts = play(tmp_path / 'undisturbed', name, 0, faults=False)
  for seed in range(request.config.getoption('--protocol_runs')):
    found, befell = play(tmp_path / str(seed), name, seed, True, ('worker-0', 'worker-1'))
    counts += befell
    assert found == expected, seed
  print(f'{name}: {dict(counts)}')
