"""All roles of an islands run as processes of their own, which tests strike down."""

import contextlib
import errno
import json
import multiprocessing
import os
import pathlib
import random
import signal
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import cheater
import quick_xla

from dipaco_jax.command_line import command
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.islands import claims, inner_phase, island, module_weights, monitor, role_loop, roles
from dipaco_jax.processes import stopping
from dipaco_jax.registry import registry
from dipaco_jax.storage import backends, files, object_store
from dipaco_jax.training import compilation_cache

PROCESSES = multiprocessing.get_context('forkserver')  # with everything imported: a role starts in no time
PROCESSES.set_forkserver_preload([roles.__name__])  # one that cannot be imported would be passed over in silence
LONGEST_S = 600  # of a run, after its last fault


class More(NamedTuple):
  """What processes differ in from those that the command starts."""

  lease_s: float
  failing: float = 0.0  # of a folder's reads and writes, with EIO
  env: Mapping[str, str] = {}
  replay: str = ''  # facts.json of a run whose decisions are followed


def work(name: str, settings: settings_lib.Settings, place: str, url: str, more: More):
  """Works in the role that the name begins with."""
  kind, is_backup = name.split('-')[0], name.startswith('backup')
  role = 'worker' if kind in ('backup', 'foreign', 'all', *cheater.KINDS) else kind
  if kind in cheater.KINDS:
    cheater.install(kind)
  if kind == 'foreign':
    inner_phase.run = cheater.rounding_otherwise(inner_phase.run)
  more_of_it = dict(is_backup=is_backup, replay=more.replay, has_all_roles=kind == 'all')
  process = roles.Process(role, place, more.lease_s, url, name, **more_of_it)
  roles.run_role(process, settings)


def play(work, name: str, settings: settings_lib.Settings, place: str, url: str, folder: pathlib.Path, more: More):
  """A role's process, as the command starts it; one device. Its machine is its own, unless the place is a folder."""
  with open(folder / f'{name}.log', 'ab') as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
  other_disk = folder / f'{name}-other'  # where Python makes temporary files if the machine's own disk is full
  other_disk.mkdir(exist_ok=True)
  os.environ.update(more.env, TMPDIR=str(folder / name), TEMP=str(other_disk))
  (folder / name).mkdir(exist_ok=True)
  tempfile.tempdir = None  # what is kept of the environment before
  for method in ('put', 'get'):
    setattr(backends.Folder, method, failing_at_times(getattr(backends.Folder, method), more.failing))
  os.environ['XLA_FLAGS'] = quick_xla.on(1)
  role_loop.LOOK_AROUND_S, role_loop.LONGEST_WAIT_S, monitor.PAUSE_S = 1.0, 0.5, 0.5  # short tasks, short waits
  claims.LOOK_S = 0.5
  command.quiet()
  try:
    with stopping.listening():
      compilation_cache.keep()
      work(name, settings, place, url, more)
  except InputError as e:
    print(e, flush=True)
    os._exit(2)
  except BaseException:
    traceback.print_exc()
    os._exit(1)
  os._exit(0)


def failing_at_times(real, failing: float):
  def call(*args):
    if random.random() < failing:
      raise OSError(errno.EIO, 'the disk has its moments')
    return real(*args)

  return call


class Cluster:
  """All roles of one run; who dies is started again."""

  work = staticmethod(work)

  def __init__(
    self, settings: settings_lib.Settings, place: str, url: str, folder: pathlib.Path, names: Sequence[str], more: More
  ):
    self.settings, self.place, self.url, self.folder, self.more = settings, place, url, folder, more
    folder.mkdir(exist_ok=True)
    self.storage = object_store.open_storage(place)
    self.processes = {name: self.start(name) for name in names}
    self.registry = registry.Registry(url, more.lease_s)

  def machine(self, name: str) -> pathlib.Path:
    """The disk of a role's machine; unless the place is a folder, which has everything then."""
    return self.folder / name

  def start(self, name: str):
    arguments = self.work, name, self.settings, self.place, self.url, self.folder, self.more
    process = PROCESSES.Process(target=play, args=arguments, daemon=True)
    process.start()
    return process

  def tend(self):
    """Starts who has died; one that ended well has seen that all is done, and with status 2 it is suspended."""
    for name, process in self.processes.items():
      if process.exitcode not in (None, 0, 2):
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

  def check(self):
    """It has ended clean: no task is open, no object is left that nobody needs, nothing is half written."""
    assert {state for states in self.registry.counts().values() for state in states} == {'done'}
    assert not [fact for fact in self.registry.unscheduled() if fact.kind != 'finished']  # from which nothing follows
    best = json.loads(bytes(self.storage.fetch('paths/best.json')))['version']
    last = {self.settings.train.phases, *best}
    kept = module_weights.objects(
      self.registry, [fact for fact in self.registry.facts('module') if fact.number in last]
    )
    assert set(self.storage.names(island.OBJECTS)) <= kept  # what was damaged since is not missed
    report = json.loads(bytes(self.storage.fetch('report.json')))
    assert report['modules_sha256'] == self.registry.facts('finished')[0].sha256
    assert json.loads(bytes(self.storage.fetch('evaluation/excerpts.json')))['documents']
    if place := self.storage.local_path(''):
      aside = [f for f in place.rglob('*') if files.ASIDE.fullmatch(f.name) or f.name.startswith('.version')]
      assert not [f for f in aside if 'checkpoints' not in f.parts], aside
      assert not (place / 'scratch').exists() and not (place / 'held').exists()

  def kill(self):
    for process in self.processes.values():
      process.kill()
      process.join()
    self.registry.close()
