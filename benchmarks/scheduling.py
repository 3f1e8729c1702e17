"""What scheduling costs as paths grow: an islands run without arrays goes through the real registry.

    python benchmarks/scheduling.py --sizes=16x16,32x32x4,32x32x32 --phases=2

One process takes and completes every task of all paths, modules and phases; facts name objects that nobody makes.
The cost per task should not grow with the number of paths. The last line is JSON with `seconds_per_task`, by paths, and
`growth`, of the largest against the smallest.
"""

import hashlib
import json
import pathlib
import tempfile
import time

from absl import flags

from dipaco_jax.command_line import command
from dipaco_jax.config import settings
from dipaco_jax.islands import island, schedule
from dipaco_jax.pipeline import run
from dipaco_jax.registry import registry
from dipaco_jax.registry.registry import Fact, NewTask
from dipaco_jax.storage import object_store, publishing

FLAGS = flags.FLAGS
flags.DEFINE_list('sizes', ['16x16', '32x32x4', '32x32x32'], 'Grids.')
flags.DEFINE_integer('phases', 2, 'Of every run.')
flags.DEFINE_string('registry', '', 'postgresql://... of an empty database, for one grid; none: SQLite.')


def make(folder: pathlib.Path, sizes: list[int]) -> island.Island:
  """A level over each axis, and one over all: path-specific."""
  axes = 'abcdef'[: len(sizes)]
  levels = [('ends', 'embed|final', tuple(axes)), *((f'level_{x}', f'block_{i}/', (x,)) for i, x in enumerate(axes))]
  s = settings.from_dict(
    {
      'grid': dict(zip(axes, sizes, strict=True)),
      'levels': tuple(levels),
      'tokenizer': {'vocab_size': 300},
      'model': {'width': 16, 'num_layers': len(sizes), 'num_heads': 2, 'head_dim': 8, 'mlp_dim': 24, 'seq_len': 64},
      'train': {'phases': FLAGS.phases, 'early_stopping': False},
    }
  )
  publishing.write_json(folder / 'stages' / 'tokenize.json', {'result': {'vocab_size': 300}})
  url = FLAGS.registry or f'sqlite:///{folder}/registry.db'
  place = object_store.open_storage(str(folder))
  return island.Island(run.unattended(folder, s), registry.Registry(url), place, 'benchmark')


def begin(of: island.Island):
  """As a worker's `prepare` ends."""
  of.registry.add_tasks([NewTask('prepare', '', 0)])
  task = of.registry.claim(of.name, ['prepare'])
  assert task
  facts = [Fact('prepared', '', 0, '', '', {}), *(Fact('module', m, 0, 'base', '0', {}) for m in of.all_modules())]
  of.registry.complete(task, facts)
  schedule.schedule(of, facts)


def simulate(of: island.Island) -> int:
  """All tasks, one after another; how many."""
  levels, count = [level.name for level in of.run.layout.levels], 0
  while task := of.registry.claim(of.name, ['train', 'outer']):
    digest = hashlib.sha256(f'{task.kind}{task.key}{task.number}'.encode()).hexdigest()
    if task.kind == 'train':
      objects = {level: [f'paths/{task.number}/{task.key}-{level}', digest] for level in levels}
      facts = [schedule.checkpoint_fact(int(task.key), task.number, objects, {'worker': of.name})]
    else:
      wanted = [str(path) for path in of.paths_through(task.key)]
      assert len(of.registry.facts('checkpoint', wanted, task.number - 1)) == len(wanted)
      facts = [Fact('module', task.key, task.number, f'modules/{task.number}/{task.key}', digest, {})]
    of.registry.complete(task, facts)
    schedule.schedule(of, facts)
    count += 1
  return count


def main():
  found = {}
  for words in FLAGS.sizes:
    with tempfile.TemporaryDirectory() as folder:
      of = make(pathlib.Path(folder), [int(size) for size in words.split('x')])
      begin(of)
      started = time.perf_counter()
      count = simulate(of)
      found[of.run.layout.grid.num_paths] = (time.perf_counter() - started) / count
      print(f'{words:10} {count:7,} tasks  {1000 * found[of.run.layout.grid.num_paths]:.2f} ms each', flush=True)
  print(json.dumps({'seconds_per_task': found, 'growth': found[max(found)] / found[min(found)]}))


if __name__ == '__main__':
  command.run(main)
