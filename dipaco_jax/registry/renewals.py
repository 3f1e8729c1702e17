"""Heartbeats of many workers, which a gateway writes together."""

from collections.abc import Sequence

import sqlalchemy as sa

from dipaco_jax.registry import registry_schema as schema
from dipaco_jax.registry.database import Row
from dipaco_jax.registry.tasks import Claim


def renew(connection: sa.Connection, claims: Sequence[Claim], lease_s: float) -> list[Row | None]:
  """Renews the leases of claims. Returns the news for each of them, or None if it is lost; see `Registry.heartbeats`.

  The rows are changed in the order of their ids, so that two such transactions never wait for each other.
  """
  news = dict[Claim, Row | None]()
  for claim in sorted({*claims}):
    renewed = connection.execute(schema.HEARTBEAT_OF_NAME, claim._asdict() | {'lease_s': lease_s})
    news[claim] = next((dict(row) for row in renewed.mappings()), None)
  return [news[claim] for claim in claims]
