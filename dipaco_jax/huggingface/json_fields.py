"""Values of a config.json, in the types of fields of settings.Model: a number is none that is written as text. Pure."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError

Config = Mapping[str, Any]
DEFAULT: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(settings.Model)}


def value(name: str, x: Any, field: str) -> Any:
  """Returns a value in the type of a field of settings.Model; raises InputError that calls it `name`."""
  kind = type(DEFAULT[field])
  if kind is bool:
    if not isinstance(x, bool):
      raise InputError(f'its {name} is {x!r}, which is neither true nor false')
    return x
  return check_integer(name, x) if kind is int else number(name, x)


def check_integer(name: str, x: Any, least: int = 1) -> int:
  """Returns a whole number of `least` or more; raises InputError."""
  if not isinstance(x, int) or isinstance(x, bool) or x < least:
    raise InputError(f'its {name} is {x!r}, which is not an integer of {least} or more')
  return x


def number(name: str, x: Any) -> float:
  """Returns a finite number above 0; raises InputError."""
  if not isinstance(x, (int, float)) or isinstance(x, bool) or not 0 < x < math.inf:
    raise InputError(f'its {name} is {x!r}, which is not a number above 0')
  return float(x)


def table(name: str, x: Any) -> dict[str, Any]:
  """Returns the fields of an object that are not null; raises InputError."""
  if not isinstance(x, dict):
    raise InputError(f'its {name} is {x!r}, which is not an object')
  return {key: item for key, item in x.items() if item is not None}
