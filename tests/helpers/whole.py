"""All parts of a text, and all shards, written by one process."""

import itertools
import os

from dipaco_jax.data import cutting, sequences, shards
from dipaco_jax.storage import records


def ignore(done, total):
  pass


def write_sequences(make_documents, tokenizer, folder, parts: int = 1, progress=ignore, threads: int = 0, **sizes):
  """Documents are dealt out one by one; returns what `meta.json` holds."""
  for k in range(parts):
    os.makedirs(f'{folder}/{k}')

    def mine(split, k=k):
      return itertools.islice(make_documents(split), k, None, parts)

    text = sequences.TextPart(mine, k, parts)
    sequences.write_part(text, tokenizer, f'{folder}/{k}', cutting.Cutting(**sizes), progress, threads)
  return records.write_meta(folder, sequences.merge_meta(folder, parts))


def write_shards(found, assignment, num_paths: int, folder, *, seq_len: int, seed: int, holdout_fraction: float):
  """Returns what `meta.json` holds."""
  dealt = shards.deal(found, assignment, num_paths, seed, holdout_fraction)
  for path in range(num_paths):
    os.makedirs(f'{folder}/{path}')
    shards.write_shard(found, dealt, path, f'{folder}/{path}', seq_len)
  return records.write_meta(folder, shards.merge_meta(folder, num_paths, seq_len))
