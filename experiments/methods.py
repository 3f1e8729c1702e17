"""(i) Methods at equal steps of a path, and beside them dense models at equal FLOPs [4, Table 1]."""

import math

import common
import config
import pictures
from common import Column
from runs import Row


def rows(size: str) -> list[Row]:
  num_paths = math.prod(config.SIZES[size].grid)
  return [
    Row('dense', 'dense', 'dense'),
    Row('diloco', f'DiLoCo, {num_paths} workers', 'diloco'),
    Row('flat', f'flat MoE, {num_paths} paths, k-means', 'flat'),
    Row('kmeans', 'DiPaCo, k-means', 'dipaco', {'routing.method': 'kmeans'}),
    Row('dipaco', 'DiPaCo, product k-means', 'dipaco'),
    Row('ends', 'DiPaCo, product k-means, path-specific ends', 'ends'),
    Row('discriminative', 'DiPaCo, discriminative', 'discriminative'),
    Row('synchronous', 'the same grid, exchange after every step', 'synchronous'),
    Row('dense_2x', 'dense, 2x steps', 'dense,2'),
    Row('dense_4x', 'dense, 4x steps', 'dense,4'),
    Row('dense_px', f'equal FLOPs: dense, {num_paths}x steps', f'dense,{num_paths}'),
    Row('batch_px', f'equal FLOPs: dense, {num_paths}x batch', 'batch'),
    Row('larger', 'equal FLOPs: larger dense', 'larger'),
  ]


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('less dense, by seed', 'perplexity', '+.2f', 'dense'),
  Column('without early stopping', 'perplexity_final'),
  Column('re-routed, W = 16, learned', 'reroute.learned.16'),
  Column('W = 16, oracle', 'reroute.oracle.16'),
  Column('bits per byte', 'bits_per_byte', '.4f'),
  Column('steps', 'steps', ',.0f'),
  Column('FLOPs', 'train_flops', '.2g'),
  Column('parameters', 'parameters_total', '.2g'),
  Column('bytes sent', 'sent_bytes', '.2g'),
)

TABLE = common.Table('methods', '(i) Methods at equal steps, and at equal FLOPs', rows, COLUMNS, pictures.dots)

if __name__ == '__main__':
  common.main(TABLE)
