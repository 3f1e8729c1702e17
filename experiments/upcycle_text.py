"""Text for upcycle_gpu.py: a part of a corpus that is small enough to travel, and validation text of many sources.

    python experiments/upcycle_text.py --data=TRAIN.jsonl.gz --validation=VALIDATION.jsonl.gz --out=DIR

writes DIR/train.jsonl.gz and DIR/validation.jsonl.gz. The documents need the fields `text`, `domain` and `source`.

Training text has the same number of bytes of every kind but UNTRAINED. Those kinds are like text that SmolLM2 was
trained on, and are kept to measure forgetting. Validation text has the given validation file, and further sources that
a hash draws from the training file: none of their documents is trained on. Its documents are cut into pieces that fit
into a row of 512 tokens, so that all of their text is scored.
"""

import gzip
import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import common
from absl import flags
from source_losses import read_documents

from dipaco_jax.command_line import command
from dipaco_jax.core.errors import InputError

UNTRAINED = ('science_abstracts', 'wiki_en')
PIECE = 1200  # characters, less than 512 tokens of English, code or German law
Document = dict[str, Any]


def is_held_back(document: Document, fraction: float) -> bool:
  """Returns whether a document's source is validation text."""
  digest = hashlib.blake2b(document['source'].encode(), digest_size=8, person=b'upcycle').digest()
  return int.from_bytes(digest, 'big') < fraction * 2**64


def cut(document: Document) -> Iterator[Document]:
  """Yields the pieces of a document, which end at a space; a short rest is left out."""
  text = document['text'].strip()
  while text:
    end = len(text) if len(text) <= PIECE else (text.rfind(' ', PIECE // 2, PIECE) + 1 or PIECE)
    if end >= PIECE // 4:
      yield document | {'text': text[:end].strip()}
    text = text[end:].strip()


def take(documents: Iterable[Document], most: int) -> list[Document]:
  """Returns documents of each kind until they have `most` bytes, in an order that a hash draws."""
  sizes: dict[str, int] = {}
  taken = []
  for document in sorted(documents, key=lambda d: hashlib.blake2b(d['text'].encode()).digest()):
    kind = document['domain']
    if sizes.setdefault(kind, 0) < most:
      sizes[kind] += len(document['text'].encode())
      taken.append(document)
  return taken


def publish(file: pathlib.Path, documents: Iterable[Document]):
  lines = ''.join(json.dumps(document, ensure_ascii=False) + '\n' for document in documents)
  common.publish(file, gzip.compress(lines.encode(), mtime=0))


def main():
  f = flags.FLAGS
  for name, file in (('data', f.data), ('validation', f.validation)):
    if not pathlib.Path(file).is_file():
      raise InputError(f'--{name}={file}: name one file of JSON lines with `text`, `domain` and `source`')
  corpus = list(read_documents(f.data))
  held = [document for document in corpus if is_held_back(document, f.held_fraction)]
  rest = [d for d in corpus if d['domain'] not in UNTRAINED and not is_held_back(d, f.held_fraction)]
  kinds = {document['domain'] for document in rest}
  training = take(rest, int(1e6 * f.megabytes / len(kinds)))
  validation = take([*read_documents(f.validation), *held], int(1e6 * f.validation_megabytes / (len(kinds) + 2)))
  pieces = [piece for document in validation for piece in cut(document)]
  out = pathlib.Path(f.out)
  publish(out / 'train.jsonl.gz', training)
  publish(out / 'validation.jsonl.gz', pieces)
  sources = len({document['source'] for document in validation})
  print(f'{len(training):,} documents to train on, {len(pieces):,} pieces of {sources:,} sources to report, in {out}')


if __name__ == '__main__':
  flags.DEFINE_string('data', '', 'A file of JSON lines, gzipped.')
  flags.DEFINE_string('validation', '', 'Validation text, likewise.')
  flags.DEFINE_string('out', 'runs/upcycle_text', 'The folder of the two files.')
  flags.DEFINE_float('megabytes', 40, 'Training text, before compression.')
  flags.DEFINE_float('validation_megabytes', 4, 'Validation text, likewise.')
  flags.DEFINE_float('held_fraction', 0.06, 'Share of the sources in --data that become validation text.')
  command.run(main)
