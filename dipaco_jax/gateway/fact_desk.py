"""What workers may ask: who they are, facts, and how long tasks take; and the signs of life that they give."""

from typing import Any

from dipaco_jax.gateway import authority, owner_checks, requests
from dipaco_jax.gateway.refusals import forbidden
from dipaco_jax.gateway.requests import Body, Caller, is_count, is_count_or_none, is_keys, take
from dipaco_jax.islands import lease, suspensions
from dipaco_jax.islands.island import OWN_TEXT, Island
from dipaco_jax.registry.registry import STOPPED

MOST_DURATIONS = 1000
TIMED = ('train', 'piece')
OF_WORKERS = suspensions.SUSPENDED, suspensions.REINSTATED  # kinds of facts, of which a worker reads its own

# What a worker may tell of itself, for people: status and monitor read these.
ABOUT = {
  **dict.fromkeys(('task', 'stage'), requests.is_text),
  **dict.fromkeys(('tasks_done', 'step', 'of'), is_count),
  **dict.fromkeys(('tokens_per_s', 'bytes_in', 'bytes_out', 'reading_s', 'writing_s', 'left_s'), requests.is_size),
  'loss': requests.is_number_or_none,
  'replay': lambda x: requests.is_counts(x) and len(x) == 3,
  STOPPED: lambda x: x is True,
}


class FactDesk:
  """Answers questions from the registry."""

  def __init__(self, island: Island):
    self.island = island

  def hello(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Tells a worker who it is."""
    paths = None if caller.token.paths is None else list(caller.token.paths)
    about = {'name': caller.name, 'paths': paths, 'owner': caller.token.owner}
    return about | {'lease_s': self.island.registry.lease_s}

  def facts(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Reads facts, without those that the token may not read."""
    kind, keys = take(body, 'kind', requests.is_text), take(body, 'keys', is_keys)
    number, at_most = take(body, 'number', is_count_or_none), take(body, 'at_most', requests.is_limit)
    at_least = take(body, 'at_least', is_count)
    allowed = self._keys(caller, kind, keys)
    found = self.island.registry.facts(kind, allowed, number, at_least, at_most)
    if kind == OWN_TEXT:
      found = [fact if fact.key == caller.scope.owner else owner_checks.for_others(fact) for fact in found]
    return {'facts': list(map(list, found)), 'withdrawn': self.island.registry.withdrawn}

  def newest(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Reads the highest numbers of facts, by key."""
    kind, keys = take(body, 'kind', requests.is_text), take(body, 'keys', is_keys)
    below = take(body, 'below', requests.is_limit)
    return {'newest': self.island.registry.newest(kind, below, self._keys(caller, kind, keys))}

  def durations(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Reads how long the newest tasks of training took."""
    kind, limit = take(body, 'kind', TIMED.__contains__), take(body, 'limit', is_count)
    return {'durations': self.island.registry.durations(kind, min(limit, MOST_DURATIONS))}

  def is_done(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Tells whether a task of the token's paths is done."""
    kind, key, number = requests.take_named(body)
    if kind not in authority.TASKS or key not in caller.scope.path_keys:
      raise forbidden()
    return {'is_done': self.island.registry.is_done(kind, key, number)}

  def beat(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Records a sign of life; of what the worker tells, only the entries that are known and have their types."""
    about = take(body, 'about', lambda x: isinstance(x, dict))
    told = {name: about[name] for name, check in ABOUT.items() if name in about and check(about[name])}
    if 'step' in told and 'of' not in told:
      del told['step']
    of_owner = {lease.OWNER: caller.scope.owner} if caller.scope.owner else {}
    self.island.registry.beat(caller.name, 'worker', {'task': ''} | told | of_owner)
    return {}

  def _keys(self, caller: Caller, kind: str, keys: list[str] | None) -> list[str] | None:
    """Returns the keys that may be read. Raises Refused for a kind that may not."""
    if kind in OF_WORKERS:
      return [caller.name] if keys is None or caller.name in keys else []
    try:
      allowed = authority.readable_keys(caller.scope, kind, keys)
    except KeyError:
      raise forbidden(f'the token does not allow to read facts of the kind {kind!r}') from None
    return None if allowed is None else list(allowed)
