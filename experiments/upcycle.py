"""(11) A pretrained model to a grid: peak rate, rewarming and outer step of `configs/upcycle.py`.

The base is a dense run of its own, with keys and values that queries share and byte-level BPE (as SmolLM2): exported,
and read again by `config.pretrain.init`. Its cosine has ended. Every row starts as that model and continues with text
of the same kinds, with a share of the base's peak rate. Choose on text that no table reports (split.py).
"""

from collections.abc import Sequence

import bases
import common
import config
import pictures
from absl import flags
from common import Column
from runs import Row, Run
from tau import STEPS, TAUS

FAMILY = {'model.num_kv_heads': 1, 'model.rope_base': 1e5}
SHARES = (0.03, 0.1, 0.3, 1.0)  # of the base's peak rate
SHARE, WARM = 0.3, 0.05  # of the rows that vary other things; WARM and WARMS are of all steps
WARMS = (0.0, 0.2)
OUTER = {
  'averages': {'outer.optimizer': 'sgd', 'outer.learning_rate': 1.0, 'outer.rescale': False, 'outer.row_weights': True},
  'nesterov': {
    'outer.optimizer': 'nesterov', 'outer.learning_rate': 0.7, 'outer.rescale': False, 'outer.row_weights': False,
  },
  'rescaled': {
    'outer.optimizer': 'nesterov', 'outer.learning_rate': 0.7, 'outer.rescale': True, 'outer.row_weights': False,
  },
}  # fmt: skip


def base_row(size: str) -> Row:
  """The base's own run, as long as a row of table (4)."""
  lasting = config.lasting(size, STEPS[size], config.SIZES[size].alone)
  return Row('pretrained', 'base', 'dense', FAMILY | lasting | {'tokenizer.kind': 'bytes'})


def rows(size: str) -> list[Row]:
  peak, (tau, seldom) = config.SIZES[size].config['inner']['learning_rate'], TAUS[size][:2]

  def row(name: str, title: str, method: str, tau: int, share: float = SHARE, warm: float = WARM, outer: str = ''):
    phases = STEPS[size] // tau
    lasting = {'train.phases': phases, 'train.steps_per_phase': tau, 'inner.decay_steps': phases * tau}
    rate = {'inner.learning_rate': peak * share, 'inner.rewarm_steps': round(warm * phases * tau)}
    schedule = rate | {'inner.warmup_steps': 0, 'inner.final_fraction': 0.1}
    start = bases.start(size, base_row(size), 'tokenizer.json')
    return Row(name, title, method, FAMILY | lasting | schedule | start | OUTER.get(outer, {}))

  alone = config.SIZES[size].alone
  found = [row(f'dense_{x:g}', f'dense, trained on, rate x {x:g}', 'dense', alone, x) for x in SHARES]
  found += [row(f'grid_{x:g}', f'DiPaCo, rate x {x:g}', 'dipaco', tau, x, outer='averages') for x in SHARES]
  found += [
    row(f'warm_{x:g}', f'rate x {SHARE:g}, warmed up for {x:.0%} of all steps', 'dipaco', tau, warm=x, outer='averages')
    for x in WARMS
  ]
  kinds = {'averages': 'averages by row', 'nesterov': 'Nesterov 0.7, 0.9', 'rescaled': 'Nesterov, rescaled'}
  return found + [
    row(f'{kind}_{seldom}', f'rate x {SHARE:g}, tau = {seldom}, {words}', 'dipaco', seldom, outer=kind)
    for kind, words in kinds.items()
  ]


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column(f'minus dense at x {SHARE:g}, by seed', 'perplexity', '+.2f', f'dense_{SHARE:g}'),
  Column('before the first step', 'base_perplexity'),
)

TABLE = common.Table('upcycle', 'A pretrained model to a grid', rows, COLUMNS, pictures.dots)


def prepare(missing: Sequence[Run]):
  """Trains and exports the base of each seed."""
  f = flags.FLAGS
  bases.export_for(missing, base_row(f.size), f.data, f.validation)


if __name__ == '__main__':
  common.main(TABLE, prepare)
