"""How queries and keys of attention are scored."""

from typing import NamedTuple


class Scores(NamedTuple):
  """How queries and keys are scored."""

  window: int = 0  # tokens that a token sees, itself included; 0: all before it
  query_scale: float = 0.0  # products are divided by its square root; 0 means K
  cap: float = 0.0  # c, of c tanh(x / c); 0: none

  def factor(self, size: int) -> float:
    """Returns the factor of products of queries and keys."""
    return (self.query_scale or size) ** -0.5


PLAIN = Scores()
