"""(6) What a router can gain: nats a sequence that its choice of paths costs against each sequence's best path.

Tried on what the paths of table (1)'s discriminative runs say of the router data, a part of which no fit has seen.
"""

import common
import methods
import pictures
from common import Column
from runs import Row

WAYS = {
  'random': 'a path at random',
  'single': 'the path that is best on the rest',
  'first': 'k-means, as trained',
  'logistic': 'logistic regression',
  'mlp': 'MLP',
  'ascent': 'labels by coordinate ascent',
}


def rows(size: str) -> list[Row]:
  return [row for row in methods.rows(size) if row.name == 'discriminative']


COLUMNS = (
  *(Column(words, f'routers.{name}.value', '+.3f') for name, words in WAYS.items()),
  *(Column(f'{words}: right', f'routers.{name}.accuracy', '.3f') for name, words in WAYS.items()),
  Column('labels by ascent: scores taken', 'labels.ascent.scored', '.2f'),
)

TABLE = common.Table('router', 'What a router can gain', rows, COLUMNS, pictures.dots)

if __name__ == '__main__':
  common.main(TABLE)
