"""Text to tune on, which no table's run trains on, and of tables (12) alone reports.

    python experiments/split.py --data=TRAIN.jsonl.gz --validation=VALIDATION.jsonl.gz --out=DIR

writes DIR/train.jsonl.gz, DIR/tuning.jsonl.gz and DIR/validation.jsonl.gz. Whole sources go to the one or the other of
the first two, by a hash of the field `source`, or of the text where there is none: no tuning document has a neighbour
in training. Choices (rates, outer steps, tau) are made with --data=DIR/train.jsonl.gz --validation=DIR/tuning.jsonl.gz;
tables are of the same training text, and of validation text that no choice has seen.

Of a validation document no more than the first tokens are scored, as many as a row has: in DIR/validation.jsonl.gz it
is cut into pieces, each of which counts as a document, as a training document is cut into sequences. Tuning documents
are left whole. With --without, kinds of text (the field `domain`) are left out of all three.
With --interleave, training text has about as many bytes of each kind in its first documents, however many are read.
"""

import collections
import contextlib
import gzip
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Collection, Iterable, Iterator

from absl import flags

from dipaco_jax.command_line import command
from dipaco_jax.core.errors import InputError

FRACTION = 0.01
PIECE = 400  # characters, 128 tokens or so of a small vocabulary


def is_for_tuning(line: bytes, fraction: float = FRACTION) -> bool:
  """By the document's source, whatever else is in the file."""
  document = json.loads(line)
  of = document.get('source', document['text'])
  return int.from_bytes(hashlib.blake2b(of.encode(), digest_size=8).digest(), 'big') < fraction * 2**64


def pieces(line: bytes) -> Iterator[bytes]:
  """The document's whole pieces, which begin with a word; one that is shorter than a piece stays as it is."""
  document = json.loads(line)
  text, start = document['text'], 0
  if len(text) < PIECE:
    yield line
  while start + PIECE <= len(text):
    yield json.dumps(document | {'text': text[start : start + PIECE]}).encode() + b'\n'
    start = next((i for i in range(start + PIECE, len(text)) if text[i - 1].isspace()), len(text))


def kept(lines: Iterable[bytes], without: Collection[str]) -> Iterator[bytes]:
  """The documents of all other kinds."""
  return (line for line in lines if not without or json.loads(line).get('domain') not in without)


def interleaved(lines: Iterable[bytes]) -> Iterator[bytes]:
  """The documents, of each kind in their order; the next is always of the kind with the fewest bytes so far."""
  by_kind = collections.defaultdict[str, collections.deque[bytes]](collections.deque)
  for line in lines:
    by_kind[json.loads(line)['domain']].append(line)
  taken = dict.fromkeys(sorted(by_kind), 0)
  while taken:
    kind = min(taken, key=taken.__getitem__)
    line = by_kind[kind].popleft()
    taken[kind] += len(json.loads(line)['text'].encode())
    if not by_kind[kind]:
      del taken[kind]
    yield line


def main():
  data, validation, out = (pathlib.Path(x) for x in (flags.FLAGS.data, flags.FLAGS.validation, flags.FLAGS.out))
  for name, file in (('data', data), ('validation', validation)):
    if not file.is_file():
      raise InputError(f'--{name}={file}: name one file of JSON lines, gzipped')
  out.mkdir(parents=True, exist_ok=True)
  names = ('train', 'tuning', 'validation')
  counts = dict.fromkeys(names, 0)
  with contextlib.ExitStack() as opened:
    files = {}
    for name in names:  # mtime 0: the same bytes every time
      raw = opened.enter_context(open(out / f'.{name}', 'wb'))
      files[name] = opened.enter_context(io.BufferedWriter(gzip.GzipFile('', 'wb', fileobj=raw, mtime=0)))

    def write(name: str, line: bytes):
      files[name].write(line)
      counts[name] += 1

    lines = kept(opened.enter_context(gzip.open(data, 'rb')), flags.FLAGS.without)
    for line in interleaved(lines) if flags.FLAGS.interleave else lines:
      write(names[is_for_tuning(line)], line)
    for line in kept(opened.enter_context(gzip.open(validation, 'rb')), flags.FLAGS.without):
      for piece in pieces(line):
        write('validation', piece)
  for name in names:
    os.replace(out / f'.{name}', out / f'{name}.jsonl.gz')
  to_train, to_tune, to_report = (f'{counts[name]:,}' for name in names)
  print(f'{to_train} documents to train on, {to_tune} to tune on, {to_report} pieces to report, in {out}')


if __name__ == '__main__':
  flags.DEFINE_string('data', '', 'Training text: JSON lines with `text`, gzipped.')
  flags.DEFINE_string('validation', '', 'Text of the tables, likewise.')
  flags.DEFINE_string('out', 'runs/split', 'Where the three files go.')
  flags.DEFINE_list('without', [], 'Kinds of text, as the field `domain` names them, that are left out of all three.')
  flags.DEFINE_bool('interleave', False, 'Whether the first documents to train on have as many bytes of each kind.')
  command.run(main)
