"""The averaging gap: what the outer step costs the paths at once, on text that they do not train on [2.6]. Pure.

With L_i(theta) the loss of path i on its shard's hold-out, nats a token, and theta_i what its phase has come to:

    gap_i = L_i(the path's modules after the outer step) - L_i(theta_i)

Modules are averaged over the paths that share them, so what one path has learned and the others have not goes away
again. Where the gap is large, phases are too long, steps too large, or paths share modules that have little in common.
"""

import math
from collections.abc import Sequence

MARK = b'"averaging_gap": '  # of rows that have it
LARGE = 0.1  # nats a token, in the mean over paths: a perplexity 10% higher
ADVICE = (
  'shorter phases (--config.train.steps_per_phase), another outer step (--config.outer), a lower rate of the paths '
  '(--config.train.learning_rate) or modules that fewer paths share (--config.levels) would lose less: '
  'python -m dipaco_jax.recipe finds out'
)


def gaps(before: Sequence[float | None], after: Sequence[float | None]) -> list[float | None]:
  """By path, from its losses before and after an outer step; None where one of them is not known, or not finite."""
  pairs = zip(before, after, strict=True)
  return [a - b if b is not None and a is not None and math.isfinite(a - b) else None for b, a in pairs]


def mean(values: Sequence[float | None]) -> float | None:
  """Over the paths that have one."""
  known = [value for value in values if value is not None]
  return math.fsum(known) / len(known) if known else None


def words(gap: float) -> str:
  """What a gap comes to, with advice where it is large."""
  told = f'averaging gap of {gap:+.3f} nats a token, a perplexity {100 * math.expm1(gap):+.1f}% by the outer step'
  return f'{told}; {ADVICE}' if gap > LARGE else told
