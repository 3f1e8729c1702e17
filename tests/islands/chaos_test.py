"""Faults of every kind, drawn by a seed, upon all roles of an islands run: it ends with the bits of an undisturbed one.

`pytest tests/islands/chaos_test.py -n0 -s --slow --chaos_s=1800` goes on for half an hour, run after run, each on
another database and place of objects; `--chaos_on=sqlite,s3` keeps to one, `--chaos_wire=thin` is over a thin line. In
every fourth run a worker computes other bits: that run has a digest of its own.
"""

import collections
import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import sqlite3
import subprocess
import threading
import time

import line
import object_server
import one_process
import postgres
import pytest
import sqlalchemy as sa
import tiny_run
from cluster import LONGEST_S, Cluster, More

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.islands import decisions, held_states, island, schedule, withdrawals
from dipaco_jax.registry import registry
from dipaco_jax.registry.registry_schema import FACTS, TASKS
from dipaco_jax.storage import object_store

NAMES = ('worker-0', 'worker-1', 'worker-2', 'outer-0', 'outer-1', 'evaluator-0', 'monitor-0')
FOREIGN = ('foreign-0', *NAMES[1:])  # of which the first computes other bits
WORKERS = 'worker-0', 'worker-1', 'worker-2', 'foreign-0'
LEASE_S = 4.0
ALONE = 'worker-0', 'outer-0', 'evaluator-0', 'monitor-0'  # in the undisturbed run
ONE_PROCESS = ('all-0',)  # as main --replay
PAUSE_S = 0.7  # between faults, on average, and until a task is done, but no longer than PATIENCE_S
PATIENCE_S = 6.0
DISK_BYTES = 256 << 20
MACHINE_BYTES = 64 << 20
FAILING = 0.02  # of a folder's reads and writes, with EIO
LATE = 'worker-0', 'worker-1', 'backup-0', 'outer-0', 'evaluator-0', 'monitor-0'  # of which the first stops
ON = ('postgresql,folder', 'sqlite,s3', 'postgresql,s3', 'sqlite,folder')


