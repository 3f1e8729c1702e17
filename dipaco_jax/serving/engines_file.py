"""engines.json: which engines serve which paths. It is read and checked before any work.

    {"paths": {"0": ["http://10.0.0.1:8000/v1", {"url": "http://10.0.0.2:8000/v1", "model": "p0"}], "1": [...]},
     "fallback": "nearest"}

An engine is the base URL of its API, or an object: `model` is its name there, else it is the only model that the engine
lists, or NAME/path-N as our server has it; `api_key_env` is the environment variable that holds its key. With
"fallback": "nearest", a text whose path has no engine that answers goes to the best of those paths that have one.
"""

import re
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

from dipaco_jax.core import json_text
from dipaco_jax.core.errors import InputError

FIELDS = ('url', 'model', 'api_key_env')
EXAMPLE = '{"paths": {"0": ["http://10.0.0.1:8000/v1"], ...}}'


class Engine(NamedTuple):
  """Where an engine is, and which of its models is the path."""

  path: int
  url: str  # of its API, without a slash at the end
  model: str  # '': as it lists
  api_key: str  # '': none


class Engines(NamedTuple):
  all: tuple[Engine, ...]
  nearest: bool  # a path without one is replaced by the nearest that has one


def parse(data: bytes, option: str, environ: Mapping[str, str]) -> Engines:
  """Parses and checks a file; raises InputError. `option` is what named it."""
  try:
    content = json_text.parse(data, _without_twins)
  except ValueError as e:
    raise InputError(f'{option} is not JSON: {" ".join(str(e).split())}') from e
  if not isinstance(content, dict) or not isinstance(paths := content.get('paths'), dict) or not paths:
    raise InputError(f'{option} should be {EXAMPLE}')
  if odd := sorted(content.keys() - {'paths', 'fallback'}):
    raise InputError(f'{option}: unknown key {odd[0]!r}; the keys are "paths" and "fallback"')
  if content.get('fallback') not in (None, 'nearest'):
    raise InputError(f'{option}: fallback={content["fallback"]!r} should be "nearest", or left out')
  engines: list[Engine] = []
  for name, listed in paths.items():
    if not re.fullmatch('0|[1-9][0-9]{0,8}', name):
      raise InputError(f'{option}: paths.{name} should be the number of a path, as "0"')
    if not isinstance(listed, list) or not listed:
      raise InputError(f'{option}: paths.{name} should be a list of engines, as ["http://10.0.0.1:8000/v1"]')
    for i, one in enumerate(listed):
      engine = _engine(one, int(name), f'{option}: paths.{name}[{i}]', environ)
      if engine in engines:
        raise InputError(f'{option}: paths.{name}[{i}] is listed twice: leave out one of them')
      engines.append(engine)
  return Engines(tuple(engines), content.get('fallback') == 'nearest')


def check_paths(engines: Engines, num_paths: int, option: str):
  """Raises InputError if an engine is of no path of the run, or a path has none and no other may replace it."""
  served_paths = {engine.path for engine in engines.all}
  if odd := sorted(path for path in served_paths if path >= num_paths):
    raise InputError(f'{option}: paths.{odd[0]}: the paths of this run are 0 to {num_paths - 1}')
  if (missing := sorted({*range(num_paths)} - served_paths)) and not engines.nearest:
    problem = f'path {missing[0]} has no engine' + (f', and {len(missing) - 1} more have none' if missing[1:] else '')
    raise InputError(
      f'{option}: {problem}: name one, or set "fallback": "nearest" to take the nearest path that has one'
    )


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  content = dict(pairs)
  if len(content) < len(pairs):
    raise ValueError(f'{next(k for k, _ in pairs if [p[0] for p in pairs].count(k) > 1)!r} occurs twice')
  return content


def _engine(one: Any, path: int, where: str, environ: Mapping[str, str]) -> Engine:
  fields = {'url': one} if isinstance(one, str) else one
  if not isinstance(fields, dict) or not all(isinstance(x, str) and x for x in fields.values()):
    raise InputError(f'{where} should be a URL, or an object of {", ".join(FIELDS)}, which are strings')
  if odd := sorted(fields.keys() - {*FIELDS}):
    raise InputError(f'{where}: unknown key {odd[0]!r}; the keys are {", ".join(FIELDS)}')
  name = fields.get('api_key_env', '')
  if name and not environ.get(name):
    raise InputError(f'{where}: api_key_env={name}: there is no {name} in the environment: set it to the key')
  key = read_key(environ, name, f'{where}: api_key_env={name}') if name else ''
  return Engine(path, _url(fields.get('url'), where), fields.get('model', ''), key)


def read_key(environ: Mapping[str, str], name: str, where: str) -> str:
  """Returns the key in an environment variable, without the newlines that files end in, or '' if it is not set.

  Raises InputError if a header cannot have it.
  """
  given = environ.get(name, '')
  key = given.rstrip('\r\n')
  if given and not re.fullmatch(r'[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?', key):
    raise InputError(
      f'{where}: its value is empty, begins or ends with a space, or has a character that is not allowed in a header: '
      'use printable ASCII characters'
    )
  return key


def _url(url: str | None, where: str) -> str:
  if not url:
    raise InputError(f'{where}: url is missing')
  try:
    parts = urllib.parse.urlsplit(url)
    has_host, has_port = bool(parts.hostname), parts.port != 0
  except ValueError:  # of a bracket or a port
    raise InputError(f'{where}: {url!r} should be a URL, as http://10.0.0.1:8000/v1') from None
  if not (re.fullmatch(r'https?://[\x21-\x7e]+', url) and has_host and has_port) or parts.query or parts.fragment:
    raise InputError(f'{where}: {url!r} should be a URL, as http://10.0.0.1:8000/v1')
  if parts.username is not None:
    raise InputError(f'{where}: a URL must not contain a password: name the key with api_key_env')
  if not parts.path.strip('/'):
    raise InputError(f'{where}: {url!r} should be the base of its API, mostly {url.rstrip("/")}/v1')
  return url.rstrip('/')
