"""(v) Parts of DiPaCo, each switched alone [2.6, 2.7]."""

import common
import config
import pictures
from common import Column
from runs import Row


def rows(size: str) -> list[Row]:
  rescale = config.SIZES[size].config.get('outer', {}).get('rescale', True)
  return [
    Row('dipaco', 'DiPaCo, product k-means', 'dipaco'),
    Row('rescale', f'with{"out" * rescale} norm rescaling', 'dipaco', {'outer.rescale': not rescale}),
    Row('no_reweigh', 'without loss reweighing', 'dipaco', {'outer.reweigh': False}),
    Row('no_early_stopping', 'without early stopping', 'dipaco', {'train.early_stopping': False}),
    Row('fresh_state', 'AdamW begins anew in every phase', 'dipaco', {'inner.keep_state': False}),
    Row('ends', 'with path-specific ends', 'ends'),
  ]


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('less the first row, by seed', 'perplexity', '+.2f', 'dipaco'),
  Column('last phase', 'perplexity_final'),
  Column('the same, less the first row', 'perplexity_final', '+.2f', 'dipaco'),
)

TABLE = common.Table('ablations', '(v) Parts of DiPaCo, each switched alone', rows, COLUMNS, pictures.dots)

if __name__ == '__main__':
  common.main(TABLE)
