"""Goodput under faults: inner steps that count, as a share of a run without faults, with real processes.

    python benchmarks/goodput.py [--faults=0,60,125 --rules=tau,time,quorum --workers=4 --minutes=30]

Each worker trains a replica of DiLoCo, and waits for --step_s after each inner step as if an accelerator took it, so
that many workers fit on few cores. `tau` has phases of --tau steps, in `time` they end after as many seconds
(config.train.phase_s), and `quorum` does the same without paths that are late (config.outer.quorum). Faults come at
random moments, so many an hour in all, and each strikes a worker or one of two outer executors:

    killed     SIGKILL, then a new process
    stopped    SIGSTOP for twice the lease, which another process takes meanwhile
    disk       killed, and the states that a worker holds are gone

A step counts if an outer step contains the outer gradient of its phase. "steps" are these inner steps, and "phases" the
outer steps, divided by those of the same rule with the first number of faults; "late" counts phases of paths without
which an outer step was taken. The clock begins with the first version, when all processes have compiled.

Prints a table in Markdown and, as the last line, a JSON object.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags
from role_processes import processes, wait

from dipaco_jax.islands import held_states
from dipaco_jax.registry.registry import Registry

FAULTS = flags.DEFINE_list('faults', ['0', '60', '125'], 'an hour, in all; the first is the reference')
RULES = flags.DEFINE_list('rules', ['tau', 'time', 'quorum'], 'of phases, as above')
WORKERS = flags.DEFINE_integer('workers', 4, 'that train a replica each')
MINUTES = flags.DEFINE_float('minutes', 30.0, 'of each run')
STEP_S = flags.DEFINE_float('step_s', 0.25, 'that each inner step takes at least')
TAU = flags.DEFINE_integer('tau', 120, 'inner steps in a phase')
LEASE_S = flags.DEFINE_float('lease_s', 15.0, 'of a task without a heartbeat')
SEED = flags.DEFINE_integer('seed', 0, 'of the faults')
FOLDER = flags.DEFINE_string('folder', '', 'for runs and logs, which then stay')

ROOT = pathlib.Path(__file__).parent.parent
MOST = 4  # times tau, that a worker may take in a phase that ends by time
QUORUM = 0.75
PATIENCE_S = 600  # for the stages before training
KINDS = 'killed', 'stopped', 'disk'
PACED = """
import runpy, sys, time
from dipaco_jax.islands import phase_metrics
dispatched = phase_metrics.PhaseMetrics.dispatched

def paced(metrics, after, *rest):
  time.sleep({step_s} * metrics.job.schedule.dispatch_steps)
  dispatched(metrics, after, *rest)

phase_metrics.PhaseMetrics.dispatched = paced
sys.argv[0] = 'dipaco_jax.main'
runpy.run_module('dipaco_jax.main', run_name='__main__')
"""
CONFIG = """
import runpy

def get_config():
  c = runpy.run_path({tiny!r})['get_config']()
  c.data.update(max_documents=300, max_validation_documents=10)
  c.tokenizer.update(vocab_size=512, sample_bytes=200_000)
  c.model.update(seq_len=64, width=32, num_heads=2, head_dim=16, mlp_dim=64)
  c.pretrain.update(steps=10, batch_size=8)
  c.train.update(phases=10_000, steps_per_phase={steps}, phase_s={phase_s}, batch_size=4, steps_per_dispatch=4)
  c.train.early_stopping = False
  c.checkpoint.every_steps = {tau} // 4
  c.inner.update(learning_rate=3e-3, final_fraction=1.0, warmup_steps=10, decay_steps=100_000)
  c.evaluate.control = False
  c.grid = {{'replica': {workers}}}
  c.levels = (('all', '.*', ()),)
  c.outer.row_weights = False
  c.outer.update({outer})
  return c
