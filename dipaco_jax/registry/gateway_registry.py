"""A worker's registry behind a gateway: the calls of `WorkerRegistry` as requests (dipaco_jax/gateway).

What differs from the database: the gateway itself adds and wakes tasks after it has accepted a completion, so those
calls do nothing here, and a worker sees no fact that waits for its tasks. `add_tasks` asks: for the state of a path,
which its holder ships, and for the next piece of a path that this worker trains. Where another result stands already,
the gateway decides which of the two stays, and withdraws a fact only if it cannot read it either.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dipaco_jax.processes import time_use
from dipaco_jax.registry.conversations import Conversations
from dipaco_jax.registry.database import Row
from dipaco_jax.registry.fact_names import FactNames
from dipaco_jax.registry.fact_rows import Fact, Newest, Withdrawal
from dipaco_jax.registry.known_facts import KnownFacts
from dipaco_jax.registry.tasks import NewTask, Task
from dipaco_jax.storage import gateway_link, retry


class GatewayRegistry:
  """One worker's access to a run's registry, through a link; its threads may share it."""

  sees_others = False

  def __init__(self, link: gateway_link.Link):
    """Asks who this worker is. Raises Rejected, an InputError, if the gateway does not know its token."""
    self._link = link
    self._known = KnownFacts()
    self._conversations = Conversations(lambda: None)
    self.names = FactNames()
    self.diverged = self.withdrawn = self.suspended = 0
    self.members = self.known_members = 0  # as the last claim or heartbeat told, and as this process's island knows
    about = self._call('hello', {})
    self.name: str = about['name']  # of this worker, as the run knows it
    self.paths: list[int] | None = about['paths']  # that it may train; None: all
    self.owner: str = about['owner']  # whose token it is, '' if nobody's
    self.lease_s: float = about['lease_s']

  def close(self):
    self._link.close()

  def conversation(self, is_urgent: bool = False) -> contextlib.AbstractContextManager[None]:
    """Makes attempts at most a tenth of a lease apart in the block, where they are urgent."""
    return self._conversations.conversation(self.lease_s / 10 if is_urgent else retry.LONGEST_WAIT_S)

  def _call(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer to a request, which may say that facts were withdrawn since the last one. Raises Lost."""
    with time_use.doing(time_use.DATABASE):
      answer = self._link.call(route, body, self._conversations.longest_wait_s())
    if answer.get('withdrawn', self.withdrawn) != self.withdrawn:
      self._known.clear()
      self.withdrawn = answer['withdrawn']
    self.diverged = answer.get('diverged', self.diverged)
    self.suspended = answer.get('suspended', self.suspended)
    self.members = max(self.members, answer.get('members', 0))
    return answer

  # -- tasks

  def claim(self, owner: str, kinds: Sequence[str], keys: Sequence[str] | None = None, holder: str = '') -> Task | None:
    """Claims a task of the token's paths, under the name that the gateway knows this worker by."""
    body = {'kinds': list(kinds), 'keys': None if keys is None else list(keys), 'holder': holder}
    task = self._call('claim', body)['task']
    return Task(*task) if task else None

  def heartbeat(self, task: Task) -> int:
    return self._call('heartbeat', _claimed(task))['diverged']

  def release(self, task: Task, waiting: bool = False, error: str = ''):
    self._call('release', _claimed(task) | {'error': error[:500]})

  def complete(self, task: Task, facts: Sequence[Fact], withdrawal: Withdrawal | None = None):
    """Completes a task. The gateway checks its facts, and what else stands in their place."""
    self._call('complete', _claimed(task) | {'facts': list(map(list, facts))})

  def reopen(self, task: Task, kind: str, key: str, number: int):
    """Reports a task whose object is missing; the gateway opens it if it misses the object, too."""
    self._call('reopen', _claimed(task) | {'named': [kind, key, number]})

  def is_done(self, kind: str, key: str, number: int) -> bool:
    return self._call('is_done', {'named': [kind, key, number]})['is_done']

  def durations(self, kind: str, limit: int) -> list[float]:
    return self._call('durations', {'kind': kind, 'limit': limit})['durations']

  def tasks(
    self, state: str | None = None, kind: str | None = None, limit: int | None = None, failed: bool = False,
  ) -> list[Row]:  # fmt: skip
    """Returns kinds, keys and numbers of open audits of an owner's paths; a worker sees no other tasks of others."""
    named = self._call('tasks', {'state': state, 'kind': kind})['tasks']
    return [dict(zip(('kind', 'key', 'number'), each, strict=True)) for each in named]

  # -- facts

  def facts(
    self, kind: str, keys: Sequence[str] | None = None, number: int | None = None, at_least: int = 0,
    at_most: int | None = None,
  ) -> list[Fact]:  # fmt: skip
    """Returns facts as `Registry.facts` does, without those that the token may not read."""
    body = {'kind': kind, 'number': number, 'at_least': at_least, 'at_most': at_most}

    def ask(unknown_keys: Sequence[str] | None) -> list[Fact]:
      answer = self._call('facts', body | {'keys': None if unknown_keys is None else list(unknown_keys)})
      return [Fact(*fact) for fact in answer['facts']]

    return self._known.read(kind, keys, number, ask)

  def newest(self, kind: str, below: int | None = None, keys: Sequence[str] | None = None) -> dict[str, int]:
    body = {'kind': kind, 'below': below, 'keys': None if keys is None else list(keys)}
    return self._call('newest', body)['newest']

  def put(self, facts: Sequence[Fact], withdrawal: Withdrawal | None = None):
    """Offers facts without a task: the state of a path, or an own module whose object is lost."""
    self._call('put', {'facts': list(map(list, facts))})

  def revoke(self, withdrawal: Withdrawal, tasks: Iterable[NewTask] = ()) -> bool:
    """Reports a fact that cannot be read; the gateway withdraws it if it cannot read it either."""
    is_withdrawn = self._call('revoke', {'named': list(withdrawal.facts[0][:3])})['is_withdrawn']
    self._known.clear()
    return is_withdrawn

  # -- scheduling, which the gateway does

  def add_tasks(self, tasks: Iterable[NewTask]):
    """Asks for tasks, which the gateway adds if they follow from what this worker does."""
    for task in tasks:
      if task.kind in ('train', 'piece', 'ship', 'own_text'):
        self._call('ask', {'named': [task.kind, task.key, task.number], 'holder': task.holder})

  def wake(self, kind: str, keys: Sequence[str], number: int):
    """Does nothing: the gateway wakes tasks."""

  def unscheduled(self, limit: int = 100) -> list[Fact]:
    """Returns nothing: the gateway schedules."""
    return []

  def count_members(self) -> int:
    """Returns how many facts say that owners joined or left, as the gateway has told last: with each claim."""
    return self.members

  def decide(
    self, facts: Callable[[Newest], Sequence[Fact]], fenced: str, ended: Iterable[tuple[str, Sequence[str]]] = ()
  ) -> bool:  # fmt: skip
    """Does nothing: the keeper decides."""
    return False

  def end_tasks(self, tasks: Iterable[tuple[str, Sequence[str]]]):
    """Does nothing: the keeper ends tasks."""

  def mark_scheduled(self, facts: Sequence[Fact]):
    """Does nothing: the gateway marks facts."""

  def is_idle(self, optional: tuple[str, Sequence[str]] | None = None) -> bool:
    """Returns False: the gateway adds the tasks that need all paths."""
    return False

  def beat(self, name: str, role: str, about: dict):
    self._call('beat', {'about': about})


def _claimed(task: Task) -> dict[str, Any]:
  return {'task': task.id, 'fence': task.fence}
