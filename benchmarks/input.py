"""How fast text becomes batches: tokenization, writing shards, and reading a step's rows.

    python benchmarks/input.py [--seq_len=128 --batch_size=32 ...]

Reading is compared with grain's shuffle over the same file, and timed in turns with it. Prints a table and, as the last
line, one JSON object.
"""

import json
import os
import statistics
import tempfile
import time

import numpy as np
from absl import app, flags

from dipaco_jax.config import settings
from dipaco_jax.data import corpus, cutting, loader, sequences, shards
from dipaco_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer, train
from dipaco_jax.data.tokenizer import sample
from dipaco_jax.storage import records

SEQ_LEN = flags.DEFINE_integer('seq_len', 128, 'tokens in a row')
BATCH_SIZE = flags.DEFINE_integer('batch_size', 32, 'rows in a batch')
VOCAB_SIZE = flags.DEFINE_integer('vocab_size', 2048, 'pieces of the tokenizer')
NUM_DOCUMENTS = flags.DEFINE_integer('num_documents', 600, 'of the standard library')
NUM_PATHS = flags.DEFINE_integer('num_paths', 4, 'shards')
NUM_STEPS = flags.DEFINE_integer('num_steps', 300, 'batches to read')


def timed(function, *args, **kwargs):
  start = time.perf_counter()
  result = function(*args, **kwargs)
  return time.perf_counter() - start, result


def grain_batches(file: str):
  """The same kind of stream by grain's own shuffle and reader: step to rows."""
  import grain

  source = grain.sources.ArrayRecordDataSource([file])
  rows = grain.MapDataset.source(source).shuffle(seed=0).repeat().batch(BATCH_SIZE.value, batch_fn=b''.join)
  return lambda step: np.frombuffer(rows[step], np.uint16).reshape(-1, 2, SEQ_LEN.value).astype(np.int32)


def median_ms(loads, num_steps: int) -> list[float]:
  """Median milliseconds of each `load(step)`, in turns."""
  times = [[timed(load, step)[0] for load in loads] for step in range(num_steps)]
  return [1e3 * statistics.median(column) for column in zip(*times, strict=True)]


def write_shards(found: sequences.Sequences, folder: str) -> dict:
  dealt = shards.deal(found, np.arange(len(found))[:, None] % NUM_PATHS.value, NUM_PATHS.value, 0, 0.01)
  for path in range(NUM_PATHS.value):
    os.makedirs(f'{folder}/{path}')
    shards.write_shard(found, dealt, path, f'{folder}/{path}', SEQ_LEN.value)
  return shards.merge_meta(folder, NUM_PATHS.value, SEQ_LEN.value)


def measure(folder: str) -> dict[str, float]:
  data = settings.Data(source='stdlib', max_documents=NUM_DOCUMENTS.value)
  read_s, documents = timed(lambda: {split: list(corpus.documents(data, split)) for split in ('train', 'validation')})
  drawn = sample(documents['train'], 2_000_000, 0)
  train_s, model = timed(train, [words for _, words in drawn], VOCAB_SIZE.value)
  tokenizer = SentencePieceTokenizer(model)
  megabytes = sum(len(d.text.encode()) for split in documents.values() for d in split) / 1e6
  cores = os.cpu_count() or 1
  os.makedirs(f'{folder}/sequences/0')
  text = sequences.TextPart(documents.__getitem__)
  sizes = cutting.Cutting(SEQ_LEN.value, SEQ_LEN.value, prefix_tokens=32)
  encode_s = {}
  for threads in (1, cores):
    encode_s[threads], _ = timed(sequences.write_part, text, tokenizer, f'{folder}/sequences/0', sizes, threads=threads)
  meta = records.write_meta(f'{folder}/sequences', sequences.merge_meta(f'{folder}/sequences', 1))
  found = sequences.Sequences(f'{folder}/sequences', 'train')
  shard_s, packed = timed(write_shards, found, f'{folder}/shards')
  file = f'{folder}/shards/0/train.array_record'
  stream = loader.Shard([file], BATCH_SIZE.value, SEQ_LEN.value, seed=0, path=0)
  batch_ms, grain_ms = median_ms((stream.batch, grain_batches(file)), NUM_STEPS.value)
  return {
    'megabytes': megabytes,
    'cores': cores,
    'read_mb_per_s': megabytes / read_s,
    'train_tokenizer_s': train_s,
    'tokenize_mb_per_s': megabytes / encode_s[cores],
    'tokenize_mb_per_s_one_core': megabytes / encode_s[1],
    'bytes_per_token': megabytes * 1e6 / (meta['tokens'] + meta['validation_tokens']),
    'pack_rows_per_s': sum(packed['shard_rows']) / shard_s,
    'shard_rows': packed['shard_rows'][0],
    'batch_ms': batch_ms,
    'grain_batch_ms': grain_ms,
    'rows_per_s': BATCH_SIZE.value / batch_ms * 1e3,
    'tokens_per_s': BATCH_SIZE.value * SEQ_LEN.value / batch_ms * 1e3,
  }


def main(_):
  with tempfile.TemporaryDirectory() as folder:
    results = measure(folder)
  print(f'rows of {SEQ_LEN.value} tokens, {BATCH_SIZE.value} in a batch, vocabulary {VOCAB_SIZE.value}')
  for name, value in results.items():
    print(f'{name:28}{value:>14,.2f}')
  print(json.dumps({name: round(value, 4) for name, value in results.items()}))


if __name__ == '__main__':
  app.run(main)
