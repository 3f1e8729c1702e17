"""(15) The strongest opponent of a grid, at equal FLOPs of training, stored parameters, or cost of a served token.

Rows are those of table (1), and variants of them. Dense models of other widths take the FLOPs that the base and all
paths take: their bases are shorter in proportion, as that of the larger model in table (1), and so is their batch, so
that they make as many steps as a path. What averages of finished runs come to is in mixtures.py.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import common
import config
import methods
import sizes
from common import Column
from runs import Row

from dipaco_jax.reports import amounts, palette, plot_style

SWITCHES: dict[str, tuple[str, dict[str, Any]]] = {
  'tokens': ('loss on all tokens', {'train.loss_on_prefix': True}),
  'zero': ('decay to 0', {'inner.final_fraction': 0.0}),
}
SWITCHES['both'] = ('loss on all tokens, decay to 0', SWITCHES['tokens'][1] | SWITCHES['zero'][1])
USUAL = (
  'dense', 'dense_px', 'dense_batch', 'diloco', 'kmeans_25', 'product', 'own', 'ends', 'flat', 'larger'
)  # rows of table (1)  # fmt: skip
SWITCHED = {  # which of them have which switches
  'dense': ('tokens',),
  'dense_px': ('both',),
  **dict.fromkeys(('dense_batch', 'diloco', 'own', 'flat'), tuple(SWITCHES)),
  'larger': ('both',),
}
# Width, heads, MLP of dense models between one path and the larger model.
WIDTHS = {
  'test': ((20, 2, 30),),
  'smoke': ((80, 2, 216),),
  'micro': ((40, 2, 108), (48, 3, 128), (56, 4, 150)),
  'medium': ((512, 8, 1368), (640, 10, 1712)),
}
# The peak rate after the base, as a share of the base's: `outer` as DiLoCo, widths as dense paths of table (1).
# tune.py tries three for each row.
SHARES: dict[str, dict[str, float]] = {'micro': {'outer': 0.125, 'width_40': 0.5, 'width_48': 0.5, 'width_56': 0.5}}
KEPT_VERSIONS = 40  # newest versions of the rows that mixtures.py averages


def rows(size: str) -> list[Row]:
  """Switched rows have the rate of the row without a switch."""
  by_name = {row.name: row for row in methods.rows(size)}
  usual = [by_name[name] for name in USUAL]
  switched = [switch(size, by_name[name], kind) for name, kinds in SWITCHED.items() for kind in kinds]
  return [*usual, *flat_of_fewer(size), *switched, *alone(size, SHARES.get(size, {})), short(size)]


def flat_of_fewer(size: str) -> list[Row]:
  """Flat mixtures of fewer paths, which store about as much as grids do; with larger batches their FLOPs are equal."""
  row = next(row for row in methods.rows(size) if row.name == 'flat')
  num_paths, batch = math.prod(config.SIZES[size].grid), config.SIZES[size].config['train']['batch_size']
  return [
    Row(
      f'flat_{n}', row.title.replace(str(num_paths), str(n)), f'{row.method},{n}',
      {**row.changes, 'train.batch_size': round(num_paths * batch / n)},
    )
    for n in range(2, num_paths) if num_paths == 4
  ]  # fmt: skip


def short(size: str) -> Row:
  """The widest dense model of table (3), with the steps and so with a part of the FLOPs that it has there."""
  row = next(row for row in reversed(sizes.rows(size)) if row.method == 'dense')
  return row._replace(name='short', title=f'dense, {row.title.replace(", 1x1", "")}')


def switch(size: str, row: Row, kind: str) -> Row:
  """The row with loss on all tokens, with decay to 0, or with both."""
  words, changes = SWITCHES[kind]
  kept = {'checkpoint.every_steps': config.SIZES[size].alone, 'checkpoint.keep': KEPT_VERSIONS}
  changes = changes | (kept if row.name == 'dense_batch' else {})
  return Row(f'{row.name}_{kind}', f'{row.title}, {words}', row.method, {**row.changes, **changes})


def alone(size: str, shares: Mapping[str, float]) -> list[Row]:
  """Rows that have a rate of their own: one worker with DiLoCo's outer step, and dense models of other widths."""
  num_paths, batch = math.prod(config.SIZES[size].grid), config.SIZES[size].config['train']['batch_size']
  changes = methods.outer_step(size, 'dense', {}) | {'train.batch_size': num_paths * batch}
  title = f'equal FLOPs: dense, {num_paths}x batch, outer Nesterov 0.7, 0.9, tau = {changes["train.steps_per_phase"]}'
  outer = methods.make_row(size, 'outer', title, 'dense', shares.get('outer', 1), changes)
  return [outer, *(of_width(size, *model, shares) for model in WIDTHS[size])]


