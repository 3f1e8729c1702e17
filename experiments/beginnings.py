"""(12) Beginnings of documents: what a served model reads first, where tables have pieces from all of a document.

Each document that validation pieces were cut from gives its first tokens, as many as a row has; all but those that the
router sees are scored, under its path. `in hindsight` is by the best path of each document. The runs are those of
tables (1), (2) and (5), whose workdirs have to be there.
"""

import collections
import gzip
import json
import math
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

import common
import config
import jax
import methods
import numpy as np
import paths
import pictures
import pretrained
import runs
from absl import flags
from common import Column
from runs import Row

from dipaco_jax.command_line import command
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import packing
from dipaco_jax.inference.trained_run import TrainedRun
from dipaco_jax.models import loss, transformer

METHODS = ('dense', 'diloco', 'kmeans', 'product', 'own', 'discriminative', 'flat', 'dense_px')
OTHERS = ('dense', 'long', 'diloco', 'grid', 'own', 'flat')
BATCH = 64


def rows(size: str) -> list[Row]:
  """Those of table (1) by their names, those of (2), with the most paths, and of (5) by the table's and theirs."""
  by_table = {
    module.TABLE.name: {row.name: row for row in module.rows(size)} for module in (methods, paths, pretrained)
  }
  most = max(int(name.rpartition('_')[2]) for name in by_table['paths'])
  found = [by_table['methods'][name] for name in METHODS]
  for table, number, suffix in (('paths', 2, f'_{most}'), ('pretrained', 5, '')):
    for name in OTHERS:
      row = by_table[table][f'{name}{suffix}']
      found.append(row._replace(name=f'{table}_{row.name}', title=f'({number}) {row.title}'))
  return found


def score(run: TrainedRun, documents: list[dict[str, str]]) -> dict[str, Any]:
  """Perplexities of {text, domain}: of all, by kind, and by the best path of each document."""
  s = run.settings
  tokens = [np.asarray(run.tokenizer.encode(document['text']))[: s.model.seq_len] for document in documents]
  kept = [i for i in range(len(tokens)) if len(tokens[i]) > s.routing.prefix_tokens]
  batches = [kept[i : i + BATCH] for i in range(0, len(kept), BATCH)]

  def whole(batch):
    """The last batch is filled up, so that there is one program."""
    return [tokens[i] for i in (batch + batch[:1] * BATCH)[:BATCH]]

  nll_NP, count_N = np.zeros((len(kept), s.num_paths)), np.zeros(len(kept))
  model = transformer.make_model(s.model, run.tokenizer.vocab_size)
  of_rows = jax.jit(lambda params, *of: loss.row_losses(model, s.routing.prefix_tokens, params, *of))
  for path in range(s.num_paths):
    params = run.path(path).params
    for n, batch in enumerate(batches):
      nll, count = of_rows(params, *packing.pad(whole(batch), s.model.seq_len))
      at = slice(n * BATCH, n * BATCH + len(batch))
      nll_NP[at, path], count_N[at] = nll[: len(batch)], count[: len(batch)]

  chosen_N = np.zeros(len(kept), int)
  if s.routing.method not in ('random', 'single'):
    prefixes = [[x[: s.routing.prefix_tokens] for x in whole(batch)] for batch in batches]
    chosen_N = np.concatenate([run.router.batch_scores(of).argmax(1) for of in prefixes])[: len(kept)]
  nll_N = nll_NP[np.arange(len(kept)), chosen_N]
  of_kind = collections.defaultdict(list)
  for n, i in enumerate(kept):
    of_kind[documents[i]['domain']].append(n)
  by_kind = {kind: perplexity(nll_N[of], count_N[of]) for kind, of in sorted(of_kind.items())}
  found = {'perplexity': perplexity(nll_N, count_N), 'perplexity_by_domain': by_kind, 'documents': len(kept)}
  return found | {'kinds': of_kinds(by_kind), 'hindsight': perplexity(nll_NP.min(1), count_N)}


def of_kinds(by_kind: Mapping[str, float]) -> float:
  """The geometric mean of the kinds' perplexities, each of the same weight: mixes of kinds differ."""
  return statistics.geometric_mean(by_kind.values())


def perplexity(nll: np.ndarray, count: np.ndarray) -> float:
  return math.exp(nll.sum() / count.sum())


COLUMNS = (
  Column('beginnings of documents', 'beginnings.perplexity'),
  Column('pieces, as in their tables', 'perplexity'),
  Column('beginnings, mean of kinds', 'beginnings.kinds'),
  Column('pieces, mean of kinds', 'beginnings.kinds_of_pieces'),
  Column('beginnings of German law', f'beginnings.perplexity_by_domain.{config.UNLIKE}', '.1f'),
  Column('by the best path in hindsight', 'beginnings.hindsight'),
)
TABLE = common.Table('beginnings', 'Beginnings of documents', rows, COLUMNS, pictures.dots)


def main() -> int:
  f = flags.FLAGS
  if not f.documents:
    raise InputError('--documents: name the validation text before split.py cut it, JSON lines with text and domain')
  with gzip.open(f.documents, 'rt') as lines:
    documents = [json.loads(line) for line in lines]

  def scored(one: runs.Run, workdirs: pathlib.Path) -> dict[str, Any]:
    trained = TrainedRun(str(runs.workdir(one, workdirs)))
    of_pieces = of_kinds({kind: x for kind, x in trained.report['perplexity_by_domain'].items() if x})
    return score(trained, documents) | {'kinds_of_pieces': of_pieces}

  return common.score_finished(TABLE, 'beginnings', scored)


if __name__ == '__main__':
  common.define_flags()
  flags.DEFINE_string('documents', '', 'The validation text whole, gzipped JSON lines.')
  command.run(main)
