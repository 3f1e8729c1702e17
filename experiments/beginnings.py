"""(12) Beginnings of documents, and the router fitted after training: as a served model reads them [2.4].

Each document from which validation pieces were cut gives its first tokens, as many as fit in a row. Its path scores all
of them except those that the router reads. `refit` uses the router that `evaluate.refit_router` fits after training,
`hindsight` the best path of each document on the scored tokens. The runs are those of tables (1), (2) and (5); their
workdirs must exist.
"""

import dataclasses
import gzip
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import common
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
from dipaco_jax.inference.text_router import TextRouter
from dipaco_jax.inference.trained_run import TrainedRun
from dipaco_jax.models import loss, transformer
from dipaco_jax.pipeline import rerouted_perplexity, route_stage, router_refit, run as run_lib

METHODS = ('dense', 'diloco', 'kmeans', 'product', 'own', 'discriminative', 'flat', 'dense_px', 'dense_batch')
OTHERS = ('dense', 'long', 'diloco', 'grid', 'own', 'flat')
BATCH = 64


def rows(size: str) -> list[Row]:
  """Those of table (1) by their names, those of (2), with the most paths, and of (5) by the table's and theirs."""
  by_table = {
    module.TABLE.name: {row.name: row for row in module.rows(size)} for module in (methods, paths, pretrained)
  }
  most = max(int(name.rpartition('_')[2]) for name in by_table['paths'])
  of_methods = by_table['methods']
  found = [of_methods[name]._replace(title=f'(1) {of_methods[name].title}') for name in METHODS]
  for table, number, suffix, names in (
    ('paths', 2, f'_{most}', OTHERS),
    ('pretrained', 5, '', (*OTHERS, 'batch')),
  ):
    for name in names:
      row = by_table[table][f'{name}{suffix}']
      found.append(row._replace(name=f'{table}_{row.name}', title=f'({number}) {row.title}'))
  return found


class Losses(NamedTuple):
  """Of texts under each path, [N, P], and the number of targets, [N]; their kinds, [N]."""

  nll: np.ndarray
  targets: np.ndarray
  kinds: np.ndarray

  def figures(self, path_N: np.ndarray) -> dict[str, Any]:
    """Perplexities of all, by kind, and the geometric mean of kinds: mixes of kinds differ."""
    nll_N = self.nll[np.arange(len(path_N)), path_N]

    def perplexity(of: np.ndarray) -> float:
      return math.exp(nll_N[of].sum() / self.targets[of].sum())

    by_kind = {str(kind): perplexity(self.kinds == kind) for kind in np.unique(self.kinds)}
    mean = statistics.geometric_mean(by_kind.values())
    return {'perplexity': perplexity(self.targets > 0), 'kinds': mean, 'perplexity_by_domain': by_kind}


def score(run: TrainedRun, documents: list[dict[str, str]]) -> tuple[Losses, list[np.ndarray]]:
  """Returns the losses of the beginnings of {text, domain}, and their prefixes for a router, without short ones."""
  s, kept, tokens = run.settings, [], []
  for document in documents:
    found = np.asarray(run.tokenizer.encode(document['text']))[: s.model.seq_len]
    if len(found) > s.routing.prefix_tokens:
      kept.append(document['domain'])
      tokens.append(found)

  nll_NP, targets_N = np.zeros((len(kept), s.num_paths)), np.zeros(len(kept))
  model = transformer.make_model(s.model, run.tokenizer.vocab_size)
  of_rows = jax.jit(lambda params, *of: loss.row_losses(model, s.routing.prefix_tokens, params, *of))
  for path, start in itertools.product(range(s.num_paths), range(0, len(kept), BATCH)):
    mine = tokens[start : start + BATCH]
    rows = packing.pad((mine + mine[:1] * BATCH)[:BATCH], s.model.seq_len)  # filled up, so that there is one program
    nll, targets = (np.asarray(x)[: len(mine)] for x in of_rows(run.path(path).params, *rows))
    nll_NP[start : start + BATCH, path], targets_N[start : start + BATCH] = nll, targets
  return Losses(nll_NP, targets_N, np.array(kept)), [x[: s.routing.prefix_tokens] for x in tokens]


def routed(router: TextRouter, prefixes: list[np.ndarray]) -> np.ndarray:
  """The paths that a router chooses, a batch at a time."""
  found = []
  for start in range(0, len(prefixes), BATCH):
    mine = prefixes[start : start + BATCH]
    found.append(router.batch_scores((mine + mine[:1] * BATCH)[:BATCH]).argmax(1)[: len(mine)])
  return np.concatenate(found)


