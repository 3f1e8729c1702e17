"""(iv) How often paths exchange, at a fixed number of steps [2.5; DiLoCo's H]."""

import common
import config
import pictures
from common import Column
from runs import Row

# Those of the papers, of 1,500 steps, where so many are affordable; else of the steps of other tables.
PAPERS = (10, 50, 150, 500)
GRIDS = {'tiny': 'dipaco,2x2'}  # 1,500 steps of 16 paths take too long on 2 cores
TAUS = {'test': (2, 4, 8), 'smoke': (2, 8, 32), 'tiny': PAPERS, 'small': (4, 16, 48, 192), 'medium': PAPERS}


def rows(size: str) -> list[Row]:
  train = config.SIZES[size].config['train']
  steps = 1500 if TAUS[size] == PAPERS else train['phases'] * train['steps_per_phase']
  method = GRIDS.get(size, 'dipaco')
  return [Row(f'tau_{t}', f'tau = {t}', method, config.lengthened(size, steps // t, t)) for t in TAUS[size]]


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('without early stopping', 'perplexity_final'),
  Column('phases', 'phases', ',.0f'),
  Column('bytes sent', 'sent_bytes', '.2g'),
)

TABLE = common.Table(
  'tau', '(iv) Steps between exchanges, at a fixed number of steps', rows, COLUMNS,
  pictures.against('steps_per_phase', 'tau: steps between exchanges', lambda row: ['DiPaCo, product k-means']),
)  # fmt: skip

if __name__ == '__main__':
  common.main(TABLE)
