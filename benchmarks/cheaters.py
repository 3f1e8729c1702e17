"""Workers that cheat in runs of islands: after how many of their phases audits find them, and what they do to the loss.

    python benchmarks/cheaters.py --fraction=0.2 --seeds=3

For each kind of cheating and each seed, two runs of the config, with and without audits: real processes, one worker
that cheats and two that do not (tests/helpers/cheater.py). A phase of a path that a cheater has trained is found with
probability `fraction`, so that it has trained 1 / fraction of them on average when it has trained the first one that is
found. How many it trained until it was suspended is larger, because audits take time.
"""

import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app, flags

from dipaco_jax.islands import audit_facts, suspensions
from dipaco_jax.registry.registry import Registry

ROOT = pathlib.Path(__file__).resolve().parent.parent
KINDS = ['scaled', 'flipped', 'stale', 'copied', 'other_text', 'fewer_steps']
ROLES = 'monitor', 'outer', 'evaluator'
PREPARED = 'sequences', 'base', 'features', 'routing', 'shards', 'stages', 'tokenizer.model', 'tokenizer.json'
FLAGS = flags.FLAGS
LONGEST_S = 7200.0
CHEAT = 'DIPACO_BENCHMARK_CHEAT'


def start(role: str, name: str, config: list[str], place: pathlib.Path) -> subprocess.Popen:
  """Starts a role; a name that is a kind of cheating makes it a cheater."""
  kind = name if name in KINDS else ''
  argv = [sys.executable, str(pathlib.Path(__file__)), *config]
  argv += [f'--workdir={place}', f'--role={role}', f'--name={name}', f'--lease_s={FLAGS.lease_s}']
  env = os.environ | {CHEAT: kind or 'none', 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
  with open(place / f'{name}.log', 'ab') as log:
    return subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT)


def play(kind: str, seed: int, fraction: float, place: pathlib.Path, prepared: pathlib.Path | None) -> dict[str, Any]:
  """Runs all roles to the end of the run; returns what was found in it."""
  place.mkdir(parents=True)
  for name in PREPARED:
    if prepared and (source := prepared / name).exists():
      (shutil.copytree if source.is_dir() else shutil.copy)(source, place / name)
  for stage in ('train', 'control', 'evaluate'):
    (place / 'stages' / f'{stage}.json').unlink(missing_ok=True)
  config = [f'--config={FLAGS.config}', f'--config.seed={seed}', f'--config.audit.fraction={fraction}']
  config += [f'--config.train.phases={FLAGS.phases}', '--config.evaluate.control=False', *FLAGS.option]
  names = [*ROLES, kind or 'honest-2', 'honest-0', 'honest-1']
  processes = [start(name if name in ROLES else 'worker', name, config, place) for name in names]
  deadline = time.monotonic() + LONGEST_S
  try:
    while (evaluator := processes[2].poll()) is None and time.monotonic() < deadline:
      time.sleep(1)
    if evaluator != 0:
      raise SystemExit(f'the run of {kind or "honest workers"} has not ended: see {place}/*.log')
  finally:
    for process in processes:
      process.terminate()
      process.wait()
  return read(kind, place)


def read(kind: str, place: pathlib.Path) -> dict[str, Any]:
  """Returns the loss of a finished run, and when its cheater was found."""
  registry = Registry(f'sqlite:///{place}/registry.db', reads_only=True)
  trained = [fact for fact in registry.facts('checkpoint') if fact.meta['worker'] == kind]
  trained.sort(key=lambda fact: fact.meta['ended'])
  audited = {fact[1:3]: fact.meta for fact in registry.facts(audit_facts.AUDITED)}
  differing = [n for n, fact in enumerate(trained, 1) if audited.get(fact[1:3], {}).get('equal') is False]
  suspended = suspensions.current(registry, [kind])
  excluded = [fact for fact in registry.facts('excluded') if fact.meta['worker'] == kind]
  wrong = [name for name in suspensions.current(registry) if name != kind]
  registry.close()
  report = json.loads((place / 'report.json').read_text())
  return {
    'kind': kind, 'phases_trained': len(trained), 'phases_until_found': differing[0] if differing else None,
    'phases_until_suspended': len(trained) if suspended else None, 'wrongly_suspended': wrong,
    'screened': sum('suspended' not in fact.meta['why'] for fact in excluded),
    'loss': math.log(report['perplexity']), 'audits': report.get('audits'),
  }  # fmt: skip


