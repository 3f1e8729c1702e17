"""(1) Methods at some 250 tokens a parameter: at equal steps of a path, and at equal FLOPs [4, Table 1]."""

import math

import common
import config
import pictures
from common import Column
from runs import Row
from tau import OUTER, TAUS

MEASURED = 12  # times, along the steps


def rows(size: str) -> list[Row]:
  """All are measured along the way; only a discriminative router's rows are re-routed, which scores every path.

  DiLoCo has longer phases than the grids: its momentum is of no use over the shortest.
  """
  num_paths = math.prod(config.SIZES[size].grid)

  def row(name: str, title: str, method: str, changes=None):
    phases = (changes or {}).get('train.phases', config.get_config(f'{size},{method}').train.phases)
    return Row(name, title, method, {'evaluate.every_phases': max(1, phases // MEASURED)} | (changes or {}))

  train = config.get_config(f'{size},dipaco').train
  seldom = config.lasting(size, train.phases * train.steps_per_phase, TAUS[size][1])
  once = {'evaluate.reroute_every': (), 'evaluate.chunk_router_steps': 0, 'evaluate.mixture': 0}
  return [
    row('dense', 'dense', 'dense'),
    row('diloco', f'DiLoCo, {num_paths} workers, tau = {TAUS[size][1]}', 'diloco', seldom),
    row('averaged', f'{num_paths} workers, averaged, tau = {TAUS[size][0]}', 'diloco', OUTER['sgd']),
    row('kmeans', 'DiPaCo, k-means', 'dipaco'),
    row('product', 'DiPaCo, product k-means', 'dipaco', {'routing.method': 'product_kmeans'}),
    row('own', 'DiPaCo, k-means, path-specific upper blocks', 'own'),
    row('discriminative', 'DiPaCo, discriminative once', 'discriminative'),
    row('em', 'DiPaCo, discriminative twice', 'discriminative', once | {'routing.rounds': 2}),
    row('flat', f'flat MoE, {num_paths} paths, k-means', 'flat'),
    row('dense_px', f'equal FLOPs: dense, {num_paths}x steps', f'dense,{num_paths}'),
    row('larger', f'equal FLOPs: dense, {num_paths}x parameters', 'larger'),
  ]


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('less dense, by seed', 'perplexity', '+.2f', 'dense'),
  Column('last version', 'perplexity_final'),
  Column('re-routed, W = 128', 'reroute.learned.128'),
  Column('W = 16', 'reroute.learned.16'),
  Column('averaging gap, last tenth', 'averaging_gap.-1', '+.3f'),
  Column('steps', 'steps', ',.0f'),
  Column('FLOPs', 'train_flops', '.2g'),
  Column('parameters', 'parameters_total', ',.0f'),
  Column('to serve', 'parameters_path', ',.0f'),
)

TABLE = common.Table('methods', 'Methods at equal steps of a path, and at equal FLOPs', rows, COLUMNS, pictures.curves)

if __name__ == '__main__':
  common.main(TABLE)
