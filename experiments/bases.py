"""Models that rows start from: a run of their own, exported in Hugging Face's layout and read again as anybody's is."""

import itertools
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
from dipaco_jax.processes import stopping


def place(size: str, row: Row) -> str:
  """Where the model of a seed is, filled in when a row is run: another base is another row's start."""
  return f'{{workdir}}/{row.name}-{runs.make(size, row, 0).config[:8]}-{{text}}-{{seed}}'


def start(size: str, row: Row, tokenizer: str = 'tokenizer.model') -> dict[str, Any]:
  """The changes of a row that starts from what `row` has trained."""
  model = place(size, row)
  return {'pretrain.init': model, 'pretrain.steps': 0, 'tokenizer.model_file': f'{model}/{tokenizer}'}


def starts(run: Run, row: Row) -> bool:
  """Whether a run starts from what `row` has trained."""
  return run.row.changes.get('pretrain.init') == place(run.size, row)


def export_for(missing: Sequence[Run], row: Row, data: str, validation: str, phases: int = 0):
  """Trains and exports the base of each seed of these runs, by a row of its own on text that may be its own too.

  `phases`: where the row's run is stopped; 0: at its end. It may be trained on later in the same workdir.
  """
  f = flags.FLAGS
  folder = pathlib.Path(f.workdir) / f.size
  wanted = sorted({(run.seed, run.text) for run in missing})
  # First bases that no other process is training, then those that others have made or left unfinished.
  for wait, (seed, of) in itertools.product((False, True), wanted):
    one = runs.make(f.size, row, seed, data, validation)
    if phases:
      one = one._replace(overrides=one.overrides | {'train.phases': phases})
    out = pathlib.Path(place(f.size, row).format(workdir=folder, text=of[:4], seed=seed))
    with common.claim(folder, out.name, wait) as claimed:
      if claimed:
        export(one, of, folder, out)


def export(one: Run, of: str, folder: pathlib.Path, out: pathlib.Path):
  """Trains and exports a base if it does not exist, and notes its costs next to it.

  `of`: the digest of the rows' text, which may be other text than the base's own.
  """
  if (out / 'config.json').exists():
    if (runs.before(out) or {}).get('text') != of:
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
