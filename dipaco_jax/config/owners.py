"""Owners: one axis of the grid has names, and a text belongs to the owner that its domain is named after. Pure."""

from dipaco_jax.algorithm.grid import Grid
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
