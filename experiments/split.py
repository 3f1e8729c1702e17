"""Text to tune on, which no table reports and no table's run trains on.

    python experiments/split.py --data=TRAIN.jsonl.gz --out=DIR

writes DIR/train.jsonl.gz and DIR/tuning.jsonl.gz. Whole sources go to the one or the other, by a hash of the field
`source`, or of the text where there is none: no tuning document has a neighbour in training. Choices (rates, outer
steps, tau) are made with --data=DIR/train.jsonl.gz --validation=DIR/tuning.jsonl.gz; tables are of the same training
text, and of validation text that no choice has seen.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import pathlib

from absl import flags

from dipaco_jax.command_line import command
from dipaco_jax.core.errors import InputError

FRACTION = 0.01


def is_for_tuning(line: bytes, fraction: float = FRACTION) -> bool:
  """By the document's source, whatever else is in the file."""
  document = json.loads(line)
  of = document.get('source', document['text'])
  return int.from_bytes(hashlib.blake2b(of.encode(), digest_size=8).digest(), 'big') < fraction * 2**64


def main():
  data, out = pathlib.Path(flags.FLAGS.data), pathlib.Path(flags.FLAGS.out)
  if not data.is_file():
    raise InputError(f'--data={data}: name one file of JSON lines, gzipped')
  out.mkdir(parents=True, exist_ok=True)
  names = ('train', 'tuning')
  counts = dict.fromkeys(names, 0)
  with contextlib.ExitStack() as opened:
    files = {}
    for name in names:  # mtime 0: the same bytes every time
      raw = opened.enter_context(open(out / f'.{name}', 'wb'))
      files[name] = opened.enter_context(io.BufferedWriter(gzip.GzipFile('', 'wb', fileobj=raw, mtime=0)))
    for line in opened.enter_context(gzip.open(data, 'rb')):
      name = names[is_for_tuning(line)]
      files[name].write(line)
      counts[name] += 1
  for name in names:
    os.replace(out / f'.{name}', out / f'{name}.jsonl.gz')
  print(f'{counts["train"]:,} documents to train on, {counts["tuning"]:,} to tune on, in {out}')


if __name__ == '__main__':
  flags.DEFINE_string('data', '', 'JSON lines with `text`, gzipped.')
  flags.DEFINE_string('out', 'runs/split', 'Where the two files go.')
  command.run(main)
