"""A config that proved wrong before training may be corrected: what was made, and still fits, is kept.

The message that ended such a run is in `refused.txt`. Only while that file is there may fields of config.json change.
"""

import pathlib
import shutil

from dipaco_jax.core import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.pipeline import stage, stage_records
from dipaco_jax.storage import files

FILE = 'refused.txt'


def words(workdir: pathlib.Path) -> str:
  """Reads why the run was refused; '' where it was not."""
  file = workdir / FILE
  return file.read_text().strip() if file.exists() else ''


def note(workdir: pathlib.Path, why: str):
  """Keeps why a run was refused; does nothing once it trains, as its config may then no longer change."""
  begun = any((workdir / name).exists() for name in ('stages/train.json', 'checkpoints/train', 'modules'))
  if (workdir / 'config.json').exists() and not begun:
    files.write_file(workdir / FILE, f'{why}\n')


def check(workdir: pathlib.Path, old: settings_lib.Settings, new: settings_lib.Settings):
  """Refuses another config than the run began with; where that was refused, removes what it has left unfinished.

  Raises InputError that names fields that differ and may not, or that a finished stage was made by.
  """
  if not (differ := settings_lib.differences(old, new)):
    return
  changed = [name for name in stage.NAMES if stage.digest(old, name) != stage.digest(new, name)]
  stretched = not new.inner.decay_steps and old.train.steps_per_phase != new.train.steps_per_phase
  if stretched and changed[:1] != ['tokenize']:
    changed = ['pretrain']  # its learning rate follows the whole run's cosine
  later = stage.since(changed[0]) if changed else ()
  if not words(workdir) or any(stage_records.record_file(workdir, one.name).exists() for one in later):
    names = '; '.join(f'config.{name} was {a!r}, is {b!r}' for name, (a, b) in differ.items())
    raise InputError(f'--workdir={workdir} holds a run with another config ({names}): use another --workdir')
  for path in (path for one in later for pattern in one.leftovers for path in workdir.glob(pattern)):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
