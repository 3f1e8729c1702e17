"""Learning rates, before all else: the best are stated in config.py.

With text that no table reports, see split.py. A base is trained at the same rate as what follows it; as many steps as
in table (4), and for the small model as in table (1). Methods of table (1) are tried at its steps too, each at three
rates after the base of the best.
"""

import common
import config
import methods
import pictures
from common import Column
from runs import Row
from tau import STEPS, TAUS

RATES = {'medium': (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)}
OTHERS = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2)
METHODS = ('dense', 'diloco', 'averaged', 'kmeans', 'own', 'flat')  # of table (1), tried at its steps


def rows(size: str) -> list[Row]:
  rates = RATES.get(size, OTHERS)
  lasting = config.lasting(size, STEPS[size], config.SIZES[size].alone)
  small = [Row(f'{rate:g}', f'dense, {rate:g}', 'dense', lasting | {'inner.learning_rate': rate}) for rate in rates]
  c = config.get_config(f'{size},larger')
  phases = max(1, round(c.train.phases * lasting['train.phases'] / config.get_config(f'{size},dense').train.phases))
  steps = {'train.phases': phases, 'inner.decay_steps': c.pretrain.steps + phases * c.train.steps_per_phase}
  large = [
    Row(f'larger_{rate:g}', f'larger dense, {rate:g}', 'larger', steps | {'inner.learning_rate': rate})
    for rate in rates
  ]
  muon = [
    Row(
      f'muon_{rate:g}',
      f'dense, Muon, {rate:g}',
      'dense',
      lasting | {'inner.optimizer': 'muon', 'inner.learning_rate': rate},
    )
    for rate in rates
  ]
  train = config.get_config(f'{size},dipaco').train
  is_longer = train.phases * train.steps_per_phase != STEPS[size]
  longer = [
    Row(f'long_{rate:g}', f'dense, steps of table (1), {rate:g}', 'dense', {'inner.learning_rate': rate})
    for rate in rates[-4:] * is_longer
  ]
  peak = config.SIZES[size].config['inner']['learning_rate']
  longer += [
    Row(
      f'long_{row.name}_{rate:g}',
      f'{row.title}, steps of table (1), {rate:g} after {peak:g}',
      row.method,
      row.changes | ({'train.learning_rate': rate} if rate != peak else {}),
    )
    for row in methods.rows(size)
    if row.name in METHODS
    for rate in (peak / 4, peak / 2, peak)
  ]
  paths = [
    Row(
      f'{name}_{rate:g}',
      f'{title}, {rate:g}',
      name,
      config.lasting(size, STEPS[size], tau) | {'inner.learning_rate': rate},
    )
    for (name, title), tau in zip((('dipaco', 'DiPaCo, k-means'), ('diloco', 'DiLoCo')), TAUS[size][:2], strict=False)
    for rate in rates[-4:]
  ]
  return small + longer + paths + muon + large


COLUMNS = (Column('perplexity', 'perplexity'), Column('base', 'base_perplexity'))

TABLE = common.Table('tune', 'Learning rates', rows, COLUMNS, pictures.dots)

if __name__ == '__main__':
  common.main(TABLE)
