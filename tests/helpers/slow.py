"""Which of a test's parameters wait for --slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def but(values: Iterable[Any], *slow: Any) -> list[Any]:
  """All of them, marked where they are slow; plain tuples are several parameters."""
  return [pytest.param(*(v if type(v) is tuple else (v,)), marks=[pytest.mark.slow] * (v in slow)) for v in values]


def all_but(values: Iterable[Any], *quick: Any) -> list[Any]:
  """All of them, marked but for those that are quick."""
  values = list(values)
  return but(values, *(v for v in values if v not in quick))
