"""JSON that may be anybody's."""

import json
from collections.abc import Callable
from typing import Any


def parse(text: str | bytes, pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
  """Returns what `json.loads` does; raises ValueError if that is a RecursionError, too: of very many brackets."""
  try:
    return json.loads(text, object_pairs_hook=pairs_hook)
  except RecursionError as e:
    raise ValueError('its brackets nest too deeply') from e
