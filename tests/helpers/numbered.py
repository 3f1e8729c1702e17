"""Sequences and shards of documents whose tokens are all different numbers, and what is packed in rows."""

import itertools
import json

import numpy as np
import whole

from dipaco_jax.data import loader
from dipaco_jax.data.corpus import Document
from dipaco_jax.data.sequences import Sequences

SEQ_LEN = 48


class Numbered:
  """A vocabulary in which no token occurs twice: a text is the range of its tokens."""

  vocab_size = 1 << 31

  def encode_batch(self, texts):
    return [np.arange(*map(int, t.split())) for t in texts]

  def byte_ends(self, text):
    return np.arange(len(self.encode_batch([text])[0])) + 1


def make_sequences(folder, lengths, parts=1):
  """Documents of so many tokens; tokens count from 1."""
  ends = [0, *itertools.accumulate(lengths)]
  documents = [Document(str(i), f'{a + 1} {b + 1}', f'd{i % 3}') for i, (a, b) in enumerate(itertools.pairwise(ends))]
  sizes = {'seq_len': SEQ_LEN, 'eval_len': SEQ_LEN, 'prefix_tokens': 4}
  whole.write_sequences(lambda split: documents, Numbered(), folder, parts, **sizes)
  return Sequences(folder, 'train', open_parts=1)


def read(file):
  return loader.read_rows(str(file), 0, 10**6, SEQ_LEN)


def segments(tokens, ids):
  """The sequences in packed rows, each row checked on the way."""
  found = []
  for row, row_ids in zip(tokens, ids, strict=True):
    used = np.count_nonzero(row_ids)
    assert (row_ids[used:] == 0).all() and (row[used:] == 0).all(), 'padding is at the end'
    steps = np.diff(row_ids[:used])
    assert used == 0 or (row_ids[0] == 1 and np.isin(steps, [0, 1]).all()), 'segments are contiguous: 1, 2...'
    found += [tuple(row[row_ids == s]) for s in range(1, row_ids.max() + 1)]
  return found


def write(sequences, assignment, num_paths, out_dir, **kwargs):
  options = {'seq_len': SEQ_LEN, 'seed': 0, 'holdout_fraction': 0.05} | kwargs
  meta = whole.write_shards(sequences, assignment, num_paths, out_dir, **options)
  with open(out_dir / 'meta.json') as f:
    assert json.load(f) == meta
  return meta
