"""How fast text becomes shards, on one core and on all, beside SentencePiece alone on the same text.

    python benchmarks/text.py --text='corpus/*.jsonl.gz' [--mb=100 --model=FILE --paths=16]

The text is repeated until it is --mb long. Prints a table and, as the last line, one JSON object.
"""

import concurrent.futures
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import sentencepiece
from absl import app, flags

from dipaco_jax import remote, sequences, settings, shards, text
from dipaco_jax.tokenizer import Tokenizer, sample, train

TEXT = flags.DEFINE_list('text', [], 'globs, as in config.data.train; none: the text of the running Python')
MB = flags.DEFINE_float('mb', 100, 'megabytes of text, 10^6 bytes each')
MODEL = flags.DEFINE_string('model', '', 'of SentencePiece; none: one is trained on the text')
VOCAB_SIZE = flags.DEFINE_integer('vocab_size', settings.Tokenizer.vocab_size, 'pieces of the one that is trained')
PATHS = flags.DEFINE_integer('paths', 16, 'shards, which sequences are dealt to at random')
SEQ_LEN = flags.DEFINE_integer('seq_len', settings.Model.seq_len, 'tokens in a row')

C4_MB = 305e3  # C4's English text
HOSTS = 64


def data() -> settings.Data:
  source = 'files' if TEXT.value else 'stdlib'
  return settings.Data(source=source, train=tuple(TEXT.value), max_validation_documents=100)


def make_model(given: settings.Data, vocab_size: int) -> bytes:
  return train(sample(text.documents(given, 'train'), settings.Tokenizer.sample_bytes, 0), vocab_size)


def repeated() -> Iterator[text.Document]:
  """Training documents again and again, until they are --mb."""
  left = MB.value * 1e6
  while left > 0:
    for document in text.documents(data(), 'train'):
      yield document
      left -= len(document.text.encode())
      if left <= 0:
        return


def documents(split: str) -> Iterator[text.Document]:
  return repeated() if split == 'train' else text.documents(data(), 'validation')


def seconds(function, *args, **kwargs):
  """(wall seconds, those of all cores together, result)."""
  wall, cpu = time.perf_counter(), time.process_time()
  result = function(*args, **kwargs)
  return time.perf_counter() - wall, time.process_time() - cpu, result


def encode_alone(model: bytes) -> float:
  """Seconds that SentencePiece takes, in one thread and with nothing around it."""
  processor, taken = sentencepiece.SentencePieceProcessor(model_proto=model), 0.0
  for document in repeated():
    taken += seconds(processor.encode, document.text)[0]
  return taken


def peak_mb() -> float:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure(folder: str, model: bytes) -> dict[str, float]:
  cores = len(os.sched_getaffinity(0))
  before_mb = peak_mb()
  read_s, _, _ = seconds(lambda: sum(1 for _ in repeated()))
  wall_s, cpu_s, meta = seconds(
    sequences.write_sequences, documents, Tokenizer(model), folder, seq_len=SEQ_LEN.value, eval_len=SEQ_LEN.value,
    prefix_tokens=settings.Routing.prefix_tokens, threads=cores,
  )  # fmt: skip
  tokenize_mb = peak_mb()
  found = sequences.Sequences(f'{folder}/train.array_record')
  paths = np.random.default_rng(0).integers(0, PATHS.value, (len(found), 1))
  how = {'seq_len': SEQ_LEN.value, 'seed': 0, 'holdout_fraction': 0.01, 'num_domains': len(meta['domains'])}
  shard_s, shard_cpu_s, _ = seconds(shards.write_shards, found, paths, PATHS.value, f'{folder}/shards', **how)
  shard_mb = peak_mb()
  alone_s = encode_alone(model)
  return {
    'megabytes': MB.value,
    'cores': cores,
    'tokens': meta['tokens'],
    'read_mb_per_s': MB.value / read_s,
    'tokenize_mb_per_s': MB.value / wall_s,
    'tokenize_mb_per_core_s': MB.value / cpu_s,
    'tokenize_cores_busy': cpu_s / wall_s,
    'sentencepiece_mb_per_core_s': MB.value / alone_s,
    'shard_mb_per_s': MB.value / shard_s,
    'shard_cores_busy': shard_cpu_s / shard_s,
    'before_mb': before_mb,
    'tokenize_peak_mb': tokenize_mb,
    'shard_peak_mb': shard_mb,
    'c4_core_hours': C4_MB / MB.value * (cpu_s + shard_cpu_s) / 3600,
    'c4_hours_of_64_hosts_with_these_cores': C4_MB / HOSTS / MB.value * (wall_s + shard_s) / 3600,
  }


def main(_):
  if MODEL.value:
    model = remote.read(MODEL.value)
  else:  # in a process of its own: its memory is not what is measured
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
      model = pool.submit(make_model, data(), VOCAB_SIZE.value).result()
  with tempfile.TemporaryDirectory() as folder:
    results = measure(folder, model)
  print(f'{MB.value:g} MB of text, vocabulary {Tokenizer(model).vocab_size}, {PATHS.value} shards')
  for name, value in results.items():
    print(f'{name:40}{value:>14,.2f}')
  print(json.dumps({name: round(value, 4) for name, value in results.items()}))


if __name__ == '__main__':
  app.run(main)
