"""The fact that a path takes no part in an outer step."""

from dipaco_jax.islands import pieces, screening_facts
from dipaco_jax.islands.island import Island
from dipaco_jax.registry.registry import Fact


def exclusion(of: Island, path: int, phase: int, worker: str, executor: str = '') -> Fact:
  """Makes the fact as from the checkpoint of a worker, as its worker or an executor says."""
  return screening_facts.exclusion(
    of, Fact(pieces.CHECKPOINT, str(path), phase, '', '', {'worker': worker}), 'bad', executor
  )