class Chaos:
  """One fault after another; counts them."""

  def __init__(self, cluster: Cluster, server: postgres.Server | None, wire: line.Line | None, draw: random.Random):
    self.cluster, self.server, self.wire, self.draw = cluster, server, wire, draw
    self.counts: collections.Counter[str] = collections.Counter()
    self.names = [*cluster.processes]
    self.snapshot: dict[str, bytes] | None = None  # objects of an earlier moment
    kinds = [self.killed, self.stopped, self.terminated, self.damaged, self.delivered_twice, self.done_again]
    kinds += [self.lost_with_its_worker, self.malformed, self.restored]
    more = [self.disk_lost] + [self.killed] * 3 + [self.database_killed] * bool(server)
    self.kinds = kinds + more + [self.line_broken] * bool(wire)
    self.disks = [place for place in (cluster.place, *map(cluster.machine, self.names)) if os.path.ismount(place)]
    if self.disks:
      self.kinds.append(self.disk_full)

  def strike(self):
    fault = self.draw.choice(self.kinds)
    name = fault.__name__ if fault() is not False else 'nothing to damage'
    self.counts[name] += 1

  def killed(self, name: str = ''):
    self.cluster.signal(name or self.draw.choice(self.names), signal.SIGKILL)

  def disk_lost(self):
    """A worker is killed, and states that a worker holds are gone: its own, or another's of this place."""
    name = self.draw.choice([name for name in self.names if name in WORKERS])
    self.cluster.signal(name, signal.SIGKILL)
    for slot in self.slots(name)[:1]:
      shutil.rmtree(slot, ignore_errors=True)

  def slots(self, name: str) -> list[pathlib.Path]:
    """Where the states are that a worker holds, or that any worker of this place does."""
    far = self.cluster.folder.glob(f'{name}/dipaco_jax-*/held/*')
    here = [] if '://' in self.cluster.place else pathlib.Path(self.cluster.place).glob('held/*')
    return sorted([*far, *here])

  def lost_with_its_worker(self):
    """An object of one of the newest checkpoints, the worker that has made it, and the states that it holds."""
    facts = [fact for fact in self.cluster.registry.facts('checkpoint') if fact.meta['objects']]
    if not facts:
      return False
    fact = self.draw.choice(facts[-4:])
    self.cluster.storage.delete(self.draw.choice(sorted(fact.meta['objects'].values()))[0])
    if fact.meta['worker'] in self.names:
      self.cluster.signal(fact.meta['worker'], signal.SIGKILL)
      for slot in self.slots(fact.meta['worker']):
        with contextlib.suppress(OSError):
          if (slot / held_states.HOLDER).read_text() == fact.meta['holder']:
            shutil.rmtree(slot, ignore_errors=True)
    return True

  def malformed(self):
    """One of the newest checkpoints names random bytes by their digest, or lacks a level."""
    facts = [fact for fact in self.cluster.registry.facts('checkpoint') if fact.meta['objects']]
    if not facts or self.cluster.finished():
      return False
    fact = self.draw.choice(facts[-4:])
    if withdrawals.times_withdrawn(self.cluster.registry, fact) + 1 >= withdrawals.MOST:
      return False  # the path would be left out
    level, named = self.draw.choice(sorted(fact.meta['objects'])), dict(fact.meta['objects'])
    del named[level]
    if self.draw.random() < 0.5:
      data = self.draw.randbytes(1000)
      sha256 = hashlib.sha256(data).hexdigest()
      named[level] = [f'objects/paths/{fact.number}/{fact.key}-{level}-{sha256[:16]}.safetensors', sha256]
      self.cluster.storage.write(named[level][0], data)
    made = schedule.checkpoint_fact(int(fact.key), fact.number, named, fact.meta)
    same = (FACTS.c.kind == fact.kind) & (FACTS.c.key == fact.key) & (FACTS.c.number == fact.number)
    changed = sa.update(FACTS).where(same, FACTS.c.sha256 == fact.sha256)
    values = {'sha256': made.sha256, 'meta': json.dumps(made.meta | {'objects': named})}
    return bool(self.cluster.registry._db.change(changed.values(**values), {}))

  def restored(self):
    """All objects, to an earlier moment, on new disks of all workers; the first time, that moment is now."""
    storage = self.cluster.storage
    if self.cluster.finished():
      return False
    if self.snapshot is None:
      self.snapshot = {}
      for name in storage.names(island.OBJECTS):
        with contextlib.suppress(object_store.Missing):
          self.snapshot[name] = bytes(storage.fetch(name))
      return False
    for name in [name for name in self.names if name in WORKERS]:
      self.cluster.signal(name, signal.SIGKILL)
      for folder in [*self.slots(name), *self.cluster.folder.glob(f'{name}/dipaco_jax-*/weights')]:
        shutil.rmtree(folder, ignore_errors=True)
    for name in {*storage.names(island.OBJECTS)} - self.snapshot.keys():
      storage.delete(name)
    for name, data in self.snapshot.items():
      storage.write(name, data)
    self.snapshot = None
    return True

  def stopped(self):
    name = self.draw.choice(self.names)
    self.cluster.signal(name, signal.SIGSTOP)
    # By itself: who is stopped may hold SQLite's lock, for which we wait.
    wake = threading.Timer(self.draw.uniform(0.5, 2.5) * LEASE_S, self.cluster.signal, (name, signal.SIGCONT))
    wake.daemon = True
    wake.start()

  def terminated(self):
    self.cluster.signal(self.draw.choice(self.names), signal.SIGTERM)

  def database_killed(self):
    assert self.server
    self.server.kill()
    time.sleep(self.draw.uniform(0, 1))
    self.server.start()

  def damaged(self):
    """A bit of an object, of an executor's sum, of the base or of the shards; or it is gone."""
    tree = self.draw.choice(['objects', 'objects', 'objects', 'scratch', 'base', 'shards/0'])
    names = self.cluster.storage.names(tree)
    if not names:
      return False
    name, place = self.draw.choice(names[-20:]), self.cluster.storage.backend
    with contextlib.suppress(FileNotFoundError):  # the monitor was faster
      place.put(name, flipped(bytes(place.get(name)))) if self.draw.random() < 0.5 else place.delete(name)
    return True

  def line_broken(self):
    """To the store of objects: what is connected, or who connects anew, some times."""
    if self.draw.random() < 0.5:
      self.wire.hang_up()
    self.wire.faults += [self.draw.choice(['reset', 'unavailable'])] * self.draw.randrange(1, 12)

  def delivered_twice(self):
    """What follows from a fact, once more; and its completion, by one whose task it is no more."""
    facts = [f for kind in ('module', 'checkpoint') for f in self.cluster.registry.facts(kind)]
    if not facts:
      return False
    fact = self.draw.choice(facts)
    for row in self.cluster.registry.tasks(kind=MAKES[fact.kind]):
      if (row['key'], row['number']) != fact[1:3]:
        continue
      task = registry.Task(row['id'], row['kind'], row['key'], row['number'], row['fence'] - 1, 'twin', 0)
      self.cluster.registry.complete(task, [fact])
    machine, folder = one_process.Machine(self.cluster.settings, {}), self.cluster.folder / 'chaos'
    made = machine.island(folder, url=self.cluster.url, storage=self.cluster.place)
    schedule.schedule(made, [fact])
    one_process.close(made)
    return True

  def done_again(self):
    """One of the newest tasks, as if somebody missed what it made."""
    kind = self.draw.choice(['train', 'outer', 'evaluate', 'prepare'])
    rows = self.cluster.registry.tasks('done', kind)
    if not rows:
      return False
    again = self.draw.choice([row['id'] for row in rows if row['number'] == rows[-1]['number']])
    over = sa.exists().where(FACTS.c.kind == 'finished')
    reopened = sa.update(TASKS).where(TASKS.c.id == again, TASKS.c.state == 'done', ~over)
    return bool(self.cluster.registry._db.change(reopened.values(state='ready', lease=0.0), {}))

  def disk_full(self):
    """The place's, or that of a role's machine; some of which begin anew meanwhile."""
    place = pathlib.Path(self.draw.choice(self.disks))
    filler = place / 'filler'
    with contextlib.suppress(OSError), open(filler, 'wb') as f:
      while True:
        f.write(bytes(1 << 20))
    if place.name in self.names and self.draw.random() < 0.5:
      self.killed(place.name)
      self.cluster.processes[place.name].join()
      self.cluster.tend()
    time.sleep(self.draw.uniform(0.5, 2))
    filler.unlink()


