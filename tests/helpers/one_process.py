"""All roles of an islands run in one process, which is stopped dead at any write, rename or commit."""

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator

import jax
import pytest
import tiny_run
from backends import Backend

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.data import tokenizer_files
from dipaco_jax.islands import (
  all_roles,
  claims,
  decisions,
  hand_over,
  held_states,
  island,
  monitor,
  outer_executor,
  registration,
  role_loop,
  roles,
  screening_facts,
  state_facts,
  worker,
)
from dipaco_jax.islands.claims import Claims
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.registry import registry
from dipaco_jax.reports import figures, island_figures
from dipaco_jax.storage import object_store

KINDS = worker.KINDS + all_roles.KINDS
LEASE_S = 0.5
PREPARED, TRAINED = 'after claim train 0 0', 'after claim finish  0'
OWN_LEVELS = (('ends', 'embed|final', ()), ('low', 'block_0', ('a',)), ('own', 'block_1', ('a', 'b')))
OURS = '(_renew)', '(note)', 'ThreadPoolExecutor'  # threads that a process of a role starts


class Killed(SystemExit):
  """The process is gone; threads end at this without a word."""


class Faults:
  """Points that are passed, by name; at the chosen ones something strikes, once.

  By default everything stops there, and nothing has any effect after it.
  """

  def __init__(self, chosen: Iterable[str] = (), strike: Callable[[], None] | None = None):
    self.chosen, self.strike, self.dead = set(chosen), strike or self.kill, False
    self.passed: list[str] = []
    self.hit: list[str] = []

  def alive(self):
    if self.dead:
      raise Killed

  def point(self, name: str):
    self.alive()
    self.passed.append(name)
    if name in self.chosen:
      self.chosen.discard(name)
      self.hit.append(name)
      self.strike()

  def kill(self):
    self.dead = True
    raise Killed

  @contextlib.contextmanager
  def installed(self, place: pathlib.Path):
    """Around every write below `place`, and every change of the registry."""
    with pytest.MonkeyPatch.context() as patch:
      for owner, method, words in CALLS:
        self._surround(patch, owner, method, words)
      real = threading.excepthook  # pytest's, to which SystemExit is news
      patch.setattr(threading, 'excepthook', lambda args: args.exc_type is Killed or real(args))
      self._claims(patch)
      self._files(patch, place)
      yield self

  def _surround(self, patch, owner, method: str, words):
    real = getattr(owner, method)

    def surrounded(this, *args, **options):
      name = f'{method} {words(*args, **options)}'
      self.point(f'before {name}')
      result = real(this, *args, **options)
      self.point(f'after {name}')
      return result

    patch.setattr(owner, method, surrounded)

  def _claims(self, patch):
    real = registry.Registry.claim

    def claim(this, *args):
      self.alive()
      task = real(this, *args)
      self.point(f'after claim {named(task)}' if task else 'after claim of nothing')
      return task

    patch.setattr(registry.Registry, 'claim', claim)

  def _files(self, patch, place: pathlib.Path):
    replace, unlink, rmtree = os.replace, pathlib.Path.unlink, shutil.rmtree

    def replaced(source, target):
      name = pathlib.Path(target).relative_to(place) if str(target).startswith(f'{place}/') else None
      if name is None or name.parts[0] in UNNAMED:
        return replace(source, target)
      self.point(f'before replace {name}')
      replace(source, target)
      self.point(f'after replace {name}')

    def cleaning(real):
      def clean(*args, **options):
        self.alive()  # what is dead does not tidy up
        return real(*args, **options)

      return clean

    patch.setattr(os, 'replace', replaced)
    patch.setattr(pathlib.Path, 'unlink', cleaning(unlink))
    patch.setattr(shutil, 'rmtree', cleaning(rmtree))


UNNAMED = 'checkpoints', 'plots'  # of Orbax, and pictures: made by others, or again each time


def named(row) -> str:
  return f'{row.kind} {row.key} {row.number}'


def first(rows, **_) -> str:
  rows = list(rows)
  return f'{len(rows)} from {named(rows[0])}' if rows else 'nothing'


CALLS = (
  (object_store.Storage, 'write', lambda name, data, sha256='': name),
  (registry.Registry, 'complete', lambda task, facts, **_: named(task)),
  (registry.Registry, 'put', first),
  (registry.Registry, 'reopen', lambda task, kind, key, number: f'{kind} {key} {number}'),
  (registry.Registry, 'add_tasks', lambda tasks: 'tasks'),
  (registry.Registry, 'wake', lambda kind, keys, number: f'{kind} {"+".join(keys)} {number}'),
  (registry.Registry, 'mark_scheduled', first),
  (registry.Registry, 'release', lambda task, waiting=False, error='': f'{named(task)} {error}'),
  (registry.Registry, 'heartbeat', named),
)


@contextlib.contextmanager
def one_device() -> Iterator[None]:
  """Of the fake ones; no waiting where nothing else is to be done, and one picture in the report."""
  with pytest.MonkeyPatch.context() as patch:
    devices = jax.devices()[:1]
    patch.setattr(jax, 'devices', lambda: devices)
    patch.setattr(jax, 'device_count', lambda: 1)
    waits = {'SHORTEST_WAIT_S': 0.02, 'LONGEST_WAIT_S': 0.1, 'LOOK_AROUND_S': 0.1}
    for name, seconds in waits.items():
      patch.setattr(role_loop, name, seconds)
    patch.setattr(claims, 'LONGEST_ASK_AGAIN_S', 0.0)
    patch.setattr(monitor, 'PAUSE_S', 0.05)
    patch.setattr(figures, 'SECTIONS', {'Islands': {'timeline': island_figures.timeline}})
    yield


