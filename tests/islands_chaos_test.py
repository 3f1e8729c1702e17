"""Faults of every kind, drawn by a seed, upon all roles of an islands run: it ends with the bits of an undisturbed one.

`pytest tests/islands_chaos_test.py -n0 -s --chaos_s=1800` goes on for half an hour, run after run.
"""

import collections
import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import subprocess
import time
import traceback

import one_process
import postgres
import pytest
import tiny_run

from dipaco_jax import backup, checkpoint, islands, leases, main, monitor, registry, roles, storage
from dipaco_jax import settings as settings_lib

PROCESSES = multiprocessing.get_context('forkserver')  # with everything imported: a role starts in no time
PROCESSES.set_forkserver_preload(['dipaco_jax.roles', 'dipaco_jax.main'])
NAMES = ('worker-0', 'worker-1', 'worker-2', 'outer-0', 'outer-1', 'evaluator-0', 'monitor-0')
LEASE_S = 4.0
LATE = 'worker-0', 'worker-1', 'backup-0', 'outer-0', 'evaluator-0', 'monitor-0'  # of which the first stops
PAUSE_S = 0.7  # between faults, on average, and until a task is done, but no longer than PATIENCE_S
PATIENCE_S = 6.0
DISK_BYTES = 256 << 20
LONGEST_S = 600  # of a run, after its last fault


def play(name: str, settings: settings_lib.Settings, place: str, url: str, log: str, lease_s: float):
  """A role's process, as the command starts it; one device."""
  with open(log, 'ab') as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
  os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0'
  leases.LOOK_AROUND_S, leases.LONGEST_WAIT_S, monitor.PAUSE_S = 1.0, 0.5, 0.5  # short tasks, short waits
  backup.LOOK_S = 0.5
  main.Signals()
  main.quiet()
  try:
    main.compilation_cache(pathlib.Path(place).parent)
    role, is_backup = name.split('-')[0].replace('backup', 'worker'), name.startswith('backup')
    roles.run_role(role, settings, place, url, name, '', lease_s, is_backup)
  except BaseException:
    traceback.print_exc()
    os._exit(1)
  os._exit(0)


class Cluster:
  """All roles of one run; who dies is started again."""

  def __init__(self, settings: settings_lib.Settings, place: pathlib.Path, url: str, names=NAMES, lease_s=LEASE_S):
    self.settings, self.place, self.url, self.lease_s = settings, place, url, lease_s
    self.logs = place.parent / f'{place.name}-logs'
    self.logs.mkdir()
    self.processes = {name: self.start(name) for name in names}
    self.wakes: dict[str, float] = {}  # when a stopped one goes on
    self.registry = registry.Registry(url, lease_s)

  def start(self, name: str):
    log = str(self.logs / f'{name}.log')
    arguments = name, self.settings, str(self.place), self.url, log, self.lease_s
    process = PROCESSES.Process(target=play, args=arguments, daemon=True)
    process.start()
    return process

  def tend(self):
    """Wakes who has slept long enough, starts who has died; one that ended well has seen that all is done."""
    for name, moment in list(self.wakes.items()):
      if time.monotonic() > moment:
        self.signal(name, signal.SIGCONT)
        del self.wakes[name]
    for name, process in self.processes.items():
      if process.exitcode not in (None, 0):
        self.wakes.pop(name, None)
        self.processes[name] = self.start(name)

  def signal(self, name: str, number: int):
    with contextlib.suppress(ProcessLookupError):
      os.kill(self.processes[name].pid, number)

  def done(self) -> int:
    return sum(states.get('done', 0) for states in self.registry.counts().values())

  def finished(self) -> bool:
    return bool(self.registry.facts('finished'))

  def end(self):
    """Everybody wakes, and goes by himself; the monitor looks once more when the others are gone."""
    for name in self.processes:
      self.signal(name, signal.SIGCONT)
    for name, process in self.processes.items():
      process.join(60)
      assert process.exitcode is not None, f'{name} does not end'
    last = self.start('monitor-0')
    last.join(60)
    assert last.exitcode == 0

  def kill(self):
    for process in self.processes.values():
      process.kill()
      process.join()
    self.registry.close()


