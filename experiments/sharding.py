"""(ii) Ways of sharding, all with the same grid and levels [2.4, Table 5]."""

import common
import pictures
from common import Column
from runs import Row


def rows(size: str) -> list[Row]:
  return [
    Row('random', 'random', 'dipaco', {'routing.method': 'random'}),
    Row('kmeans', 'k-means', 'dipaco', {'routing.method': 'kmeans'}),
    Row('dipaco', 'product k-means', 'dipaco'),
    Row('discriminative', 'discriminative, one round', 'discriminative'),
    Row('em', 'discriminative, two rounds', 'discriminative', {'routing.rounds': 2}),
    Row('overlap', 'product k-means, training shards overlap by 2', 'dipaco', {'routing.top_n': 2}),
    Row('mlp', 'discriminative, MLP router', 'discriminative', {'routing.hidden': 64}),
    Row('balanced', 'discriminative, shards of equal size', 'discriminative', {'routing.capacity': 1.0}),
    Row('coordinate', 'discriminative, labels by ascent', 'discriminative', {'routing.labels': 'coordinate'}),
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
