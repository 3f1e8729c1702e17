"""(2) More paths on more text: as many documents for each path, whatever their number [4; OpenDiPaCo's table].

Beside each grid DiLoCo of as many workers and two dense models, all on the same text: one of as many steps as a path,
one of the FLOPs of all paths. All have one tokenizer, that of the DiLoCo bases of table (1), so that perplexities can
be compared; each amount of text has a base of its own.
"""

from collections.abc import Mapping, Sequence

import bases
import common
import config
import fits
import methods
import pictures
from absl import flags
from common import Column
from runs import Row, Run
from tau import exchange

GRIDS = {'test': (1, 2), 'smoke': (1, 2)}  # 2: a grid of 2x2
STEPS = {'test': 8, 'smoke': 32, 'micro': 500, 'medium': 2000}
DOCUMENTS = {'test': 50, 'smoke': 200, 'micro': 1000, 'medium': 1000}  # for each path
# The peak rate of a row's paths, as a share of its base's, where that is not 1: the best of tune.py, by size, of four
# paths. `long` has that of dense paths of as many steps in table (1).
SHARES: dict[str, dict[str, float]] = {'micro': {'diloco': 4, 'grid': 2, 'own': 2, 'long': 0.5}}
# Rows that take DiLoCo's outer step, of longer phases; the others average every few steps.
NESTEROV: dict[str, Sequence[str]] = {'micro': ()}


def rows(size: str, shares: Mapping[str, float] | None = None, nesterov: Sequence[str] | None = None) -> list[Row]:
  """`shares`, `nesterov`: as SHARES and NESTEROV, which are taken where they are not given."""
  shares = SHARES.get(size, {}) if shares is None else shares
  nesterov = NESTEROV.get(size, ('diloco',)) if nesterov is None else nesterov
  averaged = '' if 'diloco' in nesterov else ', averaged'
  found = []

  def row(kind: str, paths: int, title: str, method: str, times: int = 1):
    tau, outer = exchange(size, method, kind in nesterov)
    lasting = config.lasting(size, STEPS[size] * times, tau) | config.LAST
    text = {'data.max_documents': DOCUMENTS[size] * paths, 'tokenizer.model_file': tokenizer(size)}
    rate = methods.at_rate(size, shares.get(kind, 1))
    found.append(Row(f'{kind}_{paths}', title, method, lasting | outer | text | rate))

  for n in GRIDS.get(size, (1, 2, 4)):
    paths = n * n
    row('dense', paths, f'dense, text for {paths}', 'dense')
    if n > 1:
      row('diloco', paths, f'DiLoCo, {paths} workers{averaged}', f'diloco,{paths}')
      row('grid', paths, f'DiPaCo {n}x{n}', f'dipaco,{n}x{n}')
      row('own', paths, f'DiPaCo {n}x{n}, path-specific upper blocks', f'own,{n}x{n}')
      row('flat', paths, f'flat MoE, {paths} paths', f'flat,{n}x{n}')
      row('long', paths, f'dense, {paths}x steps, text for {paths}', 'dense', paths)
  return found


def tokenizer(size: str) -> str:
  """Where it is, filled in by seed when a row is run."""
  return f'{bases.place(size, methods.base_row(size))}/tokenizer.model'


def prepare(missing: Sequence[Run]):
  """Makes the models whose tokenizers these runs have."""
  f = flags.FLAGS
  of_it = [run for run in missing if run.row.changes.get('tokenizer.model_file') == tokenizer(f.size)]
  base = methods.base_row(f.size)
  bases.export_for(of_it, base, f.data, f.validation, phases=base.changes['train.phases'] // 2)


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('minus dense on the same text', 'perplexity', '+.2f', 'dense_#'),
  Column('German law', f'perplexity_by_domain.{config.UNLIKE}', '.1f'),
  Column('the other kinds, geometric mean', 'perplexity_by_domain.others'),
  Column('text, tokens', 'text_tokens', '.2g'),
  Column('FLOPs', 'train_flops', '.2g'),
  Column('bytes sent', 'sent_bytes', '.2g'),
  Column('parameters', 'parameters_total', ',.0f'),
)

KINDS = {
  'dense': 'dense, equal steps',
  'diloco': 'DiLoCo',
  'grid': 'DiPaCo',
  'own': 'DiPaCo, own upper blocks',
  'flat': 'flat MoE',
  'long': 'dense, equal FLOPs',
}


def series(row: Row) -> list[str]:
  """Grids and long runs begin with the dense model of one path."""
  kind, _, number = row.name.partition('_')
  return [words for name, words in KINDS.items() if name == kind or number == '1']


def exponent(results: common.Results, kind: str) -> list[float]:
  """b of perplexity = a P^-b by seed, over a kind's own rows of more than one path; P: paths, or text for so many."""
  seeds = sorted({seed for name, seed in results if name.startswith(f'{kind}_')})
  found = []
  for seed in seeds:
    mine = {name: record for (name, of), record in results.items() if name.startswith(f'{kind}_') and of == seed}
    points = [(float(name.split('_')[1]), record['perplexity']) for name, record in sorted(mine.items())]
    points = [(number, perplexity) for number, perplexity in points if number > 1]  # as for grids
    if len(points) > 1:
      found.append(float(fits.surface(points)[1]))
  return found


TABLE = common.Table(
  'paths',
  'More paths on more text',
  rows,
  COLUMNS,
  pictures.against_number('paths, or their worth of text and steps', series),
)

if __name__ == '__main__':
  common.main(TABLE, prepare)
