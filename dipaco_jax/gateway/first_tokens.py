"""The tokens that a hub makes by itself: one for all paths or, where paths have owners, one for each owner."""

import contextlib

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.config import owners, settings as settings_lib
from dipaco_jax.config.owners import Members
from dipaco_jax.gateway import tokens as tokens_lib

NAME = 'joined'  # of a token for all paths


def make(
  url: str, settings: settings_lib.Settings, members: Members, days: float, again: bool
) -> list[tuple[str, str]]:
  """Makes the tokens that are missing, or `again` all of them; returns them as (owner, token).

  Args:
    url: of the run's registry.
    settings: with which the run began.
    members: the owners that have joined, who get tokens too, and those that have left, who get none.
    days: for which the tokens are valid.
    again: whether to make tokens for those who have one.
  """
  grid = Grid(owners.join(settings, members.joined).grid)
  names = owners.names(grid) if settings.routing.method == 'owner' else ('',)
  with contextlib.closing(tokens_lib.Tokens(url)) as tokens:
    standing = [token for token, _ in tokens.list()]
    taken = {token.name for token in standing}
    served = set() if again else {token.owner for token in standing}

    def add(owner: str) -> str:
      paths = owners.paths_of(grid, owner) if owner else None
      return tokens.add(free_name(owner or NAME, taken), paths, days, owner)

    return [(owner, add(owner)) for owner in names if owner not in served and owner not in members.left]


def free_name(name: str, taken: set[str]) -> str:
  """Returns a name that no token has: the given one, or the first of name-2, name-3..."""
  number = 1
  while (free := name if number == 1 else f'{name}-{number}') in taken:
    number += 1
  return free
