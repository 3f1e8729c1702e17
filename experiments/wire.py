"""(9) Over a thin line: what compression, streaming and overlap cost in quality, each alone and together.

The rows of a method differ in config.outer alone, and in `wire` (algorithm/compression.py and streaming.py). tau is
long enough for levels to leave at different steps, and all train for 40 phases. DiLoCo's one level is cut in three, so
that streaming has places for it.
"""

from typing import Any

import common
import config
import pictures
import runs
from common import Column
from runs import Row

from dipaco_jax.config import wires

STEPS = {'test': 15, 'smoke': 40, 'micro': 1000, 'medium': 4000}
TAU = {'test': 5, 'smoke': 10, 'micro': 25, 'medium': 100}
DISPATCH = {'test': 1, 'smoke': 2, 'micro': 5, 'medium': 20}  # steps; the overlap is as many, see below
RATE = {'micro': 1e-2}  # a quarter of what tune.py found since
NUMBERS = {'test': ('2x2', '4'), 'smoke': ('2x2', '4')}  # grid, workers


def rows(size: str) -> list[Row]:
  grid, workers = NUMBERS.get(size, ('4x4', '8'))
  methods = {'dipaco': (f'DiPaCo {grid}', f'dipaco,{grid}'), 'diloco': (f'DiLoCo {workers}', f'fragments,{workers}')}
  lasting: dict[str, Any] = usual(size) | ({'inner.learning_rate': RATE[size]} if size in RATE else {})
  overlap = overlap_steps(size, lasting)
  late = {'outer.stream': 'on', 'outer.overlap_steps': overlap}
  short = max(1, TAU[size] * 2 // 25)
  seldom = {'outer.closed_every': 128, 'checkpoint.state_every_phases': 128}
  least = seldom | {'outer.wire': 'thin', 'outer.compress': 'int2'}
  shorter = {'outer.overlap_steps': short, 'train.steps_per_dispatch': 1}
  wires: dict[str, tuple[str, dict[str, Any]]] = {
    'lan': ('float32 (lan)', {}),
    'int8': ('int8', {'outer.compress': 'int8'}),
    'int4': ('int4', {'outer.compress': 'int4'}),
    'stream': ('streaming', {'outer.stream': 'on'}),
    'mixed': (f'streaming, overlap of {overlap}, mixed', late),
    'overlap': (f'streaming, overlap of {overlap}', late | {'outer.overlap': 'keep'}),
    'wan': ('int8, streaming (wan)', {'outer.wire': 'wan'}),
    'thin': (f'int4, streaming, overlap of {overlap} (thin)', {'outer.wire': 'thin'}),
    'int2': ('int2', {'outer.compress': 'int2'}),
    'least': (f'int2, streaming, overlap of {overlap}, closed and states every 128th phase', least),
    'short': (f'int4, streaming, overlap of {short}', shorter | {'outer.wire': 'thin'}),
  }
  return [
    Row(f'{name}_{wire}', f'{title}, {words}', method, lasting | changes)
    for name, (title, method) in methods.items()
    for wire, (words, changes) in wires.items()
  ]


def usual(size: str) -> dict[str, int]:
  """The changes that all rows have: how long they train, in which phases and dispatches."""
  return config.lasting(size, STEPS[size], TAU[size]) | {'train.steps_per_dispatch': DISPATCH[size]}


def overlap_steps(size: str, lasting: dict[str, float]) -> int:
  """What `thin` takes."""
  s = runs.make_settings(f'{size},dipaco', lasting | {'outer.wire': 'thin'})
  return wires.make_wire(s.outer, s.train).overlap_steps


LESS = Column('nats minus lan, by seed (90%)', 'loss', '+.4f', '*_lan', interval=True)
COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('minus lan, by seed', 'perplexity', '+.2f', '*_lan'),
  Column('nats', 'loss', '.4f'),
  LESS,
  Column('last version', 'validation_loss', '+.4f', '*_lan', interval=True),
  Column('averaging gap, last tenth', 'averaging_gap.-1', '+.3f'),
  Column('bytes a parameter and phase', 'wire_bytes', '.3g'),
  Column('of its state', 'state_bytes', '.2g'),
)

TABLE = common.Table(
  'wire',
  'What a thin line costs in quality',
  rows,
  COLUMNS,
  pictures.differences(LESS, {'dipaco': 'DiPaCo', 'diloco': 'DiLoCo'}),
)

if __name__ == '__main__':
  common.main(TABLE)
