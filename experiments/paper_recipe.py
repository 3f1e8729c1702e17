"""(16) The paper's grid and recipe over as many outer steps as time allows, and each of its switches alone [2.7, 4].

The grid is the smallest of the paper's Table 1: 2x4 paths, with the embedding in the upper level. Its recipe: product
k-means, one discriminative re-sharding, Nesterov steps rescaled by sqrt(P) and weighed by shard sizes, and early
stopping. Each further row changes one of these, or two where the comment says why. The rows of `OUTER_STEPS` take as
many outer steps with any tau: at a fixed number of inner steps, as in table (4), longer phases leave momentum fewer
steps to build up. Where that is a run that the table has already, it is not listed again.
"""

from collections.abc import Mapping
from typing import Any

import common
import config
import methods
import pictures
from common import Column
from runs import Row
from tau import OUTER

GRID = {'micro': (2, 4), 'medium': (4, 4)}  # elsewhere that of the size
STEPS = {'test': 8, 'smoke': 32, 'micro': 1000, 'medium': 4000}
TAU = {'test': 2, 'smoke': 8, 'micro': 10, 'medium': 50}
OUTER_STEPS = {'test': (2, (2, 4)), 'smoke': (4, (2, 8)), 'micro': (40, (5, 25)), 'medium': (40, (10, 50))}
SHARES = {'micro': 0.125}  # the paths' peak rate, as a share of the base's; of dense rows it is a half
DENSE_SHARES = {'micro': 0.5}

RESCALED = OUTER['nesterov'] | {'outer.rescale': True, 'outer.row_weights': False}
# What each row changes in the recipe: its title, the method of config.py, and fields.
SWITCHES: dict[str, tuple[str, str, dict[str, Any]]] = {
  'paper': ("the paper's recipe", 'upper', {}),
  'kmeans': ('k-means alone', 'upper', {'routing.method': 'kmeans'}),
  'product': ('product k-means alone', 'upper', {'routing.method': 'product_kmeans'}),
  'first': ('k-means, then discriminative', 'upper', {'routing.first': 'kmeans'}),
  'unscaled': ('no rescaling', 'upper', {'outer.rescale': False}),
  'rows': ('row weights instead of rescaling', 'upper', {'outer.rescale': False, 'outer.row_weights': True}),
  'alike': ('paths weigh alike', 'upper', {'outer.reweigh': False}),
  'averages': ('plain averages', 'upper', {**OUTER['sgd'], 'outer.rescale': False}),
  # A level that all paths share would be rescaled by the root of their number: unscaled, as `unscaled` is.
  'shared': ('no rescaling, embedding shared by all paths', 'dipaco', {'outer.rescale': False}),
  'own': ('no rescaling, embedding shared, path-specific upper blocks', 'own', {'outer.rescale': False}),
}
AVERAGES = {'micro': 0.5}  # the share of `averages`: an eighth is for Nesterov steps alone, see tune.py


def rows(size: str) -> list[Row]:
  """The recipe and its switches, what they are compared with, and rows of a fixed number of outer steps."""
  count, taus = OUTER_STEPS[size]
  steps, tau, (a, b) = STEPS[size], TAU[size], GRID.get(size, config.SIZES[size].grid)
  num_paths, batch = a * b, config.SIZES[size].config['train']['batch_size']
  table = [dense(size, 'dense', 'dense', steps)]
  table += [dense(size, 'long', f'dense, {num_paths}x steps', steps * num_paths)]
  table += [dense(size, 'batch', f'dense, {num_paths}x batch', steps, {'train.batch_size': num_paths * batch})]
  table += [grid(size, 'diloco', f'DiLoCo, {num_paths} workers', f'diloco,{num_paths}', steps, tau, OUTER['nesterov'])]
  for name, (title, method, changes) in SWITCHES.items():
    words = title if name == 'paper' else f'but {title}'
    rate = methods.at_rate(size, AVERAGES.get(size, 1)) if name == 'averages' else {}
    changes = recipe(size, tau) | changes | rate
    table.append(grid(size, name, f'{a}x{b}, {words}', f'{method},{a}x{b}', steps, tau, changes))
  title = f'flat MoE, {num_paths} paths, k-means'
  table.append(grid(size, 'flat', title, f'flat,{num_paths}', steps, tau, OUTER['nesterov']))
  for each in taus:
    table += of_outer_steps(size, count, each, a, b)
  return [row for i, row in enumerate(table) if row[2:] not in [other[2:] for other in table[:i]]]


def recipe(size: str, tau: int) -> dict[str, Any]:
  """The paper's recipe as changes of the config; paths are re-sharded after a third of the phases."""
  sharding = {'routing.method': 'discriminative', 'routing.first': 'product_kmeans', 'routing.rounds': 1}
  return RESCALED | sharding | {'routing.phases_per_round': max(1, STEPS[size] // tau // 3), 'outer.reweigh': True}


def of_outer_steps(size: str, count: int, tau: int, a: int, b: int) -> list[Row]:
  """A grid, DiLoCo and a dense model of so many phases of tau steps."""
  title, plain = f'{count} outer steps, tau = {tau}', {**OUTER['nesterov'], 'outer.row_weights': False}
  plain |= {'routing.method': 'product_kmeans'}
  return [
    dense(size, f'outer_dense_{tau}', f'{title}: dense', count * tau),
    grid(size, f'outer_diloco_{tau}', f'{title}: DiLoCo', f'diloco,{a * b}', count * tau, tau, OUTER['nesterov']),
    grid(size, f'outer_grid_{tau}', f'{title}: {a}x{b}', f'upper,{a}x{b}', count * tau, tau, plain),
  ]


def dense(size: str, name: str, title: str, steps: int, changes: Mapping[str, Any] = {}) -> Row:
  """A dense model of so many steps."""
  lasting = config.lasting(size, steps, config.SIZES[size].alone)
  return Row(name, title, 'dense', {**lasting, **methods.at_rate(size, DENSE_SHARES.get(size, 1)), **changes})


def grid(size: str, name: str, title: str, method: str, steps: int, tau: int, changes: Mapping[str, Any]) -> Row:
  """Paths that exchange what they share every tau steps."""
  lasting = config.lasting(size, steps, tau)
  return Row(name, title, method, {**lasting, **methods.at_rate(size, SHARES.get(size, 1)), **changes})


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('last version', 'perplexity_final'),
  Column('minus dense, by seed', 'perplexity', '+.2f', 'dense'),
  Column("minus the paper's recipe, by seed", 'perplexity', '+.2f', 'paper'),
  Column('German law', f'perplexity_by_domain.{config.UNLIKE}', '.1f'),
  Column('the six kinds that are neither law nor code, geometric mean', 'perplexity_by_domain.read'),
  Column('averaging gap, last tenth', 'averaging_gap.-1', '+.3f'),
  Column('outer steps', 'phases', ',.0f'),
  Column('FLOPs', 'train_flops', '.2g'),
  Column('parameters', 'parameters_total', ',.0f'),
)

TABLE = common.Table('paper_recipe', "The paper's grid and recipe", rows, COLUMNS, pictures.dots)

if __name__ == '__main__':
  common.main(TABLE)
