"""(7) Sharing between paths: the same clusters of text at other places of the grid, and other levels.

Plain k-means numbers its clusters as they come, so which paths meet in a module is left to chance. Rows train as many
steps as those of table (4), and all average paths after phases of one length. Those whose paths share less have the
rate that was best for them with plain averages, see tune.py.
"""

import common
import config
import methods
import pictures
from common import Column
from runs import Row
from tau import STEPS, TAUS

SHARES = {'micro': {'own': 0.5, 'blocks': 0.5, 'flat': 0.5}}  # of the base's peak rate, by size, where it is not 1


def rows(size: str) -> list[Row]:
  lasting = config.lasting(size, STEPS[size], TAUS[size][0]) | config.LAST
  by_row = config.fixed(f'{size},dipaco').outer.row_weights
  alone = config.lasting(size, STEPS[size], config.SIZES[size].alone) | config.LAST

  def row(name: str, title: str, method: str = 'dipaco', lasting=lasting, **changes):
    rate = methods.at_rate(size, SHARES.get(size, {}).get(name, 1))
    return Row(name, title, method, lasting | rate | {key.replace('__', '.'): value for key, value in changes.items()})

  return [
    row('dense', 'dense', 'dense', alone),
    row('kmeans', 'k-means, clusters as they come'),
    row('product', 'product k-means', routing__method='product_kmeans'),
    row('random', 'random shards', routing__method='random'),
    row('equal', 'k-means, paths weigh alike', outer__reweigh=False),
    row(
      'rows',
      f'k-means, {"without" if by_row else "with"} row weights',
      outer__row_weights=not by_row,
      outer__rescale=False,
    ),
    row('ends', config.ends_title(size), 'ends'),
    row('own', 'path-specific upper blocks', 'own'),
    row('blocks', 'all blocks path-specific', 'blocks_own'),
    row('flat', 'nothing shared (flat MoE)', 'flat', alone),
  ]


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('minus k-means, by seed', 'perplexity', '+.2f', 'kmeans'),
  Column('German law', f'perplexity_by_domain.{config.UNLIKE}'),
  Column('cosine, lower level', 'cosine.low.-1', '+.2f'),
  Column('parameters', 'parameters_total', ',.0f'),
)

TABLE = common.Table('sharing', 'Who shares with whom', rows, COLUMNS, pictures.dots)

if __name__ == '__main__':
  common.main(TABLE)
