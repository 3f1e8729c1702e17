"""The calls that a worker makes to a registry, whether it has the database or only a gateway in front of it."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from dipaco_jax.registry.database import Row
from dipaco_jax.registry.fact_names import FactNames
from dipaco_jax.registry.fact_rows import Fact, Newest, Withdrawal
from dipaco_jax.registry.tasks import NewTask, Task


class WorkerRegistry(Protocol):
  """A worker's registry. `registry.Registry` documents the calls; `gateway_registry` says what differs there."""

  lease_s: float
  names: FactNames
  diverged: int
  withdrawn: int
  suspended: int
  members: int
  known_members: int
  sees_others: bool  # whether it shows tasks of others: a gateway does not, and draws, chooses and closes audits itself

  def close(self): ...

  def conversation(self, is_urgent: bool = False) -> contextlib.AbstractContextManager[None]: ...

  # -- tasks

  def claim(
    self, owner: str, kinds: Sequence[str], keys: Sequence[str] | None = None, holder: str = ''
  ) -> Task | None: ...

  def heartbeat(self, task: Task) -> int: ...

  def release(self, task: Task, waiting: bool = False, error: str = ''): ...

  def complete(self, task: Task, facts: Sequence[Fact], withdrawal: Withdrawal | None = None): ...

  def reopen(self, task: Task, kind: str, key: str, number: int): ...

  def is_done(self, kind: str, key: str, number: int) -> bool: ...

  def durations(self, kind: str, limit: int) -> list[float]: ...

  def tasks(
    self, state: str | None = None, kind: str | None = None, limit: int | None = None, failed: bool = False,
  ) -> list[Row]: ...  # fmt: skip

  # -- facts

  def facts(
    self, kind: str, keys: Sequence[str] | None = None, number: int | None = None, at_least: int = 0,
    at_most: int | None = None,
  ) -> list[Fact]: ...  # fmt: skip

  def newest(self, kind: str, below: int | None = None, keys: Sequence[str] | None = None) -> dict[str, int]: ...

  def put(self, facts: Sequence[Fact], withdrawal: Withdrawal | None = None): ...

  def revoke(self, withdrawal: Withdrawal, tasks: Iterable[NewTask] = ()) -> bool: ...

  # -- scheduling, which a gateway does itself

  def add_tasks(self, tasks: Iterable[NewTask]): ...

  def wake(self, kind: str, keys: Sequence[str], number: int): ...

  def unscheduled(self, limit: int = 100) -> list[Fact]: ...

  def mark_scheduled(self, facts: Sequence[Fact]): ...

  def is_idle(self, optional: tuple[str, Sequence[str]] | None = None) -> bool: ...

  # -- owners that join and leave

  def count_members(self) -> int: ...

  def decide(
    self, facts: Callable[[Newest], Sequence[Fact]], fenced: str, ended: Iterable[tuple[str, Sequence[str]]] = ()
  ) -> bool: ...  # fmt: skip

  def end_tasks(self, tasks: Iterable[tuple[str, Sequence[str]]]): ...

  # -- signs of life

  def beat(self, name: str, role: str, about: dict): ...
