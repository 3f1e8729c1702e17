"""All that one accelerator has to say, in minutes: attention, inner steps, the outer step, paths in turn, generation.

    python benchmarks/accelerator.py [--out=accelerator.jsonl --minutes=9 --parts=attention,step_150m,...]

Each part is a benchmark of this folder in a process of its own; its last line goes to --out as soon as it is there,
with the versions, the load and the date, and a part that is there is not run again: the same command goes on. Where
PyTorch is installed, a compiled step of it takes turns with ours.
"""

import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

from absl import app, flags

from dipaco_jax.reports import run_report

SIZE_150M = '--width=896 --num_layers=12 --num_heads=16 --head_dim=64 --mlp_dim=2432 --vocab_size=32000 --seq_len=1024'
SIZE_1300M = (
  '--width=2048 --num_layers=24 --num_heads=16 --head_dim=128 --mlp_dim=5504 --vocab_size=32000 --seq_len=1024'
)
MEDIUM = '--width=384 --num_layers=8 --num_heads=6 --head_dim=64 --mlp_dim=1024 --vocab_size=8192 --seq_len=256'
TRAIN = '--tied --dtype=bfloat16 --loss_chunk=32768'
HAS_TORCH = importlib.util.find_spec('torch') is not None
TORCH = '--torch=compiled' if HAS_TORCH else ''
COMMANDS = {
  'attention': 'attention.py',
  'attention_128': 'attention.py --rows=8 --seq_len=2048 --head_dim=128',
  'step_150m': f'inner_step.py {SIZE_150M} {TRAIN} --batch_size=32 --steps_per_dispatch=5 --bare=many {TORCH}',
  'step_1300m': f'inner_step.py {SIZE_1300M} {TRAIN} --batch_size=8 --steps_per_dispatch=2 --rounds=5 --bare=',
  'generate': f'generate.py {SIZE_150M} --dtype=bfloat16 --prompt=300',
  'step_medium': f'inner_step.py {MEDIUM} {TRAIN} --batch_size=64 --steps_per_dispatch=10 --bare=many {TORCH}',
  'outer': f'outer_step.py {SIZE_150M} {TRAIN} --batch_size=32 --grid=2,2 --steps_per_dispatch=2 --rounds=3',
  'paths': f'paths.py {MEDIUM} {TRAIN} --batch_size=64 --paths=1,4,16 --steps=10 --phases=1',
}  # sizes: the 150M and 1.3B paths of the paper [7.1], and those of experiments/ for one GPU
ENVIRONMENT = os.environ | {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}  # PyTorch's memory lies beside JAX's
OUT = flags.DEFINE_string('out', 'accelerator.jsonl', 'a line for every part; those that are there are not run again')
MINUTES = flags.DEFINE_float('minutes', 9, 'after which no part goes on')
PARTS = flags.DEFINE_list('parts', list(COMMANDS), 'in this order')


def run(part: str, seconds: float) -> dict:
  """The part's last line; where it failed or took longer, what it said last."""
  script, *options = COMMANDS[part].split()
  command = [sys.executable, str(pathlib.Path(__file__).parent / script), *options]
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=ENVIRONMENT)
  except subprocess.TimeoutExpired:
    return {'failed': f'not done after {seconds:.0f} s'}
  if done.returncode:
    return {'failed': done.stderr.strip()[-500:]}
  return json.loads(done.stdout.splitlines()[-1])


def main(_):
  started, out = time.monotonic(), pathlib.Path(OUT.value)
  lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
  there = {line['part'] for line in lines if 'failed' not in line}
  torch = {'torch': importlib.metadata.version('torch')} if HAS_TORCH else {}
  about = {
    'versions': run_report.versions() | torch,
    'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
    'cores': os.cpu_count(),
  }
  for part in PARTS.value:
    left = 60 * MINUTES.value - (time.monotonic() - started)
    if part in there or left < 10:
      print(f'{part}: ' + ('done before' if part in there else 'no time left; the same command goes on'))
      continue
    load, began = os.getloadavg()[0], time.monotonic()
    found = run(part, left)
    line = {'part': part, **found, 'load': load, 'seconds': time.monotonic() - began, **about}
    with out.open('a') as file:
      file.write(json.dumps(line) + '\n')
    shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items() if not isinstance(v, (list, dict))}
    print(f'{part} ({line["seconds"]:.0f} s): {shown}', flush=True)


if __name__ == '__main__':
  app.run(main)
