"""What a quorum and unequal steps cost in quality, at equal tokens, on text of several kinds.

    python benchmarks/unequal_quality.py --data=TRAIN.jsonl.gz --validation=VALIDATION.jsonl.gz --workdir=DIR

Who is late and how many steps a path takes in a phase are drawn, written as the decisions of a run (facts.json), and
computed by `main --replay`: the result does not depend on the speed of this machine. The rules, of which the first is
the reference, for DiLoCo with 8 workers and DiPaCo with 4x4 paths:

    wait      all paths take tau steps, and all are awaited
    quorum    one path of four is away in each phase, as often as outer.quorum=0.75 allows
    time      phases end by time, with workers of speeds 1, 1/2, 1/4 and 1/10, each with the same paths in all phases
    both      the two together
    moved     both, and the worker of each path is drawn anew in each phase

The mean worker takes tau steps in a phase. The number of phases is such that outer steps contain as many inner steps as
those of `wait`. Paths are small models of experiments/config.py, begin from a base that was trained for a few steps,
and decay their learning rates over as many of their own steps as a path of `wait` takes; a phase in which a path is
late is none of these. Results are kept in DIR/results.json, and the same command continues; for results of another
commit, name another DIR.

Prints a table in Markdown: the median perplexity over the seeds, and the median of the differences from `wait` with the
same seed.
"""

import json
import math
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import app, flags
from unequal_rules import METHODS

from dipaco_jax.command_line import config_file
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.islands import quorum as quorum_lib

DATA = flags.DEFINE_string('data', None, 'training text, JSON Lines', required=True)
VALIDATION = flags.DEFINE_string('validation', None, 'validation text, JSON Lines', required=True)
WORKDIR = flags.DEFINE_string('workdir', None, 'of the runs', required=True)
SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'of parameters, batches, and who is late')
SETUPS = flags.DEFINE_list('setups', ['diloco', 'grid'], 'diloco, grid')
NAMES = flags.DEFINE_list('rules', ['wait', 'both', 'time', 'quorum', 'moved'], 'as above; wait comes first')
PHASES = flags.DEFINE_integer('phases', 12, 'of `wait`')
TAU = flags.DEFINE_integer('tau', 40, 'inner steps of the mean worker in a phase')
DOCUMENTS = flags.DEFINE_integer('documents', 8000, 'of training text; 0 means all')

ROOT = pathlib.Path(__file__).parent.parent
VARIANTS = {'diloco': 'micro,diloco,8', 'grid': 'micro,dipaco,4x4'}
SPEEDS = 1.0, 0.5, 0.25, 0.1  # relative
MOST = 4  # times tau, that a path may take in a phase
DISPATCH = 2  # steps, of which each phase has a multiple
QUORUM = 0.75
CONFIG = """
import runpy

def get_config():
  c = runpy.run_path({experiments!r})['get_config']({variant!r})
  c.data.update(source='files', train=({data!r},), validation=({validation!r},), max_documents={documents})
  c.pretrain.update(steps=200, batch_size=16)
  c.train.update(phases={phases}, steps_per_phase={steps}, phase_s={phase_s})
  c.train.update(batch_size=16, steps_per_dispatch={dispatch}, early_stopping=False)
  c.inner.decay_steps = 200 + {all_steps}
  c.outer.update(row_weights=False, quorum={quorum}, grace_s={grace_s})
  c.checkpoint.every_steps = 1_000_000
  c.evaluate.control = False
  c.seed = {seed}
  return c
"""


class Rule(NamedTuple):
  """What happens in the phases of a run."""

  is_late: bool = False  # whether paths are late
  by_time: bool = False  # whether paths take different numbers of steps
  moves: bool = False  # whether the speed of a path is drawn anew in each phase


RULES = {
  'wait': Rule(),
  'quorum': Rule(is_late=True),
  'time': Rule(by_time=True),
  'both': Rule(is_late=True, by_time=True),
  'moved': Rule(is_late=True, by_time=True, moves=True),
}


class Phase(NamedTuple):
  """What the paths do in a phase."""

  late: frozenset[int]
  steps: tuple[int, ...]  # by path

  @property
  def counted(self) -> int:
    """Returns the inner steps that outer steps contain."""
    return sum(n for path, n in enumerate(self.steps) if path not in self.late)


def draw_phases(setup: str, rule: Rule, seed: int) -> list[Phase]:
  """Draws phases until as many steps count as if all paths took tau steps in PHASES phases."""
  modules = list(METHODS[setup].module_paths().values())
  paths = 1 + max(path for of_module in modules for path in of_module)
  draw, phases = random.Random(f'{setup} {seed}'), list[Phase]()
  speeds = [SPEEDS[i % len(SPEEDS)] / statistics.fmean(SPEEDS) for i in range(paths)]
  draw.shuffle(speeds)
  wanted = paths * TAU.value * PHASES.value
  while sum(phase.counted for phase in phases) < wanted - paths * TAU.value / 2:
    if rule.moves:
      draw.shuffle(speeds)
    late = draw_late(modules, paths, draw) if rule.is_late else frozenset()
    steps = [to_dispatches(TAU.value * speed) if rule.by_time else TAU.value for speed in speeds]
    phases.append(Phase(late, tuple(steps)))
  return phases


def to_dispatches(steps: float) -> int:
  """Returns the nearest number of steps that a phase can have."""
  return DISPATCH * max(1, round(steps / DISPATCH))


