"""(ii) Ways of sharding, all with the same grid and levels [2.4, Table 5]."""

import common
import pictures
from common import Column
from runs import Row

ONCE = {'evaluate.reroute_every': (), 'evaluate.chunk_router_steps': 0, 'evaluate.mixture': 0}  # not re-routed


def rows(size: str) -> list[Row]:
  return [
    Row('random', 'random', 'dipaco', {'routing.method': 'random'}),
    Row('kmeans', 'k-means', 'dipaco', {'routing.method': 'kmeans'}),
    Row('dipaco', 'product k-means', 'dipaco'),
    Row('discriminative', 'discriminative, one round', 'discriminative'),
    Row('em', 'discriminative, two rounds', 'discriminative', ONCE | {'routing.rounds': 2}),
  ]


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('less k-means, by seed', 'perplexity', '+.2f', 'kmeans'),
  Column('without early stopping', 'perplexity_final'),
  Column('mutual information of shards and kinds of text', 'domain_nmi', '.3f'),
  Column("router's accuracy on held-out router data", 'router_accuracy', '.3f'),
)

TABLE = common.Table('sharding', '(ii) Ways of sharding', rows, COLUMNS, pictures.dots)

if __name__ == '__main__':
  common.main(TABLE)
