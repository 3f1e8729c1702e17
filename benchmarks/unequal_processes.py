"""What workers of unequal speed cost in real runs: processes with CPU quotas, with phases of tau steps and by time.

    sudo python benchmarks/unequal_processes.py [--speeds=1,0.5,0.25,0.1 --cores=0.8]

Each worker trains a replica of DiLoCo. In each run of a small model, all workers together have so many cores. The
reference is a run with `equal` speeds. With the given relative speeds, there is a run for each of `--rules`: `tau`,
phases of tau steps; `time`, phases that end after the seconds that an equal worker takes for them (train.phase_s); and
`quorum`, phases of tau steps whose slowest path is not awaited (outer.quorum). Quotas begin with the second phase,
since the first one compiles, and so does the clock. The outer executor and the evaluator have no quota. "time" is the
time until the mean loss on the hold-outs is that of the reference after three quarters of its phases, divided by the
reference's; "steps" is the number of inner steps a second, divided by the reference's.

Prints a table in Markdown and, as the last line, a JSON object. Needs Linux, root and control groups with quotas; where
they are missing it says so, and ends with status 3.
"""

import contextlib
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, Self

from absl import app, flags
from role_processes import processes, wait
from unequal_rules import first_time

from dipaco_jax.registry import registry

SPEEDS = flags.DEFINE_list('speeds', ['1', '0.5', '0.25', '0.1'], 'relative speeds, one for each worker')
CORES = flags.DEFINE_float('cores', 0.8, 'that all workers have together')
TAU = flags.DEFINE_integer('tau', 20, 'inner steps in a phase')
PHASES = flags.DEFINE_integer('phases', 12, 'that are measured, after one that is not')
RULES = flags.DEFINE_list('rules', ['tau', 'time'], 'for unequal speeds: tau, time, quorum')

ROOT = pathlib.Path(__file__).parent.parent
PERIOD_US = 100_000  # within which a worker has its quota
MOST = 10  # times tau, that a worker may take in a phase that ends by time
PATIENCE_S = 3600  # for one run
PAUSE_S = 0.05  # between two looks, where quotas begin or end
GRACE_S = 1.0  # with a quorum
NAMES = {'tau': 'unequal', 'time': 'unequal, by time', 'quorum': 'unequal, quorum'}
TARGET = 0.75  # share of the reference's phases
CONFIG = """
import runpy

def get_config():
  c = runpy.run_path({tiny!r})['get_config']()
  c.data.update(max_documents=300, max_validation_documents=10)
  c.tokenizer.update(vocab_size=1024, sample_bytes=200_000)
  c.model.update(seq_len=64, width=64, num_heads=2, mlp_dim=160)
  c.pretrain.update(steps=10, batch_size=8)
  c.train.update(phases={phases}, steps_per_phase={most}, phase_s={phase_s}, batch_size=8, steps_per_dispatch=1)
  c.train.max_holdout_rows = 32
  c.checkpoint.every_steps = 1_000_000
  c.inner.update(learning_rate=3e-3, final_fraction=1.0, warmup_steps=10)
  c.evaluate.control = False
  c.grid = {{'replica': {workers}}}
  c.levels = (('all', '.*', ()),)
  c.outer.row_weights = False
  c.outer.update(quorum={quorum}, grace_s={grace_s})
  return c
"""


class Quotas:
  """A control group for each worker, of version 1 or 2."""

  def __init__(self, workers: int):
    root = pathlib.Path('/sys/fs/cgroup')
    self.is_second = (root / 'cgroup.controllers').exists()
    self.groups = [(root if self.is_second else root / 'cpu') / f'dj{os.getpid()}w{i}' for i in range(workers)]

  def __enter__(self) -> Self:
    for group in self.groups:
      group.mkdir()
    return self

  def put(self, worker: int, process: int):
    """Moves a process into a worker's group."""
    (self.groups[worker] / 'cgroup.procs').write_text(str(process))

  def limit(self, cores: Sequence[float]):
    """Sets the cores of each worker; 0 means no limit."""
    for group, share in zip(self.groups, cores, strict=True):
      quota = round(share * PERIOD_US) if share else 'max' if self.is_second else -1
      name, text = ('cpu.max', f'{quota} {PERIOD_US}') if self.is_second else ('cpu.cfs_quota_us', str(quota))
      (group / name).write_text(text)

  def __exit__(self, *_: object):
    for group in self.groups:
      with contextlib.suppress(OSError):
        group.rmdir()


def missing() -> str:
  """Returns what this machine lacks, or '' if it has everything."""
  try:
    with Quotas(1) as quotas:
      quotas.limit([0.5])
  except OSError as e:
    return f'no quotas here, which root can set on Linux: {e}'
  return ''


def start(command: Sequence[str], log: pathlib.Path) -> subprocess.Popen:
  """Starts a role; what it says goes to a file."""
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
  with log.open('w') as file:
    return subprocess.Popen([sys.executable, '-m', 'dipaco_jax.main', *command], stdout=file, stderr=file, env=env)


