"""A config that proved wrong before training may be corrected: what was made, and still fits, is kept.

The line with which such a run ended is in `refused.txt`. Only where that is may the fields of config.json change.
"""

import pathlib
import shutil

from dipaco_jax.core import settings as settings_lib
from dipaco_jax.core.errors import InputError

FILE = 'refused.txt'

# What an unfinished stage may have left that another config cannot use.
LEFT = {
  'tokenize': ('tokenizer.model*', 'tokenize-*', 'sequences'),
  'pretrain': ('shards/base*', 'base', 'checkpoints/pretrain', 'metrics.jsonl', 'events'),
  'route': ('routing', 'shards/0*'),
}


def words(workdir: pathlib.Path) -> str:
  """Why the run was refused; '' where it was not."""
  file = workdir / FILE
  return file.read_text().strip() if file.exists() else ''


def note(workdir: pathlib.Path, why: str):
  """Keeps why a run is refused; of no effect once it trains, where its config stays what it is."""
  from dipaco_jax.storage import files

  begun = any((workdir / name).exists() for name in ('stages/train.json', 'checkpoints/train', 'modules'))
  if (workdir / 'config.json').exists() and not begun:
    files.write_file(workdir / FILE, f'{why}\n')


def check(workdir: pathlib.Path, old: settings_lib.Settings, new: settings_lib.Settings):
  """Refuses another config than the run began with; where that was refused, removes what it has left unfinished.

  Raises:
    InputError: fields differ that may not, or that a finished stage was made by; names them.
  """
  from dipaco_jax.pipeline import run

  differ = settings_lib.differences(old, new)
  stage = first_changed(old, new)
  later = settings_lib.STAGES[settings_lib.STAGES.index(stage) :] if stage else ()
  made = [name for name in later if run.record_file(workdir, name).exists()]
  if differ and (made or not words(workdir)):
    names = '; '.join(f'config.{name} was {a!r}, is {b!r}' for name, (a, b) in differ.items())
    raise InputError(f'--workdir={workdir} holds a run with another config ({names}): use another --workdir')
  for path in (path for name in later if differ for pattern in LEFT.get(name, ()) for path in workdir.glob(pattern)):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def first_changed(old: settings_lib.Settings, new: settings_lib.Settings) -> str | None:
  """The first stage that would make something else."""
  from dipaco_jax.pipeline import run

  stages = [name for name in settings_lib.STAGES if run.digest(old, name) != run.digest(new, name)]
  stretched = not new.inner.decay_steps and old.train.steps_per_phase != new.train.steps_per_phase
  if stretched and stages[:1] != ['tokenize']:
    return 'pretrain'  # its learning rate follows the whole run's cosine
  return stages[0] if stages else None