class Chaos:
  """One fault after another; counts them."""

  def __init__(self, cluster: Cluster, server: postgres.Server | None, draw: random.Random):
    self.cluster, self.server, self.draw = cluster, server, draw
    self.counts: collections.Counter[str] = collections.Counter()
    kinds = [self.killed, self.stopped, self.terminated, self.damaged, self.delivered_twice]
    self.kinds = kinds + [self.killed] * 3 + [self.database_killed] * bool(server)
    if os.path.ismount(cluster.place):
      self.kinds.append(self.disk_full)

  def strike(self):
    fault = self.draw.choice(self.kinds)
    name = fault.__name__ if fault() is not False else 'nothing to damage'
    self.counts[name] += 1

  def killed(self):
    self.cluster.signal(self.draw.choice(NAMES), signal.SIGKILL)

  def stopped(self):
    name = self.draw.choice(NAMES)
    self.cluster.signal(name, signal.SIGSTOP)
    self.cluster.wakes[name] = time.monotonic() + self.draw.uniform(0.5, 2.5) * LEASE_S

  def terminated(self):
    self.cluster.signal(self.draw.choice(NAMES), signal.SIGTERM)

  def database_killed(self):
    assert self.server
    self.server.kill()
    time.sleep(self.draw.uniform(0, 1))
    self.server.start()

  def damaged(self):
    """A bit of an object or of an executor's sum; or it is gone."""
    files = [f for tree in ('objects', 'scratch') for f in sorted((self.cluster.place / tree).rglob('[!.]*.s*'))]
    if not files:
      return False
    with contextlib.suppress(FileNotFoundError):  # the monitor was faster
      self.draw.choice([pathlib.Path.unlink, flip_in_place])(self.draw.choice(files[-20:]))
    return True

  def delivered_twice(self):
    """What follows from a fact, once more; and its completion, by one whose task it is no more."""
    facts = [f for kind in ('module', 'checkpoint') for f in self.cluster.registry.facts(kind)]
    if not facts:
      return False
    fact = self.draw.choice(facts)
    for row in self.cluster.registry.tasks(kind=MAKES[fact.kind]):
      if (row['key'], row['number']) != fact[1:3]:
        continue
      task = registry.Task(row['id'], row['kind'], row['key'], row['number'], row['fence'] - 1, 'twin', 0, None)
      self.cluster.registry.complete(task, [fact])
    made = one_process.Machine(self.cluster.settings, {}).islands(self.cluster.place, url=self.cluster.url)
    islands.schedule(made, [fact])
    one_process.close(made)
    return True

  def disk_full(self):
    filler = self.cluster.place / 'filler'
    with contextlib.suppress(OSError), open(filler, 'wb') as f:
      while True:
        f.write(bytes(1 << 20))
    time.sleep(self.draw.uniform(0.5, 2))
    filler.unlink()


MAKES = {'module': 'outer', 'checkpoint': 'train'}


