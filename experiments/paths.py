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


def rows(size: str) -> list[Row]:
  found = []
  for n in GRIDS.get(size, (1, 2, 4)):
    number = n * n

    def row(kind: str, title: str, method: str, tau: int, times: int = 1, *, like: str, number: int = number):
      share = methods.SHARES.get(size, {}).get(like, 1)
      rate = {'train.learning_rate': config.SIZES[size].config['inner']['learning_rate'] * share} if share != 1 else {}
      text = {'data.max_documents': DOCUMENTS[size] * number}
      lasting = config.lasting(size, STEPS[size] * times, tau)
      return Row(f'{kind}_{number}', title, method, lasting | text | config.LAST | rate)

    alone = config.SIZES[size].alone
    found.append(row('dense', f'dense, text for {number}', 'dense', alone, like='dense'))
    if n > 1:
      found += [
        row('diloco', f'DiLoCo, {number} workers', f'diloco,{number}', TAUS[size][1], like='diloco'),
        row('grid', f'DiPaCo {n}x{n}', f'dipaco,{n}x{n}', TAUS[size][0], like='kmeans'),
        row('long', f'dense, {number}x steps, text for {number}', 'dense', alone, number, like='dense_px'),
      ]
  return found


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
