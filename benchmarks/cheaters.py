"""Workers that cheat in runs of islands: after how many of their phases audits find them, and what they do to the loss.

    python benchmarks/cheaters.py --fraction=0.2 --seeds=5

For each kind of cheating and each seed, two runs of a small model, with and without audits (--nolosses: with audits
alone): all roles are processes, and of three workers one cheats in each phase that it trains
(tests/helpers/cheater.py). A phase that a cheater has trained is audited with probability `fraction`, so that the
first of its phases that is audited is number 1 / fraction on average. How many it trains until it is suspended is
larger, because audits take time.
"""

import json
import math
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

from absl import app, flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / 'tests' / 'helpers'))

import cheater  # noqa: E402 - in the path's folder
import one_process  # noqa: E402
from cluster import Cluster, More  # noqa: E402

from dipaco_jax.config import settings as settings_lib  # noqa: E402
from dipaco_jax.islands import audit_facts, suspensions  # noqa: E402

KINDS = [kind for kind in cheater.KINDS if kind != 'accuser']  # which trains honestly
HONEST = 'worker-0', 'worker-1', 'worker-2'
OTHERS = 'outer-0', 'evaluator-0', 'monitor-0'
LONGEST_S = 600.0  # of a run
FLAGS = flags.FLAGS


def make_settings(text: pathlib.Path, seed: int, fraction: float) -> settings_lib.Settings:
  """The settings of a run: four paths of a model that is small enough for many runs."""
  phases = FLAGS.phases
  settings = one_process.changed(
    one_process.two_phases(text),
    train={'phases': phases},
    inner={'decay_steps': 12 + 6 * phases},
    audit={'fraction': fraction},
    checkpoint={'state_every_phases': FLAGS.state_every},
  )
  return settings_lib.from_dict(settings.to_dict() | {'seed': seed})


def play(kind: str, seed: int, fraction: float, folder: pathlib.Path) -> dict[str, Any]:
  """Runs all roles to the end of the run; returns what was found in it."""
  place, text = folder / 'run', folder / 'text'
  for new in (place, text):
    new.mkdir(parents=True)
  name = f'{kind}-0' if kind else HONEST[2]
  names = name, *HONEST[:2], *OTHERS
  url = f'sqlite:///{place}/registry.db'
  cluster = Cluster(make_settings(text, seed, fraction), str(place), url, folder / 'machines', names, More(4.0))
  deadline = time.monotonic() + LONGEST_S
  try:
    while not cluster.finished():
      if time.monotonic() > deadline:
        raise SystemExit(f'the run of {kind or "honest workers"} has not ended: see {folder}/machines/*.log')
      cluster.tend()
      time.sleep(0.1)
    return read(cluster, name, kind)
  finally:
    cluster.kill()


def read(cluster: Cluster, name: str, kind: str) -> dict[str, Any]:
  """Returns the loss of a finished run, and when its cheater was found."""
  registry = cluster.registry
  trained = [fact for fact in registry.facts('checkpoint') if fact.meta['worker'] == name]
  trained.sort(key=lambda fact: fact.meta['ended'])
  audited = {fact[1:3]: fact.meta for fact in registry.facts(audit_facts.AUDITED)}
  drawn = [number for number, fact in enumerate(trained, 1) if fact[1:3] in audited]
  differing = [n for n, fact in enumerate(trained, 1) if audited.get(fact[1:3], {}).get('equal') is False]
  suspended = [*suspensions.current(registry)]
  excluded = [fact for fact in registry.facts('excluded') if fact.meta['worker'] == name]
  return {
    'kind': kind, 'trained': len(trained), 'first_audited': drawn[0] if drawn else None,
    'found': differing[0] if differing else None, 'suspended_after': len(trained) if name in suspended else None,
    'wrongly_suspended': [other for other in suspended if other != name or not kind],
    'screened': sum('suspended' not in fact.meta['why'] for fact in excluded),
    'audits': len(audited), 'loss': math.log(registry.facts('finished')[0].meta['perplexity']),
  }  # fmt: skip


def mean(values: list[float | None]) -> str:
  """Returns the mean of the values that are known, and how many of all are."""
  known = [x for x in values if x is not None]
  return f'{statistics.fmean(known):.1f} ({len(known)} of {len(values)})' if known else f'never (0 of {len(values)})'


def measure(kind: str, folder: pathlib.Path, fraction: float) -> list[dict[str, Any]]:
  """Returns what was found in a run of each seed."""
  runs = []
  for seed in range(FLAGS.seeds):
    place = folder / f'{kind}-{seed}-{fraction}'
    runs.append(play(kind, seed, fraction, place) | {'seed': seed, 'fraction': fraction})
    shutil.rmtree(place, ignore_errors=True)
  return runs


def main(argv: list[str]):
  del argv
  folder, expected = pathlib.Path(tempfile.mkdtemp(dir=FLAGS.scratch or None)), f'{1 / FLAGS.fraction:.1f}'
  os.environ['JAX_COMPILATION_CACHE_DIR'] = str(folder / 'compiled')  # for all processes
  columns = '{:12} {:>16} {:>10} {:>17} {:>9} {:>6} {:>9} {:>9} {:>9}'
  names = 'found at phase', 'expected', 'suspended after', 'screened', 'wrong', 'honest', 'audited', 'not'
  print(columns.format('cheating', *names), flush=True)
  honest = measure('', folder, 0.0) if FLAGS.losses else []
  runs = [*honest]
  for kind in FLAGS.kinds:
    audited = measure(kind, folder, FLAGS.fraction)
    not_audited = measure(kind, folder, 0.0) if FLAGS.losses else []
    runs += [*audited, *not_audited]
    losses = [
      f'{statistics.fmean(run["loss"] for run in of):.4f}' if of else '' for of in (honest, audited, not_audited)
    ]
    found_at = [run['found'] for run in audited]
    suspended_after = [run['suspended_after'] for run in audited]
    screened = sum(run['screened'] for run in audited)
    wrong = sum(bool(run['wrongly_suspended']) for run in audited)
    print(columns.format(kind, mean(found_at), expected, mean(suspended_after), screened, wrong, *losses), flush=True)
  of_all = [run['found'] for run in runs if run['kind'] and run['fraction']]
  print(columns.format('all', mean(of_all), expected, *[''] * 6))
  shutil.rmtree(folder, ignore_errors=True)
  print(json.dumps({'fraction': FLAGS.fraction, 'phases': FLAGS.phases, 'runs': runs}))


if __name__ == '__main__':
  flags.DEFINE_list('kinds', KINDS, 'Kinds of cheating.')
  flags.DEFINE_float('fraction', 0.2, 'Share of phases that are audited.', lower_bound=0.01, upper_bound=1)
  flags.DEFINE_integer('seeds', 5, 'Number of seeds.', lower_bound=1)
  flags.DEFINE_integer('phases', 16, 'Number of phases of a run.', lower_bound=1)
  flags.DEFINE_integer('state_every', 1, 'States of paths are published after so many phases.', lower_bound=1)
  flags.DEFINE_bool('losses', True, 'Whether to run honest workers, and cheaters without audits, to compare losses.')
  flags.DEFINE_string('scratch', '', 'Folder of the runs; by default, a temporary one.')
  app.run(main)
