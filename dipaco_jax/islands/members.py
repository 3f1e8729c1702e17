"""Owners that join and leave a run while it trains, as facts say, each decided once and in one transaction.

    joined (number)    `owner` is one more coordinate of the axis of owners; with it, its modules of version 0, which
                       are parts of the base as those of all others are
    began (owner)      the text of an owner that joined is read: its paths train from the phase `since` on, the newest
                       version of any module; with it, its modules of that version, still those of the base
    left (owner)       its paths take part in no phase from `until` on, for each path the number of phases that it has
                       contributed to so far

Nobody waits for an owner before it has begun, nor after it has left: its paths are not active (`Island.active_paths`).
No version after `since` can be made without a path that begins, and none after `until` needs one that leaves: the
transaction takes the outer tasks that are running from their executors, and who claims a task learns how many of these
facts there are. A process that knows fewer gives the task back, ends its island, and continues with a new one (`grow`).
It is the same process; programs are compiled again. What such a process has done before stands, because it concerns no
path of the owner; it notes no fact as scheduled (`Registry.mark_scheduled`), so that others add what it left out.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from dipaco_jax.config import owners
from dipaco_jax.config.owners import Members
from dipaco_jax.core.errors import InputError
from dipaco_jax.islands.island import OF_PATHS, OWN_TEXT, Island
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.registry import database
from dipaco_jax.registry.database_errors import Damaged
from dipaco_jax.registry.fact_rows import Newest
from dipaco_jax.registry.registry import FINISHED, Fact, NewTask, Registry
from dipaco_jax.registry.registry_schema import MEMBERS
from dipaco_jax.registry.worker_registry import WorkerRegistry
from dipaco_jax.storage.object_store import Storage

JOINED, BEGAN, LEFT = MEMBERS
OUTER_TASK = 'outer'
ENDED = tuple(kind for kind in OF_PATHS if kind != 'judge')  # with an owner: what it has sent still counts


class Changed(Exception):
  """Owners have joined or left since this process began or grew; it continues with a new island."""


def read(registry: WorkerRegistry) -> Members:
  """Returns which owners have joined and left. The kinds are read in an order in which none can name a later one."""
  left, began, joined = (registry.facts(kind) for kind in (LEFT, BEGAN, JOINED))
  since = {fact.key: fact.meta['since'] for fact in began}
  until = {int(path): phases for fact in left for path, phases in fact.meta['until'].items()}
  names = tuple(fact.meta['owner'] for fact in joined)
  return Members(names, since, until, tuple(fact.key for fact in left), len(left) + len(began) + len(joined))


def joined_so_far(url: str) -> tuple[str, ...]:
  """Returns the owners that have joined the run of a registry, or none if there is no registry yet."""
  file = database.sqlite_file(url)
  if file and not file.exists():
    return ()
  with contextlib.suppress(Damaged), contextlib.closing(Registry(url, reads_only=True)) as registry:
    return read(registry).joined
  return ()  # a database without tables


def grown_run(run: run_lib.Run, joined: Sequence[str]) -> run_lib.Run:
  """Returns a run with its settings after owners have joined, with nothing compiled; the run itself if none have."""
  return run if not joined else dataclasses.replace(run, settings=owners.join(run.settings, joined))


def run_of(island: Island, owner: str = '') -> run_lib.Run:
  """Returns the run as it was when an owner joined, or as it began: stages do not depend on who joined later."""
  joined = island.members.joined
  later = joined[joined.index(owner) + 1 :] if owner in joined else joined
  settings = owners.before_joins(island.run.settings, later)
  return dataclasses.replace(island.run, settings=settings) if later else island.run


def make_island(run: run_lib.Run, registry: Registry, storage: Storage, name: str) -> Island:
  """Returns an island of a run with its config's settings, with all owners that have joined or left so far."""
  members = read(registry)
  return Island(grown_run(run, members.joined), registry, storage, name, members=members)


def grow(island: Island) -> Island:
  """Returns the island with all owners that have joined or left so far."""
  members, before = read(island.registry), island.members
  run = grown_run(island.run, members.joined[len(before.joined) :])
  return dataclasses.replace(island, run=run, members=members)


def log_changes(before: Members, now: Members):
  """Logs who has joined, begun and left."""
  for owner in now.joined[len(before.joined) :]:
    logging.warning('%s has joined this run', owner)
  for owner in now.since.keys() - before.since.keys():
    logging.warning('%s trains from phase %d on', owner, now.since[owner] + 1)
  for owner in set(now.left) - set(before.left):
    logging.warning('%s has left this run', owner)


def heed(island: Island):
  """Raises Changed if owners have joined or left that this island does not know."""
  if island.run.settings.data.own_text and island.registry.count_members() != island.members.num_facts:
    raise Changed


# -- the three decisions


def add(island: Island, owner: str):
  """Adds an owner, who may join at any time from now on. Raises InputError if that is not possible."""
  owners.check_changes(island.run.settings, is_join=True)
  _check_trains(island)
  is_added = False
  while not is_added:  # else another owner has joined meanwhile
    facts = _facts_of_join(grow(island), owner)
    is_added = island.registry.decide(functools.partial(_given, facts), fenced='')


def _given(facts: list[Fact], newest: Newest) -> list[Fact]:
  """Returns facts that do not depend on what is newest."""
  return facts


