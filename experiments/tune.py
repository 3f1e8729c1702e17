"""Tuning of learning rates, before all tables: config.py has the best ones.

With text of its own, see split.py. A base is trained at the same rate as what follows it; as many steps as
in table (4), and for the small model as in table (1). Methods of table (1) are tried at its steps too, each at three
rates or four after the base of the best, and those of tables (2) and (5) at two or three after theirs; rows of table
(15) with a rate of their own at three.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import baselines
import common
import config
import methods
import paths
import pretrained
from common import Column
from runs import Row, Run
from tau import STEPS, TAUS

RATES = {'medium': (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)}
OTHERS = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2)
SHARES = (0.0625, 0.125, 0.25, 0.5, 1)  # of the base's peak rate, the paths'
LOW = 0.125  # so low a share and lower ones are for Nesterov alone
STOPPED = {'train.early_stopping': True}  # hold-outs are withheld: another base, other shards than rows without it
PATHS = ('dense', 'kmeans', 'own', 'ends', 'flat')  # tried with DiLoCo's outer step too
# Of tables (2) and (5): number, module, end of a row's name; shares of the base's peak rate by outer step and rows.
TRIED = {
  'paths': (2, paths, '_4', {
    ('', ('dense', 'long')): (0.25, 0.5, 1, 2),
    ('averages', ('diloco', 'grid', 'own', 'flat')): (0.5, 1, 2, 4),
    ('Nesterov', ('diloco', 'own')): (0.25, 0.5, 1),
  }),
  'pretrained': (5, pretrained, '', {
    ('', ('dense', 'long', 'batch')): (0.03, 0.1, 0.3, 1),
    ('averages', ('diloco', 'grid', 'own', 'flat')): (0.03, 0.1, 0.3, 1),
    ('Nesterov', ('diloco', 'own', 'flat')): (0.03, 0.1, 0.3),
  }),
}  # fmt: skip
# Of table (15): shares for the dense model with an outer step, and for dense models of other widths.
OF_OUTER = (0.125, 0.25, 0.5)
OF_WIDTHS = (0.25, 0.5, 1)
METHODS = ('dense', 'diloco', 'kmeans', 'own', 'ends', 'flat', 'diloco_own', 'dense_batch')


def rows(size: str) -> list[Row]:
  rates = RATES.get(size, OTHERS)
  lasting = config.lasting(size, STEPS[size], config.SIZES[size].alone)
  muon = lasting | {'inner.optimizer': 'muon'}
  return [
    *tried('', 'dense', 'dense', lasting, rates),
    *longer(size, rates[-4:]),
    *tried('dipaco_', 'DiPaCo, k-means', 'dipaco', config.lasting(size, STEPS[size], TAUS[size][0]), rates[-4:]),
    *tried('diloco_', 'DiLoCo', 'diloco', config.lasting(size, STEPS[size], TAUS[size][1]), rates[-4:]),
    *tried('muon_', 'dense, Muon', 'dense', muon, rates),
    *of_table(size, 'paths'),
    *of_table(size, 'pretrained'),
    *of_baselines(size),
    *tried('larger_', 'larger dense', 'larger', config.lasting_larger(size, STEPS[size]), rates),
  ]


def tried(name: str, title: str, method: str, changes: Mapping[str, Any], rates: Sequence[float]) -> list[Row]:
  """A row for each rate, the base's too."""
  return [
    Row(f'{name}{rate:g}', f'{title}, {rate:g}', method, {**changes, 'inner.learning_rate': rate}) for rate in rates
  ]


def longer(size: str, rates: Sequence[float]) -> list[Row]:
  """The small model at the steps of table (1), where they are others; methods of it, whose paths have another rate."""
  c, peak = config.fixed(f'{size},own'), config.SIZES[size].config['inner']['learning_rate']
  steps = c.train.phases * c.train.steps_per_phase
  found = tried('long_', f'dense, {steps:,} steps', 'dense', {}, rates if steps != STEPS[size] else ())
  for kind, words, names, nesterov, changes in (
    ('long', '', METHODS, ('diloco',), STOPPED),
    ('averaged', ', averages', ('diloco',), (), {'evaluate.every_phases': 0}),
    ('nesterov', ', Nesterov', PATHS, PATHS, {'evaluate.every_phases': 0}),
  ):
    by_share = {x: {row.name: row for row in methods.rows(size, dict.fromkeys(METHODS, x), nesterov)} for x in SHARES}
    for name, (share, of_share) in itertools.product(names, by_share.items()):
      row, rate = of_share[name], peak * share
      if share <= LOW and name not in nesterov:
        continue
      title = f'{row.title}{words}: {steps:,} steps, {rate:g} after {peak:g}'
      found.append(row._replace(name=f'{kind}_{name}_{rate:g}', title=title, changes=row.changes | changes))
  return found + (other_weights(size, found) if c.outer.row_weights else [])


