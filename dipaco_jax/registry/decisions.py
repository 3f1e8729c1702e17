"""Decisions: facts that follow from what is in the registry at one moment, inserted once, in one transaction."""

import json
from collections.abc import Callable, Iterable, Sequence

import sqlalchemy as sa

from dipaco_jax.registry import fact_rows, registry_schema as schema
from dipaco_jax.registry.fact_rows import Conflict, Fact, Newest

Ended = Iterable[tuple[str, Sequence[str]]]  # kinds and keys of tasks that nobody shall do any longer


def insert(
  connection: sa.Connection, new_fact: sa.Executable, facts: Callable[[Newest], Sequence[Fact]], fenced: str,
  ended: Ended,
):  # fmt: skip
  """Takes running tasks from their owners, ends others, and inserts the facts; see `Registry.decide`.

  The tasks come first: a completion that is committed before counts, and one that comes later is rejected. Raises
  Conflict, after which nothing of this has happened, where the first of the facts exists.
  """
  connection.execute(schema.DISOWN_KIND, {'kind_': fenced})
  for kind, keys in ended:
    connection.execute(schema.END, {'kind_': kind, 'keys': json.dumps(list(keys))})

  def newest(kind: str) -> dict[str, int]:
    rows = connection.execute(schema.NEWEST, {'kind_': kind}).mappings()
    return {row['key']: row['number'] for row in rows}

  first, *others = facts(newest)
  if not connection.execute(new_fact, fact_rows.to_row(first)).rowcount:
    raise Conflict(f'{first} is decided already')
  fact_rows.insert(connection, new_fact, others)
