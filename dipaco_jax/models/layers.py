"""What differs from block to block of a model."""

import math
from typing import NamedTuple

from dipaco_jax.core import settings


class Layer(NamedTuple):
  """What differs from block to block."""

  window: int  # tokens that a token sees, itself included; 0: all before it
  has_local_base: bool  # of its rotary embedding
  turns: bool  # queries and keys, by rotary embedding


def layer(c: settings.Model, n: int) -> Layer:
  """Returns what block n is."""
  window = 0 if c.full_every and (n + 1) % c.full_every == 0 else c.window
  turns = not c.no_rope_every or (n + 1) % c.no_rope_every != 0
  return Layer(window, bool(window and c.rope_local_base), turns)


def period(c: settings.Model) -> int:
  """Returns the number of blocks after which they repeat."""
  return math.lcm(c.full_every if c.window and c.full_every else 1, c.no_rope_every or 1)
