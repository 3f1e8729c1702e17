"""(1) Methods at some 250 tokens a parameter: at equal steps of a path, and at equal FLOPs [4, Table 1]."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import bases
import common
import config
import pictures
from absl import flags
from common import Column
from runs import Row, Run
from tau import OUTER, TAUS

MEASURED = 12  # times, along the steps
# The peak rate of a row's paths, as a share of its base's, where that is not 1: the best of tune.py, by size.
SHARES = {
  'micro': {
    'dense': 0.5, 'diloco': 0.125, 'kmeans_25': 0.125, 'flat': 0.125, 'own': 0.125, 'ends': 0.125, 'diloco_own': 0.5,
    'dense_px': 0.5,  # as the dense row
    'dense_batch': 0.5,
  }
}  # fmt: skip
# Rows of paths that take DiLoCo's outer step after phases of its length; the others average paths after short phases.
NESTEROV = {'micro': ('diloco', 'kmeans_25', 'own', 'ends', 'flat')}


def rows(size: str, shares: Mapping[str, float] | None = None, nesterov: Collection[str] | None = None) -> list[Row]:
  """All are measured along the way; only a discriminative router's rows are re-routed, which scores every path.

  `shares`, `nesterov`: as SHARES and NESTEROV, which are taken where they are not given.
  """
  shares = SHARES.get(size, {}) if shares is None else shares
  nesterov = NESTEROV.get(size, ('diloco', 'kmeans_25')) if nesterov is None else nesterov
  num_paths, batch = math.prod(config.SIZES[size].grid), config.SIZES[size].config['train']['batch_size']

  def row(name: str, title: str, method: str, changes=None):
    steps = outer_step(size, method, changes or {}) if name in nesterov else {}
    return make_row(size, name, title, method, shares.get(name, 1), (changes or {}) | steps)

  def after(name: str, words: str, method: str):
    changes = second_half(size, method, shares.get(name, 1)) | {'train.learning_rate': 0.0}
    return row(name, f'half of the steps DiLoCo, then {words}', method, changes)

  of_diloco = diloco(size, shares.get('diloco', 1), 'diloco' in nesterov)
  weighed = {**of_diloco.changes, 'outer.row_weights': True}
  once = {'evaluate.reroute_every': (), 'evaluate.chunk_router_steps': 0}
  return [
    row('dense', 'dense', 'dense'),
    of_diloco,
    of_diloco._replace(name='diloco_rows', title=f'{of_diloco.title}, row weights', changes=weighed),
    row('kmeans', 'DiPaCo, k-means', 'dipaco'),
    row('kmeans_25', f'DiPaCo, k-means, tau = {TAUS[size][1]}', 'dipaco'),
    row('product', 'DiPaCo, product k-means', 'dipaco', {'routing.method': 'product_kmeans'}),
    row('own', 'DiPaCo, k-means, path-specific upper blocks', 'own'),
    row('ends', f'DiPaCo, k-means, {config.ends_title(size)}', 'ends'),
    row('discriminative', 'DiPaCo, discriminative once', 'discriminative'),
    row('em', 'DiPaCo, discriminative twice', 'discriminative', once | {'routing.rounds': 2}),
    row('flat', f'flat MoE, {num_paths} paths, k-means', 'flat'),
    after('diloco_own', 'path-specific upper blocks', 'own'),
    row('dense_px', f'equal FLOPs: dense, {num_paths}x steps', f'dense,{num_paths}'),
    row('dense_batch', f'equal FLOPs: dense, {num_paths}x batch', 'dense', {'train.batch_size': num_paths * batch}),
    row('larger', f'equal FLOPs: dense, {num_paths}x parameters', 'larger'),
  ]


def outer_step(size: str, method: str, changes: Mapping[str, Any]) -> dict[str, Any]:
  """The changes that give a row DiLoCo's outer step and the length of its phases, over as many steps."""
  c, tau = config.fixed(f'{size},{method}'), TAUS[size][1]
  phases = changes.get('train.phases', c.train.phases) * c.train.steps_per_phase // tau
  return OUTER['nesterov'] | {'train.phases': phases, 'train.steps_per_phase': tau}


def make_row(size: str, name: str, title: str, method: str, share: float, changes=None) -> Row:
  """Measured along the way, at its last version: hold-outs of a path's own shard are smaller than DiLoCo's of all."""
  phases = (changes or {}).get('train.phases', config.fixed(f'{size},{method}').train.phases)
  measured = {'evaluate.every_phases': max(1, phases // MEASURED)}
  return Row(name, title, method, measured | config.LAST | at_rate(size, share) | (changes or {}))


def at_rate(size: str, share: float) -> dict[str, float]:
  """The changes that make paths' peak rate a share of the base's."""
  peak = config.SIZES[size].config['inner']['learning_rate']
  return {'train.learning_rate': peak * share} if share != 1 else {}


def diloco(size: str, share: float, nesterov: bool = True) -> Row:
  """Of longer phases than plain averages: its momentum is of no use over the shortest."""
  title = f'DiLoCo, {math.prod(config.SIZES[size].grid)} workers, tau = {TAUS[size][nesterov]}'
  return make_row(size, 'diloco', title, 'diloco', share, outer_step(size, 'diloco', {}) if nesterov else OUTER['sgd'])


def base_row(size: str) -> Row:
  """DiLoCo's own row, at its own rate, which hands over at half of its phases."""
  return diloco(size, SHARES.get(size, {}).get('diloco', 1))


def second_half(size: str, method: str, share: float) -> dict[str, Any]:
  """Returns the changes of a row that continues from there: the rest of steps and cosine, warmed up again."""
  c = config.fixed(f'{size},{method}')
  steps = c.train.phases * c.train.steps_per_phase // 2
  last, done = c.inner.final_fraction, (c.pretrain.steps + steps) / c.inner.decay_steps
  left = round(last + (1 - last) * (1 + math.cos(math.pi * done)) / 2, 3)
  return bases.start(size, base_row(size)) | {
    'train.phases': c.train.phases // 2,
    'inner.decay_steps': steps,
    'inner.learning_rate': c.inner.learning_rate * share * left,
    'inner.final_fraction': round(last / left, 3),
    'inner.warmup_steps': 0,
    'inner.rewarm_steps': c.inner.warmup_steps // 2,
  }


def prepare(missing: Sequence[Run]):
  """Trains and exports the models that some rows start from, by seed, before DiLoCo's own row, which continues them."""
  f = flags.FLAGS
  base = base_row(f.size)
  of_it = [run for run in missing if bases.starts(run, base) or run.row == base]
  bases.export_for(of_it, base, f.data, f.validation, phases=base.changes['train.phases'] // 2)


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('minus dense, by seed', 'perplexity', '+.2f', 'dense'),
  Column('German law', f'perplexity_by_domain.{config.UNLIKE}', '.1f'),
  Column('the other kinds, geometric mean', 'perplexity_by_domain.others'),
  Column('re-routed, W = 64', 'reroute.learned.64'),
  Column('W = 16', 'reroute.learned.16'),
  Column('steps of a path', 'steps_of_path', ',.0f'),
  Column('FLOPs', 'train_flops', '.2g'),
  Column('parameters', 'parameters_total', ',.0f'),
  Column('that a token passes', 'parameters_path', ',.0f'),
)

TABLE = common.Table('methods', 'Methods at equal steps of a path, and at equal FLOPs', rows, COLUMNS, pictures.curves)

if __name__ == '__main__':
  common.main(TABLE, prepare)
