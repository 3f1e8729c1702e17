"""The learning rate of the dense baseline, before all else: the best of these is stated in config.py.

Its base is trained at the same rate. `lowest` in results/<size>/tune.json is the choice.
"""

import common
import pictures
from common import Column
from runs import Row

RATES = {'medium': (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)}
OTHERS = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)


def rows(size: str) -> list[Row]:
  rates = RATES.get(size, OTHERS)
  return [Row(f'{rate:g}', f'learning rate {rate:g}', 'dense', {'inner.learning_rate': rate}) for rate in rates]


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('without early stopping', 'perplexity_final'),
  Column('base', 'base_perplexity'),
)

TABLE = common.Table('tune', "The dense baseline's learning rate", rows, COLUMNS, pictures.dots)

if __name__ == '__main__':
  common.main(TABLE)
