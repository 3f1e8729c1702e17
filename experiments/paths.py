"""(2) More paths on more text: as many documents for each path, whatever their number [4; OpenDiPaCo's table].

Beside each grid two dense models on the same text: one of as many steps as a path, one of the FLOPs of all paths.
"""

import common
import config
import fits
import pictures
from common import Column
from runs import Row

GRIDS = {'test': (1, 2), 'smoke': (1, 2)}  # 2: a grid of 2x2
STEPS = {'test': 8, 'smoke': 32, 'micro': 500, 'medium': 2000}
DOCUMENTS = {'test': 50, 'smoke': 200, 'micro': 1000, 'medium': 1000}  # for each path
TAU = {'test': 2, 'smoke': 8, 'micro': 5, 'medium': 50}


def rows(size: str) -> list[Row]:
  found = []
  for n in GRIDS.get(size, (1, 2, 4, 6)):
    lasting = config.lasting(size, STEPS[size], TAU[size])
    long = config.lasting(size, STEPS[size] * n * n, TAU[size])
    text = {'data.max_documents': DOCUMENTS[size] * n * n}
    found.append(Row(f'dense_{n * n}', f'dense, text for {n * n}', 'dense', lasting | text))
    if n > 1:
      found.append(Row(f'grid_{n * n}', f'DiPaCo {n}x{n}', f'dipaco,{n}x{n}', lasting | text))
      found.append(Row(f'long_{n * n}', f'dense, {n * n}x steps, text for {n * n}', 'dense', long | text))
  return found


COLUMNS = (
  Column('bits per byte', 'bits_per_byte', '.4f'),
  Column('less dense on the text for 1', 'bits_per_byte', '+.4f', 'dense_1'),
  Column('perplexity (tokenizers differ with the text)', 'perplexity'),
  Column('averaging gap, last tenth', 'averaging_gap.-1', '+.3f'),
  Column('text, tokens', 'text_tokens', '.2g'),
  Column('FLOPs', 'train_flops', '.2g'),
  Column('parameters', 'parameters_total', ',.0f'),
)

KINDS = {'dense': 'dense, equal steps', 'grid': 'DiPaCo', 'long': 'dense, equal FLOPs'}


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
