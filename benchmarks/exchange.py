"""What an outer round of one module costs an executor, beside reading its bytes once.

    python benchmarks/exchange.py [--paths=16 --blocks=4 --place=s3://BUCKET/prefix]

The module is so many blocks of the paper's path of 150 M parameters; its paths' checkpoints are random numbers that are
written before time counts. `read_once_seconds` reads the same objects one after another, each verified, as every read
is: file to memory, and its sha256. `seconds` is the round: read, sum exactly, outer step, publish. Medians of
`--rounds`, in turns. `peak_memory_bytes` is what the process grows by, the first round and its compilation included. In
modules: the old one and its outer state, 2; their sum, 2; contributions, 3, one being added and two being read; and 3
or so that XLA has used for the step before and malloc keeps. Prints a table and, as the last line, one JSON object.
"""

import ctypes
import gc
import json
import pathlib
import statistics
import tempfile
import time

import numpy as np
import psutil
from absl import app, flags

from dipaco_jax.config import settings
from dipaco_jax.islands import island, outer_executor, schedule
from dipaco_jax.islands.lease import Lease
from dipaco_jax.models import transformer as model_lib
from dipaco_jax.pipeline import run
from dipaco_jax.registry import registry
from dipaco_jax.registry.registry import Fact, NewTask
from dipaco_jax.storage import object_store, publishing

PATHS = flags.DEFINE_integer('paths', 16, 'through the module')
BLOCKS = flags.DEFINE_integer('blocks', 4, 'of the module, of 7.8 M parameters each')
PLACE = flags.DEFINE_string('place', '', 'of the objects; none: a temporary folder')
ROUNDS = flags.DEFINE_integer('rounds', 3, 'of each')


def make(folder: pathlib.Path) -> island.Island:
  """A module of its own level, shared by all paths; the rest is path-specific."""
  mine = f'block_({"|".join(map(str, range(BLOCKS.value)))})/'
  rest = f'^(?!{mine})'
  s = settings.from_dict(
    {
      'grid': {'a': PATHS.value},
      'levels': (('mine', mine, ()), ('rest', rest, ('a',))),
      'train': {'phases': ROUNDS.value, 'early_stopping': False},
    }
  )
  shards = {'shard_tokens': [1000 + i for i in range(PATHS.value)], 'holdout_rows': [0] * PATHS.value}
  publishing.write_json(folder / 'shards' / '0' / 'meta.json', shards)
  (folder / 'stages').mkdir()
  place = object_store.open_storage(PLACE.value or str(folder))
  facts = registry.Registry(f'sqlite:///{folder}/registry.db')
  facts.put([Fact('prepared', '', 0, '', '', {'trees': {}})])
  return island.Island(run.unattended(folder, s), facts, place, 'benchmark')


def publish(of: island.Island):
  """Version 0 of the module, and every path's checkpoint of phase 0."""
  s, rng = of.run.settings, np.random.default_rng(0)
  level = of.layout.levels[0]
  shapes = model_lib.shapes(model_lib.make_model(s.model, s.tokenizer.vocab_size))
  old = {name: rng.standard_normal(shapes[name].shape, np.float32) * 0.02 for name in of.layout.names(level)}
  uri, sha256 = of.write_object('modules/0/mine', old)
  of.registry.put([Fact('module', 'mine/shared', 0, uri, sha256, {})])
  for path in range(PATHS.value):
    new = {name: x + rng.standard_normal(x.shape, np.float32) * 1e-3 for name, x in old.items()}
    of.registry.put([schedule.checkpoint_fact(path, 0, {'mine': of.write_object(f'paths/0/{path}-mine', new)}, {})])
  of.registry.add_tasks([NewTask('outer', 'mine/shared', 1)])


def read_once(of: island.Island) -> float:
  started = time.perf_counter()
  for fact in of.registry.facts('checkpoint', number=0):
    of.storage.read(*fact.meta['objects']['mine'])
  return time.perf_counter() - started


def outer_round(of: island.Island, folder: pathlib.Path) -> float:
  """The task, up to its fact; then it is given back."""
  task = of.registry.claim(of.name, ['outer'])
  assert task
  lease = Lease(of, 'outer', task)
  started = time.perf_counter()
  finish = outer_executor.Executor(folder / 'scratch').perform(of, task, lease)
  assert finish
  finish()
  seconds = time.perf_counter() - started
  lease.close()
  of.registry.release(task)
  return seconds


def peak_bytes() -> int:
  """The most memory that this process has had."""
  line = next(x for x in pathlib.Path('/proc/self/status').read_text().splitlines() if x.startswith('VmHWM'))
  return int(line.split()[1]) * 1024


def main(argv):
  del argv
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    of = make(folder)
    publish(of)
    found: dict[str, list[float]] = {'seconds': [], 'read_once_seconds': []}
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what glibc has kept would count as not grown by
    before = psutil.Process().memory_info().rss
    pathlib.Path('/proc/self/clear_refs').write_text('5')  # the peak counts from here (Linux)
    outer_round(of, folder)  # compiles; and brings the objects of a local disk into the page cache
    for _ in range(ROUNDS.value):
      found['read_once_seconds'].append(read_once(of))
      found['seconds'].append(outer_round(of, folder))
    medians = {name: statistics.median(values) for name, values in found.items()}
    size = sum(x.nbytes for x in of.read_object(*of.registry.facts('checkpoint')[0].meta['objects']['mine']).values())
    peak = peak_bytes() - before
  print(
    f'{PATHS.value} checkpoints of {size / 1e6:.0f} MB: read once {medians["read_once_seconds"]:.2f} s, '
    f'outer round {medians["seconds"]:.2f} s, memory {peak / 1e6:.0f} MB'
  )
  ratio = medians['seconds'] / medians['read_once_seconds']
  print(json.dumps(medians | {'ratio': ratio, 'peak_memory_bytes': peak, 'bytes': size * PATHS.value}))


if __name__ == '__main__':
  app.run(main)
