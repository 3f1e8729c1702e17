"""The config of a run in its folder on this machine, which is of one run alone."""

import pathlib

from dipaco_jax.config import fields, settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.pipeline import stage_records
from dipaco_jax.storage import publishing


def keep(local: pathlib.Path, settings: settings_lib.Settings, option: str = '--workdir'):
  """Writes config.json unless it is there. Raises InputError if it is of a run with another config.

  `option`: which names the folder.
  """
  if not (file := local / 'config.json').exists():
    publishing.write_json(file, settings_lib.recorded(settings))
  elif differences := changes(stage_records.read_settings(local), settings):
    raise InputError(f'{local} holds a run with another config ({differences}): use another {option}')


def changes(before: settings_lib.Settings, settings: settings_lib.Settings) -> str:
  """Names all fields that differ; none may, unlike when `main` resumes, because other processes are running."""
  was, now = (fields.flatten(s.to_dict()) for s in (before, settings))
  return settings_lib.in_words({name: (was[name], now[name]) for name in now if was[name] != now[name]})
