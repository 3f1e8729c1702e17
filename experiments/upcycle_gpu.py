"""(13) A published model on one GPU: SmolLM2-135M to a grid of 2x2 paths, against dense training at equal FLOPs.

    python experiments/upcycle_gpu.py --model=DIR --data=TRAIN --validation=VALIDATION --size=gpu --minutes=12

`--model` is a folder as transformers writes it, `--data` and `--validation` are the files of upcycle_text.py. Size
`gpu` is for one GPU of 80 GB, `cpu` trains on a tenth of the tokens. Rows run in their order, each is written to the
results when it has ended, and the same command continues. With `--minutes` no row starts that could not end in time.

Every row has one learning rate; rows named `_high` repeat the comparison at three times that rate, if time is left.
Forgetting is how much worse text of kinds that are not trained on has become, in nats a token: below 0 it is better.
"""

import functools
import hashlib
import math
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import common
import config
import runs
import source_losses
from absl import flags
from common import Column
from runs import Row, Run
from source_losses import Losses

from dipaco_jax.core.errors import InputError
from dipaco_jax.huggingface import pretrained

SIZES = ('test', 'cpu', 'gpu')
HIGH = 3  # times the learning rate, in the rows named _high
MODEL = '{workdir}/model'  # a link to --model: records are the same wherever the folder is
LONG, BATCH = 'long', 'batch'  # rows that all others are compared with


