"""Audits: a worker trains phases that another has trained, and compares the results [audit_facts.py, docs/audit.md].

An audit begins from the newest state of the path that was published before the phase, and keeps nothing on this
machine: what it computes is compared with what facts name, and forgotten.
"""

import hashlib
import json
import logging
import math
import time
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.algorithm.grid import Level
from dipaco_jax.core.errors import Diverged, Unavailable
from dipaco_jax.islands import (
  audit_facts,
  lineage,
  messages,
  own_levels,
  path_exchange,
  pieces,
  screening_facts,
  state_facts,
  worker,
)
from dipaco_jax.islands.guard import Gone, Later, objects_of
from dipaco_jax.islands.held_states import HeldStates
from dipaco_jax.islands.island import STATES, Island
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.messages import Sent
from dipaco_jax.islands.path_state import PathState
from dipaco_jax.islands.pieces import Part
from dipaco_jax.islands.role_loop import Perform, Publish
from dipaco_jax.islands.suspensions import Suspended
from dipaco_jax.islands.worker import Beginning, Trained
from dipaco_jax.islands.worker_hosts import Hosts
from dipaco_jax.processes import time_use
from dipaco_jax.registry.database_errors import Unusable
from dipaco_jax.registry.registry import Fact, Lost, Task
from dipaco_jax.storage import tensors

MOST_ATTEMPTS = 5  # of an audit that has to wait again and again, after which it is given up
EXCLUSION, STATE = 'exclusion', 'state'  # what is compared beside levels


class Difference(NamedTuple):
  """How a piece differs from the published one."""

  worker: str  # that has published it
  levels: list[str]  # that differ by more than the tolerance
  measured: dict[str, float | None]  # |difference| / |contribution| of levels of other bits; None: not known


class Auditor:
  """Performs the audits of one worker."""

  def __init__(self, hosts: Hosts | None = None):
    self.hosts = hosts or Hosts()

  def beside(self, perform: Perform) -> Perform:
    """Returns a function that performs audits here, and other tasks by `perform`."""
    return lambda island, task, lease: (self.perform if task.kind in audit_facts.KINDS else perform)(
      island, task, lease
    )

  def perform(self, island: Island, task: Task, lease: Lease) -> Publish:
    """Audits a phase of a path; returns a function that publishes the result.

    Whatever goes wrong is no reason for the worker to end: an audit that cannot be computed is given up.
    """
    try:
      fact = self.audit(island, task, lease)
    except (Lost, Diverged, Suspended, Unavailable, Unusable):
      raise
    except Exception as e:
      lease.check()
      if isinstance(e, Later) and not isinstance(e, Gone) and task.fence < MOST_ATTEMPTS:
        raise
      logging.warning('%s cannot be computed: %s', lease.about['task'], e, exc_info=not isinstance(e, Later))
      fact = audit_facts.closed(island, task, f'it cannot be computed: {island.error_text(e)}')
    return lambda: [fact]

  @time_use.doing(time_use.LOST)
  def audit(self, island: Island, task: Task, lease: Lease) -> Fact:
    """Trains the phase again, and those before it since the last published state; returns the fact of the result."""
    started, path = time.time(), int(task.key)
    replayer = worker.Worker(HeldStates(), self.hosts, only_replays=True)
    beginning = replayer.find_beginning(island, task)
    parts, digests = beginning.parts, dict[str, str]()
    measured: dict[str, float | None] = {}
    differences: dict[int, list[Difference]] = {}
    for i, part in enumerate(parts):
      trained = replayer.train_first(island, lease, beginning)
      state, own_modules, why = self.finish_piece(island, path, part, trained)
      fact = published(island, path, part)
      difference = compare(island, fact, trained.sent, own_modules, why)
      measured |= difference.measured if part.phase == task.number else {}
      if difference.levels:
        differences.setdefault(part.phase, []).append(difference)
      if part.phase == task.number:
        digests |= digest_piece(part, trained.sent, own_modules, why)
      if i + 1 < len(parts):
        beginning = self.go_on(island, path, parts[i:], state, lease, replayer)
    checkpoint = published(island, path, parts[-1])
    expected = '' if differences.get(task.number) else expected_state(island, path, task.number, state)
    if expected and not audit_facts.agrees_with_state(island, checkpoint, expected):
      differences[task.number] = [Difference(checkpoint.meta.get('worker', ''), [STATE], {})]
    about = {'phases': sorted({part.phase for part in parts}), 'started': started, 'ended': time.time()}
    about |= {'difference': {level: x if x is None or math.isfinite(x) else None for level, x in measured.items()}}
    about |= {STATE: expected} if expected else {}
    return describe(island, task, checkpoint, differences, digests, about)

  def finish_piece(
    self, island: Island, path: int, part: Part, trained: Trained
  ) -> tuple[PathState, list[Fact], str]:  # fmt: skip
    """Returns the path's state after a piece, the facts of its own modules, and why its worker should exclude it."""
    state = trained.state
    own = own_levels.facts(part.phase, state)
    judged = screening_facts.judge(island, path, part.phase, trained.squares, trained.steps, own)
    why = judged.get('excluded') or (screening_facts.EARLIER if state.excluded else '')
    own_modules: list[Fact] = []
    if pieces.is_last(island, part) and not why:
      state, own_modules = own_levels.take_step(island, path, part.phase, state, trained.steps, None)
    return state._replace(excluded=bool(why)), own_modules, why

  def go_on(
    self, island: Island, path: int, parts: tuple[Part, ...], state: PathState, lease: Lease, replayer: worker.Worker
  ) -> Beginning:  # fmt: skip
    """Returns the beginning of the pieces after the first of these."""
    is_excluded = 'excluded' in published(island, path, parts[0]).meta  # as all that follows was computed from
    with replayer.looking_again(island, lease.task, parts[1]):
      after = path_exchange.after(island, parts[0], state._replace(excluded=is_excluded))
      return worker.begin_after(island, path, parts[1:], after)


