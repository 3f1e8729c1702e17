"""(5) From a pretrained base: trained on all kinds of text but two, then a grid on all, against dense training on.

The base is a dense run of its own, exported in Hugging Face's Llama layout and read again as anybody's is
(`config.pretrain.init`). German law and code are the kinds that it has not read. Forgetting is how much worse the
others have become.
"""

import gzip
import json
import pathlib
import sys

import common
import config
import pictures
import runs
from absl import flags
from common import Column
from runs import Row
from tau import STEPS, TAUS

from dipaco_jax.core.errors import InputError
from dipaco_jax.training import stopping

UNREAD = ('law_de', 'code')
BASE = '{workdir}/base-{seed}'  # filled in when a row is run


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
    base = {'pretrain.init': BASE, 'pretrain.steps': 0, 'tokenizer.model_file': f'{BASE}/tokenizer.model'}
    return Row(name, title, method, lasting | base)

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


def make_base(size: str, seed: int, data: str, validation: str, folder: pathlib.Path):
  """Trains and exports the base of a seed, which reads other kinds of text alone, where it is not there."""
  for name, file in (('train', data), ('validation', validation)):
    without(file, folder / f'{name}.jsonl.gz')
  kept = [str(folder / f'{name}.jsonl.gz') for name in ('train', 'validation')]
  export_base(runs.make(size, base_row(size), seed, *kept), runs.text_digest(data, validation), folder)


def export_base(one: runs.Run, of: str, folder: pathlib.Path):
  """Trains and exports a base, where it is not there; `of` is the digest of all text."""
  out = folder / f'base-{one.seed}'
  if (out / 'config.json').exists():
    if out.with_suffix('.text').read_text() != of:
      raise InputError(f'{out} is of another text: name another --workdir')
    return
  if status := runs.execute(one, folder):
    sys.exit(status)
  command = [sys.executable, '-m', 'dipaco_jax.export', f'--workdir={runs.workdir(one, folder)}', '--path=0']
  common.publish(out.with_suffix('.text'), of)
  if status := stopping.run_process([*command, f'--out={out}']):
    sys.exit(status)


if __name__ == '__main__':

  def prepare(size: str):
    f = flags.FLAGS
    if not f.data.endswith('.jsonl.gz') or not f.validation.endswith('.jsonl.gz'):
      raise InputError('--data, --validation: this table needs JSON lines with `text` and `domain`, gzipped')
    for seed in f.seeds:
      make_base(size, int(seed), f.data, f.validation, pathlib.Path(f.workdir) / size)

  common.main(TABLE, prepare)
