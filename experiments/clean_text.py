"""A clean test text: documents of the corpus's kinds that it has neither in its training nor in its validation text.

    git clone https://github.com/OWNER/NAME REPOSITORIES/OWNER/NAME   # each repository of clean_text_sources.py
    python experiments/clean_text.py --repositories=REPOSITORIES --corpus=TRAIN.jsonl.gz,VALIDATION.jsonl.gz --out=FILE

Every kind has DOCUMENTS documents, each of another file, in an order that a hash draws. Files, articles and papers
that the corpus has are left out, and so are documents that have an opening or a passage in common with a document of
the corpus (shared_passages.py). The same repositories and corpus give the same lines on every machine.
"""

import collections
import gzip
import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import clean_text_sources
import common
import shared_passages
from absl import flags
from clean_text_sources import Repository
from shared_passages import opening
from source_losses import read_documents

from dipaco_jax.command_line import command
from dipaco_jax.core.errors import InputError

DOCUMENTS = 64  # of each kind
SPARE = 4  # files that are read for each document, as some of them repeat the corpus
SPARE_OF_FILE = 2  # documents of a file, likewise
SHORTEST = 800  # characters, as in the corpus
LONGEST = 4000  # shorter than in the corpus, so that the same amount of text has more sources


class Document(NamedTuple):
  text: str
  domain: str
  source: str


# -- documents of repositories


def draw_number(*names: str) -> bytes:
  """Returns what documents are ordered by: a number that a hash draws for a name."""
  return hashlib.blake2b('\0'.join(names).encode(), digest_size=8, person=b'clean_text').digest()


def cut(text: str) -> Iterator[str]:
  """Yields the pieces of a text, which end with a paragraph; pieces and paragraphs of a wrong length are left out."""
  piece = ''
  for paragraph in [*text.split('\n\n'), ' ' * LONGEST]:
    if len(piece) + 2 + len(paragraph) <= LONGEST:
      piece += '\n\n' + paragraph
      continue
    if len(piece.strip()) >= SHORTEST:
      yield piece.strip()
    piece = paragraph if len(paragraph) <= LONGEST else ''


def read_file(repository: Repository, path: str, used: set[str]) -> list[Document]:
  """Returns some documents of a file, in the order of their numbers, without those of sources that are used."""
  file = f'{repository.place.repository}:{path}'
  numbered = []
  for name, text in repository.texts(path):
    source = f'{file}#{name}' if name else file
    if source not in used:
      for i, piece in enumerate(cut(text)):
        numbered.append((draw_number(source, str(i)), Document(piece, repository.place.kind, source)))
  return [document for _, document in sorted(numbered)[:SPARE_OF_FILE]]


def read_kind(repositories: Iterable[Repository], used: set[str]) -> list[list[Document]]:
  """Returns documents of unused files of one kind, by file, in the order in which they are taken."""
  files = [
    (repository.place.rank, draw_number(repository.place.repository, path), path, repository)
    for repository in repositories
    for path in repository.paths()
  ]
  by_file: list[list[Document]] = []
  for _, _, path, repository in sorted(files, key=lambda file: file[:3]):
    if len(by_file) < SPARE * DOCUMENTS and (documents := read_file(repository, path, used)):
      by_file.append(documents)
  return by_file


# -- the test text


def choose(by_file: Iterable[Sequence[Document]], left_out: set[Document], openings: set[str]) -> list[Document]:
  """Returns one document of each file, up to DOCUMENTS; adds their openings to `openings`."""
  chosen: list[Document] = []
  for documents in by_file:
    for document in documents:
      if len(chosen) < DOCUMENTS and document not in left_out and opening(document.text) not in openings:
        chosen.append(document)
        openings.add(opening(document.text))
        break
  return chosen


def make(folder: str, corpus: Sequence[dict[str, str]]) -> list[Document]:
  """Returns the documents of the test text, by kind and source."""
  repositories = [Repository(folder, place) for place in clean_text_sources.PLACES]
  used = {document['source'] for document in corpus}
  kinds = [
    read_kind([repository for repository in repositories if repository.place.kind == kind], used)
    for kind in sorted({repository.place.kind for repository in repositories})
  ]
  candidates = [document for by_file in kinds for documents in by_file for document in documents]
  shared = shared_passages.find([d.text for d in candidates], (document['text'] for document in corpus))
  left_out = {document for document, is_shared in zip(candidates, shared, strict=True) if is_shared}
  openings = {opening(document['text']) for document in corpus}
  documents = [document for by_file in kinds for document in choose(by_file, left_out, openings)]
  return sorted(documents, key=lambda document: (document.domain, document.source))


def print_counts(documents: Sequence[Document]):
  for kind in sorted({document.domain for document in documents}):
    of_kind = [document for document in documents if document.domain == kind]
    repositories = collections.Counter(document.source.partition(':')[0] for document in of_kind)
    num_bytes = sum(len(document.text.encode()) for document in of_kind)
    names = ', '.join(f'{count} of {name}' for name, count in sorted(repositories.items()))
    print(f'{kind}: {len(of_kind)} documents, {num_bytes:,} bytes; {names}')
  print(f'{len(documents)} documents, {sum(len(document.text.encode()) for document in documents):,} bytes')


def main():
  f = flags.FLAGS
  if not f.repositories:
    raise InputError('--repositories is missing: name the folder in which each repository is OWNER/NAME')
  if not f.corpus or not all(pathlib.Path(file).is_file() for file in f.corpus):
    raise InputError(
      f'--corpus={",".join(f.corpus)}: name the files of JSON lines with `text` and `source`, with commas'
    )
  documents = make(f.repositories, [document for file in f.corpus for document in read_documents(file)])
  lines = ''.join(json.dumps(document._asdict(), ensure_ascii=False) + '\n' for document in documents).encode()
  contents = gzip.compress(lines, mtime=0)
  common.publish(pathlib.Path(f.out), contents)
  print_counts(documents)
  print(f'sha256 of the lines: {hashlib.sha256(lines).hexdigest()}')
  print(f'sha256 of the file, which depends on the version of zlib too: {hashlib.sha256(contents).hexdigest()}')


if __name__ == '__main__':
  flags.DEFINE_string('repositories', '', 'The folder of the repositories, each in OWNER/NAME.')
  flags.DEFINE_list('corpus', '', 'Files whose documents the test text may not repeat.')
  flags.DEFINE_string('out', 'runs/clean_text/test.jsonl.gz', 'The file to write.')
  command.run(main)
