"""Owners: one axis of the grid has names, and a text belongs to the owner that its domain is named after. Pure.

Owners may join and leave while a run trains. A new owner is one more coordinate of the axis of owners, and that axis
has to be the first of the grid, so that the numbers of all other paths and modules stay the same.
"""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.config import wires
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError


def names(grid: Grid) -> tuple[str, ...]:
  """Returns the owners' names; raises InputError unless exactly one axis of the grid has names."""
  named = list(grid.coordinate_names.values())
  if len(named) != 1:
    fix = "name the owners in config.grid, as {'owner': ('clinic', 'court')}"
    raise InputError(f"config.routing.method='owner': {len(named)} axes have names instead of one; {fix}")
  return named[0]


def check_domain(grid: Grid, domain: str) -> None:
  """Raises InputError if no owner has the name of a text's domain."""
  if domain not in (known := names(grid)):
    fix = 'give each source of config.data.train and config.data.validation, or each document, the name of an owner'
    raise InputError(f'text of {printable.name(domain)!r} has no owner among {", ".join(known)}: {fix}')


def paths_of(grid: Grid, owner: str) -> list[int]:
  """Returns the paths of an owner.

  Example:
    >>> paths_of(Grid(owner=('clinic', 'court'), topic=2), 'court')
    [2, 3]
  """
  [axis] = [i for i, name in enumerate(grid.names) if name in grid.coordinate_names]
  number = names(grid).index(owner)
  return [path for path in range(grid.num_paths) if grid.coordinates(path)[axis] == number]


class Members(NamedTuple):
  """The owners that have joined or left a run since it began, as its facts say."""

  joined: tuple[str, ...] = ()  # in the order in which they joined
  since: Mapping[str, int] = types.MappingProxyType({})  # first phase of owners that joined and whose text is read
  until: Mapping[int, int] = types.MappingProxyType({})  # number of phases of each path of the owners that left
  left: tuple[str, ...] = ()
  num_facts: int = 0  # that say so


def join(settings: Any, joined: Sequence[str]) -> Any:
  """Returns the settings of a run after owners have joined: the axis of owners has more coordinates."""
  if not joined:
    return settings
  [axis] = Grid(settings.grid).coordinate_names
  grid = dict(settings.grid)
  return dataclasses.replace(settings, grid=tuple((grid | {axis: (*grid[axis], *joined)}).items()))


def before_joins(settings: Any, joined: Sequence[str]) -> Any:
  """Returns the settings with which a run began; the inverse of `join`."""
  if not joined:
    return settings
  [axis] = Grid(settings.grid).coordinate_names
  grid = dict(settings.grid)
  return dataclasses.replace(settings, grid=tuple((grid | {axis: tuple(grid[axis][: -len(joined)])}).items()))


def check_changes(settings: Any, is_join: bool) -> None:
  """Raises InputError if owners cannot join, or cannot leave, a run while it trains."""
  if not settings.data.own_text:
    raise InputError('owners join and leave runs whose config has data.own_text=True: here, all text is in one place')
  if wires.make_wire(settings.outer, settings.train).stream:
    problem = "levels leave one by one within a phase, so that no phase is the first or the last of an owner's path"
    raise InputError(f"config.outer.stream: {problem}; begin a run with outer.stream='off'")
  grid = Grid(settings.grid)
  [axis] = grid.coordinate_names
  if is_join and grid.names[0] != axis:
    problem = f'{axis!r} comes after {grid.names[0]!r}, and one more owner would change the numbers of all paths'
    raise InputError(f'config.grid: its axes are sorted by name, {problem}; begin a run whose axis of owners is first')
  if is_join and len(names(grid)) == 1:
    raise InputError(f'config.grid has one owner, {names(grid)[0]}, who shares nothing: begin a run with two or more')


def active_paths(grid: Grid, members: Members, phase: int) -> list[bool]:
  """Returns whether the owner of each path trains it in a phase.

  Example:
    >>> members = Members(('press',), {'press': 2}, {0: 3}, ('clinic',))
    >>> grid = Grid(owner=('clinic', 'court', 'press'))
    >>> [active_paths(grid, members, phase) for phase in (1, 2, 3)]
    [[True, True, False], [True, True, True], [False, True, True]]
  """
  since = dict.fromkeys(names(grid), 0) | dict.fromkeys(members.joined, phase + 1) | dict(members.since)
  begins = {path: since[owner] for owner in names(grid) for path in paths_of(grid, owner)}
  return [begins[path] <= phase < members.until.get(path, phase + 1) for path in range(grid.num_paths)]
