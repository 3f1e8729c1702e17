"""A whole run of the command, small enough for a test: text, config, process."""

import functools
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import quick_xla
import repository

RARELY = '--config.checkpoint.every_steps=24'  # checkpoints: where nothing is stopped
CONTROL = '--config.evaluate.control=True'
SAMPLES = '--config.evaluate.samples=6'  # which take seconds to compile: other runs have none
PATIENCE_S = 240  # for a process, on a machine that does much else; then it hangs

CONFIG = """
from ml_collections import ConfigDict
from dipaco_jax import settings

def get_config():
  c = ConfigDict(settings.Settings().to_dict())
  c.data.update(source='files', train=({train!r},), validation_fraction=0.2, holdout_fraction=0.1, parts=3)
  c.tokenizer.vocab_size = 300
  c.model.update(width=16, num_layers=2, num_heads=2, head_dim=8, mlp_dim=24, seq_len=64)
  c.pretrain.update(steps=12, batch_size=4)
  c.train.update(phases=4, steps_per_phase=6, batch_size=4, steps_per_dispatch=2)
  c.inner.update(learning_rate=0.01, warmup_steps=4)
  c.evaluate.samples = 0
  c.checkpoint.every_steps = 4
  c.grid = ConfigDict({{'a': 2, 'b': 2}})
  c.levels = (('ends', 'embed|final', ()), ('low', 'block_0', ('a',)), ('high', 'block_1', ('b',)))
  return c
"""


@functools.cache
def make_lines(documents: int) -> str:
  """Draws documents of two domains with words of their own, once for all tests of a process."""
  rng = np.random.default_rng(0)
  lines = []
  for i in range(documents):
    domain, letters = (('vowels', 'aeiouy'), ('consonants', 'bcdfgklmnprst'))[i % 2]
    words = [''.join(rng.choice(list(letters), rng.integers(2, 6))) for _ in range(rng.integers(20, 60))]
    lines.append(json.dumps({'text': ' '.join(words) + '.', 'domain': domain}))
  return '\n'.join(lines) + '\n'


def write_config(folder: pathlib.Path, documents: int = 300) -> pathlib.Path:
  """A config file, and its text."""
  (folder / 'text.jsonl').write_text(make_lines(documents))
  config = folder / 'config.py'
  config.write_text(CONFIG.format(train=str(folder / 'text.jsonl')))
  return config


def cache_of(workdir: pathlib.Path) -> pathlib.Path:
  """Where a run with a cache of its own keeps what XLA compiles."""
  return workdir.with_name(f'{workdir.name}-xla')


def start(
  config: pathlib.Path, workdir: pathlib.Path, *options: str, devices: int = 1, own_cache: bool = False
) -> subprocess.Popen:
  """The command, in a process of its own; what XLA compiles is kept beside its workdir, or for all tests."""
  path = os.pathsep.join([str(repository.ROOT), os.environ.get('PYTHONPATH', '')])
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': quick_xla.on(devices), 'PYTHONPATH': path}
  if own_cache:
    env['JAX_COMPILATION_CACHE_DIR'] = str(cache_of(workdir))
  command = [sys.executable, '-m', 'dipaco_jax.main', f'--config={config}', f'--workdir={workdir}', *options]
  return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, status: int = 0) -> str:
  """Waits for the process to end with this status; what it wrote to stderr."""
  try:
    out, err = process.communicate(timeout=PATIENCE_S)
  finally:
    process.kill()
  assert process.returncode == status, f'status {process.returncode}\n{out}\n{err[-4000:]}'
  return err


def run(config: pathlib.Path, workdir: pathlib.Path, *options: str, **how) -> str:
  """To the end."""
  return finish(start(config, workdir, RARELY, *options, **how))


def run_until(stage: str, config: pathlib.Path, workdir: pathlib.Path, *options: str, **how) -> str:
  """To the end of a stage: what follows is of no use to the test."""
  moment = (workdir / 'stages' / f'{stage}.json').exists
  return stop_when(start(config, workdir, RARELY, *options, **how), moment, signal.SIGKILL)


def stop_when(process: subprocess.Popen, moment, number: int) -> str:
  """Sends the signal as soon as `moment()` is true; what the process wrote to stderr."""
  deadline = time.monotonic() + PATIENCE_S
  while not moment():
    if time.monotonic() > deadline:
      process.kill()
    if process.poll() is not None:
      raise AssertionError(f'it ended before the moment came:\n{process.communicate()[1][-4000:]}')
    time.sleep(0.002)
  process.send_signal(number)
  return finish(process, -number if number == signal.SIGKILL else 128 + number)


def flip_a_bit(file: pathlib.Path):
  data = bytearray(file.read_bytes())
  data[len(data) // 2] ^= 1
  file.write_bytes(data)


def largest(folder: pathlib.Path) -> pathlib.Path:
  """The largest file below it."""
  return max((file for file in folder.rglob('*') if file.is_file()), key=lambda file: file.stat().st_size)


def updates(workdir: pathlib.Path, stage: str) -> int:
  """How far the stage is, by metrics.jsonl."""
  file = workdir / 'metrics.jsonl'
  lines = file.read_bytes().split(b'\n')[:-1] if file.exists() else []
  return max([row['updates'] for row in map(json.loads, lines) if row['stage'] == stage], default=0)


def record(workdir: pathlib.Path, stage: str) -> dict:
  return json.loads((workdir / 'stages' / f'{stage}.json').read_text())


def modules_sha256(workdir: pathlib.Path) -> str:
  return record(workdir, 'train')['result']['modules_sha256']


def sha256(file: pathlib.Path) -> str:
  return hashlib.sha256(file.read_bytes()).hexdigest()
