"""(3) A law of path sizes, a limitation that the paper names [6]: loss by parameters of a path, paths, and tokens.

    loss = a N^-b P^-c D^-d

with N the parameters of a path's blocks, P the paths and D the tokens that a path reads, the base's too. It is fitted
on the rows that are not held out, and asked for those that are: the largest path with the most paths, of few and many
tokens. All sizes have one rate, which was tuned for one of them.
"""

import math
from collections.abc import Sequence

import common
import config
import fits
import pictures
from common import Column
from runs import Row

# width, heads, MLP, of a model of as many blocks as the size has.
MODELS = {
  'test': ((16, 2, 24), (24, 3, 32)),
  'smoke': ((32, 1, 86), (64, 2, 172)),
  'medium': ((128, 2, 344), (192, 3, 512), (256, 4, 688), (384, 6, 1024)),
}
MICRO = ((16, 1, 43), (24, 2, 64), (32, 2, 86), (48, 3, 128))
GRIDS = {'test': (1, 2), 'smoke': (1, 2)}
STEPS = {'test': (4, 8), 'smoke': (16, 32), 'micro': (250, 1000), 'medium': (500, 2000)}
TAU = {'test': 2, 'smoke': 8, 'micro': 5, 'medium': 50}


def rows(size: str) -> list[Row]:
  found = []
  for width, heads, mlp in MODELS.get(size, MICRO):
    model = of_width(width, heads, mlp)
    for n in GRIDS.get(size, (1, 2, 3)):
      for steps in STEPS[size]:
        method = f'dipaco,{n}x{n}' if n > 1 else 'dense'
        name, title = f'{width}_{n}_{steps}', f'width {width}, {n}x{n}, {steps:,} steps'
        found.append(Row(name, title, method, config.lasting(size, steps, TAU[size]) | config.LAST | model))
  return found


def of_width(width: int, heads: int, mlp: int) -> dict[str, int]:
  """The changes that make a model this wide."""
  return {'model.width': width, 'model.num_heads': heads, 'model.head_dim': width // heads, 'model.mlp_dim': mlp}


def held_out(rows: Sequence[Row]) -> set[str]:
  """The names of the largest model with the largest grid, at the end and at the beginning."""
  largest, _, _ = rows[-1].name.rpartition('_')
  return {row.name for row in rows if row.name.startswith(f'{largest}_')}


def point(record: common.Record) -> tuple[float, float, float, float]:
  """N, P, D, loss."""
  own = (record['train_tokens'] - record['pretrain_tokens']) / record['paths'] + record['pretrain_tokens']
  c = config.get_config(record['variant'])
  embedding = c.tokenizer.vocab_size * record['changes'].get('model.width', c.model.width)
  return record['parameters_path'] - embedding, record['paths'], own, record['validation_loss']


def points(size: str, results: common.Results, without: str = '') -> list[tuple[float, float, float, float]]:
  """Those that the law is fitted on."""
  left_out = held_out(rows(size)) | {without}
  return [point(r) for (name, _), r in sorted(results.items()) if name not in left_out]


def ranges(size: str, results: common.Results) -> list[tuple[float, float]]:
  """The least and the most of b, c and d where one of the rows is left out."""
  names = sorted({name for name, _ in results} - held_out(rows(size)))
  found = [fits.surface(points(size, results, name))[1:].tolist() for name in names]
  return [(min(of), max(of)) for of in zip(*found, strict=True)]


def law(size: str, results: common.Results) -> tuple[list[float], dict[str, tuple[float, float]]]:
  """[log a, b, c, d], and {held-out row: (loss, what the law says)}, means over seeds."""
  fit = fits.surface(points(size, results))
  asked: dict[str, list[tuple[float, float]]] = {}
  for (name, _), record in sorted(results.items()):
    if name in held_out(rows(size)):
      *x, loss = point(record)
      asked.setdefault(name, []).append((loss, fits.at(fit, *x)))
  means = {name: (math.fsum(a for a, _ in of) / len(of), of[0][1]) for name, of in asked.items()}
  return fit.tolist(), means


def series(row: Row) -> list[str]:
  _, n, steps = row.name.split('_')
  return [f'{n}x{n}, {int(steps):,} steps']


COLUMNS = (
  Column('perplexity, last version', 'perplexity_final'),
  Column('loss', 'validation_loss', '.3f'),
  Column('parameters of a path', 'parameters_path', ',.0f'),
  Column('parameters', 'parameters_total', ',.0f'),
  Column('FLOPs', 'train_flops', '.2g'),
)


def by_width(rows: Sequence[Row], results: common.Results) -> list[list[str]]:
  """Perplexity: a line for each size of a path, a column for each grid and number of steps; * is held out."""
  found: dict[str, dict[str, str]] = {}
  for row in rows:
    width, _, what = row.title.partition(', ')
    parameters = common.cell(common.figures(results, row.name, COLUMNS[2]), ',.0f')
    mine = found.setdefault(width, {'parameters of a path': parameters})
    mine['parameters of a path'] = mine['parameters of a path'] or parameters
    numbers = common.figures(results, row.name, COLUMNS[0])
    mine[what] = common.cell(numbers, '.2f') + ' \\*' * (bool(numbers) and row.name in held_out(rows))
  head = ['', *dict.fromkeys(name for mine in found.values() for name in mine)]
  lines = [[width, *(mine.get(name, '') for name in head[1:])] for width, mine in found.items()]
  return [head, ['---', *['---:'] * (len(head) - 1)], *lines]


TABLE = common.Table(
  'sizes',
  'A law of path sizes',
  rows,
  COLUMNS,
  pictures.against('parameters_path', 'parameters of a path', series),
  by_width,
)

if __name__ == '__main__':
  common.main(TABLE)
