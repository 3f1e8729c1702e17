"""(2) More paths on more text: as many documents for each path, whatever their number [4; OpenDiPaCo's table].

Beside each grid DiLoCo of as many workers and two dense models, all on the same text: one of as many steps as a path,
one of the FLOPs of all paths. Rates are those of table (1).
"""

import common
import config
import fits
import methods
import pictures
from common import Column
from runs import Row
from tau import TAUS

GRIDS = {'test': (1, 2), 'smoke': (1, 2)}  # 2: a grid of 2x2
STEPS = {'test': 8, 'smoke': 32, 'micro': 500, 'medium': 2000}
DOCUMENTS = {'test': 50, 'smoke': 200, 'micro': 1000, 'medium': 1000}  # for each path
LIKE = {
  'dense': 'dense',
  'diloco': 'diloco',
  'grid': 'kmeans',
  'long': 'dense_px',
}  # the rows of table (1) with the rate


def rows(size: str) -> list[Row]:
  tau, seldom = TAUS[size][:2]
  alone = config.SIZES[size].alone
  found = []
  for n in GRIDS.get(size, (1, 2, 4)):
    paths = n * n
    found.append(make_row(size, 'dense', paths, f'dense, text for {paths}', 'dense', alone))
    if n > 1:
      title, steps = f'dense, {paths}x steps, text for {paths}', STEPS[size] * paths
      found += [
        make_row(size, 'diloco', paths, f'DiLoCo, {paths} workers', f'diloco,{paths}', seldom),
        make_row(size, 'grid', paths, f'DiPaCo {n}x{n}', f'dipaco,{n}x{n}', tau),
        make_row(size, 'long', paths, title, 'dense', alone, steps),
      ]
  return found


def make_row(size: str, kind: str, paths: int, title: str, method: str, tau: int, steps: int = 0) -> Row:
  """On the text for so many paths; `steps` of 0 are those of a path."""
  lasting = config.lasting(size, steps or STEPS[size], tau)
  rate = methods.at_rate(size, methods.SHARES.get(size, {}).get(LIKE[kind], 1))
  text = {'data.max_documents': DOCUMENTS[size] * paths}
  return Row(f'{kind}_{paths}', title, method, lasting | text | config.LAST | rate)


COLUMNS = (
  Column('bits per byte', 'bits_per_byte', '.4f'),
  Column('less dense on the text for 1', 'bits_per_byte', '+.4f', 'dense_1'),
  Column('perplexity (tokenizers differ with the text)', 'perplexity'),
  Column('text, tokens', 'text_tokens', '.2g'),
  Column('FLOPs', 'train_flops', '.2g'),
  Column('parameters', 'parameters_total', ',.0f'),
)

KINDS = {'dense': 'dense, equal steps', 'diloco': 'DiLoCo', 'grid': 'DiPaCo', 'long': 'dense, equal FLOPs'}


def series(row: Row) -> list[str]:
  """Grids and long runs begin with the dense model of one path."""
  kind, _, number = row.name.partition('_')
  return [words for name, words in KINDS.items() if name == kind or number == '1']


def exponent(results: common.Results, kind: str) -> tuple[float, tuple[float, float]]:
  """b of bits per byte = a P^-b, with its interval over seeds and rows; P: paths, or their worth of text or steps."""
  points = [
    (float(name.split('_')[1]), record['bits_per_byte'])
    for (name, _), record in sorted(results.items())
    if name.startswith(kind) or name == 'dense_1'
  ]
  return fits.power(points)


TABLE = common.Table(
  'paths',
  'More paths on more text',
  rows,
  COLUMNS,
  pictures.against_number('paths, or their worth of text and steps', series),
)

if __name__ == '__main__':
  common.main(TABLE)
