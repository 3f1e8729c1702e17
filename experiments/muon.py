"""(10) Muon inside paths, against AdamW: DiLoCo and DiPaCo, each from a base that the same optimizer has trained.

As in MuLoCo (arXiv 2505.23725). Rates are those of tune.py, chosen from equally many for each. Averages by row need
AdamW's second moments, so a grid without them is compared with both.
"""

import common
import config
import pictures
import wire
from common import Column
from runs import Row

RATE = {'micro': 8e-2}  # Muon's, from tune.py


def rows(size: str) -> list[Row]:
  grid, workers = wire.NUMBERS.get(size, ('4x4', '8'))
  usual = wire.usual(size)
  muon = {'inner.optimizer': 'muon', **({'inner.learning_rate': RATE[size]} if size in RATE else {})}
  plain = {'outer.row_weights': False}
  by_row = Row('dipaco_byrow', f'DiPaCo {grid}, AdamW, averages by row', f'dipaco,{grid}', usual)
  return [
    Row('diloco_adamw', f'DiLoCo {workers}, AdamW', f'fragments,{workers}', usual),
    Row('diloco_muon', f'DiLoCo {workers}, Muon', f'fragments,{workers}', usual | muon),
    *([by_row] if config.SIZES[size].config.get('outer', {}).get('row_weights') else []),
    Row('dipaco_adamw', f'DiPaCo {grid}, AdamW', f'dipaco,{grid}', usual | plain),
    Row('dipaco_muon', f'DiPaCo {grid}, Muon', f'dipaco,{grid}', usual | plain | muon),
  ]


LESS = Column('nats less AdamW, by seed (90%)', 'loss', '+.4f', '*_adamw', interval=True)
COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('nats', 'loss', '.4f'),
  LESS,
  Column('base', 'base_perplexity'),
  Column('averaging gap, last tenth', 'averaging_gap.-1', '+.3f'),
)

TABLE = common.Table(
  'muon',
  'Muon against AdamW inside paths',
  rows,
  COLUMNS,
  pictures.differences(LESS, {'dipaco': 'DiPaCo', 'diloco': 'DiLoCo'}),
)

if __name__ == '__main__':
  common.main(TABLE)
