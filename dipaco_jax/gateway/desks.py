"""All desks of a gateway by the names of their requests, and the callers that tokens stand for."""

import contextlib
import functools
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dipaco_jax.gateway import requests
from dipaco_jax.gateway.authority import Scope
from dipaco_jax.gateway.fact_desk import FactDesk
from dipaco_jax.gateway.object_desk import ObjectDesk
from dipaco_jax.gateway.refusals import Refused
from dipaco_jax.gateway.requests import Body, Caller
from dipaco_jax.gateway.task_desk import TaskDesk
from dipaco_jax.gateway.tokens import Token, Tokens
from dipaco_jax.islands import members, schedule
from dipaco_jax.islands.island import Island
from dipaco_jax.storage import retry

LOOK_AROUND_S = 10.0  # between looks for tasks that nobody has added

WHY = {
  'expired': 'the token has expired: ask the keeper of the run for another',
  'revoked': 'the token was revoked by the keeper of the run',
  '': 'the token is unknown: ask the keeper of the run for one',
}


def unknown(state: str) -> Refused:
  """Returns the error of a token that is not valid; '' if there is no such token."""
  return Refused(401, state or 'unknown_token', WHY[state])


class Desks:
  """What a gateway answers, without HTTP."""

  def __init__(self, island: Island, tokens: Tokens, aside: pathlib.Path, most_claims: int = 64):
    self.tokens = tokens
    facts, self.objects = FactDesk(island), ObjectDesk(island, aside)
    self.tasks = tasks = TaskDesk(island, self.objects, most_claims)
    self.desks = facts, self.objects, tasks
    self.growing = threading.Lock()
    self.give(island)
    self.routes: dict[str, Callable[[Caller, Body], dict[str, Any]]] = {
      **{name: getattr(facts, name) for name in ('hello', 'facts', 'newest', 'durations', 'is_done', 'beat')},
      **{name: getattr(tasks, name) for name in ('claim', 'heartbeat', 'release', 'complete', 'ask', 'tasks')},
      **{name: getattr(tasks, name) for name in ('reopen', 'put', 'revoke')},
      **{name: getattr(self.objects, name) for name in ('exists', 'offer', 'commit')},
    }

  def give(self, island: Island):
    """Gives all desks a view of the run."""
    for desk in self.desks:
      desk.island = island
    self.scope = functools.lru_cache(1024)(functools.partial(scope_of, island))
    self.island = island

  def follow_members(self):
    """Continues with all owners that have joined or left, before anything is answered."""
    try:
      members.heed(self.island)
    except members.Changed:
      with self.growing:
        before = self.island.members
        self.give(members.grow(self.island))
        members.log_changes(before, self.island.members)

  def find_callers(self, tokens: Sequence[str]) -> list[Caller | Refused]:
    """Returns the workers that tokens stand for, and Refused for a token that is not valid, or no longer."""
    found = self.tokens.find(tokens)
    self.follow_members()
    return [self._caller(*each) if each else unknown('') for each in found]

  def _caller(self, token: Token, now: float) -> Caller | Refused:
    state = token.state(now)
    return Caller(token, self.scope(token.paths, token.owner), token.name) if state == 'valid' else unknown(state)

  def named(self, caller: Caller, body: Body) -> Caller:
    """Returns a caller with the name of its process, which a request tells."""
    return caller._replace(name=requests.name_of(caller.token, body.get('name')))

  def advance(self):
    """Adds tasks that are due: those that follow from a fact whose process was lost, and those that need all paths."""
    self.follow_members()
    schedule.advance(self.island)

  @contextlib.contextmanager
  def looking_around(self) -> Iterator[None]:
    """Adds such tasks from time to time, in a thread, during the block."""
    with retry.every(LOOK_AROUND_S, 'looking for tasks to add', self.advance):
      yield


def scope_of(island: Island, paths: tuple[int, ...] | None, owner: str = '') -> Scope:
  """Returns the paths and modules of a token; `owner` counts where text stays with its owners."""
  num_paths, layout = island.run.settings.num_paths, island.layout
  mine = frozenset(range(num_paths)) if paths is None else frozenset(paths)
  modules = frozenset(module for path in mine for module in island.modules_of(path).values())
  levels = frozenset(level.name for level in layout.levels)
  if not owner or not island.run.settings.data.own_text:
    return Scope(mine, modules, levels, is_all=paths is None)
  models = frozenset(path for model in layout.models() if mine & {*model} for path in model)
  return Scope(mine, modules, levels, owner, models)


def make_aside(folder: pathlib.Path) -> pathlib.Path:
  """Returns an empty folder for objects that are not checked yet; a gateway before this one may have left some."""
  aside = folder / 'incoming'
  aside.mkdir(mode=0o700, exist_ok=True)
  for left in aside.iterdir():
    os.unlink(left)
  return aside
