"""(4) How far apart, how often: tau, the paths' rate, the base's share of all steps, the outer step [2.5, 2.7].

All rows train as many steps, the base's and a path's together; the cosine ends with the last of them.
"""

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


def rows(size: str) -> list[Row]:
  steps, taus = STEPS[size], TAUS[size]
  rate, base = (config.SIZES[size].config[s][f] for s, f in (('inner', 'learning_rate'), ('pretrain', 'steps')))
  often, seldom = taus[0], taus[1]
  outer = config.get_config(f'{size},dipaco').outer
  other = 'nesterov' if outer.optimizer == 'sgd' else 'sgd'

  def grid(name: str, title: str, tau: int, changes=None, method='dipaco'):
    return Row(name, title, method, config.lasting(size, steps, tau) | (changes or {}))

  found = [Row('dense', 'dense', 'dense', config.lasting(size, steps, config.SIZES[size].alone))]
  found += [grid(f'tau_{t}', f'DiPaCo, tau = {t}', t) for t in taus]
  found += [grid(f'diloco_{t}', f'DiLoCo, tau = {t}', t, method='diloco') for t in taus]
  found += [grid(f'averaged_{t}', f'DiLoCo, {NAMES["sgd"]}, tau = {t}', t, OUTER['sgd'], 'diloco') for t in taus[:3]]
  third = {'train.learning_rate': rate / 3}
  found += [grid(f'third_{t}', f'tau = {t}, a third of the rate', t, third) for t in taus[:3]]
  found += [grid(f'{other}_{t}', f'tau = {t}, {NAMES[other]}', t, OUTER[other]) for t in taus[:3]]
  by_shard = {'outer.row_weights': not outer.row_weights, 'outer.rescale': False}
  words = 'without' if outer.row_weights else 'with'
  found += [grid(f'rows_{t}', f'tau = {t}, {words} row weights', t, by_shard) for t in taus[:3]]
  found += [
    grid(f'{other}_third', f'tau = {seldom}, {NAMES[other]}, a third of the rate', seldom, OUTER[other] | third),
    grid('rescale', f'tau = {often}, {"not " * outer.rescale}rescaled', often,
         {'outer.rescale': not outer.rescale, 'outer.row_weights': False}),
    *(grid(f'base_{n}', f'tau = {often}, a base of {n:,} of all steps', often, config.lasting(size, steps, often, n))
      for n in (max(1, (base + steps) // 16 // often) * often, (base + steps) // 2)),
  ]  # fmt: skip
  return found


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('less dense, by seed', 'perplexity', '+.2f', 'dense'),
  Column('last version', 'perplexity_final'),
  Column('averaging gap, first tenth', 'averaging_gap.0', '+.3f'),
  Column('last tenth', 'averaging_gap.-1', '+.3f'),
  Column('phases', 'phases', ',.0f'),
  Column('bytes sent', 'sent_bytes', '.2g'),
)


def series(row: Row) -> list[str]:
  named = {
    'tau': 'DiPaCo',
    'diloco': 'DiLoCo',
    'averaged': 'averages',
    'third': 'a third of the rate',
    'rows': 'other row weights',
  } | NAMES
  kind, _, tau = row.name.partition('_')
  return [named[kind]] if kind in named and tau.isdecimal() else []


TABLE = common.Table(
  'tau',
  'Steps between exchanges, rates and outer steps, at a fixed number of steps',
  rows,
  COLUMNS,
  pictures.against('steps_per_phase', 'tau: steps between exchanges', series),
)

if __name__ == '__main__':
  common.main(TABLE)
