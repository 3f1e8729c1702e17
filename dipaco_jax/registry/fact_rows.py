"""Facts as rows of the registry: each is inserted once, and one that is withdrawn leaves a fact that says so."""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from dipaco_jax.core import json_text
from dipaco_jax.registry import registry_schema as schema
from dipaco_jax.registry.database import Row

WITHDRAWN = 'withdrawn'  # kind of the facts that others were withdrawn
Newest = Callable[[str], dict[str, int]]  # kind -> the highest number of its facts, by key
NAMING = 'outer', 'whole'  # metadata that name more objects, and are part of a fact's identity


class Fact(NamedTuple):
  """An immutable row. `meta` says how it was made; only its entries in NAMING are part of the row's identity."""

  kind: str
  key: str
  number: int
  uri: str
  sha256: str  # this and the uri have to agree where a fact is inserted again
  meta: dict


class Withdrawal(NamedTuple):
  """Facts to be withdrawn, as they are in the registry; for people, the reason and the process that withdraws them."""

  facts: Sequence[Fact]
  why: str
  by: str


class Conflict(ValueError):
  """Another fact exists under the same name; `standing` are all facts that exist under the names of the new ones."""

  def __init__(self, message: str, standing: Sequence[Fact] = ()):
    super().__init__(message)
    self.standing = standing


def insert(connection: sa.Connection, new_fact: sa.Executable, facts: Sequence[Fact]) -> bool:
  """Inserts facts, or raises Conflict; returns whether all were new. The database answers once."""
  in_order = sorted(facts, key=lambda fact: fact[:3])  # or two that insert could wait for each other
  if not in_order or connection.execute(new_fact, list(map(to_row, in_order))).rowcount == len(in_order):
    return True
  stored = [read_stored(connection, fact) for fact in in_order]
  for fact, existing in zip(in_order, stored, strict=True):
    if not is_same(existing, fact):
      standing = [stored_fact for stored_fact in stored if stored_fact]
      raise Conflict(f'{fact} cannot replace the existing fact: {existing}', standing)
  return False


def withdraw(connection: sa.Connection, new_fact: sa.Executable, withdrawal: Withdrawal) -> bool:
  """Deletes facts that are still as given, and notes each; does nothing, and returns False, where the first is not."""
  for n, fact in enumerate(withdrawal.facts):
    given = name(fact) | {'uri_': fact.uri, 'sha256_': fact.sha256}
    if connection.execute(schema.REVOKE, given).rowcount:
      _note(connection, new_fact, fact, withdrawal)
    elif n == 0:
      return False  # another has withdrawn it
  return True


def _note(connection: sa.Connection, new_fact: sa.Executable, fact: Fact, withdrawal: Withdrawal):
  """Inserts the fact that another was withdrawn, under the first number that is free."""
  about = {'why': withdrawal.why, 'by': withdrawal.by, 'meta': fact.meta}
  for n in itertools.count(1):
    mark = Fact(WITHDRAWN, f'{fact.kind} {fact.key} {n}', fact.number, fact.uri, fact.sha256, about)
    if connection.execute(new_fact, to_row(mark) | {'scheduled': True}).rowcount:  # nothing follows from it
      return


def read_stored(connection: sa.Connection, fact: Fact) -> Fact | None:
  """Returns the fact that the registry has under the name of this one."""
  row = connection.execute(schema.STORED, name(fact)).mappings().one_or_none()
  return from_row(dict(row)) if row else None


def is_same(stored: Fact | None, fact: Fact) -> bool:
  """Returns whether a stored fact equals this one, even if another process made it."""
  return stored is not None and _identity(stored) == _identity(fact)


def _identity(fact: Fact) -> list[Any]:
  return [fact.uri, fact.sha256, *((fact.meta or {}).get(name) for name in NAMING)]


def name(row: Any) -> Row:
  """Returns the parameters that name the row of a fact or a task."""
  return {'kind_': row.kind, 'key_': row.key, 'number_': row.number}


def to_row(fact: Fact) -> Row:
  """Returns a fact as a row; `from_row` is the inverse."""
  return fact._asdict() | {'meta': to_json(fact.meta)}


def from_row(row: Row) -> Fact:
  return Fact(**row | {'meta': _parse(row['meta'])})


def _parse(meta: str) -> Any:
  """Returns the metadata of a row, or None if they are not JSON, which `FactNames` rejects."""
  try:
    return json_text.parse(meta)
  except (ValueError, TypeError):
    return None


def to_json(meta: dict) -> str:
  return json.dumps(meta, sort_keys=True)
