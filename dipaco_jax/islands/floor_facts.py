"""The floor: a contribution that makes its path worse on public text is left out of the outer step [docs/audit.md].

    judge (path, phase)         task of an evaluator, when the checkpoint is a fact (judge.py)
    judged (path, phase)        the path's loss on public text without and with its contribution, nats per target, and
                                the digest of the checkpoint

An outer executor waits for these facts, and leaves a contribution out if it raises the loss by more than `outer.floor`.
Whether it counts follows from facts alone, so replays agree. A contribution that is not judged because it cannot be
read is left to the executor, which reads it, too. A path that is left out does not count towards divergence: otherwise
one faulty worker could end the run.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping

from dipaco_jax.islands.island import Island
from dipaco_jax.registry.registry import Fact, NewTask, Task

JUDGE, JUDGED = 'judge', 'judged'
UNREADABLE = 'unreadable'  # in the metadata of a fact: why a contribution was not judged


def is_on(island: Island) -> bool:
  """Returns whether contributions to modules of this run are judged."""
  return island.run.settings.outer.floor > 0 and bool(island.shared_levels)


def tasks(island: Island, checkpoints: Iterable[Fact]) -> list[NewTask]:
  """Returns the tasks that judge what paths have sent with these checkpoints; paths without any are left out."""
  if not is_on(island):
    return []
  return [NewTask(JUDGE, fact.key, fact.number) for fact in checkpoints if 'excluded' not in fact.meta]


def judged(checkpoint: Fact, losses: tuple[float, float] | None, by: str, unreadable: str = '') -> Fact:
  """Makes the fact of the losses of a path without and with its contribution, None if that cannot be read."""
  numbers = None if losses is None else [x if math.isfinite(x) else 'inf' for x in losses]  # JSON has no infinity
  identity = hashlib.sha256(json.dumps([checkpoint.sha256, numbers]).encode()).hexdigest()
  about = {'checkpoint': checkpoint.sha256, 'losses': numbers, 'by': by}
  about |= {UNREADABLE: unreadable} if unreadable else {}
  return Fact(JUDGED, checkpoint.key, checkpoint.number, '', identity, about)


def is_of(fact: Fact, checkpoint: Fact) -> bool:
  """Returns whether a fact judges this checkpoint, and not an earlier one of its name that was withdrawn."""
  return fact.meta.get('checkpoint') == checkpoint.sha256


def only_judged(island: Island, task: Task, sent: Mapping[str, Fact]) -> dict[str, Fact]:
  """Returns which of the contributions to a module, by path, were judged, or excluded by their worker.

  Those that were made again after they had been judged are judged again.
  """
  if not is_on(island):
    return dict(sent)
  facts = judgements(island, sent)
  for path in sorted(facts):
    if not is_of(facts[path], sent[path]):
      island.registry.reopen(task, JUDGE, path, facts.pop(path).number)
  return {path: fact for path, fact in sent.items() if path in facts or 'excluded' in fact.meta}


def why_left_out(island: Island, sent: Mapping[str, Fact]) -> dict[str, str]:
  """Returns why contributions that were judged are left out, by path; {} if none is below the floor."""
  if not is_on(island):
    return {}
  most = island.run.settings.outer.floor
  worse_by = {path: loss_added(fact) for path, fact in judgements(island, sent).items()}
  return {path: f'worse by {nats:.4g} nats on public text' for path, nats in worse_by.items() if nats > most}


def judgements(island: Island, sent: Mapping[str, Fact]) -> dict[str, Fact]:
  """Returns the facts that judge contributions of one phase, by path."""
  number = next((fact.number for fact in sent.values()), 0)
  return {fact.key: fact for fact in island.registry.facts(JUDGED, sorted(sent), number)} if sent else {}


def loss_added(fact: Fact) -> float:
  """Returns by how much a contribution raises the loss of its path, nats per target; 0 if it was not judged."""
  if not fact.meta.get('losses'):
    return 0.0
  without, with_it = map(float, fact.meta['losses'])
  return with_it - without if math.isfinite(without) else 0.0