def measure(workdir: pathlib.Path, documents: Mapping[str, list[dict[str, str]]]) -> dict[str, Any]:
  """Of beginnings and pieces, by the router of training and by one fitted after it; of beginnings, by the best path.

  `documents` are by what their beginnings are called.
  """
  trained = TrainedRun(str(workdir))
  s, begun = trained.settings, {name: score(trained, of) for name, of in documents.items()}
  by_kind = {kind: x for kind, x in trained.report['perplexity_by_domain'].items() if x}
  of_pieces = {'perplexity': trained.report['perplexity'], 'kinds': statistics.geometric_mean(by_kind.values())}
  if not any(level.axes for level in trained.layout.levels):
    of_begun = {name: losses.figures(np.zeros(len(prefixes), int)) for name, (losses, prefixes) in begun.items()}
    return of_begun | {'pieces': of_pieces}

  run = run_lib.unattended(workdir, s, num_devices=1)
  of_train, scored = (rerouted_perplexity.score(run, split) for split in ('train', 'validation'))
  assert of_train and scored  # this is the first process
  fitted, about = router_refit.fit(run, rerouted_perplexity.sums(of_train))
  pieces = run.sequences('validation')
  names = run.result('tokenize')['domains']
  kinds = np.array([names[piece.domain] for piece in pieces.read(range(len(pieces)))])
  losses = Losses(rerouted_perplexity.sums(scored), scored.counts.sum(1), kinds)
  by_refit = dataclasses.replace(trained.router, fitted=fitted)
  found = {'pieces': of_pieces, 'pieces_refit': losses.figures(route_stage.scores(run, fitted, 'validation').argmax(1))}
  for name, (of_name, prefixes) in begun.items():
    found[name] = of_name.figures(routed(trained.router, prefixes))
    found[f'{name}_refit'] = of_name.figures(routed(by_refit, prefixes))
    found[f'{name}_hindsight'] = of_name.figures(of_name.nll.argmin(1))
  as_reported = losses.figures(run.routed('validation', s.rounds))['perplexity']
  assert math.isclose(as_reported, of_pieces['perplexity'], rel_tol=1e-4), (as_reported, of_pieces)
  return found | about


COLUMNS = (
  Column('beginnings of documents', 'texts.beginnings.perplexity'),
  Column('beginnings, router refitted', 'texts.beginnings_refit.perplexity'),
  Column('beginnings, best path', 'texts.beginnings_hindsight.perplexity'),
  Column('pieces', 'texts.pieces.perplexity'),
  Column('pieces, router refitted', 'texts.pieces_refit.perplexity'),
  Column('tuning beginnings', 'texts.tuning.perplexity'),
  Column('tuning beginnings, router refitted', 'texts.tuning_refit.perplexity'),
  Column('beginnings, mean of kinds', 'texts.beginnings.kinds'),
  Column('beginnings, mean of kinds, router refitted', 'texts.beginnings_refit.kinds'),
  Column('pieces, mean of kinds', 'texts.pieces.kinds'),
  Column('pieces, mean of kinds, router refitted', 'texts.pieces_refit.kinds'),
)


def part(row: str) -> str:
  """The table that a row's run is of."""
  first = row.partition('_')[0]
  return first if first in (paths.TABLE.name, pretrained.TABLE.name) else methods.TABLE.name


TABLE = common.Table('beginnings', 'Beginnings of documents', rows, COLUMNS, pictures.dots, part=part)


def main() -> int:
  f = flags.FLAGS
  check_documents()
  documents = {'beginnings': read(f.documents)} | ({'tuning': read(f.tuning)} if f.tuning else {})
  return common.score_finished(TABLE, 'texts', lambda one, workdirs: measure(runs.workdir(one, workdirs), documents))


def check_documents():
  """Raises InputError, before any work, if no documents are named."""
  if not flags.FLAGS.documents:
    raise InputError('--documents: name the validation text before split.py cut it, JSON lines with text and domain')


def read(file: str) -> list[dict[str, str]]:
  with gzip.open(file, 'rt') as lines:
    return [json.loads(line) for line in lines]


if __name__ == '__main__':
  common.define_flags()
  flags.DEFINE_string('documents', '', 'The validation text whole, gzipped JSON lines.')
  flags.DEFINE_string(
    'tuning', '', 'Likewise text that rates were chosen on, of which records have the beginnings too.'
  )
  command.run(main)
