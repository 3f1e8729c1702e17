"""Requests as the gateway's desks see them: who asks, and the fields of a JSON object that anybody may have written."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dipaco_jax.gateway.authority import Scope
from dipaco_jax.gateway.refusals import malformed
from dipaco_jax.gateway.tokens import Token

Body = Mapping[str, Any]
MOST_ERROR = 300  # characters of an error that a worker tells
LARGEST = 2**31 - 1  # number that a database's column holds
SUFFIX = re.compile(r'[A-Za-z0-9._-]{1,64}')
SHA256 = re.compile(r'[0-9a-f]{64}')
HOLDER = re.compile(r'[\w.-]{0,64}')


class Caller(NamedTuple):
  """A worker, by its token."""

  token: Token
  scope: Scope
  name: str  # that of the token, then '/' and the process's own name if it has one

  def owns(self, owner: str) -> bool:
    """Returns whether tasks of this owner are the token's."""
    return owner == self.token.name or owner.startswith(f'{self.token.name}/')


def name_of(token: Token, given: Any) -> str:
  """Returns a worker's identity: its token's name, and what the process calls itself."""
  if given in (None, ''):
    return token.name
  if not isinstance(given, str) or not SUFFIX.fullmatch(given):
    raise malformed('the name of a worker has letters, digits, ".", "-" and "_", and 64 characters at most')
  return f'{token.name}/{given}'


def take(body: Body, field: str, check: Callable[[Any], bool]) -> Any:
  """Returns a field of a request. Raises Refused if it is missing or another type of value."""
  value = body.get(field)
  if not check(value):
    raise malformed(f'the field {field!r} is missing or malformed')
  return value


def take_named(body: Body) -> tuple[str, str, int]:
  """Returns the (kind, key, number) that a request names."""
  named = take(body, 'named', lambda x: isinstance(x, list) and len(x) == 3)
  if not (is_text(named[0], 64) and is_text(named[1], 256) and is_count(named[2])):
    raise malformed("the field 'named' is malformed")
  return named[0], named[1], named[2]


def is_text(value: Any, most: int = 300) -> bool:
  """Returns whether a value is a text of one line that can be shown and stored."""
  return isinstance(value, str) and len(value) <= most and (value.isprintable() or not value)


def is_count(value: Any) -> bool:
  """Returns whether a value is an integer from 0 that a database's column holds."""
  return type(value) is int and 0 <= value <= LARGEST


def is_number(value: Any) -> bool:
  """Returns whether a value is a finite number."""
  return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)


def is_size(value: Any) -> bool:
  """Returns whether a value is a finite number, 0 or more."""
  return is_number(value) and value >= 0


def is_number_or_none(value: Any) -> bool:
  return value is None or is_number(value)


def is_keys(value: Any) -> bool:
  """Returns whether a value is None, or a list of keys."""
  return value is None or (isinstance(value, list) and len(value) <= 100_000 and all(is_text(x, 256) for x in value))


def is_count_or_none(value: Any) -> bool:
  return value is None or is_count(value)


def is_limit(value: Any) -> bool:
  """Returns whether a value is None, or a limit of numbers; -1 is below all."""
  return value is None or is_count(value) or (type(value) is int and value == -1)


def is_counts(value: Any) -> bool:
  """Returns whether a value is a list of integers from 0."""
  return isinstance(value, list) and len(value) <= 100_000 and all(map(is_count, value))


def is_sha256(value: Any) -> bool:
  return isinstance(value, str) and bool(SHA256.fullmatch(value))


def is_holder(value: Any) -> bool:
  """Returns whether a value may be the id of a worker's disk, '' for none."""
  return isinstance(value, str) and bool(HOLDER.fullmatch(value))
