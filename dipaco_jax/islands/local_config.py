"""The config of a run in its folder on this machine, which is of one run alone."""

import pathlib
from collections.abc import Sequence

from dipaco_jax.config import fields, owners, settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.pipeline import stage_records
from dipaco_jax.storage import publishing


def keep(
  local: pathlib.Path, settings: settings_lib.Settings, option: str = '--workdir', joined: Sequence[str] = ()
):  # fmt: skip
  """Writes config.json unless it is there. Raises InputError if it is of a run with another config.

  Args:
    local: the folder.
    settings: of the run as it began.
    option: which names the folder.
    joined: owners that have joined the run since; the folder's config may have the first of them.
  """
  check(local, settings, option, joined)
  if not (file := local / 'config.json').exists():
    publishing.write_json(file, settings_lib.recorded(settings))


def check(local: pathlib.Path, settings: settings_lib.Settings, option: str = '--workdir', joined: Sequence[str] = ()):
  """Raises InputError if the folder has the config.json of a run with another config; the arguments are `keep`'s."""
  if not (local / 'config.json').exists():
    return
  if differences := differences_of(stage_records.read_settings(local), settings, joined):
    raise InputError(f'{local} holds a run with another config ({differences}): use another {option}')


def differences_of(here: settings_lib.Settings, settings: settings_lib.Settings, joined: Sequence[str]) -> str:
  """Names all fields in which settings differ from those of a run, also as it was after each owner had joined."""
  same = (owners.join(settings, joined[:count]) for count in range(len(joined) + 1))
  return '' if here in same else changes(here, settings)


def changes(before: settings_lib.Settings, settings: settings_lib.Settings) -> str:
  """Names all fields that differ; none may, unlike when `main` resumes, because other processes are running."""
  was, now = (fields.flatten(s.to_dict()) for s in (before, settings))
  return settings_lib.in_words({name: (was[name], now[name]) for name in now if was[name] != now[name]})
