"""What workers may do: claim tasks of their paths, hold them, and complete them with facts that were checked.

The tasks that follow from a completion are added here (`schedule`), so that no worker can add any other. A fact is
withdrawn, and a task opened again, only where the gateway itself finds that an object cannot be read. Objects in the
store of an owner cannot be read here: of these, an owner's worker is believed, for its own paths.
"""

import hashlib
import json
import threading
from collections.abc import Sequence
from typing import Any

from dipaco_jax.core import printable
from dipaco_jax.gateway import authority, fact_checks, held_tasks, owner_checks, requests
from dipaco_jax.gateway.object_desk import ObjectDesk
from dipaco_jax.gateway.refusals import Refused, forbidden, lost, malformed
from dipaco_jax.gateway.requests import Body, Caller, take
from dipaco_jax.islands import (
  audit_facts,
  lineage,
  members,
  path_state,
  pieces,
  schedule,
  state_facts,
  suspensions,
  withdrawals,
)
from dipaco_jax.islands.guard import Gone, guarding
from dipaco_jax.islands.hand_over import SHIP
from dipaco_jax.islands.island import OWN_TEXT, Island
from dipaco_jax.registry.registry import Fact, Lost, NewTask, Task
from dipaco_jax.registry.tasks import Claim


class TaskDesk:
  """Changes the registry for workers. Its threads share one island."""

  def __init__(self, island: Island, objects: ObjectDesk, most_claims: int):
    self.island, self.objects, self.most_claims = island, objects, most_claims
    self.reading = threading.Lock()  # of what is as large as a path: one at a time
    self.has_stores = island.run.settings.data.own_text  # of owners, which cannot be read here

  # -- tasks

  def claim(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Claims a task of the token's paths for a worker."""
    kinds = take(body, 'kinds', lambda x: requests.is_keys(x) and x is not None)
    keys, holder = take(body, 'keys', requests.is_keys), take(body, 'holder', requests.is_holder)
    if self.has_stores and not caller.scope.owner:
      raise forbidden('the text of this run stays with its owners: ask the keeper for a token with an owner')
    if suspensions.current(self.island.registry, {caller.name, caller.token.name}):
      raise forbidden('this worker is suspended: ask the keeper of the run')
    allowed = authority.claims(caller.scope, kinds, keys)
    if (allowed or caller.scope.owner) and held_tasks.count(
      self.island.registry, caller.token.name
    ) >= self.most_claims:
      raise Refused(429, 'claims', f'the token holds {self.most_claims} tasks: it may claim more when these are done')
    if caller.scope.owner and kinds == [*audit_facts.KINDS]:
      task = audit_facts.claim(self.island, caller.name, caller.scope.path_keys, holder)
      return self._news({'task': list(task) if task else None})
    for claimed_kinds, claimed_keys in allowed:
      if task := self.island.registry.claim(caller.name, claimed_kinds, claimed_keys, holder):
        return self._news({'task': list(task)})
    return self._news({'task': None})

  def tasks(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Lists the open audits of an owner's paths, for which its workers keep states; no other tasks."""
    state, kind = take(body, 'state', audit_facts.OPEN.__contains__), take(body, 'kind', requests.is_text)
    is_shown = bool(caller.scope.owner) and kind in audit_facts.KINDS
    rows = self.island.registry.tasks(state, kind) if is_shown else []
    return {'tasks': [[kind, row['key'], row['number']] for row in rows if row['key'] in caller.scope.path_keys]}

  def heartbeat(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Renews the lease of a task."""
    [answer] = self.heartbeats([(caller, body)])
    if isinstance(answer, Refused):
      raise answer
    return answer

  def heartbeats(self, asked: Sequence[tuple[Caller, Body]]) -> list[dict[str, Any] | Refused]:
    """Renews leases in one transaction. Returns for each request its own answer, or Refused."""
    claims = [_claim(*each) for each in asked]
    valid = [claim for claim in claims if isinstance(claim, Claim)]
    times = dict(zip(valid, self.island.registry.heartbeats(valid) if valid else [], strict=True))
    return [claim if isinstance(claim, Refused) else self._renewed(times[claim]) for claim in claims]

  def _renewed(self, diverged: int | None) -> dict[str, Any] | Refused:
    """Returns the answer to a heartbeat: what the registry has told, or that the task is lost."""
    return lost() if diverged is None else self._news({}) | {'diverged': diverged}

  def release(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Gives a task back; does nothing where it is lost."""
    error = printable.name(take(body, 'error', lambda x: isinstance(x, str)), requests.MOST_ERROR)
    try:
      self.island.registry.release(self._held(caller, body), error=error)
    except Refused as e:
      if e.cause != 'lost':
        raise
    return {}

  def complete(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Completes a task with its facts, after all that they name was found to be there, and adds what follows."""
    task = self._held(caller, body, states=('running', 'done'))
    check = owner_checks.CHECKS.get(task.kind, fact_checks.of_task)
    facts = check(self.island, task, fact_checks.parse(body.get('facts')), caller.name)
    for fact in facts:
      self.objects.check_named(fact)
    try:
      standing = withdrawals.complete(self.island, task, facts)
    except Lost:
      raise lost() from None
    schedule.schedule(self.island, standing)
    return self._news({})

  def ask(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Adds a task that follows from one that the worker holds: the path's next piece, or a request for its state.

    An owner that has joined asks for the task that reads its text.
    """
    kind, key, number = requests.take_named(body)
    holder = take(body, 'holder', requests.is_holder)
    if kind == OWN_TEXT and key == caller.scope.owner:
      members.add_text_task(self.island, key)
      return {}
    if kind not in authority.TASKS or key not in caller.scope.path_keys:
      raise forbidden()
    if kind == SHIP:
      self._ask_for_state(caller, key, number)
      return {}
    last = self.island.run.settings.train.phases
    if pieces.phase_of(self.island, kind, number) >= last:
      raise malformed('the run has no such phase')
    before = pieces.before(self.island, pieces.part_of(self.island, Task(0, kind, key, number, 0, '', 0)))
    if before and held_tasks.find(self.island.registry, *_named(self.island, key, before), caller.owns):
      schedule.go_on(self.island, int(key), before, holder)
    return {}

  def _ask_for_state(self, caller: Caller, path: str, phase: int):
    """Asks the holder of a path's state for it, if the worker has a task of that path."""
    if not held_tasks.find_of_key(self.island.registry, ('train', 'piece'), path, caller.owns):
      raise lost()
    for checkpoint in self.island.registry.facts('checkpoint', [path], phase):
      if holder := checkpoint.meta.get('holder'):
        self.island.registry.add_tasks([NewTask(SHIP, path, phase, holder=holder)])

  # -- what cannot be read

  def reopen(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Opens a task again if an object that it made cannot be read here either, or is in the worker's own store."""
    task, (kind, key, number) = self._held(caller, body), requests.take_named(body)
    is_own = self.has_stores and (kind, key) in owner_checks.tasks_of_store(caller.scope)
    with self.reading:
      if is_own or self.objects.is_missing(kind, key, number):
        self.island.registry.reopen(task, kind, key, number)
    return {}

  def put(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Inserts the state of a path, or replaces an own module whose object is lost; leaves all else to other roles."""
    for fact in fact_checks.parse(body.get('facts')):
      if fact.kind == state_facts.STATE:
        self._put_state(caller, fact)
      elif fact.kind == 'module':
        self._replace_module(caller, fact)
      elif fact.kind != 'diverged':  # which an executor, an evaluator or the monitor finds out, and nobody else says
        raise forbidden(f'the token does not allow facts of the kind {fact.kind!r}')
    return {}

  def _put_state(self, caller: Caller, given: Fact):
    """Inserts the state of a path after it was read and checked, if a worker of this token has trained the path."""
    if given.key not in caller.scope.path_keys:
      raise forbidden()
    fact = fact_checks.of_state(self.island, given, caller.name)
    checkpoints = self.island.registry.facts('checkpoint', [fact.key], fact.number)
    if not checkpoints or checkpoints[0].sha256 != fact.meta['checkpoint']:
      raise malformed('the state is not that of a checkpoint of this run')
    if fact.sha256 != hashlib.sha256(json.dumps(fact.meta['objects']).encode()).hexdigest():
      raise malformed('the fact of a state has another sha256 than its objects')
    if not self.has_stores:
      with self.reading:
        self._check_state(fact)
    withdrawals.put(self.island, [fact])
    self.island.registry.mark_scheduled([fact])

  def _check_state(self, fact: Fact):
    """Raises Refused if a state cannot be read, or is not what a path carries."""
    try:
      with guarding('the state'):
        state = state_facts.whole([self.island.read_object(*each) for each in fact.meta['objects']])
        path_state.check_carried(state, self.island.shapes, self.island.inner_shapes)
        if not lineage.is_finite(state):
          raise ValueError('it has values that are not finite')
    except Gone as e:
      raise malformed(str(e)) from e

  def _replace_module(self, caller: Caller, given: Fact):
    """Replaces the fact of an own module whose object is lost by that of a replay, while its path's task runs."""
    own = [module for path in caller.scope.paths for module in self.island.own_modules(path)]
    standing = self.island.registry.facts('module', [given.key], given.number) if given.key in own else []
    if not standing:
      raise forbidden()
    new = standing[0]._replace(uri=given.uri, sha256=given.sha256)
    self.objects.check_named(new)
    if not held_tasks.find(self.island.registry, *self.objects.writer(given.uri), caller.owns):
      raise lost()
    with self.reading:
      withdrawals.replace(self.island, standing[0], new, is_lost=self.has_stores)

  def revoke(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Withdraws the state of a path if it cannot be read here either, or is in the worker's own store."""
    kind, key, number = requests.take_named(body)
    if kind != state_facts.STATE or key not in caller.scope.path_keys:
      raise forbidden()
    if self.has_stores:
      for state in self.island.registry.facts(kind, [key], number):
        withdrawals.withdraw(self.island, state, Gone(key, 'its owner cannot read it'))
      return self._news({'is_withdrawn': True})
    with self.reading:
      checkpoints = self.island.registry.facts('checkpoint', [key], number)
      is_read = checkpoints and state_facts.read(self.island, checkpoints[0]) is not None  # else it withdraws it
    return self._news({'is_withdrawn': not is_read})

  # -- help

  def _held(self, caller: Caller, body: Body, states: tuple[str, ...] = ('running',)) -> Task:
    """Returns the task of a request, which the token has claimed. Raises Refused if it has not, or no longer."""
    task_id, fence = take(body, 'task', requests.is_count), take(body, 'fence', requests.is_count)
    task = held_tasks.by_id(self.island.registry, task_id, fence, states)
    if not task or not caller.owns(task.owner):
      raise lost()
    return task

  def _news(self, answer: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer with what each answer to a claim or heartbeat tells."""
    registry = self.island.registry
    news = {name: getattr(registry, name) for name in ('diverged', 'withdrawn', 'suspended')}
    return answer | news | {'members': max(registry.members, self.island.members.num_facts)}


def _claim(caller: Caller, body: Body) -> Claim | Refused:
  """Returns the claim that a request names."""
  try:
    return Claim(take(body, 'task', requests.is_count), take(body, 'fence', requests.is_count), caller.token.name)
  except Refused as e:
    return e


def _named(island: Island, key: str, part: pieces.Part) -> tuple[str, str, int]:
  kind, number = pieces.task_name(island, part)
  return kind, key, number
