"""Workers that cheat: small patches of what a worker trains and sends, by kind.

`install(KIND)` in the process of a worker, or `installed({(path, phase): KIND})` around a run in one process. What a
cheater is asked to audit it computes honestly, but for the kind 'accuser', which trains honestly instead.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from dipaco_jax.islands import auditor, inner_phase, messages, worker
from dipaco_jax.islands.auditor import Difference

STALE = 5  # phases
OF_MESSAGES = ('scaled', 'flipped', 'stale', 'copied')
OF_TRAINING = ('other_text', 'fewer_steps')
KINDS = (*OF_MESSAGES, *OF_TRAINING, 'accuser')

Arrays = dict[str, np.ndarray]


class Cheater:
  """What a worker does, and what it has computed before."""

  def __init__(self, kind_of: Callable[[int, int], str]):
    self.kind_of = kind_of
    self.kind, self.path, self.phase = '', 0, 0  # of what is trained now; '' where that is honest
    self.moves: dict[tuple[int, int, str], Arrays] = {}  # old - new, by path, phase and first parameter

  def train_first(self, real, this, island, lease, beginning):
    self.path, self.phase = int(lease.task.key), beginning.parts[0].phase
    self.kind = '' if this.only_replays else self.kind_of(self.path, self.phase)
    try:
      return real(this, island, lease, beginning)
    finally:
      self.kind = ''

  def send(self, real, kind, old, new, residuals, rows=None):
    if not self.kind:
      return real(kind, old, new, residuals, rows)
    level = min(new)
    moves = {name: old[name] - x for name, x in new.items()}
    self.moves[self.path, self.phase, level] = moves
    sent = self.other(level, moves)
    return real(kind, old, {name: (old[name] - x).astype(old[name].dtype) for name, x in sent.items()}, residuals, rows)

  def other(self, level: str, moves: Arrays) -> Arrays:
    """What is sent in the place of an outer gradient."""
    if self.kind in ('scaled', 'flipped'):
      return {name: x * np.float32({'scaled': 3, 'flipped': -1}[self.kind]) for name, x in moves.items()}
    earlier = {key: x for key, x in self.moves.items() if key[2] == level}
    if self.kind == 'stale':
      own = sorted(t for path, t, _ in earlier if path == self.path and self.phase - STALE <= t)
      return earlier[self.path, own[0], level]
    if self.kind == 'copied':
      others = [key for key in earlier if key[0] != self.path]
      return earlier[max(others, key=lambda key: key[1])] if others else moves
    return moves

  def load_batch(self, real, job, dispatch, own_first=None):
    read = dispatch
    if self.kind == 'other_text':  # on one device, the turn is the path
      read = dispatch._replace(turn=(dispatch.turn + 1) % job.programs.layout.grid.num_paths)
    return dispatch, real(job, read, own_first)[1]

  def remaining(self, real, job, path, phase, step, end):
    dispatches = [*real(job, path, phase, step, end)]
    return dispatches[: max(1, len(dispatches) // 2)] if self.kind == 'fewer_steps' else dispatches

  def compare(self, real, island, fact, sent, own_modules, why):
    if self.kind_of(int(fact.key), 0) == 'accuser':
      return Difference(fact.meta.get('worker', ''), [*sent], {})
    return real(island, fact, sent, own_modules, why)


def patch(cheater: Cheater, set_attribute: Callable[[Any, str, Any], None] = setattr):
  places = [(worker.Worker, 'train_first'), (messages, 'send'), (inner_phase, 'load_batch')]
  places += [(inner_phase, 'remaining'), (auditor, 'compare')]
  for owner, name in places:
    surrounded = functools.partial(getattr(cheater, name), getattr(owner, name))
    set_attribute(owner, name, functools.partialmethod(surrounded) if owner is worker.Worker else surrounded)


@contextlib.contextmanager
def installed(kinds: Mapping[tuple[int, int], str]) -> Iterator[Cheater]:
  """Within the block, paths in these phases are trained by a cheater."""
  import pytest

  cheater = Cheater(lambda path, phase: kinds.get((path, phase), ''))
  with pytest.MonkeyPatch.context() as monkeypatch:
    patch(cheater, monkeypatch.setattr)
    yield cheater


def install(kind: str):
  """Makes the worker of this process a cheater, for good."""
  patch(Cheater(lambda path, phase: kind))


def rounding_otherwise(run):
  """The inner steps of a machine that rounds otherwise."""

  def other(*args):
    result = run(*args)
    params = {name: x * np.float32(1 + 2**-20) for name, x in result.state.params.items()}
    return result._replace(state=result.state._replace(params=params))

  return other
