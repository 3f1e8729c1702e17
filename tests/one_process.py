"""All roles of an islands run in one process, which is stopped dead at any write, rename or commit."""

import contextlib
import gc
import itertools
import os
import pathlib
import shutil
import threading
from collections.abc import Iterable

import pytest

from dipaco_jax import evaluator, leases, outer_executor, registry, roles, storage, worker
from dipaco_jax import run as run_lib
from dipaco_jax import settings as settings_lib
from dipaco_jax.islands import Islands

KINDS = worker.KINDS + outer_executor.KINDS + evaluator.KINDS
LEASE_S = 0.5
OURS = '(_renew)', '(note)', 'ThreadPoolExecutor'  # threads that a process of a role starts


class Killed(SystemExit):
  """The process is gone; threads end at this without a word."""


class Faults:
  """Points that are passed, by name; at the chosen ones everything stops, once, and nothing has any effect after it."""

  def __init__(self, chosen: Iterable[str] = ()):
    self.chosen, self.dead = set(chosen), False
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
      self.dead = True
      raise Killed(name)

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


UNNAMED = 'checkpoints', 'cache', 'plots'  # of Orbax, of JAX, and pictures: made by others, or again each time


def named(row) -> str:
  return f'{row.kind} {row.key} {row.number}'


def first(rows, *rest) -> str:
  rows = list(rows)
  return f'{len(rows)} from {named(rows[0])}' if rows else 'nothing'


CALLS = (
  (storage.Storage, 'write', lambda name, data, sha256='': name),
  (registry.Registry, 'complete', lambda task, facts: named(task)),
  (registry.Registry, 'put', first),
  (registry.Registry, 'add_tasks', lambda tasks: 'tasks'),
  (registry.Registry, 'wake', lambda kind, keys, number: f'{kind} {"+".join(keys)} {number}'),
  (registry.Registry, 'mark_scheduled', first),
  (registry.Registry, 'release', lambda task, waiting=False, error='': f'{named(task)} {error}'),
  (registry.Registry, 'heartbeat', lambda task, progress=None: f'{named(task)} {(progress or {}).get("step", "")}'),
)


class Machine:
  """Where the lives of one test take place; what was compiled is theirs together."""

  def __init__(self, settings: settings_lib.Settings, programs: dict):
    self.settings, self.programs = settings, programs

  def islands(self, place: pathlib.Path, workdir: pathlib.Path | None = None, url: str = '') -> Islands:
    """As a process that has just begun; its workdir is the place itself, unless it is a machine far away."""
    workdir = workdir or place
    workdir.mkdir(parents=True, exist_ok=True)
    facts = registry.Registry(url or f'sqlite:///{place}/registry.db', LEASE_S)
    roles.settle(facts, self.settings, workdir)
    run = run_lib.unattended(workdir, roles.on_own_devices(self.settings))
    run.__dict__.update(self.programs)
    return Islands(run, facts, storage.open_storage(str(place)), 'all')

  def live(self, place: pathlib.Path, workdir: pathlib.Path | None = None):
    """Serves until the run is finished, or the process is killed."""
    islands, before = self.islands(place, workdir), set(threading.enumerate())
    executor = outer_executor.Executor(islands.run.workdir / 'scratch')
    performs = {
      **dict.fromkeys(worker.KINDS, worker.perform), **dict.fromkeys(evaluator.KINDS, evaluator.perform),
      **dict.fromkeys(outer_executor.KINDS, executor.perform),
    }  # fmt: skip
    try:
      perform = lambda i, task, lease: performs[task.kind](i, task, lease)  # noqa: E731
      leases.Role(islands, 'all', KINDS, perform, fetches={'train': worker.fetch}).serve()
    finally:
      for thread in set(threading.enumerate()) - before:
        if any(words in thread.name for words in OURS):
          thread.join(10)
      close(islands)
      for name in ('model', 'programs', 'base_programs'):
        if name in islands.run.__dict__:
          self.programs[name] = islands.run.__dict__[name]

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


def close(islands: Islands):
  islands.registry.close()
  islands.run.metrics.close()


def outcome(place: pathlib.Path) -> dict:
  """{name of a fact: (uri, sha256)} of all that a run has come to."""
  facts = registry.Registry(f'sqlite:///{place}/registry.db')
  found = {}
  for kind in ('prepared', 'checkpoint', 'module', 'evaluation', 'round', 'finished'):
    found |= {named(fact): (fact.uri, fact.sha256) for fact in facts.facts(kind)}
  facts.close()
  return found