def two_phases(folder: pathlib.Path) -> settings_lib.Settings:
  """A run's settings; its text is in the folder."""
  found: dict = {}
  exec(tiny_run.write_config(folder).read_text(), found)
  values = found['get_config']()
  values.train.phases, values.inner.decay_steps = 2, 36
  return settings_lib.from_dict(values.to_dict())


def changed(s: settings_lib.Settings, levels=None, **sections) -> settings_lib.Settings:
  values = {name: dataclasses.replace(getattr(s, name), **fields) for name, fields in sections.items()}
  return dataclasses.replace(s, **values, levels=levels or s.levels)


class Machine:
  """Where the lives of one test take place; what was compiled is theirs together."""

  def __init__(self, settings: settings_lib.Settings, programs: dict, backend: Backend | None = None):
    self.settings, self.programs, self.backend = settings, programs, backend or Backend()
    self.decisions = None  # that a replay follows

  def other(self, settings: settings_lib.Settings | None = None, backend: Backend | None = None) -> 'Machine':
    """Of another config or with another backend; programs are shared where they are the same."""
    s = settings or self.settings
    is_same = (s.levels, s.outer, s.checkpoint) == (self.settings.levels, self.settings.outer, self.settings.checkpoint)
    return Machine(s, self.programs if is_same else {}, backend or self.backend)

  def begin(self, prepared: pathlib.Path, place: pathlib.Path, s: settings_lib.Settings) -> 'Machine':
    """For another config of training, whose text, base and shards are in the place already."""
    place.mkdir()
    copy(prepared, place, 'sequences', 'base', 'features', 'routing', 'shards', 'stages', tokenizer_files.MODEL)
    return self.other(s)

  def island(
    self, place: pathlib.Path, workdir: pathlib.Path | None = None, url: str = '', storage: str = ''
  ) -> island.Island:
    """As a process that has just begun; its workdir is the place itself, unless it is a machine far away."""
    workdir = workdir or place
    workdir.mkdir(parents=True, exist_ok=True)
    facts = registry.Registry(url or self.backend.registry(place), LEASE_S)
    place_of = object_store.open_storage(storage or self.backend.storage(place))
    registration.settle(facts, place_of, self.settings, workdir)
    run = run_lib.unattended(workdir, roles.on_own_devices(self.settings))
    run.__dict__.update(self.programs)
    made = island.Island(run, facts, place_of, 'all')
    return dataclasses.replace(made, resumed=screening_facts.resume(made), decisions=self.decisions)

  def live(self, place: pathlib.Path, workdir: pathlib.Path | None = None):
    """Serves until the run is finished, or the process is killed."""
    made, before = self.island(place, workdir), set(threading.enumerate())
    executor = outer_executor.Executor(made.run.workdir / 'scratch' / str(made.resumed))
    slot = contextlib.ExitStack()
    # Nobody would answer; on a busy machine a replay might take long enough to ask for its state.
    slot.enter_context(pytest.MonkeyPatch.context()).setattr(hand_over, 'WORTHWHILE', math.inf)
    held = slot.enter_context(held_states.slot(made.run.workdir))
    line = state_facts.Line()
    does = worker.Worker(held, line=line)
    performs = all_roles.perform(does.perform, executor.perform)
    try:

      def perform(i, task, lease):
        if task.kind not in worker.TRAIN:
          return performs(i, task, lease)
        state_facts.publish_aside(made, held, line)  # in a thread of a worker's
        publish = performs(i, task, lease)
        state_facts.publish_aside(made, held, line)  # what a replay has made
        return publish

      role_loop.Role(
        Claims(made, 'all', KINDS, fetches=dict.fromkeys(worker.TRAIN, does.fetch), holder=held.holder), perform
      ).serve()
    finally:
      for pool in (made.weights.reader, made.weights.kept.writer, does.scheduler):
        pool.shutdown(wait=False, cancel_futures=True)
      for thread in set(threading.enumerate()) - before:
        if any(words in thread.name for words in OURS):
          thread.join(10)
      slot.close()
      close(made)
      for name in ('model', 'programs', 'base_programs'):
        if name in made.run.__dict__:
          self.programs[name] = made.run.__dict__[name]

  def to_the_end(self, place: pathlib.Path, faults: Faults, far: pathlib.Path | None = None, end: str = ''):
    """Starts anew whenever it was killed (on another machine, below `far`), but not after the point `end`."""
    faults.chosen |= {end}
    with faults.installed(place):
      for life in itertools.count():
        faults.dead = False
        with contextlib.suppress(Killed):
          self.live(place, far and far / str(life))
        if not faults.dead or faults.hit[-1] == end:
          break
    gc.collect()  # files that a dead process has left open are closed, and said to be, here


def close(made: island.Island):
  made.registry.close()
  made.run.metrics.close()


def decisions_of(made: island.Island, folder: pathlib.Path) -> decisions.Decisions:
  """Writes the facts.json of a run to a folder, and reads it as a replay does."""
  file = folder / decisions.FILE
  file.write_text(json.dumps(decisions.to_json(made.registry)))
  return decisions.read(str(file), settings_lib.of_run(made.registry.facts('config')[0].meta['config']))


def copy(source: pathlib.Path, target: pathlib.Path, *names: str):
  """Files and directories."""
  for name in names:
    (shutil.copytree if (source / name).is_dir() else shutil.copy)(source / name, target / name)


@pytest.fixture
def made(tmp_path) -> Iterator[island.Island]:
  """A process of a run that has just begun, on one device."""
  with one_device():
    found = Machine(two_phases(tmp_path), {}).island(tmp_path)
    yield found
    close(found)


def with_settings(made: island.Island, **sections) -> island.Island:
  """The same process, of a run with other settings."""
  return dataclasses.replace(made, run=dataclasses.replace(made.run, settings=changed(made.run.settings, **sections)))
