"""Phases of a run whose workdir is in a bucket, against those of the same run on a disk.

    python benchmarks/bucket.py --url=s3://BUCKET/PREFIX [--config=configs/tiny.py --turns=3]

Runs `main` on a disk and in the bucket, in turns, and compares the seconds from one end of a phase to the next, while
checkpoints and modules of the phase before go to where the workdir is. The first phase, which compiles, does not count.
The defaults save a checkpoint in every phase. What is made stays: PREFIX/0, PREFIX/1 and so on have to be new.
Prints a line for each turn and, as the last line, one JSON object: `ratio` is bucket to disk, of medians over all
phases, `ratios` is that of each turn; `waits_s` is the time in which training waited for checkpoints.
"""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile

from absl import flags

from dipaco_jax.command_line import command
from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import remote_files
from dipaco_jax.telemetry import metrics_log

URL = flags.DEFINE_string('url', '', 'a folder of a bucket, gs:// or s3://; credentials are those of a run')
CONFIG = flags.DEFINE_string('config', 'configs/tiny.py', "the run's")
CHANGES = flags.DEFINE_list(
  'changes',
  ['pretrain.steps=16', 'train.phases=6', 'train.steps_per_phase=64', 'checkpoint.every_steps=64',
   'evaluate.control=False', 'evaluate.every_phases=0'],
  'fields of the config: SECTION.FIELD=VALUE',
)  # fmt: skip
TURNS = flags.DEFINE_integer('turns', 3, 'runs on a disk, and runs in the bucket', lower_bound=1)


def train(workdir: str, scratch: str) -> tuple[list[float], float]:
  """Returns the seconds of each phase but the first, and those in which training waited for checkpoints."""
  made = [sys.executable, '-m', 'dipaco_jax.main', f'--config={CONFIG.value}', f'--workdir={workdir}']
  where = [f'--scratch={scratch}'] if remote_files.is_remote(workdir) else []
  done = subprocess.run([*made, *where, *(f'--config.{x}' for x in CHANGES.value)], capture_output=True, text=True)
  if done.returncode:
    raise InputError(f'the run in {workdir} ended with status {done.returncode}: {done.stderr[-500:]}')
  rows = filter(None, map(metrics_log.from_line, remote_files.read(f'{workdir}/metrics.jsonl').splitlines()))
  ends = [row['time'] for row in rows if row['kind'] == 'phase' and row['stage'] == 'train']
  report = json.loads(remote_files.read(f'{workdir}/report.json'))
  return [after - before for before, after in itertools.pairwise(ends)], report['seconds']['train']['checkpoint']


def main():
  if not remote_files.is_remote(URL.value):
    raise InputError('--url: write a folder of a bucket, as s3://BUCKET/PREFIX')
  phases: dict[str, list[float]] = {'disk': [], 'bucket': []}
  waits: dict[str, list[float]] = {'disk': [], 'bucket': []}
  ratios = []
  with tempfile.TemporaryDirectory() as folder:
    for turn in range(TURNS.value):
      places = {'disk': f'{folder}/disk-{turn}', 'bucket': f'{URL.value.rstrip("/")}/{turn}'}
      now = {}
      for name, place in places.items():
        seconds, waited = train(place, f'{folder}/scratch-{turn}')
        now[name] = statistics.median(seconds)
        phases[name] += seconds
        waits[name].append(waited)
      ratios.append(now['bucket'] / now['disk'])
      about = f'a phase on a disk {now["disk"]:.3f} s, in a bucket {now["bucket"]:.3f} s'
      print(f'turn {turn + 1} of {TURNS.value}: {about}')
  medians, waits_s = ({name: statistics.median(x) for name, x in of.items()} for of in (phases, waits))
  ratio = medians['bucket'] / medians['disk']
  print(f'phases in a bucket take {ratio:.3f} of those on a disk')
  result = {'ratio': ratio, 'ratios': ratios, 'phase_s': medians, 'waits_s': waits_s}
  print(json.dumps(result | {'phases': {name: len(x) for name, x in phases.items()}}))


if __name__ == '__main__':
  command.run(main)
