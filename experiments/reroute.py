"""(iii) Re-routing every W tokens while evaluating [2.4.3, Table 3], and the mixture of the top paths."""

import statistics

import common
import pictures
from common import Column
from runs import Row

from dipaco_jax import drawing

WIDTHS = (128, 64, 32, 16)
CHOOSERS = {
  'learned': 'learned', 'oracle': 'by the last chunk', 'history': 'by all before', 'hindsight': 'by the chunk itself',
}  # fmt: skip


def rows(size: str) -> list[Row]:
  return [
    Row('rerouted', 'product k-means', 'rerouted'),
    Row('discriminative', 'discriminative', 'discriminative'),
  ]


COLUMNS = (
  Column('routed once', 'perplexity'),
  *(Column(f'{words}, W = {W}', f'reroute.{name}.{W}') for name, words in CHOOSERS.items() for W in WIDTHS),
  *(Column(f'mixture of {n}', f'mixture.{n}') for n in (2, 4)),
  Column('all, by posterior', 'mixture.posterior'),
)


@drawing.styled
def picture(table, rows, results):
  """Means over seeds against W."""
  made, ax = drawing.axes(drawing.WIDE * 0.8, 4.2)
  lines = {}
  for row in rows:
    for column in COLUMNS[1 : 1 + len(CHOOSERS) * len(WIDTHS)]:
      if found := common.figures(results, row.name, column):
        words, W = column.title.rsplit(', W = ', 1)
        lines.setdefault(f'{row.title}, {words}', []).append((int(W), statistics.fmean(found)))
    if once := common.figures(results, row.name, COLUMNS[0]):
      lines[f'{row.title}, once'] = [(W, statistics.fmean(once)) for W in WIDTHS]
  pictures.draw_lines(ax, lines)
  ax.set_xscale('log', base=2)
  ax.set_xticks(WIDTHS, map(str, WIDTHS))
  ax.set_xlabel('W: tokens between choices')
  ax.set_ylabel('perplexity')
  return made


TABLE = common.Table('reroute', '(iii) Re-routing every W tokens', rows, COLUMNS, picture)

if __name__ == '__main__':
  common.main(TABLE)
