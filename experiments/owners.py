"""(19) Owners of text: what each gains from the others, by how much text each has and by what they share.

Each kind of text belongs to an owner, who trains a path on it alone. There is no base: nobody has text of all. The text
is made by split.py with --interleave, so that the first documents have as many bytes of each kind; `alone` is what an
owner has without the others, `pooled` one dense model on the text of all, where that may be pooled, and `tuned` the
shared model, on which each owner then trains alone for a quarter of the steps: the usual way to a model of one's own.
"""

from collections.abc import Sequence
from typing import Any

import bases
import common
import config
import methods
import paths
import pictures
from absl import flags
from common import Column
from runs import Row, Run
from tau import OUTER

DOCUMENTS = {'test': {'little': 60, 'more': 120}, 'micro': {'0.3 MB': 770, '1.5 MB': 3900, '7.5 MB': 20_000}}
STEPS = {'test': 16, 'micro': 500}
TAU = {'test': 4, 'micro': 5}
HOLDOUT = {'test': 0.3}  # of the documents, so that each path has some
HOLDOUT_ROWS = {'micro': 128}  # of a path, that are looked at after every phase; elsewhere all
SHARES = {'micro': 0.5}  # the peak rate of all rows but `tuned`, as a share of a base's
TUNED = {'micro': 0.3}  # that of `tuned`, the best of flat paths that continue from a base, see pretrained.py
PART = 4  # one of so many parts of the steps of `tuned` is trained alone
# What an owner has of its own, most sharing first.
SHARING = {
  'all': ('one shared model', 'owners'),
  'mlps': ('MLPs of their own', 'owners_mlps'),
  'upper': ('upper blocks of their own', 'owners_upper'),
  'blocks': ('blocks of their own', 'owners_blocks'),
  'alone': ('alone', 'owners_alone'),
}


def rows(size: str) -> list[Row]:
  """For each amount of text: one dense model on all of it, and owners who share less and less."""
  return [row for number in range(len(DOCUMENTS.get(size, ()))) for row in of_amount(size, number)]


def of_amount(size: str, number: int) -> list[Row]:
  """The rows of one amount of text."""
  steps, text, amount = STEPS[size], text_of(size, number), list(DOCUMENTS[size])[number]
  batch = len(config.SIZES[size].owners) * config.SIZES[size].config['train']['batch_size']
  changes = lasting(steps, config.SIZES[size].alone) | text | {'train.batch_size': batch}
  table = [
    Row(f'pooled_{number}', f'{amount} each: one dense model on all text', 'dense',
        {**changes, **methods.at_rate(size, SHARES.get(size, 1))}),
    tuned(size, number),
  ]  # fmt: skip
  return table + of_sharing(size, number, steps)


def of_sharing(size: str, number: int, steps: int) -> list[Row]:
  """The rows of owners who share more or less."""
  amount, table = list(DOCUMENTS[size])[number], []
  for kind, (words, method) in SHARING.items():
    outer = OUTER['sgd'] | ({} if kind == 'alone' else {'outer.row_weights': True})
    changes = {**lasting(steps, TAU[size]), **outer, **methods.at_rate(size, SHARES.get(size, 1))}
    changes |= text_of(size, number)
    table.append(Row(f'{kind}_{number}', f'{amount} each: {words}', method, changes))
  return table


def text_of(size: str, number: int) -> dict[str, Any]:
  """The changes of the config that make an amount of text, and that there is no base."""
  holdout = HOLDOUT.get(size, 0.15 if number == 0 else 0.05)
  return {
    'data.max_documents': list(DOCUMENTS[size].values())[number],
    'data.holdout_fraction': holdout,
    'train.max_holdout_rows': HOLDOUT_ROWS.get(size, 0),
    'tokenizer.model_file': paths.tokenizer(size),
    'pretrain.steps': 0,
  }


def shared_row(size: str, number: int) -> Row:
  """The run that `tuned` starts from: `all`, with the steps that are not trained alone."""
  [row] = [row for row in of_sharing(size, number, STEPS[size] * (PART - 1) // PART) if row.name == f'all_{number}']
  return row._replace(name=f'shared_{number}')


def tuned(size: str, number: int) -> Row:
  """The shared model, on which each owner has trained alone."""
  start = text_of(size, number) | bases.start(size, shared_row(size, number))
  steps = STEPS[size] // PART
  changes = lasting(steps, TAU[size]) | OUTER['sgd'] | start | {'inner.warmup_steps': max(1, steps // 10)}
  title = f'{list(DOCUMENTS[size])[number]} each: one shared model, then alone'
  return Row(f'tuned_{number}', title, 'owners_alone', {**changes, **methods.at_rate(size, TUNED.get(size, 1))})


def lasting(steps: int, tau: int) -> dict[str, int]:
  """As config.lasting, without a base."""
  phases = steps // tau
  return {'train.phases': phases, 'train.steps_per_phase': tau, 'inner.decay_steps': phases * tau}


COLUMNS = (
  Column('mean of owners', 'perplexity_by_domain.each'),
  Column('minus alone, by seed', 'perplexity_by_domain.each', '+.2f', 'alone_#'),
  *(Column(name, f'perplexity_by_domain.{name}', '.1f') for name in config.KINDS),
  Column('text, tokens', 'text_tokens', '.2g'),
  Column('parameters', 'parameters_total', ',.0f'),
)


def series(row: Row) -> Sequence[str]:
  """A line for each degree of sharing."""
  return [row.title.partition(': ')[2]]


TABLE = common.Table(
  'owners', 'Owners of text', rows, COLUMNS,
  pictures.against('text_tokens', 'tokens of text of all owners', series),
  sizes=tuple(DOCUMENTS),
)  # fmt: skip


def prepare(missing: Sequence[Run]):
  """The tokenizer, and the models that rows start from."""
  f = flags.FLAGS
  paths.prepare(missing)
  for number in range(len(DOCUMENTS[f.size])):
    row = shared_row(f.size, number)
    if starting := [run for run in missing if bases.starts(run, row)]:
      bases.export_for(starting, row, f.data, f.validation)


if __name__ == '__main__':
  common.main(TABLE, prepare)