def flip_in_place(file: pathlib.Path):
  with open(file, 'r+b') as f:
    f.seek(file.stat().st_size // 2)
    byte = f.read(1)[0]
    f.seek(-1, 1)
    f.write(bytes([byte ^ 1]))


@contextlib.contextmanager
def disk(place: pathlib.Path):
  """One of its own that may be filled, for root; else a folder."""
  place.mkdir()
  command = ['mount', '-t', 'tmpfs', '-o', f'size={DISK_BYTES}', 'tmpfs', str(place)]
  mounted = os.geteuid() == 0 and not subprocess.run(command, capture_output=True).returncode
  try:
    yield
  finally:
    if mounted:
      subprocess.run(['umount', '-l', str(place)], check=True)


@pytest.fixture(scope='module')
def config(tmp_path_factory) -> settings_lib.Settings:
  found: dict = {}
  exec(tiny_run.write_config(tmp_path_factory.mktemp('config')).read_text(), found)
  return settings_lib.from_dict(found['get_config']().to_dict())


@pytest.fixture(scope='module')
def server():
  """PostgreSQL's where it is installed."""
  made = postgres.Server() if postgres.programs() else None
  yield made
  if made:
    made.stop()


def run(config, place: pathlib.Path, server, draw: random.Random | None, until: float) -> collections.Counter[str]:
  """To the end; with faults before `until`, if there is something to draw them with."""
  url = server.new_database() if server else f'sqlite:///{place}.db'
  counts: collections.Counter[str] = collections.Counter()
  with disk(place), contextlib.ExitStack() as stack:
    cluster = Cluster(config, place, url)
    stack.callback(cluster.kill)
    chaos = draw and Chaos(cluster, server, draw)
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
    if chaos:
      counts = chaos.counts
    cluster.end()
    counts['modules ' + tiny_run.modules_sha256(place)] += 1
    check(cluster)
  return counts


def check(cluster: Cluster):
  """No task is open, no object is left that nobody needs, nothing is half written."""
  place = cluster.place
  assert {state for states in cluster.registry.counts().values() for state in states} == {'done'}
  assert not [fact for fact in cluster.registry.unscheduled() if fact.kind != 'finished']  # from which nothing follows
  last = {cluster.settings.train.phases, *checkpoint.best_versions(place)}
  kept = {fact.uri for fact in cluster.registry.facts('module') if fact.number in last}
  assert set(storage.open_storage(str(place)).names(islands.OBJECTS)) <= kept  # what was damaged since is not missed
  aside = [f for f in place.rglob('*') if storage.ASIDE.fullmatch(f.name) or f.name.startswith('.version')]
  assert not [f for f in aside if 'checkpoints' not in f.parts], aside
  report = json.loads((place / 'report.json').read_text())
  assert report['modules_sha256'] == cluster.registry.facts('finished')[0].sha256


@pytest.fixture(scope='module')
def expected(config, server, tmp_path_factory) -> str:
  """Of an undisturbed run."""
  (found,) = run(config, tmp_path_factory.mktemp('undisturbed') / 'run', server, None, time.monotonic())
  return found


def test_a_backup_does_what_a_straggler_is_at(config, server, expected, tmp_path):
  """One worker stops in the middle of a task, with its lease; the run ends without it, and then it goes on."""
  with contextlib.closing(Stopped(config, server, tmp_path / 'run')) as late:
    late.stop()
    until = time.monotonic() + LONGEST_S
    while not late.cluster.finished():
      assert time.monotonic() < until, late.cluster.registry.counts()
      time.sleep(0.1)
    late.cluster.end()
    check(late.cluster)
    assert 'modules ' + tiny_run.modules_sha256(tmp_path / 'run') == expected
    (made,) = late.cluster.registry.facts('checkpoint', [late.task['key']], late.task['number'])
    assert made.meta['worker'] == 'backup-0'


class Stopped:
  """A run whose first worker is stopped as soon as others have done some tasks."""

  def __init__(self, config, server, place: pathlib.Path):
    place.mkdir()
    url = server.new_database() if server else f'sqlite:///{place}.db'
    self.cluster = Cluster(config, place, url, LATE, lease_s=600)
    self.task: dict = {}

  def stop(self):
    """It holds a task then, and no transaction."""
    registry, until = self.cluster.registry, time.monotonic() + LONGEST_S
    while not self.task:
      assert time.monotonic() < until
      time.sleep(0.02)
      if registry.counts().get('train', {}).get('done', 0) >= 2 and self.held():
        self.cluster.signal(LATE[0], signal.SIGSTOP)
        time.sleep(0.5)
        self.task = next(iter(self.held()), {})
        if not self.task:
          self.cluster.signal(LATE[0], signal.SIGCONT)

  def held(self) -> list[dict]:
    return [task for task in self.cluster.registry.tasks('running', 'train') if task['owner'] == LATE[0]]

  def close(self):
    self.cluster.kill()


def test_chaos(config, server, expected, tmp_path, request):
  chaos_s = request.config.getoption('--chaos_s')
  total: collections.Counter[str] = collections.Counter()
  until, seed = time.monotonic() + chaos_s, 0
  while time.monotonic() < until:
    place = tmp_path / f'run{seed}'
    total += run(config, place, server, random.Random(seed), until)
    shutil.rmtree(place)
    seed += 1
    print(f'{seed} runs, {total}', flush=True)
  assert total.pop(expected) == seed and sum(total.values()) > chaos_s / 6