def mean(values: list[float | None]) -> str:
  """Returns the mean of the values that are known, and how many of all are."""
  known = [x for x in values if x is not None]
  return f'{statistics.fmean(known):.1f} ({len(known)} of {len(values)})' if known else f'never (0 of {len(values)})'


def main(argv: list[str]):
  del argv
  folder = pathlib.Path(tempfile.mkdtemp(dir=FLAGS.scratch or None))
  runs: list[dict[str, Any]] = []
  columns = '{:12} {:>16} {:>10} {:>18} {:>9} {:>10} {:>10} {:>10}'
  print(
    columns.format('cheating', 'found at phase', 'expected', 'suspended after', 'screened', 'honest', 'audited', 'not')
  )
  honest: dict[int, dict[str, Any]] = {}
  for seed in range(FLAGS.seeds):
    honest[seed] = play('', seed, 0.0, folder / f'{seed}-honest', None)
  for kind in FLAGS.kinds:
    by_audit: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for seed in range(FLAGS.seeds):
      for audits in (True, False):
        place = folder / f'{seed}-{kind}-{audits}'
        found = play(kind, seed, FLAGS.fraction * audits, place, folder / f'{seed}-honest')
        by_audit[audits].append(found | {'seed': seed, 'fraction': FLAGS.fraction * audits})
        shutil.rmtree(place, ignore_errors=True)
    runs += [*by_audit[True], *by_audit[False]]
    losses = [statistics.fmean(run['loss'] for run in of) for of in (honest.values(), by_audit[True], by_audit[False])]
    found_at, suspended = (
      [run[name] for run in by_audit[True]] for name in ('phases_until_found', 'phases_until_suspended')
    )
    screened = sum(run['screened'] for run in by_audit[False])
    cells = [f'{loss:.4f}' for loss in losses]
    print(
      columns.format(kind, mean(found_at), f'{1 / FLAGS.fraction:.1f}', mean(suspended), screened, *cells), flush=True
    )
  shutil.rmtree(folder, ignore_errors=True)
  print(json.dumps({'fraction': FLAGS.fraction, 'honest': [*honest.values()], 'runs': runs}))


if __name__ == '__main__':
  if kind := os.environ.pop(CHEAT, ''):  # a role of a run
    sys.path.insert(0, str(ROOT / 'tests' / 'helpers'))
    if kind != 'none':
      import cheater

      cheater.install(kind)
    import runpy

    sys.argv[0] = str(ROOT / 'dipaco_jax' / 'main.py')
    runpy.run_module('dipaco_jax.main', run_name='__main__', alter_sys=True)
  else:
    flags.DEFINE_string('config', str(ROOT / 'configs' / 'tiny.py'), 'Config of the runs.')
    flags.DEFINE_multi_string('option', [], 'More options of the runs, such as --config.train.steps_per_phase=8.')
    flags.DEFINE_list('kinds', KINDS, 'Kinds of cheating.')
    flags.DEFINE_float('fraction', 0.2, 'Share of phases that are audited.', lower_bound=0.01, upper_bound=1)
    flags.DEFINE_integer('seeds', 3, 'Number of seeds.', lower_bound=1)
    flags.DEFINE_integer('phases', 12, 'Number of phases of a run.', lower_bound=1)
    flags.DEFINE_float('lease_s', 10, 'Seconds of a lease.')
    flags.DEFINE_string('scratch', '', 'Folder of the runs; by default, a temporary one.')
    app.run(main)
