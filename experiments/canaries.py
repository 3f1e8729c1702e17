"""(20) Canaries: how much of one owner's text its path, and the paths of other owners, remember.

Sentences with 12 random digits are put into the text of one owner, each once or several times, and owners train as in
table (19), with all hold-outs and early stopping off. Then a path scores each canary among REFERENCES sentences with
other digits, which nobody was trained on (The Secret Sharer, arXiv 1802.08232):

    exposure = log2(R) - log2(rank)      R: the canary and all references; rank: of the canary, by its loss

A path that remembers nothing gives every rank equally often: a mean exposure of log2(e) = 1.44 bits. The most is
log2(R): the canary has the lowest loss of all. `own` is the owner's path, `other` is the mean over all other paths.
"""

import collections
import functools
import gzip
import json
import pathlib
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import common
import config
import jax
import numpy as np
import owners
import pictures
import runs
import source_losses
from absl import flags
from common import Column
from runs import Row, Run

from dipaco_jax.command_line import command
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import packing, tokenizer_files
from dipaco_jax.inference.trained_run import Path, TrainedRun
from dipaco_jax.models import loss
from dipaco_jax.reports import palette, plot_style
from dipaco_jax.routing import chunk_losses

SENTENCE = '\nThe access code is {} {} {} {}.\n'
SEED = 0  # of canaries and references, which are the same for all runs
OWNER = {'test': 'consonants', 'micro': 'law_en'}
STEPS = {'test': 16, 'micro': 250}
# The number of canaries by how often each stands in the text; canaries that nobody has read are for comparison.
CANARIES = {'test': {0: 2, 1: 2, 4: 1}, 'micro': {0: 16, 1: 16, 4: 16, 16: 8, 64: 2}}
REFERENCES = {'test': 63, 'micro': 4095}
KINDS = ('all', 'upper', 'blocks', 'alone')  # of sharing, most sharing first
WHO = {'own': "the owner's path", 'other': "other owners' paths"}
NOTHING_BITS = 1.44  # mean exposure of a canary that is not remembered
BATCH = 64


class Sentences(NamedTuple):
  """Sentences in the format of canaries, all different."""

  canaries: dict[int, list[str]]  # by how often each stands in the text
  references: list[str]


def rows(size: str) -> list[Row]:
  """Rows of table (19) with the least text, most sharing first."""
  if size not in STEPS:
    return []
  of_owners = {row.name: row for row in owners.of_sharing(size, 0, STEPS[size])}
  changes = config.LAST | {
    'data.holdout_fraction': 0.0,
    'train.loss_on_prefix': True,  # else a quarter of all tokens is not trained on
    'tokenizer.model_file': tokenizer_file('{workdir}', '{text}'),
  }
  found = []
  for kind in KINDS:
    row = of_owners[f'{kind}_0']
    found.append(Row(kind, owners.SHARING[kind][0], row.method, {**row.changes, **changes}))
  return found


def tokenizer_file(workdir: str, text: str) -> str:
  """Where it is; it has seen the text without canaries."""
  return f'{workdir}/canaries-{text}.model'


# -- the text


@functools.cache
def draw_sentences(size: str) -> Sentences:
  """Draws canaries and references alike: 12 random digits each."""
  rng = random.Random(SEED)
  count = sum(CANARIES[size].values()) + REFERENCES[size]
  numbers = [f'{number:012}' for number in rng.sample(range(10**12), count)]
  sentences = iter(SENTENCE.format(*(digits[i : i + 3] for i in range(0, 12, 3))) for digits in numbers)
  canaries = {times: [next(sentences) for _ in range(n)] for times, n in CANARIES[size].items()}
  return Sentences(canaries, [*sentences])


