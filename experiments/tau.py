"""(4) How far apart, how often: tau, the paths' rate, the base's share of all steps, the outer step [2.5, 2.7].

All rows train as many steps, the base's and a path's together; the cosine ends with the last of them.
"""

from typing import Any

import common
import config
import pictures
from common import Column
from runs import Row

STEPS = {'test': 24, 'smoke': 32, 'micro': 1000, 'medium': 4000}
TAUS = {'test': (2, 4), 'smoke': (2, 8, 32), 'micro': (5, 25, 100, 500), 'medium': (10, 50, 100, 500)}
OUTER = {
  'sgd': {'outer.optimizer': 'sgd', 'outer.learning_rate': 1.0, 'outer.rescale': False},
  'nesterov': {'outer.optimizer': 'nesterov', 'outer.learning_rate': 0.7, 'outer.rescale': False},
}
NAMES = {'sgd': 'outer SGD 1.0', 'nesterov': 'outer Nesterov 0.7, 0.9'}


def exchange(size: str, method: str, nesterov: bool) -> tuple[int, dict[str, Any]]:
  """Steps of a phase, and the changes that give the outer step: DiLoCo's, or averages after short phases."""
  if method == 'dense':
    return config.SIZES[size].alone, {}
  return TAUS[size][nesterov], OUTER['nesterov' if nesterov else 'sgd']


def rows(size: str) -> list[Row]:
  steps, taus = STEPS[size], TAUS[size]
  rate, base = (config.SIZES[size].config[s][f] for s, f in (('inner', 'learning_rate'), ('pretrain', 'steps')))
  often, seldom, *longer = taus
  outer = config.fixed(f'{size},dipaco').outer
  usual, other = (outer.optimizer, 'nesterov' if outer.optimizer == 'sgd' else 'sgd')
  quarter, words = {'train.learning_rate': rate / 4}, 'a quarter of the rate'
  paper = quarter | OUTER['nesterov'] | {'outer.rescale': True, 'outer.row_weights': False}

  def grid(name: str, title: str, tau: int, changes=None, method='dipaco'):
    return Row(name, title, method, config.lasting(size, steps, tau) | (changes or {}))

  def diloco(name: str, tau: int, kind: str, title: str = '', changes=None):
    return grid(
      f'{name}_{tau}', f'DiLoCo, tau = {tau}, {NAMES[kind]}{title}', tau, OUTER[kind] | (changes or {}), 'diloco'
    )

  found = [Row('dense', 'dense', 'dense', config.lasting(size, steps, config.SIZES[size].alone))]
  found += [grid(f'tau_{t}', f'DiPaCo, tau = {t}, {NAMES[usual]}', t) for t in taus[:3]]
  found += [grid(f'quarter_{t}', f'DiPaCo, tau = {t}, {NAMES[usual]}, {words}', t, quarter) for t in taus]
  found += [
    grid(f'{other}_quarter_{t}', f'DiPaCo, tau = {t}, {NAMES[other]}, {words}', t, OUTER[other] | quarter)
    for t in (seldom, *longer[:1])
  ]
  if usual == 'sgd':
    title = f"DiPaCo, tau = {seldom}, {NAMES['nesterov']}, {words}, the paper's rescaling, no row weights"
    found += [grid('paper', title, seldom, paper)]
  found += [diloco('diloco', seldom, 'nesterov')]
  found += [diloco('diloco_quarter', t, 'nesterov', f', {words}', quarter) for t in (seldom, *longer[:1])]
  found += [diloco('averaged', t, 'sgd') for t in (often, seldom)]
  bases = max(1, (base + steps) // 16 // often) * often, (base + steps) // 2
  found += [
    grid(f'base_{n}', f'DiPaCo, tau = {often}, a base of {n:,} of all steps', often,
         config.lasting(size, steps, often, n))
    for n in bases
  ]  # fmt: skip
  return found


COLUMNS = (
  Column('perplexity, last version', 'perplexity_final'),
  Column('minus dense, by seed', 'perplexity_final', '+.2f', 'dense'),
  Column('averaging gap, first tenth', 'averaging_gap.0', '+.3f'),
  Column('last tenth', 'averaging_gap.-1', '+.3f'),
  Column('phases', 'phases', ',.0f'),
  Column('bytes sent', 'sent_bytes', '.2g'),
  Column('FLOPs', 'train_flops', '.2g'),
)


def series(row: Row) -> list[str]:
  """Rows that differ in tau alone, of two or more."""
  quarter = 'a quarter of the rate'
  lines = {
    'tau': 'DiPaCo, averages', 'quarter': f'DiPaCo, averages, {quarter}',
    'nesterov_quarter': f'DiPaCo, Nesterov, {quarter}',
    'diloco_quarter': f'DiLoCo, Nesterov, {quarter}', 'averaged': 'DiLoCo, averages',
  }  # fmt: skip
  kind, _, tau = row.name.rpartition('_')
  return [lines[kind]] if kind in lines and tau.isdecimal() else []


TABLE = common.Table(
  'tau',
  'Steps between exchanges, rates and outer steps, at a fixed number of steps',
  rows,
  COLUMNS,
  pictures.against('steps_per_phase', 'tau: steps between exchanges', series, level='dense'),
)

if __name__ == '__main__':
  common.main(TABLE)