def other_weights(size: str, rows: Sequence[Row]) -> list[Row]:
  """What row weights are for: path-specific upper blocks without, DiLoCo with them, at a low rate with Nesterov."""
  rate = f'{LOW * config.SIZES[size].config["inner"]["learning_rate"]:g}'
  by_name = {row.name: row for row in rows}
  return [
    weighed(by_name[f'nesterov_own_{rate}'], f'unweighed_own_{rate}', False),
    weighed(by_name[f'long_diloco_{rate}'], f'weighed_diloco_{rate}', True),
  ]


def weighed(row: Row, name: str, row_weights: bool) -> Row:
  """The row with row weights, or without them."""
  rate = name.rpartition('_')[2]
  words = 'row weights' if row_weights else 'no row weights'
  before, comma, after = row.title.rpartition(':' if ':' in row.title else f', {rate}')
  return Row(name, f'{before}, {words}{comma}{after}', row.method, {**row.changes, 'outer.row_weights': row_weights})


def of_table(size: str, table: str) -> list[Row]:
  """Methods of table (2), of four paths, or of (5), with both outer steps; what is tried is in TRIED."""
  number, module, suffix, tried = TRIED[table]
  peak = config.SIZES[size].config['inner']['learning_rate']
  found = []
  for (words, kinds), shares in tried.items():
    nesterov = kinds if words == 'Nesterov' else ()
    for share, kind in itertools.product(shares, kinds):
      row = next(row for row in module.rows(size, {kind: share}, nesterov) if row.name == f'{kind}{suffix}')
      name, rate = '_'.join([table, *(['nesterov'] if nesterov else []), kind]), f'{peak * share:g}'
      how = words and f', {words}'
      title = f'table ({number}), {row.title.removesuffix(", averaged")}{how}, {rate}'
      found.append(row._replace(name=f'{name}_{rate}', title=title))
      if (words, kind) == ('averages', 'diloco'):
        found.append(weighed(found[-1], f'{table}_weighed_diloco_{rate}', True))
  return found


def of_baselines(size: str) -> list[Row]:
  """Rows of table (15) that have a rate of their own, at three shares of the base's peak rate each."""
  peak = config.SIZES[size].config['inner']['learning_rate']
  found = []
  for name in (row.name for row in baselines.alone(size, {})):
    for share in OF_OUTER if name == 'outer' else OF_WIDTHS:
      row = next(row for row in baselines.alone(size, {name: share}) if row.name == name)
      rate = f'{peak * share:g}'
      found.append(row._replace(name=f'baselines_{name}_{rate}', title=f'table (15), {row.title}, {rate}'))
  return found


def prepare(missing: Sequence[Run]):
  """What rows of tables (1), (2) and (5) start from."""
  for module in (methods, paths, pretrained):
    module.prepare(missing)


COLUMNS = (Column('perplexity, last version', 'perplexity_final'), Column('base', 'base_perplexity'))


def by_rate(rows: Sequence[Row], results: common.Results) -> list[list[str]]:
  """A line for each method, a column for each rate; nothing stands where none was run."""
  found: dict[str, dict[float, str]] = {}
  rates = set[float]()
  for row in rows:
    *_, rate = row.name.rpartition('_')
    mine = found.setdefault(row.title.replace(f', {rate}', ''), {})
    if numbers := common.figures(results, row.name, COLUMNS[0]):
      mine[float(rate)] = common.cell(numbers, '.2f')
      rates.add(float(rate))
  head = ['peak rate', *(f'{rate:g}' for rate in sorted(rates))]
  lines = [[words, *(mine.get(rate, '') for rate in sorted(rates))] for words, mine in found.items() if mine]
  return [head, ['---', *['---:'] * len(rates)], *lines]


TABLE = common.Table('tune', 'Learning rates', rows, COLUMNS, None, by_rate)

if __name__ == '__main__':
  common.main(TABLE, prepare)