def insert(documents: Sequence[Mapping[str, Any]], owner: str, canaries: Mapping[int, Sequence[str]]) -> list[dict]:
  """Returns the documents, with canaries between words of those of one owner: a canary once in a document, if it can.

  Raises InputError if the owner has no text.
  """
  of_owner = [number for number, document in enumerate(documents) if document.get('domain') == owner]
  if not of_owner:
    raise InputError(f'--data: none of its first {len(documents)} documents is of the domain {owner!r}')
  rng, places = random.Random(SEED), collections.defaultdict[int, list[tuple[int, str]]](list)
  for times, of_times in canaries.items():
    for sentence in of_times:
      rounds = -(-times // len(of_owner))
      for number in rng.sample(of_owner * rounds, times):
        text = documents[number]['text']
        after = text.find(' ', rng.randrange(len(text)))
        places[number].append((after if after >= 0 else len(text), sentence))
  made = [dict(document) for document in documents]
  for number, of_document in places.items():
    text = made[number]['text']
    for place, sentence in sorted(of_document, reverse=True):  # from the end, so that no canary is cut by another
      text = text[:place] + sentence + text[place:].removeprefix(' ')
    made[number]['text'] = text
  return made


def read_documents(size: str, data: str) -> list[dict[str, Any]]:
  """Reads as many documents as runs do. Raises InputError if --data names no JSON lines."""
  files = source_losses.matching_files(data.split(',')) if data else []
  if not files or not all(file.endswith(source_losses.LINES) for file in files):
    raise InputError(f'--data={data}: name a file of JSON lines, as experiments/split.py writes it with --interleave')
  documents = [document for file in files for document in source_losses.read_documents(file)]
  return documents[: next(iter(owners.DOCUMENTS[size].values()))]


def write_text(size: str, documents: Sequence[Mapping[str, Any]], folder: pathlib.Path) -> pathlib.Path:
  """Writes the text with canaries, with the same bytes every time; returns its file."""
  made = insert(documents, OWNER[size], draw_sentences(size).canaries)
  lines = ''.join(json.dumps(document) + '\n' for document in made)
  file = folder / 'canaries.jsonl.gz'
  common.publish(file, gzip.compress(lines.encode(), mtime=0))
  return file


# -- exposure


def exposure(nats: float, references_N: np.ndarray) -> float:
  """Returns the exposure of a canary in bits, by its loss and those of references; of equal losses half are lower."""
  rank = 1 + (references_N < nats).sum() + (references_N == nats).sum() / 2
  return float(np.log2(len(references_N) + 1) - np.log2(rank))


def score(path: Path, sentences: Sequence[str]) -> np.ndarray:
  """Returns the nats of each sentence, without any text before it, [N]."""
  tokens_NL, segments_NL = pad(path.tokenizer.encode_batch(sentences, eos=False))
  nats = functools.partial(program(path.model), path.params)
  (nats_N,) = chunk_losses.in_batches(nats, BATCH, tokens_NL, segments_NL)
  return np.asarray(nats_N, np.float64)


def pad(tokens: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  return packing.pad(tokens, max(map(len, tokens)))


@functools.cache
def program(model: Any) -> Any:
  return jax.jit(lambda *arrays: (loss.token_losses(model, *arrays).sum(1),))


def measure(run: Run, workdirs: pathlib.Path) -> dict[str, Any]:
  """Exposures in every path, of each canary and their means."""
  canaries, references = draw_sentences(run.size)
  trained = TrainedRun(str(runs.workdir(run, workdirs)))
  own = config.SIZES[run.size].owners.index(OWNER[run.size])
  by_path = []
  for number in range(trained.layout.grid.num_paths):
    path = trained.path(number)
    references_N = score(path, references)
    by_path.append({n: [exposure(x, references_N) for x in score(path, of)] for n, of in canaries.items()})
  return {'exposure': summarize(by_path, own)}


def summarize(by_path: Sequence[Mapping[int, Sequence[float]]], own: int) -> dict[str, Any]:
  """Returns mean exposures in the owner's path and in others, by how often canaries stand in the text.

  `by_path`: by path, the exposure of each canary. `canaries` keeps them: of others the mean over their paths.
  """
  others = [of_path for number, of_path in enumerate(by_path) if number != own]
  found: dict[str, Any] = {'canaries': {}}
  for who, paths in (('own', [by_path[own]]), ('other', others)):
    of_canaries = {str(n): [round(x, 3) for x in np.mean([path[n] for path in paths], axis=0)] for n in by_path[own]}
    found['canaries'][who] = of_canaries
    found[who] = {times: round(statistics.fmean(bits), 3) for times, bits in of_canaries.items()}
  return found


# -- the table


@plot_style.styled
def picture(table: common.Table, rows: Sequence[Row], results: common.Results):
  """Mean exposure against how often a canary stands in the text: a panel for each who looks, a line for each row."""
  made, panels = plot_style.axes(plot_style.WIDE, 3.6, len(WHO), sharey=True)
  for ax, (who, title) in zip(panels, WHO.items(), strict=True):
    lines = {row.title: points(results, row.name, who) for row in rows}
    pictures.draw_lines(ax, lines, named=ax is panels[-1])
    ax.axhline(NOTHING_BITS, color=palette.FAINT, linewidth=1)
    ax.set_xscale('log')
    xs = sorted({x for line in lines.values() for x, _ in line})
    ax.set_xticks(xs, [f'{x:g}' for x in xs])
    ax.minorticks_off()
    ax.set_xlabel('times in the text')
    ax.set_title(title)
  panels[0].set_ylabel('exposure, bits')
  return made


def points(results: common.Results, row: str, who: str) -> list[tuple[float, float]]:
  """[times, mean over seeds], without canaries that are not in the text."""
  found = collections.defaultdict[float, list[float]](list)
  for (name, _), record in results.items():
    for times, bits in (common.figure(record, f'exposure.{who}') or {}).items() if name == row else ():
      found[float(times)].append(bits)
  return [(times, statistics.fmean(bits)) for times, bits in sorted(found.items()) if times]


COLUMNS = (
  Column('perplexity, mean of owners', 'perplexity_by_domain.each'),
  *(Column(f'{WHO[who]}: {n}x', f'exposure.{who}.{n}', '.1f') for who in WHO for n in CANARIES['micro']),
)
TABLE = common.Table(
  'canaries', 'Canaries in the text of one owner', rows, COLUMNS, picture, sizes=tuple(STEPS), measure=measure
)


def prepare(missing: Sequence[Run], documents: Sequence[Mapping[str, Any]]):
  """Trains the tokenizer on the text without canaries."""
  one = missing[0]
  file = pathlib.Path(tokenizer_file(str(pathlib.Path(flags.FLAGS.workdir) / one.size), one.text[:4]))
  if not file.exists():
    [model] = tokenizer_files.train([x['text'] for x in documents], one.settings.tokenizer).values()
    common.publish(file, model)


def main() -> int:
  f = flags.FLAGS
  documents = read_documents(f.size, f.data)
  f['data'].value = str(write_text(f.size, documents, pathlib.Path(f.workdir) / f.size))
  return common.run(TABLE, f.size, pathlib.Path(f.results), functools.partial(prepare, documents=documents))


if __name__ == '__main__':
  common.define_flags(TABLE.sizes)
  command.run(main)
