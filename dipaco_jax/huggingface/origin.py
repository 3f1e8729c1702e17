"""Where a base model comes from: its name and license, for the cards of models that are trained from it."""

import contextlib
import posixpath
import re

from dipaco_jax.core import json_text
from dipaco_jax.core.errors import InputError, Unavailable
from dipaco_jax.storage import remote_files

HUB_NAME = r'[A-Za-z0-9][\w.-]*/[\w.-]+'
NOTES = '_name_or_path', 'name_or_path', 'model_name_or_path', '_model_name_or_path'  # keys of config.json
LICENSES = (  # text of a LICENSE file -> identifier on the Hub
  (r'Apache License\s+Version 2\.0', 'apache-2.0'),
  (r'MIT License', 'mit'),
  (r'Gemma Terms of Use', 'gemma'),
)
MOST_BYTES = 200_000  # of a card or license that are looked at


def describe(folder: str) -> dict[str, str]:
  """Returns the 'name' of the model in a folder, never a path, and its 'license' where the folder states it."""
  license_name = _license(folder)
  return {'name': _name(folder)} | ({'license': license_name} if license_name else {})


def _name(folder: str) -> str:
  """Returns the name on the Hub where it is known, otherwise that of the folder."""
  if folder.startswith(remote_files.HUB):
    return folder.removeprefix(remote_files.HUB)
  notes: dict = {}
  with contextlib.suppress(ValueError):
    notes = json_text.parse(_read(folder, 'config.json') or b'{}')
  named = [notes.get(key) for key in NOTES if isinstance(notes, dict)]
  on_hub = [name for name in named if isinstance(name, str) and re.fullmatch(HUB_NAME, name)]
  return on_hub[0] if on_hub else last_name(folder)


def last_name(path: str) -> str:
  """Returns the last part of a path or URL."""
  return posixpath.basename(path.rstrip('/')) or path


def _license(folder: str) -> str:
  """Returns the identifier of a license from the heading of README.md, or from LICENSE, or '' if it is not known."""
  card = _read(folder, 'README.md').decode(errors='replace')
  heading = re.match(r'---\n(.*?)\n---', card, re.DOTALL)
  stated = re.search(r'^license:[ \t]*[\'"]?([\w.-]+)', heading[1], re.MULTILINE) if heading else None
  if stated:
    return stated[1]
  text = _read(folder, 'LICENSE').decode(errors='replace')
  return next((name for pattern, name in LICENSES if re.search(pattern, text)), '')


def _read(folder: str, name: str) -> bytes:
  """Returns the beginning of a file, b'' where it cannot be read."""
  with contextlib.suppress(OSError, InputError, Unavailable), remote_files.open_file(f'{folder}/{name}') as file:
    return file.read(MOST_BYTES)
  return b''
