"""(19) Owners of text: what each gains from the others, by how much text each has and by what they share.

Each kind of text belongs to an owner, who trains a path on it alone. There is no base: nobody has text of all. The text
is made by split.py with --interleave, so that the first documents have as many bytes of each kind; `alone` is what an
owner has without the others, `pooled` one dense model on the text of all, where that may be pooled.
"""

from collections.abc import Sequence
from typing import Any

import common
import config
import methods
import paths
import pictures
from common import Column
from runs import Row
from tau import OUTER, TAUS

DOCUMENTS = {'test': {'little': 60, 'more': 120}, 'micro': {'0.3 MB': 770, '1.5 MB': 3900, '7.5 MB': 20_000}}
STEPS = {'test': 8, 'micro': 1000}
HOLDOUT = {'test': 0.3}  # of the documents, so that each path has some
SHARES = {'micro': (0.5, 0.25)}  # peak rates of `pooled` and of paths, as a share of a base's
# What an owner has of its own, most sharing first.
SHARING = {
  'all': ('one shared model', 'owners'),
  'mlps': ('MLPs of their own', 'owners_mlps'),
  'upper': ('upper blocks of their own', 'owners_upper'),
  'blocks': ('blocks of their own', 'owners_blocks'),
  'alone': ('alone', 'owners_alone'),
  'adamw': ('alone, AdamW', 'owners_alone'),
}


def rows(size: str) -> list[Row]:
  """For each amount of text: one dense model on all of it, and owners who share less and less."""
  if size not in DOCUMENTS:
    return []
  owners, steps, tau = config.SIZES[size].owners, STEPS[size], TAUS[size][1]
  batch = len(owners) * config.SIZES[size].config['train']['batch_size']
  table = []
  for number, (amount, documents) in enumerate(DOCUMENTS[size].items()):
    text: dict[str, Any] = {
      'data.max_documents': documents,
      'data.holdout_fraction': HOLDOUT.get(size, 0.15 if number == 0 else 0.05),
    }
    text |= {'train.max_holdout_rows': 0}
    text |= {'tokenizer.model_file': paths.tokenizer(size), 'pretrain.steps': 0}
    of_dense, of_paths = SHARES.get(size, (1, 1))
    pooled = {**lasting(steps, config.SIZES[size].alone), **text, 'train.batch_size': batch}
    title = f'{amount} each: one dense model on all text'
    table.append(Row(f'pooled_{number}', title, 'dense', {**pooled, **methods.at_rate(size, of_dense)}))
    for kind, (words, method) in SHARING.items():
      alone = (
        kind == 'adamw'
      )  # at the rate of the dense model, and without outer steps, as one would train without others
      outer: dict[str, Any] = OUTER['sgd'] if alone else {**OUTER['nesterov'], 'outer.row_weights': True}
      changes: dict[str, Any] = {
        **lasting(steps, tau),
        **outer,
        **text,
        **methods.at_rate(size, of_dense if alone else of_paths),
      }
      table.append(Row(f'{kind}_{number}', f'{amount} each: {words}', method, changes))
  return table


def lasting(steps: int, tau: int) -> dict[str, int]:
  """As config.lasting, without a base."""
  phases = steps // tau
  return {'train.phases': phases, 'train.steps_per_phase': tau, 'inner.decay_steps': phases * tau}


COLUMNS = (
  Column('mean of owners', 'perplexity_by_domain.each'),
  Column('minus alone, by seed', 'perplexity_by_domain.each', '+.2f', 'adamw_#'),
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

if __name__ == '__main__':
  common.main(TABLE, paths.prepare)
