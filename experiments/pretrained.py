"""(5) From a pretrained base: trained on all kinds of text but two, then a grid on all, against dense training on.

The base is a dense run of its own, exported in Hugging Face's Llama layout and read again as anybody's is
(`config.pretrain.init`). German law and code are the kinds that it has not read. Forgetting is how much worse the
others have become.
"""

import gzip
import json
import pathlib
from collections.abc import Sequence

import bases
import common
import config
import pictures
from absl import flags
from common import Column
from runs import Row, Run
from tau import STEPS, TAUS

from dipaco_jax.core.errors import InputError

UNREAD = ('law_de', 'code')
BASE = 'six-kinds'


def base_row(size: str) -> Row:
  """The base's own run: as many steps as a path of table (1) has in all."""
  return Row('base', 'base', 'dense', {'evaluate.every_phases': 0})


def rows(size: str) -> list[Row]:
  tau, seldom = TAUS[size][0], config.SIZES[size].alone
  numbers = 'x'.join(map(str, config.SIZES[size].grid))
  paths = config.SIZES[size].grid[0] * config.SIZES[size].grid[1]

  def row(name: str, title: str, method: str, tau: int, times: int = 1):
    phases = STEPS[size] * times // tau
    lasting = {'train.phases': phases, 'train.steps_per_phase': tau, 'inner.decay_steps': phases * tau}
    return Row(name, title, method, lasting | bases.start(BASE))

  return [
    row('dense', 'dense, trained on', 'dense', seldom),
    row('long', f'dense, trained on, {paths}x steps', 'dense', seldom, paths),
    row('diloco', f'DiLoCo, {paths} workers', 'diloco', tau),
    row('grid', f'DiPaCo {numbers}', 'dipaco', tau),
    row('own', f'DiPaCo {numbers}, path-specific upper blocks', 'own', tau),
    row('flat', f'flat MoE, {paths} paths', 'flat', seldom),
  ]


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('less dense, by seed', 'perplexity', '+.2f', 'dense'),
  Column('base', 'base_perplexity'),
  *(Column(f'{kind}: base', f'base_perplexity_by_domain.{kind}', '.1f') for kind in UNREAD),
  *(Column(kind, f'perplexity_by_domain.{kind}', '.1f') for kind in UNREAD),
  Column('forgetting, nats', 'forgetting', '+.3f'),
)

TABLE = common.Table('pretrained', 'From a pretrained base', rows, COLUMNS, pictures.dots)


def without(file: str, out: pathlib.Path):
  """The JSON lines whose kind the base is to read."""
  if not out.exists():
    out.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, 'rt') as lines:
      kept = [line for line in lines if json.loads(line)['domain'] not in UNREAD]
    common.publish(out, gzip.compress(''.join(kept).encode(), mtime=0))


def prepare(missing: Sequence[Run]):
  """Trains and exports the base of each seed, which reads other kinds of text alone."""
  f = flags.FLAGS
  if not f.data.endswith('.jsonl.gz') or not f.validation.endswith('.jsonl.gz'):
    raise InputError('--data, --validation: this table needs JSON lines with `text` and `domain`, gzipped')
  folder = pathlib.Path(f.workdir) / f.size
  for name, file in (('train', f.data), ('validation', f.validation)):
    without(file, folder / f'{name}.jsonl.gz')
  kept = [str(folder / f'{name}.jsonl.gz') for name in ('train', 'validation')]
  bases.export_for(missing, BASE, base_row(f.size), *kept)


if __name__ == '__main__':
  common.main(TABLE, prepare)
