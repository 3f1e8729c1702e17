"""(17) Routing by sequence or by document, on pieces of validation text and on beginnings of documents [2.4].

In training, a sequence is routed by its own first tokens, or, with `routing.by_document`, by those of its document. A
served document is routed by its beginning. Rows are those of table (1), once by sequence and once by document;
beginnings are scored as in table (12).
"""

import pathlib

import beginnings
import common
import methods
import pictures
import runs
from absl import flags
from common import Column
from runs import Row

from dipaco_jax.command_line import command

METHODS = ('own', 'flat', 'discriminative')


def rows(size: str) -> list[Row]:
  of_methods = {row.name: row for row in methods.rows(size)}
  by_sequence = [of_methods[name] for name in METHODS]
  return [row for one in by_sequence for row in (one, by_document(one))]


def by_document(row: Row) -> Row:
  """The same row with its documents routed as wholes."""
  changes = {**row.changes, 'routing.by_document': True}
  return row._replace(name=f'{row.name}_documents', title=f'{row.title}, by document', changes=changes)


def measure(run: runs.Run, workdirs: pathlib.Path) -> runs.Record:
  """Pieces and beginnings, by the router of training and by one fitted after it."""
  documents = {'beginnings': beginnings.read(flags.FLAGS.documents)}
  return {'texts': beginnings.measure(runs.workdir(run, workdirs), documents)}


def less(field: str, title: str) -> Column:
  """The difference to the row of the same method by sequence."""
  return Column(f'{title} less by sequence, by seed (90%)', field, '+.2f', '*', interval=True)


COLUMNS = (
  Column('pieces', 'texts.pieces.perplexity'),
  less('texts.pieces.perplexity', 'pieces'),
  Column('beginnings', 'texts.beginnings.perplexity'),
  less('texts.beginnings.perplexity', 'beginnings'),
  Column('pieces, router refitted', 'texts.pieces_refit.perplexity'),
  Column('beginnings, router refitted', 'texts.beginnings_refit.perplexity'),
  less('texts.beginnings_refit.perplexity', 'beginnings, router refitted,'),
  Column('beginnings, best path', 'texts.beginnings_hindsight.perplexity'),
)
TABLE = common.Table('documents', 'Routing by sequence or by document', rows, COLUMNS, pictures.dots, measure=measure)


def main() -> int:
  f = flags.FLAGS
  beginnings.check_documents()
  return common.run(TABLE, f.size, pathlib.Path(f.results), lambda missing: None)


if __name__ == '__main__':
  common.define_flags()
  flags.DEFINE_string('documents', '', 'The validation text whole, gzipped JSON lines.')
  command.run(main)
