"""(6) What a router can gain: nats a sequence that its choice of paths costs against each sequence's best path.

Measured with the scores of router data in the discriminative runs of table (1), on a part that no router is fitted on.
"""

from collections.abc import Sequence

import common
import methods
import pictures
from common import Column
from runs import Row

WAYS = {  # of `routers` in scores.py
  'random': 'a path at random',
  'single': 'the path that is best on the rest',
  'first': 'k-means, as trained',
  'logistic': 'logistic regression on features, 32 tokens',
  'mlp': 'MLP on the same',
  'layer_0': 'logistic regression on mean embeddings',
  'layer_1': 'on the first block',
  'prefix_8': 'on 8 tokens',
  'prefix_16': 'on 16 tokens',
  'prefix_64': 'on 64 tokens, some of them scored',
  'prefix_128': 'on 128 tokens, all that is scored',
  'ascent': 'labels by coordinate ascent: scores of some paths',
}


def rows(size: str) -> list[Row]:
  return [row for row in methods.rows(size) if row.name == 'discriminative']


COLUMNS = (Column('nats a sequence, logistic regression', 'routers.logistic.value', '+.3f'),)


def by_way(rows: Sequence[Row], results: common.Results) -> list[list[str]]:
  """A line for each way to choose a path."""
  name, lines = rows[0].name, []
  for way, words in WAYS.items():
    fields = (f'routers.{way}.value', '+.3f'), (f'routers.{way}.accuracy', '.3f')
    found = [(common.figures(results, name, Column('', field)), form) for field, form in fields]
    scored = common.figures(results, name, Column('', f'labels.{way}.scored'))
    if found[0][0]:
      lines.append([words, *(common.cell(*one) for one in found), common.cell(scored, '.2f')])
  head = ['', 'nats a sequence, less its best path', 'names the best path', 'scores taken, of all']
  return [head, ['---', *['---:'] * 3], *lines]


def picture(table: common.Table, rows: Sequence[Row], results: common.Results):
  """A line for each way but the worst two, a dot for every seed."""
  ways = [(way, words) for way, words in WAYS.items() if way not in ('random', 'single')]
  mine = [Row(way, words, '') for way, words in ways]
  name, column = rows[0].name, Column('nats a sequence, less its best path', 'value')
  found = {
    (way, seed): record['routers'].get(way, {})
    for (row, seed), record in results.items() for way, _ in ways if row == name and record.get('routers')
  }  # fmt: skip
  return pictures.dots(table._replace(columns=(column,)), mine, found)


TABLE = common.Table('router', 'What a router can gain', rows, COLUMNS, picture, by_way)

if __name__ == '__main__':
  common.main(TABLE)
