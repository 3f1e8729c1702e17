"""Labels of the discriminative router without scoring all paths [6]: how many are the exact ones, and at what cost.

All ways are tried on the scores of one run, see scores.py.
"""

import statistics

import common
import config
from common import Column
from runs import Row
from sharding import ONCE

from dipaco_jax import drawing

GRIDS = {'test': (2,), 'smoke': (2,)}  # 2: a grid of 2x2


def rows(size: str) -> list[Row]:
  """No more phases than those before the first round, and one after it."""
  train, before = config.SIZES[size].config['train'], config.SIZES[size].config['routing']['phases_per_round']
  changes = config.lengthened(size, before + 1, train['steps_per_phase']) | ONCE
  changes |= {'routing.first': 'kmeans', 'routing.capacity': 1.0}  # of many clusters some are empty
  return [
    Row(f'paths_{n * n}', f'DiPaCo {n}x{n}', f'discriminative,{n}x{n}', changes) for n in GRIDS.get(size, (4, 8, 16))
  ]


@drawing.styled
def picture(table, rows, results):
  """Agreement against the share of scores taken, a line for each way, on which a point is a grid."""
  made, ax = drawing.axes(drawing.WIDE * 0.8, 4.2)
  for (name, words), colour in zip(WAYS.items(), drawing.COLOURS, strict=False):
    points = []
    for row in rows:
      agreement, scored = (
        common.figures(results, row.name, Column('', f'labels.{name}.{field}')) for field in ('agreement', 'scored')
      )
      if agreement:
        points.append((statistics.fmean(scored), statistics.fmean(agreement)))
        ax.annotate(row.title.split()[-1], points[-1], (0, 6), textcoords='offset points', size=7.5, ha='center')
    if points:
      ax.plot(*zip(*points, strict=True), 'o-', color=colour, linewidth=1, label=words)
  ax.set_xlabel('scores taken, of all')
  ax.set_ylabel('agreement with exact labels')
  ax.legend()
  return made


WAYS = {'first': 'the first router', 'one_sweep': 'one sweep of ascent', 'ascent': 'ascent', 'additive': 'additive fit',
        'additive_more': 'additive fit, twice the scores'}  # fmt: skip
COLUMNS = (
  *(Column(f'{words}: agreement', f'labels.{name}.agreement', '.3f') for name, words in WAYS.items()),
  *(Column(f'{words}: scored', f'labels.{name}.scored', '.3f') for name, words in WAYS.items() if name != 'first'),
)

TABLE = common.Table(
  'labels', "(ix) The discriminative router's labels without scoring all paths", rows, COLUMNS, picture
)

if __name__ == '__main__':
  common.main(TABLE)