def draw_late(modules: Sequence[Sequence[int]], paths: int, draw: random.Random) -> frozenset[int]:
  """Draws as many late paths as leave each module its quorum."""
  late = set[int]()
  for path in draw.sample(range(paths), paths):
    of_modules = [of_module for of_module in modules if path in of_module]
    present = (len({*of_module} - late - {path}) for of_module in of_modules)
    needed = (quorum_lib.quorum_size(QUORUM, len(of_module)) for of_module in of_modules)
    if all(n >= least for n, least in zip(present, needed, strict=True)):
      late.add(path)
  return frozenset(late)


def to_facts(phases: Sequence[Phase], settings: settings_lib.Settings) -> dict[str, Any]:
  """Returns the content of facts.json, without the digests of modules, which nobody knows yet.

  All runs but that of `wait` have timed phases, so that learning rates follow the paths' own steps.
  """
  own = [settings.pretrain.steps] * len(phases[0].steps)
  late, steps = list[list[int]](), list[list[int]]()
  for number, phase in enumerate(phases):
    for path, planned in enumerate(phase.steps):
      taken = 0 if path in phase.late else planned
      late += [[path, number]] if path in phase.late else []
      steps += [[path, number, own[path], taken]] if settings.train.phase_s else []
      own[path] += taken
  excluded = [[*at, 'late: drawn'] for at in late]
  config = settings_lib.recorded(settings)
  return {'config': config, 'modules': [], 'excluded': excluded, 'late': late, 'steps': steps}


def measure(folder: pathlib.Path, setup: str, name: str, seed: int) -> dict[str, Any]:
  """Computes a run, and returns its figures."""
  rule, folder = RULES[name], folder / f'{setup}-{name}-{seed}'
  phases, config = draw_phases(setup, rule, seed), folder / 'config.py'
  folder.mkdir(parents=True, exist_ok=True)
  text = {
    'data': str(pathlib.Path(DATA.value).absolute()),
    'validation': str(pathlib.Path(VALIDATION.value).absolute()),
  }
  about = text | {'experiments': str(ROOT / 'experiments' / 'config.py'), 'variant': VARIANTS[setup], 'seed': seed}
  about |= {'documents': DOCUMENTS.value, 'phases': len(phases), 'all_steps': PHASES.value * TAU.value}
  about |= {'quorum': QUORUM, 'grace_s': 1.0} if rule.is_late else {'quorum': 1.0, 'grace_s': 0.0}
  about |= {'phase_s': 0.0, 'steps': TAU.value} if rule == Rule() else {'phase_s': 1.0, 'steps': MOST * TAU.value}
  about['dispatch'] = DISPATCH
  config.write_text(CONFIG.format(**about))
  settings = settings_lib.from_dict(config_file.read(str(config), [], ''))
  (folder / 'facts.json').write_text(json.dumps(to_facts(phases, settings)))
  run, env = folder / 'run', os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
  command = [sys.executable, '-m', 'dipaco_jax.main', f'--config={config}', f'--workdir={run}']
  with (folder / 'log').open('a') as log:
    status = subprocess.run([*command, f'--replay={folder}/facts.json'], env=env, stdout=log, stderr=log).returncode
  if status != 1 or not (run / 'report.json').exists():  # 1: modules are others than those that are not known
    raise RuntimeError(f'{folder}/log: the run ended with status {status}')
  report = json.loads((run / 'report.json').read_text())
  shutil.rmtree(run)
  counted = sum(phase.counted for phase in phases)
  return {
    'setup': setup, 'rule': name, 'seed': seed, 'perplexity': report['perplexity'], 'phases': len(phases),
    'steps': counted, 'late': sum(len(phase.late) for phase in phases), 'about': about_all(),
  }  # fmt: skip


def about_all() -> list[Any]:
  """Returns what all rows of a table have in common."""
  return [PHASES.value, TAU.value, DOCUMENTS.value, DATA.value, VALIDATION.value]


def to_text(rows: Sequence[dict[str, Any]]) -> str:
  """Returns the rows as a table in Markdown."""
  lines = ['| setup | rule | perplexity | less that of `wait` | by seed | phases | steps | late |', f'|{"---|" * 8}']
  by_name = {(row['setup'], row['rule'], row['seed']): row for row in rows}
  for setup, name in dict.fromkeys((row['setup'], row['rule']) for row in rows):
    own = [row for row in rows if (row['setup'], row['rule']) == (setup, name)]
    pairs = [(row, by_name.get((setup, 'wait', row['seed']))) for row in own]
    lost = [row['perplexity'] - reference['perplexity'] for row, reference in pairs if reference]
    median = statistics.median(row['perplexity'] for row in own)
    behind = statistics.median(lost) if lost else math.nan
    each = ', '.join(f'{row["perplexity"]:.2f}' for row in own)
    counts = ' | '.join(f'{statistics.median(row[field] for row in own):,.0f}' for field in ('phases', 'steps', 'late'))
    lines.append(f'| {setup} | {name} | {median:.2f} | {behind:+.2f} | {each} | {counts} |')
  return '\n'.join(lines)


def main(_: Sequence[str]):
  folder = pathlib.Path(WORKDIR.value)
  folder.mkdir(parents=True, exist_ok=True)
  file = folder / 'results.json'
  rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
  if any(row['about'] != about_all() for row in rows):
    raise app.UsageError(f'{file} has results of other options: {rows[0]["about"]}; choose another --workdir')
  for seed in map(int, SEEDS.value):
    for setup in SETUPS.value:
      for name in NAMES.value:
        if not any((row['setup'], row['rule'], row['seed']) == (setup, name, seed) for row in rows):
          rows.append(measure(folder, setup, name, seed))
          file.write_text(json.dumps(rows, indent=1))
          print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
  print(to_text(rows))


if __name__ == '__main__':
  app.run(main)
