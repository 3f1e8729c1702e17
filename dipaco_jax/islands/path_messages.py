"""What a path sends after a piece of a phase, and what its checkpoint notes of the pieces before [3]."""

import hashlib
from typing import Any

from dipaco_jax.islands import path_exchange, pieces
from dipaco_jax.islands.guard import objects_of
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.messages import Sent
from dipaco_jax.islands.path_state import PathState
from dipaco_jax.islands.pieces import Part
from dipaco_jax.storage import tensors


def write_objects(island: Island, path: int, part: Part, sent: dict[str, Sent]) -> dict[str, list[str]]:
  """Writes an object for each level, so that an executor reads only the part of its own module."""
  kind, number = pieces.fact_name(island, part)
  prefix = f'paths/{part.phase}/{path}' + (f'.{number}' if kind == pieces.PIECE else '')
  shared = {level: message for level, message in sent.items() if level not in island.own_levels}
  return {level: island.write_object(f'{prefix}-{level}', message.arrays) for level, message in shared.items()}


def send(
  island: Island, path: int, part: Part, before: PathState, trained: PathState
) -> tuple[dict[str, Sent], PathState]:
  """Returns the messages of a path after a piece, by level, and its new state; `before` is its state before it."""
  sent, residuals = path_exchange.send(island, path, part, trained, before)
  leaving = island.timetable.left(pieces.piece(island, part).sent, part.phase)
  left = before.left | path_exchange.of_levels(island, trained.params, leaving)
  return sent, before._replace(params=trained.params, inner=trained.inner, residuals=residuals, left=left)


def send_again(island: Island, path: int, part: Part, sent: dict[str, Sent]):
  """Writes lost messages of a replayed piece again, from which the next version has to be computed again.

  Otherwise the piece would become a task again, and begin with a state that the replay has already passed.
  """
  kind, number = pieces.fact_name(island, part)
  for fact in island.registry.facts(kind, [str(path)], number):
    for level, (name, sha256) in objects_of(fact).items():
      data = tensors.to_bytes(sent[level].arrays) if level in sent else b''
      if hashlib.sha256(data).hexdigest() == sha256 and not island.storage.exists(name):
        island.storage.write(name, data, sha256)


def phase_sums(island: Island, path: int, part: Part, about: dict[str, Any]) -> dict[str, Any]:
  """Returns measurements summed over the pieces of a phase, which its checkpoint notes instead of the last piece's."""
  metas = [*(fact.meta for fact in pieces.earlier_facts(island, part.phase, [str(path)])), about]
  sums: dict[str, Any] = {name: sum(meta[name] for meta in metas) for name in ('timed_steps', 'timed_s', 'busy_s')}
  return sums | {'rows': [row for meta in metas for row in meta['rows']], 'started': metas[0]['started']}