MAKES = {'module': 'outer', 'checkpoint': 'train'}


def flipped(data: bytes) -> bytes:
  half = len(data) // 2
  return data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]


@contextlib.contextmanager
def disk(place: pathlib.Path, size: int = DISK_BYTES):
  """One of its own that may be filled, for root; else a folder."""
  place.mkdir(parents=True)
  command = ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(place)]
  mounted = os.geteuid() == 0 and not subprocess.run(command, capture_output=True).returncode
  try:
    yield
  finally:
    if mounted:
      subprocess.run(['umount', '-l', str(place)], check=True)


@pytest.fixture(scope='module')
def config(tmp_path_factory, request) -> settings_lib.Settings:
  found: dict = {}
  exec(tiny_run.write_config(tmp_path_factory.mktemp('config')).read_text(), found)
  values = found['get_config']()
  values.checkpoint.state_every_phases = values.outer.closed_every = 2
  if (wire := request.config.getoption('--chaos_wire')) != 'lan':
    values.outer.wire, values.levels = wire, one_process.OWN_LEVELS
  return settings_lib.from_dict(values.to_dict())


@pytest.fixture(scope='module')
def server():
  """PostgreSQL's where it is installed."""
  made = postgres.Server() if postgres.programs() else None
  yield made
  if made:
    made.stop()


@pytest.fixture(scope='module')
def endpoint():
  with object_server.s3_server() as made:
    yield made


def is_foreign(seed: int) -> bool:
  """Whether a worker of a run computes other bits."""
  return seed % 4 == 3