def measure(
  folder: pathlib.Path, name: str, cores: Sequence[float], phase_s: float = 0.0, quorum: float = 1.0
) -> dict[str, Any]:  # fmt: skip
  """Returns times, losses and steps of a run whose workers have so many cores."""
  place, config, last = folder / name, folder / f'{name}.py', PHASES.value + 1
  place.mkdir()
  most = TAU.value * (MOST if phase_s else 1)
  about = {'phases': last, 'most': most, 'phase_s': phase_s, 'workers': len(cores), 'quorum': quorum}
  about['grace_s'] = GRACE_S if quorum < 1 else 0.0
  config.write_text(CONFIG.format(tiny=str(ROOT / 'configs' / 'tiny.py'), **about))
  url = f'sqlite:///{folder}/{name}.db'
  options = [f'--config={config}', f'--workdir={place}', f'--registry={url}']
  facts = registry.Registry(url)
  with Quotas(len(cores)) as quotas, processes() as running:
    for role in ('outer', 'evaluator'):
      running.append(start([*options, f'--role={role}', f'--name={role}'], folder / f'{name}-{role}.log'))
    for i in range(len(cores)):
      running.append(start([*options, '--role=worker', f'--name=worker-{i}'], folder / f'{name}-worker-{i}.log'))
      quotas.put(i, running[-1].pid)
    wait(running, lambda: bool(facts.facts('module', number=1)), PATIENCE_S, PAUSE_S)
    quotas.limit(cores)
    wait(running, lambda: bool(facts.facts('module', number=last)), PATIENCE_S, PAUSE_S)
    quotas.limit([0.0] * len(cores))
    awaited = len(cores) if quorum == 1 else len(cores) - 1
    wait(running, lambda: len(facts.facts('evaluation', number=last)) >= awaited, PATIENCE_S)
  figures = read(facts, len(cores))
  facts.close()
  return figures


def read(facts: registry.Registry, workers: int) -> dict[str, Any]:
  """Reads what became of a run, from the first version on."""
  versions = range(1, PHASES.value + 2)
  ended = [max(fact.meta['ended'] for fact in facts.facts('module', number=version)) for version in versions]
  losses = [statistics.fmean(f.meta['loss'] for f in facts.facts('evaluation', number=version)) for version in versions]
  checkpoints = facts.facts('checkpoint', at_least=1)
  by_worker = dict.fromkeys((f'worker-{i}' for i in range(workers)), 0)
  done = [fact for fact in checkpoints if 'late' not in fact.meta]
  for fact in done:
    by_worker[fact.meta['worker']] += fact.meta['rows'][-1][0]
  seconds = ended[-1] - ended[0]
  steps = sum(by_worker.values())
  return {
    'times': [round(each - ended[0], 2) for each in ended], 'losses': [round(loss, 4) for loss in losses],
    'phase_s': seconds / PHASES.value, 'steps': steps, 'steps_per_s': steps / seconds, 'by_worker': by_worker,
    'busy_s': statistics.median(fact.meta['busy_s'] for fact in done), 'late': len(checkpoints) - len(done),
    'of_a_phase': {worker: of_a_phase(done, worker, ended) for worker in by_worker},
  }  # fmt: skip


def of_a_phase(checkpoints: Sequence[registry.Fact], worker: str, ended: Sequence[float]) -> list[float]:
  """Returns for how many seconds of a phase a worker began, trained, and was awaited or waited: medians."""
  own = [fact for fact in checkpoints if fact.meta['worker'] == worker]
  began = [fact.meta['started'] - ended[fact.number - 1] for fact in own]
  after = [ended[fact.number] - fact.meta['ended'] for fact in own]
  trained = [fact.meta['busy_s'] for fact in own]
  return [round(statistics.median(each), 2) for each in (began, trained, after)] if own else []


def compare(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns a row for each run, compared with the first."""
  reference, rows = next(iter(runs.values())), []
  target = reference['losses'][round(TARGET * PHASES.value)]
  expected = first_time(reference['times'], reference['losses'], target)
  for name, run in runs.items():
    reached = first_time(run['times'], run['losses'], target)
    rows.append({
      'run': name, 'time': reached / expected, 'steps': run['steps_per_s'] / reference['steps_per_s'],
      'phase_s': run['phase_s'], 'last_loss': run['losses'][-1], 'by_worker': list(run['by_worker'].values()),
    })  # fmt: skip
  return rows


def to_text(rows: Sequence[dict[str, Any]]) -> str:
  """Returns the rows as a table in Markdown."""
  lines = ['| run | time | steps | seconds a phase | last loss | steps of each worker |', '|---|---|---|---|---|---|']
  for row in rows:
    took = f'{row["time"]:.2f}' if math.isfinite(row['time']) else 'not reached'
    each = ', '.join(map(str, row['by_worker']))
    lines.append(
      f'| {row["run"]} | {took} | {row["steps"]:.2f} | {row["phase_s"]:.1f} | {row["last_loss"]:.3f} | {each} |'
    )
  return '\n'.join(lines)


def main(_: Sequence[str]) -> int:
  if lacking := missing():
    print(lacking, file=sys.stderr)
    return 3
  if unknown := {*RULES.value} - {*NAMES}:
    raise app.UsageError(f'--rules={",".join(unknown)}: there are {", ".join(NAMES)}')
  speeds = [float(speed) for speed in SPEEDS.value]
  shares = [CORES.value * speed / sum(speeds) for speed in speeds]
  equal = [CORES.value / len(speeds)] * len(speeds)
  with tempfile.TemporaryDirectory(prefix='unequal') as name:
    folder = pathlib.Path(name)
    runs = {'equal': measure(folder, 'equal', equal)}
    options: dict[str, dict[str, float]] = {
      'tau': {}, 'time': {'phase_s': runs['equal']['busy_s']}, 'quorum': {'quorum': 1 - 1 / len(speeds)},
    }  # fmt: skip
    for rule in RULES.value:
      runs[NAMES[rule]] = measure(folder, rule, shares, **options[rule])
      print(json.dumps({NAMES[rule]: runs[NAMES[rule]]}), file=sys.stderr, flush=True)
  rows = compare(runs)
  load = os.getloadavg()[0]
  print(to_text(rows))
  print(json.dumps({'rows': rows, 'runs': runs, 'load': load}))
  return 0


if __name__ == '__main__':
  app.run(main)
