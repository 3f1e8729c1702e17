"""The averaging gap: how much the outer step [2.6] raises each path's loss on its hold-out. Pure.

It is not in the paper. With L_i(theta) the loss of path i on its shard's hold-out in nats per token, and theta_i its
parameters at the end of the phase:

    gap_i = L_i(the path's modules after the outer step) - L_i(theta_i)

Modules are averaged over the paths that share them, so that what only one path has learned is partly lost. If the
gap is large, phases are too long, steps too large, or paths share modules that have little in common.
"""

import math
from collections.abc import Sequence

LARGE = 0.1  # nats per token, mean over paths: a perplexity 10% higher
ADVICE = (
  'shorter phases (--config.train.steps_per_phase), another outer step (--config.outer), a lower rate of the paths '
  '(--config.train.learning_rate) or modules that fewer paths share (--config.levels) would lose less: '
  'python -m dipaco_jax.recipe finds out'
)


def gaps(before: Sequence[float | None], after: Sequence[float | None]) -> list[float | None]:
  """Returns each path's gap from its losses around an outer step, or None if a loss is unknown or not finite.

  Example:
    >>> gaps([3.0, 4.0, None], [3.5, float('inf'), 2.0])
    [0.5, None, None]
  """
  pairs = zip(before, after, strict=True)
  return [a - b if b is not None and a is not None and math.isfinite(a - b) else None for b, a in pairs]


def mean_gap(values: Sequence[float | None]) -> float | None:
  """Returns the mean gap of the paths that have one, or None.

  Example:
    >>> mean_gap([0.5, None, 1.5])
    1.0
  """
  known = [value for value in values if value is not None]
  return math.fsum(known) / len(known) if known else None


def describe(gap: float) -> str:
  """Describes a gap in one line, with advice if it is large."""
  change = f'{abs(100 * math.expm1(gap)):.1f}% {"lower" if gap < 0 else "higher"}'
  sentence = f'averaging gap of {gap:+.3f} nats a token: the outer step makes perplexity {change}'
  return f'{sentence}; {ADVICE}' if gap > LARGE else sentence