class Chosen:
  """Where runs are: of a seed, or as asked for."""

  def __init__(self, config, folder: pathlib.Path, server, endpoint: str, on: str):
    self.config, self.folder, self.server, self.endpoint, self.on = config, folder, server, endpoint, on
    folder.mkdir(exist_ok=True)
    self.numbers = itertools.count()  # of runs, whose objects stay

  def run(
    self, seed: int | None, until: float, replay: str = '', alone: tuple[str, ...] = ALONE
  ) -> collections.Counter[str]:  # fmt: skip
    """To the end; with faults before `until`, if there is a seed to draw them with. Keeps its facts.json.

    With `replay`, the facts.json of another run, it follows that run's decisions, with the roles `alone`.
    """
    database, kind = (self.on or ON[(seed or 0) % len(ON)]).split(',')
    place, server = self.facts(seed).with_suffix(''), self.server if database == 'postgresql' else None
    url = server.new_database() if server else f'sqlite:///{place}.db'
    with contextlib.ExitStack() as stack:
      wire = None
      if kind == 's3':
        wire = stack.enter_context(line.Line(int(self.endpoint.rpartition(':')[2])))
        where = f's3://{object_server.BUCKET}/{self.folder.name}-{next(self.numbers)}/run-{seed}'
        for name in {*NAMES, *FOREIGN}:
          stack.enter_context(disk(self.folder / f'machines-{seed}' / name, MACHINE_BYTES))
      else:
        where = str(place)
        stack.enter_context(disk(place))
      env = object_server.environment(f'http://127.0.0.1:{wire.port}') if wire else {}
      more = More(LEASE_S, 0.0 if seed is None else FAILING, env, replay)
      names = alone if seed is None else FOREIGN if is_foreign(seed) else NAMES
      cluster = Cluster(self.config, where, url, self.folder / f'machines-{seed}', names, more)
      stack.callback(cluster.kill)
      chaos = Chaos(cluster, server, wire, random.Random(seed)) if seed is not None else None
      counts = befall(cluster, chaos, until)
      self.facts(seed).write_bytes(bytes(cluster.storage.fetch(decisions.FILE)))
    for folder in (place, self.folder / f'machines-{seed}'):
      shutil.rmtree(folder, ignore_errors=True)
    for file in self.folder.glob(f'{place.name}.db*'):
      file.unlink()
    return counts

  def facts(self, seed: int | None) -> pathlib.Path:
    """The facts.json of a run."""
    return self.folder / f'run-{seed}.json'


def befall(cluster: Cluster, chaos: Chaos | None, until: float) -> collections.Counter[str]:
  """One run, to the end."""
  next_fault, before, patience = time.monotonic() + 1, 0, 0.0
  while not cluster.finished():
    assert time.monotonic() < until + LONGEST_S, f'it does not end: {cluster.registry.counts()}'
    cluster.tend()
    now, done = time.monotonic(), cluster.done()
    if chaos and next_fault < now < until and (done > before or now > patience):
      chaos.strike()
      next_fault = time.monotonic() + chaos.draw.expovariate(1 / PAUSE_S)
      before, patience = done, time.monotonic() + PATIENCE_S
    time.sleep(0.05)
  cluster.end()
  counts = chaos.counts if chaos else collections.Counter[str]()
  counts['modules ' + json.loads(bytes(cluster.storage.fetch('report.json')))['modules_sha256']] += 1
  cluster.check()
  return counts


@pytest.fixture(scope='module')
def expected(config, tmp_path_factory) -> str:
  """Of an undisturbed run."""
  (found,) = Chosen(config, tmp_path_factory.mktemp('undisturbed'), None, '', 'sqlite,folder').run(
    None, time.monotonic()
  )
  return found


@pytest.mark.slow
def test_a_backup_completes_a_stragglers_task(config, expected, tmp_path):
  """One worker stops amid a task, with its lease; the run ends without it. What else it holds waits for a lease."""
  with contextlib.closing(Stopped(config, tmp_path / 'run')) as late:
    late.stop()
    until = time.monotonic() + LONGEST_S
    while not late.cluster.finished():
      assert time.monotonic() < until, late.cluster.registry.counts()
      time.sleep(0.1)
    late.cluster.end()
    late.cluster.check()
    assert 'modules ' + tiny_run.modules_sha256(tmp_path / 'run') == expected
    made = [late.cluster.registry.facts('checkpoint', [task['key']], task['number']) for task in late.tasks]
    assert 'backup-0' in {fact.meta['worker'] for [fact] in made}


