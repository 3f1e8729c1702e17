"""What all processes know of owners' text, from facts `own_text (owner)`, and which tasks a process may take.

If a run's config has `data.own_text`, the text of a path stays with its owner, and so do all tasks that need it. Other
processes know sizes alone: w_i of the outer steps follow from them [2.7]. Training begins when all owners' facts exist.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dipaco_jax.config import owners
from dipaco_jax.islands.guard import Later
from dipaco_jax.islands.island import OWN_TEXT, Island
from dipaco_jax.registry.registry import Fact, NewTask

DIGEST = 'sha256'  # of what is known of a path's text
NOBODY = ''  # key of the tasks of a run that are not an owner's


def tasks(island: Island) -> list[NewTask]:
  """Returns the tasks that read the text of the owners with whom a run begins, if it stays with its owners.

  The worker of an owner that joins adds its own task (`roles.join_owner`), so that nobody waits for it.
  """
  return [NewTask(OWN_TEXT, owner, 0) for owner in needed(island)]


def names(island: Island) -> tuple[str, ...]:
  """Returns the owners whose text stays with them; none if all text is in one place."""
  return owners.names(island.layout.grid) if island.run.settings.data.own_text else ()


def paths_of_owners(island: Island) -> dict[str, list[str]]:
  """Returns the keys of the paths of each owner whose text stays with it; {} if all text is in one place."""
  grid = island.layout.grid
  return {owner: [*map(str, owners.paths_of(grid, owner))] for owner in names(island)}


def needed(island: Island) -> list[str]:
  """Returns the owners without whose text no path trains: those who have joined and not begun, or left, are none."""
  members = island.members
  others = {*members.joined} - {*members.since} | {*members.left}
  return [owner for owner in names(island) if owner not in others]


def missing(island: Island) -> list[str]:
  """Returns the owners for whose text all wait."""
  owners_needed = needed(island)
  known = {fact.key for fact in island.registry.facts(OWN_TEXT, owners_needed, 0)} if owners_needed else set()
  return [owner for owner in owners_needed if owner not in known]


def read(island: Island) -> dict[int, dict[str, Any]]:
  """Returns what is known of the text of each path. Raises Later while the text of an owner is not read.

  Owners who have joined and not begun, or who left before their text was read, have no entry.
  """
  if owners_missing := missing(island):
    raise Later(f'the text of {", ".join(owners_missing)} is not there yet')
  facts = island.registry.facts(OWN_TEXT, names(island), 0)
  return {int(path): about for fact in facts for path, about in fact.meta['paths'].items()}


def weights(island: Island) -> Callable[[int], np.ndarray]:
  """Returns phase -> w_i of every path, like the grid. Raises Later while an owner's text is not read.

  Tokens are divided by the mean of the owners that the run began with. So no bit of a weight depends on who has joined
  or left, which a phase that is computed again knows, and the worker that computed it first may not have known.
  """
  by_path, s, grid = read(island), island.run.settings, island.layout.grid
  tokens = np.array([by_path[path]['tokens'] if path in by_path else 0 for path in range(grid.num_paths)], float)
  later = {path for owner in island.members.joined for path in owners.paths_of(grid, owner)}
  first = [path for path in by_path if path not in later]
  mean = tokens[first].mean() if first else 1.0
  weights_P = (tokens / mean if s.outer.reweigh else np.sign(tokens)).astype(np.float32)

  @functools.lru_cache(2)
  def of_phase(phase: int) -> np.ndarray:
    return np.where(island.active_paths(phase), weights_P, np.float32(0)).reshape(grid.shape)

  return of_phase


def sizes(fact: Fact) -> dict[str, dict[str, int]]:
  """Returns the sizes of a text by path, of a fact `own_text`, without digests."""
  return {path: {name: x for name, x in about.items() if name != DIGEST} for path, about in fact.meta['paths'].items()}


def why_replaced(fact: Fact, standing: Sequence[Fact]) -> str:
  """Says why another fact of the same text may replace one: it has other digests, as its store is new; else ''."""
  is_same = fact.kind == OWN_TEXT and len(standing) == 1 and standing[0].kind == OWN_TEXT
  return f'the store of {fact.key} was made again' if is_same and sizes(fact) == sizes(standing[0]) else ''


def claim_keys(island: Island) -> list[str] | None:
  """Returns the keys of the tasks that this process may claim as a worker; None if it may claim all."""
  if not island.run.settings.data.own_text:
    return None
  paths = owners.paths_of(island.layout.grid, island.owner) if island.owner else []
  return [island.owner or NOBODY, *map(str, paths)]
