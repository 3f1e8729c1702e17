"""(vii) Bytes that paths exchange in the whole of training, against perplexity. Its runs are those of other tables."""

import statistics

import common
import config
import methods
import pictures
import tau
from common import Column
from runs import Row

from dipaco_jax import drawing

TAKEN = ('dense', 'diloco', 'flat', 'dipaco', 'ends', 'synchronous', 'batch_px')


def rows(size: str) -> list[Row]:
  """Those of table (i), and those of table (iv) with another tau where they train as many steps."""
  found = [row for row in methods.rows(size) if row.name in TAKEN]
  default = f'tau_{config.SIZES[size].config["train"]["steps_per_phase"]}'
  others = [row for row in tau.rows(size) if row.name != default]
  return found + (others if tau.TAUS[size] != tau.PAPERS else [])


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('bytes sent', 'sent_bytes', '.3g'),
  Column('phases', 'phases', ',.0f'),
)


@drawing.styled
def picture(table, rows, results):
  """Names stand beside their means; what sends nothing stands at the left."""
  made, ax = drawing.axes(drawing.WIDE, 5.0)
  for row in rows:
    x, found = pictures.place(row, results, 'sent_bytes'), common.figures(results, row.name, COLUMNS[0])
    ax.plot([x] * len(found), found, 'o', color=drawing.BLUE, markersize=4, alpha=0.5)
    if found:
      words = row.title.replace('tau', 'DiPaCo, tau')
      ax.annotate(words, (x, statistics.fmean(found)), (6, 0), textcoords='offset points', va='center', size=8.5)
  ax.set_xscale('symlog', linthresh=1e6)
  ax.set_xlim(-1e5, ax.get_xlim()[1] * 100)
  ax.set_xlabel('bytes that all paths exchange in training')
  ax.set_ylabel('perplexity')
  return made


TABLE = common.Table('exchanged', '(vii) Bytes exchanged against perplexity', rows, COLUMNS, picture)

if __name__ == '__main__':
  common.main(TABLE)