def rows(size: str) -> list[Row]:
  """The most informative rows first: time may end after any of them."""
  if size not in SIZES:
    return []
  at_size = (config.SIZES | config.PUBLISHED)[size].config
  phases, tau, batch = (at_size['train'][name] for name in ('phases', 'steps_per_phase', 'batch_size'))
  paths = math.prod((config.SIZES | config.PUBLISHED)[size].grid)

  def row(name: str, title: str, method: str, times: int = 1, high: bool = False, **changes: Any) -> Row:
    is_alone = method in ('dense', 'flat')
    steps = phases * tau * times
    lasting = {'train.steps_per_phase': phases * tau if is_alone else tau}
    lasting |= {'train.phases': times if is_alone else phases, 'inner.decay_steps': steps}
    start = {'pretrain.init': MODEL, 'pretrain.steps': 0, 'inner.rewarm_steps': max(1, steps // 20)}
    start |= {'inner.warmup_steps': 0, 'inner.final_fraction': 0.0, 'evaluate.samples': 0}
    # Of dense rows too: they read the same text.
    start['routing.router_fraction'] = at_size['routing']['router_fraction']
    if high:
      start['train.learning_rate'] = HIGH * at_size['inner']['learning_rate']
    named = {key.replace('__', '.'): value for key, value in changes.items()}
    suffix, more_title = ('_high', f', {HIGH}x rate') if high else ('', '')
    return Row(name + suffix, title + more_title, method, lasting | start | named | config.LAST)

  def compared(high: bool) -> list[Row]:
    make = functools.partial(row, high=high)
    fitted: dict[str, Any] = {'evaluate__refit_router': True}
    averaged: dict[str, Any] = {'outer__optimizer': 'sgd', 'outer__learning_rate': 1.0}
    averaged |= {'outer__reweigh': True, 'outer__row_weights': True}
    large = {'train__batch_size': paths * batch, 'train__microbatch': 2 * batch}
    return [
      make(LONG, f'dense, {paths}x steps', 'dense', times=paths),
      make('third', '2x2, path-specific upper third', 'third', **fitted),
      make(BATCH, f'dense, {paths}x batch', 'dense', **large),
      make('flat', f'flat, {paths} paths', 'flat', **fitted),
      make('diloco', f'DiLoCo, {paths} workers, averaged', 'diloco', **averaged),
      make('shared', '2x2, all blocks shared', 'dipaco', **fitted),
    ]

  return [*compared(False), row('dense', 'dense, a quarter of the tokens', 'dense'), *compared(True)]


# -- records


def measure(run: Run, workdirs: pathlib.Path) -> common.Record:
  """Returns what a record has beside the usual fields; then removes the checkpoints, which are many gigabytes."""
  workdir = runs.workdir(run, workdirs)
  train, validation = (source_losses.matching_files(x) for x in (run.settings.data.train, run.settings.data.validation))
  losses = source_losses.read(workdir, validation)
  trained = sorted({d.get('domain', 'all') for file in train for d in source_losses.read_documents(file)})
  shutil.rmtree(workdir / 'checkpoints', ignore_errors=True)
  return {
    'perplexity_trained': source_losses.perplexity(losses, trained),
    'forgetting': forgetting(losses, trained),
    'trained_kinds': trained,
    'model_sha256': model_sha256(workdirs / 'model'),
    'wire_bytes': None,  # arithmetic on a model of other sizes
    'state_bytes': None,
  }


def forgetting(losses: Losses, trained: Sequence[str]) -> float | None:
  """Returns the mean over the other kinds of text of what they have lost against the base, in nats a token."""
  others = sorted({*losses.kind.tolist()} - {*trained})
  found = [math.log(1 + source_losses.change(losses, losses.nats['base'], [kind])[0]) for kind in others]
  return sum(found) / len(found) if found else None


def model_sha256(folder: pathlib.Path) -> str:
  """Returns a digest of a model's weights."""
  total = hashlib.sha256()
  for file in sorted(folder.glob('*.safetensors')):
    with open(file, 'rb') as f:
      total.update(hashlib.file_digest(f, 'sha256').digest())
  return total.hexdigest()


# -- the table

COLUMNS = (
  Column('perplexity', 'perplexity_trained'),
  Column('forgetting, nats', 'forgetting', '+.3f'),
  Column('training tokens', 'train_tokens', ',.0f'),
  Column('FLOPs', 'train_flops', '.2g'),
  Column('parameters', 'parameters_total', ',.0f'),
)


def lines(rows: Sequence[Row], results: common.Results) -> list[list[str]]:
  """Returns the table: perplexity of the kinds trained on, changes against the dense rows, each kind, forgetting."""
  records = {
    row.name: [r for (name, _), r in results.items() if name == row.name and r.get('by_source')] for row in rows
  }
  losses = {
    name: source_losses.mean([source_losses.unpack(r['by_source']) for r in of_row])
    for name, of_row in records.items()
    if of_row
  }
  first, *others = COLUMNS
  kinds = sorted({kind for one in losses.values() for kind in one.kind.tolist()})
  against = ((LONG, 'against dense, more steps'), (BATCH, 'against dense, larger batch'))
  table = [['', first.title, *(title for _, title in against), *kinds, *(column.title for column in others)]]
  table.append(['---', *['---:'] * (len(table[0]) - 1)])
  for row in rows:
    if row.name not in losses:
      continue
    mine, trained = losses[row.name], records[row.name][0]['trained_kinds']
    if len(table) == 2:
      table.append(base_line(mine, trained, kinds, len(against), len(others)))
    cells = [change_cell(mine, losses.get(name), trained) if name != row.name else '' for name, _ in against]
    by_kind = [f'{source_losses.perplexity(mine, [kind]):.2f}' for kind in kinds]
    cells = [f'{source_losses.perplexity(mine, trained):.2f}', *cells, *by_kind]
    table.append([row.title, *cells, *(common.cell(common.figures(results, row.name, c), c.form) for c in others)])
  return table


def base_line(
  losses: Losses, trained: Sequence[str], kinds: Sequence[str], num_against: int, num_others: int
) -> list[str]:
  """Returns the line of the model before any training."""
  by_kind = [f'{source_losses.perplexity(losses, [kind], "base"):.2f}' for kind in kinds]
  whole = f'{source_losses.perplexity(losses, trained, "base"):.2f}'
  return ['the model itself', whole, *[''] * num_against, *by_kind, *[''] * num_others]


def change_cell(losses: Losses, other: Losses | None, kinds: Sequence[str]) -> str:
  """Returns the change of perplexity in percent and its 95% interval; '' where there is nothing to compare with."""
  if other is None or other.names != losses.names:
    return ''
  change, interval = source_losses.change(losses, other.nats['paths'], kinds)
  return f'{change:+.1%}' + (f' ({interval[0]:+.1%} to {interval[1]:+.1%})' if interval else '')


TABLE = common.Table('upcycle_gpu', 'SmolLM2-135M to 2x2 paths', rows, COLUMNS, None, lines, SIZES, measure)


# -- the script


def prepare(missing: Sequence[Run]):
  """Links the model into the folder of the runs, after checking that rows can start from it."""
  f, size = flags.FLAGS, missing[0].size
  if not f.model or not f.data or not f.validation:
    raise InputError('name the model with --model, and its text with --data and --validation')
  model = pathlib.Path(f.model).absolute()
  blocks, wanted = pretrained.read_model(str(model))['num_layers'], missing[0].settings.model.num_layers
  if blocks != wanted:
    raise InputError(f'--model={f.model} has {blocks} blocks, and rows of --size={size} are for {wanted}')
  link = pathlib.Path(f.workdir) / size / 'model'
  digest = model_sha256(model)
  if link.exists() and model_sha256(link) != digest:
    raise InputError(f'--workdir={f.workdir} has runs of another model: name another folder')
  earlier = common.read(TABLE, size, pathlib.Path(f.results)).values()
  if any(record.get('model_sha256') != digest for record in earlier):
    raise InputError(f'--results={f.results} has results of another model: name another folder')
  if not link.exists():
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    os.symlink(model, link)
  os.environ.setdefault('PJRT_NPROC', str(os.cpu_count()))  # one run at a time: it computes and compiles on all cores


if __name__ == '__main__':
  flags.DEFINE_string('model', '', "The model to start from: a folder of Hugging Face's.")
  common.main(TABLE, prepare)
