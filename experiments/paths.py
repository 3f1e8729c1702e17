"""(2) More paths on more text: as many documents for each path, whatever their number [4; OpenDiPaCo's table].

Beside each grid DiLoCo of as many workers and two dense models, all on the same text: one of as many steps as a path,
one of the FLOPs of all paths.
"""

from collections.abc import Mapping

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
# The peak rate of a row's paths, as a share of its base's, where that is not 1: the best of tune.py, by size.
SHARES = {'micro': {'long': 0.5}}  # as dense paths of as many steps in table (1)


def rows(size: str, shares: Mapping[str, float] | None = None) -> list[Row]:
  """`shares`: as SHARES, which are taken if they are not given."""
  shares = SHARES.get(size, {}) if shares is None else shares
  tau, seldom = TAUS[size][:2]
  alone = config.SIZES[size].alone
  found = []

  def row(kind: str, paths: int, title: str, method: str, tau: int, times: int = 1):
    lasting = config.lasting(size, STEPS[size] * times, tau) | config.LAST
    text = {'data.max_documents': DOCUMENTS[size] * paths}
    rate = methods.at_rate(size, shares.get(kind, 1))
    found.append(Row(f'{kind}_{paths}', title, method, lasting | text | rate))

  for n in GRIDS.get(size, (1, 2, 4)):
    paths = n * n
    row('dense', paths, f'dense, text for {paths}', 'dense', alone)
    if n > 1:
      row('diloco', paths, f'DiLoCo, {paths} workers', f'diloco,{paths}', seldom)
      row('grid', paths, f'DiPaCo {n}x{n}', f'dipaco,{n}x{n}', tau)
      row('own', paths, f'DiPaCo {n}x{n}, path-specific upper blocks', f'own,{n}x{n}', tau)
      row('long', paths, f'dense, {paths}x steps, text for {paths}', 'dense', alone, paths)
  return found


COLUMNS = (
  Column('bits per byte', 'bits_per_byte', '.4f'),
  Column('less dense on the text for 1', 'bits_per_byte', '+.4f', 'dense_1'),
  Column('perplexity (tokenizers differ with the text)', 'perplexity'),
  Column('text, tokens', 'text_tokens', '.2g'),
  Column('FLOPs', 'train_flops', '.2g'),
  Column('parameters', 'parameters_total', ',.0f'),
)

KINDS = {
  'dense': 'dense, equal steps',
  'diloco': 'DiLoCo',
  'grid': 'DiPaCo',
  'own': 'DiPaCo, own upper blocks',
  'long': 'dense, equal FLOPs',
}


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
