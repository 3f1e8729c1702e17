"""(x) Ways of sharding that the paper does not try, or leaves open: against those of table (ii)."""

import common
import pictures
from common import Column
from runs import Row
from sharding import ONCE


def rows(size: str) -> list[Row]:
  return [
    Row('dipaco', 'product k-means', 'dipaco'),
    Row('overlap', 'product k-means, training shards overlap by 2', 'dipaco', {'routing.top_n': 2}),
    Row('discriminative', 'discriminative', 'discriminative', ONCE),
    Row('mlp', 'discriminative, MLP router', 'discriminative', ONCE | {'routing.hidden': 64}),
    Row('balanced', 'discriminative, shards of equal size', 'discriminative', ONCE | {'routing.capacity': 1.0}),
    Row('ascent', 'discriminative, labels by ascent', 'discriminative', ONCE | {'routing.labels': 'coordinate'}),
  ]


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('less product k-means, by seed', 'perplexity', '+.2f', 'dipaco'),
  Column('less discriminative, by seed', 'perplexity', '+.2f', 'discriminative'),
  Column('mutual information of shards and kinds of text', 'domain_nmi', '.3f'),
  Column("router's accuracy on held-out router data", 'router_accuracy', '.3f'),
)

TABLE = common.Table('beyond', '(x) Other ways of sharding', rows, COLUMNS, pictures.dots)

if __name__ == '__main__':
  common.main(TABLE)
