"""(vi) More paths on the same text: does flat MoE overfit where the grid doesn't [Table 2]?

There is little text and there are many steps, so that the shards of many paths are read several times over. Shards are
of equal size: of many clusters of little text some are empty.
"""

import common
import config
import pictures
from common import Column
from runs import Row

GRIDS = {'test': (2,), 'smoke': (2,)}  # 2: a grid of 2x2
DOCUMENTS = {'tiny': 1000, 'small': 3000, 'medium': 12_000}
TIMES = {'tiny': 1}  # the steps of other tables; elsewhere 3


def rows(size: str) -> list[Row]:
  train = config.SIZES[size].config['train']
  changes = config.lengthened(size, TIMES.get(size, 3) * train['phases'], train['steps_per_phase'])
  if size in DOCUMENTS:
    changes |= {'data.max_documents': DOCUMENTS[size]}
  found = [Row('dense', 'dense', 'dense', changes)]
  changes |= {'routing.capacity': 1.0}
  for n in GRIDS.get(size, (2, 4, 8)):
    found += [
      Row(f'flat_{n * n}', f'flat MoE, {n * n} paths', f'flat,{n * n}', changes),
      Row(f'dipaco_{n * n}', f'DiPaCo {n}x{n}', f'dipaco,{n}x{n}', changes),
      Row(f'ends_{n * n}', f'DiPaCo {n}x{n}, path-specific ends', f'ends,{n}x{n}', changes),
    ]
  return found


COLUMNS = (
  Column('validation loss, last phase', 'validation_loss', '.3f'),
  Column('training loss, last phase', 'train_loss', '.3f'),
  Column('perplexity, last phase', 'perplexity_final'),
  Column('perplexity, early stopping', 'perplexity'),
  Column('parameters', 'parameters_total', '.2g'),
)

SERIES = {'flat': 'flat MoE', 'dipaco': 'DiPaCo', 'ends': 'DiPaCo, path-specific ends'}


def series(row: Row) -> list[str]:
  """All begin with the dense model, which is one path."""
  return [words for name, words in SERIES.items() if row.name.split('_')[0] in (name, 'dense')]


TABLE = common.Table(
  'paths', '(vi) More paths on the same text', rows, COLUMNS,
  pictures.against('paths', 'paths', series),
)  # fmt: skip

if __name__ == '__main__':
  common.main(TABLE)
