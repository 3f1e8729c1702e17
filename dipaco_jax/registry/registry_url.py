"""The registry that a user names: by an option or, hidden from lists of processes, by the environment or a file."""

import logging
import os
import pathlib

from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError

VARIABLE = 'DIPACO_REGISTRY'
FILE = 'file:'
OF_FOLDER = 'registry.db'  # of a run that names none


def in_folder(folder: pathlib.Path) -> str:
  """Returns the URL of the registry of a run that names none. Raises InputError if the URL would change the path."""
  file = str((folder / OF_FOLDER).absolute())
  if {*'?%'} & {*file}:
    raise InputError(f'{folder}: no registry can be in a folder whose path contains ? or %: use another, or --registry')
  return f'sqlite:///{file}'


def explain_unknown(place: str) -> str:
  """Says what to do where a place has a run of islands that the registry at hand does not know."""
  return (
    f'{place} has a run with another --registry: name that one, or set {VARIABLE}, or use another --workdir; if '
    f'that registry is lost, run `python -m dipaco_jax.registry --workdir={place} rebuild`'
  )


def given(option: str | None, name: str = '--registry') -> str:
  """Returns the URL of the option, else of DIPACO_REGISTRY, else ''; either may be file:PATH of the file with it.

  Raises InputError if there is no such file, or if it contains anything but a URL.
  """
  url = option or os.environ.get(VARIABLE, '').strip()
  if option and printable.redacted(option) != option:
    message = 'anyone who can list the processes of this machine can read the password in --registry: set'
    logging.warning('%s %s, or name a file, --registry=file:PATH', message, VARIABLE)
  if not url.startswith(FILE):
    return url
  try:
    url_in_file = pathlib.Path(url.removeprefix(FILE)).read_text().strip()
  except (OSError, UnicodeDecodeError) as e:
    raise InputError(f'{name}={url}: {getattr(e, "strerror", "it is not UTF-8")}') from e
  if len(url_in_file.split()) != 1:
    raise InputError(f'{name}={url}: the file should have one line, which is the URL')
  return url_in_file