def of_width(size: str, width: int, heads: int, mlp: int, shares: Mapping[str, float]) -> Row:
  """A dense model of this width: its base and its training take the FLOPs of the small base and of all paths."""
  model = sizes.of_width(width, heads, mlp)
  c = config.get_config(f'{size},dense')
  small, batch = config.flops_per_token(c), c.train.batch_size * math.prod(config.SIZES[size].grid)
  c.update_from_flattened_dict(model)
  ratio = config.flops_per_token(c) / small
  base = round(c.pretrain.steps / ratio)
  changes = {
    'pretrain.steps': base,
    'inner.decay_steps': base + c.train.phases * c.train.steps_per_phase,
    'train.batch_size': round(batch / ratio),
  }
  name = f'width_{width}'
  return methods.make_row(
    size, name, f'equal FLOPs: dense, width {width}', 'dense', shares.get(name, 1), model | changes
  )


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('minus dense, by seed', 'perplexity', '+.2f', 'dense'),
  Column('German law', f'perplexity_by_domain.{config.UNLIKE}', '.1f'),
  Column('the other kinds, geometric mean', 'perplexity_by_domain.others'),
  Column('steps of a path', 'steps_of_path', ',.0f'),
  Column('FLOPs', 'train_flops', '.2g'),
  Column('parameters', 'parameters_total', ',.0f'),
  Column('that a token passes', 'parameters_path', ',.0f'),
)


def served_flops(record: common.Record) -> float:
  """The FLOPs of a served token: a forward pass of one path."""
  c = config.get_config(record['variant'])
  c.update_from_flattened_dict({name: x for name, x in record['changes'].items() if name.startswith('model.')})
  return config.flops_per_token(c) / 3


def points(rows: Sequence[Row], results: common.Results) -> list[dict[str, Any]]:
  """Of each row that was run: title, mean perplexity, parameters, FLOPs of training and of a served token."""
  found = []
  for row in rows:
    records = [record for (name, _), record in results.items() if name == row.name and record['perplexity']]
    if records:
      mean = statistics.fmean(record['perplexity'] for record in records)
      facts = {name: records[0][name] for name in ('parameters_total', 'parameters_path', 'train_flops')}
      found.append({'title': row.title, 'perplexity': mean, 'served': served_flops(records[0]), **facts})
  return found


def lowest(points: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
  """Lines: the lowest point of each number of stored parameters, rising.

  A line is of equal FLOPs of training, to one digit, and either of dense models or of paths that differ.
  """
  lines: dict[tuple[str, bool], dict[int, Mapping[str, Any]]] = {}
  for point in points:
    stored = point['parameters_total']
    line = lines.setdefault((f'{point["train_flops"]:.0e}', stored == point['parameters_path']), {})
    if stored not in line or point['perplexity'] < line[stored]['perplexity']:
      line[stored] = point
  return [[line[stored] for stored in sorted(line)] for line in lines.values()]


@plot_style.styled
def picture(table: common.Table, rows: Sequence[Row], results: common.Results):
  """A dot for each row, in the colour of the cost of a served token; lines join the lowest of equal training FLOPs."""
  figure, ax = plot_style.axes(plot_style.WIDE, 5.0)
  of_rows = points(rows, results)
  costs = sorted({point['served'] for point in of_rows})
  for line in lowest(of_rows):
    ax.plot(*places(line), color=palette.FAINT, linewidth=1.6, zorder=1)
    is_dense = line[0]['parameters_total'] == line[0]['parameters_path']
    for point in line:
      at = point['parameters_total'], point['perplexity']
      title = point['title'].removeprefix('equal FLOPs: ')
      ax.annotate(title, at, (5, -11 if is_dense else 6), textcoords='offset points', fontsize=plot_style.SMALL)
  for cost in costs:
    share = math.log(cost / costs[0]) / math.log(costs[-1] / costs[0]) if cost > costs[0] else 0.0
    mine = places([point for point in of_rows if point['served'] == cost])
    words = f'{amounts.count(cost)} FLOPs a served token'
    ax.plot(*mine, 'o', color=palette.mix(palette.BLUE, palette.ORANGE, share), markersize=6, label=words)
  ax.set_xscale('log')
  ax.set_xticks(sorted({point['parameters_path'] for point in of_rows}))
  ax.xaxis.set_major_formatter('{x:,.0f}')
  ax.minorticks_off()
  ax.margins(x=0.2)
  ax.set_xlabel('stored parameters')
  ax.set_ylabel('perplexity')
  ax.legend(frameon=False)
  return figure


def places(points: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
  return [point['parameters_total'] for point in points], [point['perplexity'] for point in points]


TABLE = common.Table('baselines', 'The strongest opponent of a grid', rows, COLUMNS, picture)

if __name__ == '__main__':
  common.main(TABLE)
