"""Models that rows start from: a run of their own, exported in Hugging Face's layout and read again as anybody's is."""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import common
import runs
from absl import flags
from runs import Row, Run

from dipaco_jax.core.errors import InputError
from dipaco_jax.training import stopping


def place(name: str) -> str:
  """Where the model of a seed is, filled in when a row is run."""
  return f'{{workdir}}/{name}-{{text}}-{{seed}}'


def start(name: str, tokenizer: str = 'tokenizer.model') -> dict[str, Any]:
  """The changes of a row that starts from it."""
  return {'pretrain.init': place(name), 'pretrain.steps': 0, 'tokenizer.model_file': f'{place(name)}/{tokenizer}'}


def export_for(missing: Sequence[Run], name: str, row: Row, data: str, validation: str):
  """Trains and exports the base of each seed of these runs, by a row of its own on text that may be its own too."""
  f = flags.FLAGS
  for seed in sorted({run.seed for run in missing}):
    one = runs.make(f.size, row, seed, data, validation)
    export(name, one, missing[0].text, pathlib.Path(f.workdir) / f.size)


def export(name: str, one: Run, of: str, folder: pathlib.Path):
  """Trains and exports a base, where it is not there; what it took is kept beside it.

  `of`: the digest of the rows' text, which may be other text than the base's own.
  """
  out = folder / f'{name}-{of[:4]}-{one.seed}'
  if (out / 'config.json').exists():
    if runs.before(out)['text'] != of:
      raise InputError(f'{out} is of another text: name another --workdir')
    return
  if status := runs.execute(one, folder):
    sys.exit(status)
  record = runs.make_record(one, folder)
  tokens = record['pretrain_tokens'] + (record['train_tokens'] - record['pretrain_tokens']) / record['paths']
  took = {
    'text': of,
    'flops': record['train_flops'],
    'tokens': tokens,
    'steps': record['pretrain_steps'] + record['steps'],
  }
  common.publish(runs.told(out), json.dumps(took))
  command = [sys.executable, '-m', 'dipaco_jax.export', f'--workdir={runs.workdir(one, folder)}', '--path=0']
  if status := stopping.run_process([*command, f'--out={out}']):
    sys.exit(status)