def published(island: Island, path: int, part: Part) -> Fact:
  """Returns the fact of a piece. Raises Later if it was withdrawn."""
  kind, number = pieces.fact_name(island, part)
  for fact in island.registry.facts(kind, [str(path)], number):
    return fact
  raise Later(f'the {kind} of path {path} in phase {part.phase + 1} was withdrawn')


# -- comparison


def compare(
  island: Island, fact: Fact, sent: dict[str, Sent], own_modules: list[Fact], why: str
) -> Difference:  # fmt: skip
  """Compares a piece with the published one."""
  maker, tolerance = fact.meta.get('worker', ''), island.run.settings.audit.tolerance
  if bool(why) != ('excluded' in fact.meta):
    return Difference(maker, [EXCLUSION], {})
  if why:
    return Difference(maker, [], {})
  shared = {level: message for level, message in sent.items() if level not in island.own_levels}
  named = objects_of(fact)
  levels = [*lineage.differing_levels(fact, shared), *(level for level in shared if level not in named)]
  measured = {level: relative_difference(island, fact, level, shared[level]) for level in levels}
  own = own_levels.differing(island, own_modules) if not tolerance else []
  far = [level for level, x in measured.items() if x is None or not tolerance or not x <= tolerance]
  return Difference(maker, [*far, *own], measured)


def relative_difference(island: Island, fact: Fact, name: str, sent: Sent) -> float | None:
  """Returns |d - d'| / |d| of the outer gradients d computed here and d' published, or None if that is gone."""
  level = island.layout.level(name)
  try:
    theirs = island.read_contribution(fact, level)
  except Gone:
    return None
  x, y = (gradient(island, level, arrays) for arrays in (sent.arrays, theirs))
  square = math.fsum(float(np.linalg.norm(x[at].astype(np.float64) - y[at])) ** 2 for at in x)
  distance = math.sqrt(square / max(sent.square, 1e-30)) if math.isfinite(square) else math.inf
  rows = [messages.split_rows(arrays)[1] for arrays in (sent.arrays, theirs)]
  of_rows = (float(np.linalg.norm(a - rows[1][at])) / max(float(np.linalg.norm(a)), 1e-30) for at, a in rows[0].items())
  return max([distance, *of_rows])


def gradient(island: Island, level: Level, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns a contribution's outer gradient, or its parameters if it is not compressed: they differ equally."""
  values, _ = messages.split_rows(arrays)
  kind = island.kind(level)
  if kind == 'none':
    return values
  like = {name: np.zeros(x.shape, x.dtype) for name, x in island.level_shapes(level).items()}
  return messages.decode(kind, values, like)


def digest_piece(part: Part, sent: dict[str, Sent], own_modules: list[Fact], why: str) -> dict[str, str]:
  """Returns digests of what was computed, by name; two auditors that compute alike have the same."""
  if why:
    return {f'{part.nth} {EXCLUSION}': ''}
  digests = {level: hashlib.sha256(tensors.to_bytes(message.arrays)).hexdigest() for level, message in sent.items()}
  digests |= {fact.key: fact.sha256 for fact in own_modules}
  return {f'{part.nth} {name}': sha256 for name, sha256 in digests.items()}


def expected_state(island: Island, path: int, phase: int, state: PathState) -> str:
  """Returns the digest of the state that the path's worker may publish after a phase, or '' if none is compared."""
  has_none = state.excluded and not island.own_levels
  if has_none or not lineage.has_state(island) or island.run.settings.audit.tolerance:
    return ''
  parts = state_facts.in_parts(path_exchange.carried(island, phase, state))
  names = ((f'{STATES}/{path}/{phase}-{i}', tensors.to_bytes(part)) for i, part in enumerate(parts))
  return state_facts.digest([[*island.object_name(name, data)] for name, data in names])


# -- the result


def describe(
  island: Island, task: Task, checkpoint: Fact, differences: dict[int, list[Difference]], digests: dict[str, str],
  about: dict[str, Any],
) -> Fact:  # fmt: skip
  """Makes the fact of an audit; the worker of the first piece that differs has made the difference."""
  here = differences.get(task.number, [])
  about |= {
    'by': island.name,
    'worker': here[0].worker if here else checkpoint.meta.get('worker', ''),
    'levels': sorted({level for difference in here for level in difference.levels}),
    'differing': [phase for phase in sorted(differences) if phase != task.number],
  }
  digest = hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()
  return audit_facts.result(task, checkpoint.sha256, not here, digest, about)
