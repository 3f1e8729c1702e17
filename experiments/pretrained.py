"""(5) From a pretrained base: trained on all kinds of text but two, then a grid on all, against dense training on.

The base is a dense run of its own, exported in Hugging Face's Llama layout and read again as anybody's is
(`config.pretrain.init`). German law and code are the kinds that it has not read. Forgetting is how much worse the
others have become, in nats, their mean; below 0 they are better.
"""

import gzip
import math
import pathlib
from collections.abc import Mapping, Sequence

import bases
import common
import config
import pictures
import split
from absl import flags
from common import Column
from runs import Row, Run
from tau import STEPS, exchange

from dipaco_jax.core.errors import InputError

# Peak rates as a share of the base's, the best of tune.py, by size; `long` has that of `dense`.
SHARES: dict[str, dict[str, float]] = {
  'micro': {'dense': 0.1, 'long': 0.1, 'batch': 0.3, 'diloco': 0.3, 'grid': 0.3, 'own': 0.3, 'flat': 0.3}
}
# Rows that take DiLoCo's outer step, of longer phases; the others average every few steps.
NESTEROV: dict[str, Sequence[str]] = {'micro': ()}


def base_row(size: str) -> Row:
  """The base's own run: as many steps as a path of table (1) has in all."""
  return Row('six-kinds', 'base', 'dense', {'evaluate.every_phases': 0})


def rows(size: str, shares: Mapping[str, float] | None = None, nesterov: Sequence[str] | None = None) -> list[Row]:
  """`shares`, `nesterov`: as SHARES and NESTEROV, which are taken where they are not given."""
  shares = SHARES.get(size, {}) if shares is None else shares
  nesterov = NESTEROV.get(size, ('diloco',)) if nesterov is None else nesterov
  peak = config.SIZES[size].config['inner']['learning_rate']
  averaged = '' if 'diloco' in nesterov else ', averaged'
  numbers = 'x'.join(map(str, config.SIZES[size].grid))
  paths, batch = math.prod(config.SIZES[size].grid), config.SIZES[size].config['train']['batch_size']

  def row(name: str, title: str, method: str, times: int = 1, changes: dict[str, int] | None = None):
    tau, outer = exchange(size, method, name in nesterov)
    phases = STEPS[size] * times // tau
    lasting = {'train.phases': phases, 'train.steps_per_phase': tau, 'inner.decay_steps': phases * tau} | outer
    if name in shares:
      lasting['inner.learning_rate'] = peak * shares[name]
    return Row(name, title, method, lasting | config.LAST | bases.start(size, base_row(size)) | (changes or {}))

  return [
    row('dense', 'dense, trained on', 'dense'),
    row('long', f'dense, trained on, {paths}x steps', 'dense', paths),
    row('batch', f'dense, trained on, {paths}x batch', 'dense', changes={'train.batch_size': paths * batch}),
    row('diloco', f'DiLoCo, {paths} workers{averaged}', 'diloco'),
    row('grid', f'DiPaCo {numbers}', 'dipaco'),
    row('own', f'DiPaCo {numbers}, path-specific upper blocks', 'own'),
    row('flat', f'flat MoE, {paths} paths', 'flat'),
  ]


COLUMNS = (
  Column('perplexity', 'perplexity'),
  Column('minus dense, by seed', 'perplexity', '+.2f', 'dense'),
  Column('German law', f'perplexity_by_domain.{config.UNLIKE}', '.1f'),
  Column('code', 'perplexity_by_domain.code', '.1f'),
  Column('the six kinds of the base, geometric mean', 'perplexity_by_domain.read'),
  Column('forgetting, nats', 'forgetting', '+.3f'),
  Column('bytes sent', 'sent_bytes', '.2g'),
  Column('FLOPs', 'train_flops', '.2g'),
  Column('parameters', 'parameters_total', ',.0f'),
)

TABLE = common.Table('pretrained', 'From a pretrained base', rows, COLUMNS, pictures.dots)


def without(file: str, out: pathlib.Path):
  """The JSON lines whose kind the base is to read."""
  if not out.exists():
    out.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, 'rb') as lines:
      common.publish(out, gzip.compress(b''.join(split.kept(lines, config.UNREAD)), mtime=0))


def prepare(missing: Sequence[Run]):
  """Trains and exports the base of each seed, which reads other kinds of text alone."""
  f = flags.FLAGS
  missing = [run for run in missing if bases.starts(run, base_row(f.size))]
  if not missing:
    return
  if not f.data.endswith('.jsonl.gz') or not f.validation.endswith('.jsonl.gz'):
    raise InputError('--data, --validation: this table needs JSON lines with `text` and `domain`, gzipped')
  kept = {}
  for name, file in (('train', f.data), ('validation', f.validation)):
    kept[name] = pathlib.Path(f.workdir) / f.size / f'{name}-{missing[0].text[:4]}.jsonl.gz'
    without(file, kept[name])
  bases.export_for(missing, base_row(f.size), str(kept['train']), str(kept['validation']))


if __name__ == '__main__':
  common.main(TABLE, prepare)
