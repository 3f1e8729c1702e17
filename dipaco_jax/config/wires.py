"""What `outer.wire` and the fields that override it choose of algorithm/streaming.py and compression.py."""

import math

from dipaco_jax.algorithm.grid import largest_divisor
from dipaco_jax.algorithm.streaming import Wire
from dipaco_jax.config.training_sections import Outer, Train


def make_wire(outer: Outer, train: Train) -> Wire:
  """Returns what is exchanged, and how; the arguments are those sections of Settings.

  thin: d is a fifth of tau, in whole dispatches.
  """
  tau, k = train.steps_per_phase, largest_divisor(train.steps_per_phase, train.steps_per_dispatch)
  compress = {'lan': 'none', 'wan': 'int8', 'thin': 'int4'}[outer.wire] if outer.compress == 'auto' else outer.compress
  stream = outer.wire != 'lan' if outer.stream == 'auto' else outer.stream == 'on'
  overlap = outer.overlap_steps
  if overlap < 0:
    overlap = min(math.ceil(tau / 5 / k) * k, tau - k) if outer.wire == 'thin' else 0
  keeps = outer.overlap == 'keep' or (outer.overlap == 'auto' and outer.wire == 'thin')
  alpha = outer.mix if outer.mix >= 0 else 0.0 if keeps else 0.5
  return Wire(compress, stream, overlap if stream else 0, keeps, alpha)