def _facts_of_join(island: Island, owner: str) -> list[Fact]:
  """Returns the facts that one more owner joins. Raises InputError if the run has one of that name."""
  known, joined = owners.names(island.layout.grid), island.members.joined
  if owner in island.members.left:
    raise InputError(f'{owner} has left this run: an owner who comes back needs another name')
  if owner in known:
    raise InputError(f'{owner} is an owner of this run already: these are {", ".join(known)}')
  larger = dataclasses.replace(island, run=grown_run(island.run, [owner]))
  base = {fact.key.partition('/')[0]: fact for fact in larger.registry.facts('module', number=0)}
  new = sorted(set(larger.all_modules()) - set(island.all_modules()))
  modules = [base[key.partition('/')[0]]._replace(key=key) for key in new]
  return [Fact(JOINED, '', len(joined), '', '', {'owner': owner}), *modules]


def begin(island: Island, owner: str):
  """Decides from which phase on an owner that joined trains, now that its text is read; does so once."""
  paths = owners.paths_of(island.layout.grid, owner)
  own = modules_of(island, paths)
  base = island.registry.facts('module', own, 0)

  def facts(newest: Newest) -> list[Fact]:
    since = max(newest('module').values())
    modules = [fact._replace(number=since) for fact in base] if since else []
    return [Fact(BEGAN, owner, 0, '', '', {'since': since}), *modules]

  island.registry.decide(facts, OUTER_TASK)


def remove(island: Island, owner: str):
  """Removes an owner, who takes part in nothing from now on. Raises InputError if that is not possible."""
  owners.check_changes(island.run.settings, is_join=False)
  _check_trains(island)
  island = grow(island)
  known, left = owners.names(island.layout.grid), island.members.left
  if owner not in known:
    raise InputError(f'{owner} is no owner of this run: these are {", ".join(known)}')
  if owner in left:
    raise InputError(f'{owner} has left this run already')
  others = [name for name in known if name not in left and name not in pending(island)]
  if others == [owner]:
    raise InputError(f'{owner} is the last owner of this run: stop its processes instead')
  paths = owners.paths_of(island.layout.grid, owner)

  def facts(newest: Newest) -> list[Fact]:
    trained = newest('checkpoint')
    until = {str(path): trained.get(str(path), -1) + 1 for path in paths}
    return [Fact(LEFT, owner, 0, '', '', {'until': until})]

  if not island.registry.decide(facts, OUTER_TASK, tasks_of(island, [owner])):
    raise InputError(f'{owner} has left this run already')


def _check_trains(island: Island):
  """Raises InputError unless the run is prepared and not finished."""
  if island.registry.facts(FINISHED):
    raise InputError('this run is finished: its owners stay as they are')
  if not island.registry.facts('prepared'):
    raise InputError("the keeper has not prepared this run yet: try again when `status` shows 'prepare 1 of 1'")


# -- what follows


def modules_of(island: Island, paths: Iterable[int]) -> list[str]:
  """Returns the modules through which none but these paths go."""
  alone = set(paths)
  keys = {key for path in alone for key in island.modules_of(path).values()}
  return sorted(key for key in keys if alone.issuperset(island.paths_through(key)))


def modules_left(island: Island) -> set[str]:
  """Returns the modules through which only paths of owners go that have left."""
  return set(modules_of(island, island.members.until)) if island.members.until else set()


def tasks_of(island: Island, names: Iterable[str]) -> list[tuple[str, list[str]]]:
  """Returns the tasks of owners, as kinds and keys, and those of modules that only their paths go through."""
  paths = [path for owner in names for path in owners.paths_of(island.layout.grid, owner)]
  keys = [*map(str, paths)]
  all_left = {*paths, *island.members.until}
  return [
    (OWN_TEXT, [*names]),
    *((kind, keys) for kind in ENDED),
    (OUTER_TASK, modules_of(island, all_left)),
  ]


def optional_tasks(island: Island) -> tuple[str, list[str]] | None:
  """Returns the tasks that nobody waits for: reading the text of owners that have joined and not begun."""
  waiting = pending(island)
  return (OWN_TEXT, waiting) if waiting else None


def pending(island: Island) -> list[str]:
  """Returns the owners that have joined and whose text is not read yet."""
  return [owner for owner in island.members.joined if owner not in island.members.since]


def add_text_task(island: Island, owner: str):
  """Adds the task that reads the text of an owner who has joined, unless it has left or the run is finished."""
  members = island.members
  if owner in members.joined and owner not in members.left and not island.registry.facts(FINISHED):
    island.registry.add_tasks([NewTask(OWN_TEXT, owner, 0)])


def describe(island: Island, owner: str) -> str:
  """Says since when an owner takes part in the run, and until when if it has left."""
  members, since = island.members, 'from the beginning'
  if owner in members.joined:
    since = 'has joined; its text is not read yet'
  if owner in members.since:
    since = f'has joined, trains from phase {members.since[owner] + 1} on'
  if owner in members.left:
    last = max(members.until[path] for path in owners.paths_of(island.layout.grid, owner))
    return f'{owner}: has left after phase {last}' if last else f'{owner}: has left before its first phase'
  return f'{owner}: {since}'


def lines(island: Island) -> list[str]:
  """Returns a line for each owner that has joined or left."""
  changed = {*island.members.joined, *island.members.left}
  return [describe(island, owner) for owner in owners.names(island.layout.grid) if owner in changed] if changed else []


def changes_of_phase(island: Island, phase: int) -> dict[str, Any]:
  """Returns the owners whose first phase this is, and those who have left before it, for the phase's row of metrics."""
  members, grid = island.members, island.layout.grid
  joined = [owner for owner, since in members.since.items() if since == phase]
  last = {owner: max(members.until[path] for path in owners.paths_of(grid, owner)) for owner in members.left}
  left = [owner for owner, phases in last.items() if phases == phase]
  return ({'joined': joined} if joined else {}) | ({'left': left} if left else {})