class Stopped:
  """A run whose first worker is stopped as soon as others have done some tasks."""

  def __init__(self, config, place: pathlib.Path):
    place.mkdir()
    self.database = f'{place}.db'
    url = f'sqlite:///{self.database}'
    self.cluster = Cluster(config, str(place), url, place.parent / 'machines', LATE, More(lease_s=60))
    self.tasks: list[dict] = []

  def stop(self):
    """It holds a task then, and no transaction."""
    registry, until = self.cluster.registry, time.monotonic() + LONGEST_S
    while not self.tasks:
      assert time.monotonic() < until
      time.sleep(0.02)
      if registry.counts().get('train', {}).get('done', 0) >= 2 and self.held():
        self.cluster.signal(LATE[0], signal.SIGSTOP)
        time.sleep(0.5)
        self.tasks = self.held() if self.can_write() else []
        if not self.tasks:
          self.cluster.signal(LATE[0], signal.SIGCONT)

  def can_write(self) -> bool:
    """Whether nobody was stopped amid a transaction, for which all others would wait for ever."""
    with contextlib.closing(sqlite3.connect(self.database, timeout=5, isolation_level=None)) as connection:
      try:
        connection.execute('BEGIN IMMEDIATE')
      except sqlite3.OperationalError:
        return False
      connection.execute('ROLLBACK')
      return True

  def held(self) -> list[dict]:
    return [task for task in self.cluster.registry.tasks('running', 'train') if task['owner'] == LATE[0]]

  def close(self):
    self.cluster.kill()


@pytest.mark.slow
def test_a_run_of_unequal_phases_under_faults_is_computed_again(
  config, server, endpoint, tmp_path, request, monkeypatch
):  # fmt: skip
  """Phases end by time and without late paths; one worker, and one process, follow what was decided, undisturbed."""
  for name, value in object_server.environment(endpoint).items():
    monkeypatch.setenv(name, value)
  train = dict(phases=8, phase_s=1.5, steps_per_phase=600)
  unequal = one_process.changed(config, train=train, outer=dict(quorum=0.75, grace_s=LEASE_S))
  chosen = [
    Chosen(unequal, tmp_path / name, server, endpoint, request.config.getoption('--chaos_on'))
    for name in ('run', 'again', 'in_one_process')
  ]
  total: collections.Counter[str] = collections.Counter()
  chaos_s, first = request.config.getoption('--chaos_s'), request.config.getoption('--chaos_seed')
  until, seed = time.monotonic() + chaos_s, first
  while time.monotonic() < until:
    counts = chosen[0].run(2 * seed, until)  # nobody computes other bits
    replay = str(chosen[0].facts(2 * seed))
    again = [chosen[1].run(None, time.monotonic(), replay), chosen[2].run(None, time.monotonic(), replay, ONE_PROCESS)]
    digests = [{name for name in each if name.startswith('modules')} for each in (counts, *again)]
    assert digests[0] == digests[1] == digests[2], seed
    decided = json.loads(chosen[0].facts(2 * seed).read_text())
    counts['late'], counts['steps'] = len(decided['late']), sum(taken for *_, taken in decided['steps'])
    total += collections.Counter({name: n for name, n in counts.items() if name not in digests[0]})
    seed += 1
    print(f'{seed - first} runs, each computed again twice to the bit, {total}', flush=True)
  assert total['late'] or chaos_s < 60


@pytest.mark.slow
def test_faults_change_no_bits(config, server, endpoint, expected, tmp_path, request, monkeypatch):
  for name, value in object_server.environment(endpoint).items():
    monkeypatch.setenv(name, value)
  chosen = Chosen(config, tmp_path, server, endpoint, request.config.getoption('--chaos_on'))
  chaos_s = request.config.getoption('--chaos_s')
  total: collections.Counter[str] = collections.Counter()
  until, seed = time.monotonic() + chaos_s, request.config.getoption('--chaos_seed')
  first, runs_alike = seed, 0
  while time.monotonic() < until:
    counts = chosen.run(seed, until)
    if is_foreign(seed):  # what was published first stands, whoever did
      counts = collections.Counter({name: n for name, n in counts.items() if not name.startswith('modules')})
      counts['with a foreign worker'] += 1
    runs_alike += not is_foreign(seed)
    total += counts
    seed += 1
    print(f'{seed - first} runs, {total}', flush=True)
  assert total.pop(expected, 0) == runs_alike and sum(total.values()) >= chaos_s / 6