"""


class Roles:
  """The processes of a run, by name; one that faults have ended is started again."""

  def __init__(self, folder: pathlib.Path, options: Sequence[str], running: list[subprocess.Popen]):
    self.folder, self.options, self.running = folder, options, running
    self.names = ['outer-0', 'outer-1', *(f'worker-{i}' for i in range(WORKERS.value))]
    (folder / 'paced.py').write_text(PACED.format(step_s=STEP_S.value))
    running.extend(map(self.start, range(len(self.names))))

  def start(self, i: int) -> subprocess.Popen:
    """Starts the i-th process, in its log."""
    name = self.names[i]
    command = [str(self.folder / 'paced.py'), *self.options, f'--role={name.split("-")[0]}', f'--name={name}']
    env = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
    with (self.folder / f'{name}.log').open('a') as file:
      return subprocess.Popen([sys.executable, *command], stdout=file, stderr=file, env=env)

  def strike(self, kind: str, i: int):
    """Strikes the i-th process."""
    process = self.running[i]
    if kind == 'stopped':
      process.send_signal(signal.SIGSTOP)
      threading.Timer(2 * LEASE_S.value, self.go_on, (process,)).start()
      return
    process.kill()
    process.wait()
    if kind == 'disk' and self.names[i].startswith('worker'):
      held_states.remove_free(self.folder / 'run')
    self.running[i] = self.start(i)

  def go_on(self, process: subprocess.Popen):
    """Lets a stopped process go on, unless it was killed meanwhile."""
    with contextlib.suppress(ProcessLookupError):
      process.send_signal(signal.SIGCONT)


def moments(an_hour: float, seconds: float, draw: random.Random) -> Iterator[float]:
  """Yields the moments of faults that come at random."""
  now = 0.0
  while an_hour and (now := now + draw.expovariate(an_hour / 3600)) < seconds:
    yield now


def measure(folder: pathlib.Path, rule: str, an_hour: float) -> dict[str, Any]:
  """Returns figures of a run with so many faults an hour."""
  place, config, url = folder / 'run', folder / 'config.py', f'sqlite:///{folder}/run.db'
  place.mkdir(parents=True)
  phase_s = TAU.value * STEP_S.value
  outer = f'quorum={QUORUM}, grace_s={LEASE_S.value / 3:g}' if rule == 'quorum' else ''
  by_rule = {'phase_s': 0.0, 'steps': TAU.value} if rule == 'tau' else {'phase_s': phase_s, 'steps': MOST * TAU.value}
  about = by_rule | {'tau': TAU.value, 'workers': WORKERS.value, 'outer': outer}
  config.write_text(CONFIG.format(tiny=str(ROOT / 'configs' / 'tiny.py'), **about))
  options = [f'--config={config}', f'--workdir={place}', f'--registry={url}', f'--lease_s={LEASE_S.value}']
  facts, draw, counts = Registry(url), random.Random(SEED.value), dict.fromkeys(KINDS, 0)
  with contextlib.closing(facts), processes() as running:
    roles = Roles(folder, options, running)
    wait(running, lambda: bool(facts.facts('module', number=1)), PATIENCE_S)
    began, seconds = time.time(), 60 * MINUTES.value
    for moment in moments(an_hour, seconds, draw):
      time.sleep(max(0.0, began + moment - time.time()))
      kind, i = draw.choice(KINDS), draw.randrange(len(running))
      roles.strike(kind, i)
      counts[kind] += 1
    time.sleep(max(0.0, began + seconds - time.time()))
    return read(facts, began, seconds) | {'faults': counts}


def read(facts: Registry, began: float, seconds: float) -> dict[str, Any]:
  """Reads which steps count in the versions that were made in a run's time."""
  modules = [f for f in facts.facts('module', at_least=1) if began < f.meta['ended'] < began + seconds]
  by_path = dict.fromkeys(map(str, range(WORKERS.value)), 0)
  late = replay_s = 0
  for module in modules:
    for fact in facts.facts('checkpoint', number=module.number - 1):
      late += 'late' in fact.meta
      replay_s += fact.meta.get('replay', {}).get('seconds', 0.0)
      if fact.key not in module.meta.get('left_out', {}):
        by_path[fact.key] += fact.meta['rows'][-1][0]
  return {
    'phases': len(modules), 'steps': sum(by_path.values()), 'steps_per_s': sum(by_path.values()) / seconds,
    'by_path': list(by_path.values()), 'late': late, 'replay_s': round(replay_s, 1),
  }  # fmt: skip


def to_text(rows: Sequence[dict[str, Any]]) -> str:
  """Returns the rows as a table in Markdown; each is compared with the first one of its rule."""
  lines = ['| rule | faults an hour | steps | phases | late | killed, stopped, disk | steps of each path |']
  lines.append('|---|---|---|---|---|---|---|')
  for row in rows:
    first = next(each for each in rows if each['rule'] == row['rule'])
    steps, phases = (row[name] / max(first[name], 1) for name in ('steps', 'phases'))
    faults, paths = (', '.join(f'{n:,}' for n in each) for each in (row['faults'].values(), row['by_path']))
    lines.append(
      f'| {row["rule"]} | {row["an_hour"]:g} | {steps:.1%} | {phases:.1%} | {row["late"]} | {faults} | {paths} |'
    )
  return '\n'.join(lines)


def main(_: Sequence[str]):
  rows = list[dict[str, Any]]()
  for rule in RULES.value:
    for an_hour in map(float, FAULTS.value):
      with tempfile.TemporaryDirectory(prefix='goodput') as name:
        folder = pathlib.Path(FOLDER.value or name).absolute() / f'{rule}-{an_hour:g}'
        rows.append({'rule': rule, 'an_hour': an_hour} | measure(folder, rule, an_hour))
      print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
  print(to_text(rows))
  print(json.dumps({'rows': rows, 'load': os.getloadavg()[0]}))


if __name__ == '__main__':
  app.run(main)
