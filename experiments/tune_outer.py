"""The outer step of the grid, after the dense baseline's rate and before all else: the paper's is for more phases.

Nesterov with rate 0.7 and momentum 0.9 moves a module, in the long run, 7 times the mean outer gradient; the rescale
by sqrt(P_{l,e}) [2.7] is 2 for a module of 4 paths and 4 for one of 16.
"""

import common
import pictures
from common import Column
from runs import Row


def rows(size: str) -> list[Row]:
  changes = [
    (f'{"rescaled" if rescale else "plain"}_{rate:g}', rate, rescale)
    for rescale, rates in ((True, (0.7, 0.35, 0.2)), (False, (0.7, 0.5)))
    for rate in rates
  ]
  return [
    Row(name, f'outer learning rate {rate:g}, {"with" if rescale else "without"} rescaling', 'dipaco',
        {'outer.learning_rate': rate, 'outer.rescale': rescale})
    for name, rate, rescale in changes
  ]  # fmt: skip


COLUMNS = (Column('perplexity', 'perplexity'), Column('without early stopping', 'perplexity_final'))

TABLE = common.Table('tune_outer', 'The outer step of the grid', rows, COLUMNS, pictures.dots)

if __name__ == '__main__':
  common.main(TABLE)
