"""How fast text becomes shards, on one core and on all, beside SentencePiece alone on the same text.

    python benchmarks/text.py --text='corpus/*.jsonl.gz' [--mb=100 --model=FILE --paths=16 --parts=4]

The text is repeated until it is --mb long, in each of --parts a share of that. Rates are per second of a core, so that
other work on the machine counts little; `tokenize_mb_per_s_at_most` is what one thread, which reads and writes for the
others, keeps up with on any number of cores. Memory is Linux's resident set at its highest: what a stage adds to it.
Prints a table and, as the last line, one JSON object.
"""

import concurrent.futures
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
from absl import app, flags

from dipaco_jax.config import settings
from dipaco_jax.data import corpus, cutting, sequences, shards, source
from dipaco_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer, train
from dipaco_jax.data.tokenizer import Tokenizer, sample
from dipaco_jax.storage import records, remote_files

TEXT = flags.DEFINE_list('text', [], 'globs, as in config.data.train; none: the text of the running Python')
MB = flags.DEFINE_float('mb', 100, 'megabytes of text, 10^6 bytes each')
MODEL = flags.DEFINE_string('model', '', 'of SentencePiece; none: one is trained on the text')
VOCAB_SIZE = flags.DEFINE_integer('vocab_size', settings.Tokenizer.vocab_size, 'pieces of the one that is trained')
PARTS = flags.DEFINE_integer('parts', 1, 'of the text, one after the other')
PATHS = flags.DEFINE_integer('paths', 16, 'shards, which sequences are dealt to at random')
SEQ_LEN = flags.DEFINE_integer('seq_len', settings.Model.seq_len, 'tokens in a row')

C4_MB = 305e3  # C4's English text


def data() -> settings.Data:
  kind = 'files' if TEXT.value else 'stdlib'
  return settings.Data(source=kind, train=tuple(TEXT.value), max_validation_documents=100)


def make_model(given: settings.Data, vocab_size: int) -> bytes:
  drawn = sample(corpus.documents(given, 'train'), settings.Tokenizer.sample_bytes, 0)
  return train((words for _, words in drawn), vocab_size)


def repeated(mb: float) -> Iterator[corpus.Document]:
  """Training documents again and again, until they are so many megabytes."""
  left = mb * 1e6
  while left > 0:
    for document in corpus.documents(data(), 'train'):
      yield document
      left -= source.num_bytes(document.text)
      if left <= 0:
        return


def documents(split: str) -> Iterator[corpus.Document]:
  return repeated(MB.value / PARTS.value) if split == 'train' else corpus.documents(data(), 'validation')


class Seconds(NamedTuple):
  """What a call takes: on the clock, of all cores together, of the core of the main thread."""

  wall: float
  cores: float
  main: float


def timed(function, *args, **kwargs) -> tuple[Seconds, Any]:
  """(seconds, result)."""
  clocks = (time.perf_counter, time.process_time, time.thread_time)
  before = [clock() for clock in clocks]
  result = function(*args, **kwargs)
  return Seconds(*(clock() - start for clock, start in zip(clocks, before, strict=True))), result


def encode_alone(model: bytes) -> float:
  """Seconds of a core that SentencePiece takes, with nothing around it."""
  processor = sentencepiece.SentencePieceProcessor(model_proto=model)
  return sum(timed(processor.encode, document.text)[0].main for document in repeated(MB.value))


def resident_mb(what: str) -> float:
  """VmRSS, now; or VmHWM, at its highest."""
  with open('/proc/self/status') as f:
    return next(int(line.split()[1]) for line in f if line.startswith(what)) / 1e3


def grown_mb(function, *args, **kwargs) -> tuple[float, Any]:
  """(megabytes by which memory grew at the most during a call, result)."""
  with open('/proc/self/clear_refs', 'w') as f:
    f.write('5')  # forgets how high it was
  before = resident_mb('VmRSS')
  result = function(*args, **kwargs)
  return resident_mb('VmHWM') - before, result


def tokenize(folder: str, tokenizer: Tokenizer, cores: int) -> dict[str, Any]:
  for k in range(PARTS.value):
    os.makedirs(f'{folder}/{k}')
    sequences.write_part(
      sequences.TextPart(documents, k, PARTS.value),
      tokenizer,
      f'{folder}/{k}',
      cutting.Cutting(SEQ_LEN.value, SEQ_LEN.value, settings.Routing.prefix_tokens),
      threads=cores,
    )
  return records.write_meta(folder, sequences.merge_meta(folder, PARTS.value))


def shard(folder: str, num_sequences: int):
  """All shards, one after the other, as one process writes them."""
  paths = np.random.default_rng(0).integers(0, PATHS.value, (num_sequences, 1), np.int32)
  found = sequences.Sequences(folder, 'train', open_parts=1)
  dealt = shards.deal(found, paths, PATHS.value, 0, 0.01)
  for path in range(PATHS.value):
    os.makedirs(f'{folder}/shards/{path}')
    shards.write_shard(found, dealt, path, f'{folder}/shards/{path}', SEQ_LEN.value)


def measure(folder: str, model: bytes) -> dict[str, float]:
  cores = len(os.sched_getaffinity(0))
  before_mb = resident_mb('VmRSS')
  read, _ = timed(lambda: sum(1 for _ in repeated(MB.value)))
  tokenize_mb, (tokenized, meta) = grown_mb(timed, tokenize, folder, SentencePieceTokenizer(model), cores)
  shard_mb, (sharded, _) = grown_mb(timed, shard, folder, meta['sequences'])
  return {
    'megabytes': MB.value,
    'cores': cores,
    'tokens': meta['tokens'],
    'read_mb_per_core_s': MB.value / read.main,
    'tokenize_mb_per_s': MB.value / tokenized.wall,
    'tokenize_mb_per_core_s': MB.value / tokenized.cores,
    'tokenize_cores_busy': tokenized.cores / tokenized.wall,
    'tokenize_mb_per_s_at_most': MB.value / tokenized.main,
    'sentencepiece_mb_per_core_s': MB.value / encode_alone(model),
    'shard_mb_per_core_s': MB.value / sharded.cores,
    'before_mb': before_mb,
    'tokenize_grown_mb': tokenize_mb,
    'shard_grown_mb': shard_mb,
    'sequences': meta['sequences'],
    'shard_bytes_per_sequence': 1e6 * shard_mb / meta['sequences'],
    'c4_tokenize_core_hours': C4_MB / MB.value * tokenized.cores / 3600,
    'c4_tokenize_hours_at_least': C4_MB / MB.value * tokenized.main / 3600,
    'c4_shard_hours': C4_MB / MB.value * sharded.cores / 3600,
  }


def main(_):
  if MODEL.value:
    model = remote_files.read(MODEL.value)
  else:  # in a process of its own: its memory is not what is measured
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
      model = pool.submit(make_model, data(), VOCAB_SIZE.value).result()
  with tempfile.TemporaryDirectory() as folder:
    results = measure(folder, model)
  print(f'{MB.value:g} MB of text, vocabulary {SentencePieceTokenizer(model).vocab_size}, {PATHS.value} shards')
  for name, value in results.items():
    print(f'{name:32}{value:>14,.2f}')
  print(json.dumps({name: round(value, 4) for name, value in results.items()}))


if __name__ == '__main__':
  app.run(main)
