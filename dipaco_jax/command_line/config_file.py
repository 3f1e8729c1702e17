"""A config: a Python file with get_config(), and the changes of the command line, --config.FIELD=VALUE.

An error in either is one line that names the file and line, or the option, and the fix.
"""

import ast
import contextlib
import difflib
import inspect
import pathlib
import re
import runpy
import traceback
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from ml_collections import ConfigDict

from dipaco_jax.config import fields, settings
from dipaco_jax.core.errors import InputError

SHIPPED = pathlib.Path(__file__).parent.parent / 'configs'  # in a clone a link, so that wheels take them along
# Fields and their defaults, in order; the first two stand alone, before all sections.
FIELDS = {'seed': 0, 'grid': {}} | fields.flatten(settings.Settings().to_dict())
ABOUT = dict(fields.fields(settings.Settings))
TRUTH = {'true': True, '1': True, 'yes': True, 'false': False, '0': False, 'no': False}


class Override(typing.NamedTuple):
  """A field of the config, and its value as typed."""

  name: str
  text: str


def shipped() -> list[str]:
  return sorted(file.stem for file in SHIPPED.glob('*.py'))


def split(argv: Sequence[str]) -> tuple[list[str], list[Override]]:
  """Splits arguments into others, and --config.FIELD=VALUE, --config.FIELD VALUE or --[no]config.SWITCH."""
  rest = []
  overrides = []
  left = list(argv)
  while left:
    arg = left.pop(0)
    match = re.fullmatch(r'--?(no)?config\.([^=]*)(?:=(.*))?', arg, re.DOTALL)
    if not match:
      rest.append(arg)
      continue
    no, name, text = match.groups()
    if text is None and kind_of(name) is bool:
      text = str(not no)
    elif text is None and left and not left[0].startswith('--'):
      text = left.pop(0)
    if text is None or (no and kind_of(name) is not bool):
      raise InputError(f'--config.{name}: give a value, such as --config.{name}={example(name)}')
    overrides.append(Override(name, text))
  return rest, overrides


def read(named: str, overrides: Sequence[Override] = (), workdir: str = '') -> dict[str, Any]:
  """Reads a config with its overrides; returns fields by section, for `settings.from_dict`.

  What it leaves open of a model that the grid starts from is filled in.

  Args:
    named: a file, or the name of a config of `shipped`; a variant may follow, behind a colon.
    overrides: applied in order; several of one tuple of strings, as data.train, are joined.
    workdir: of the run, which may have begun.
  """
  c = load(*find(named), workdir)
  return change(c, [(name, value_of(name, text)) for name, text in _joined(overrides)], workdir)


def change(c: ConfigDict, changes: Iterable[tuple[str, Any]], workdir: str = '') -> dict[str, Any]:
  """Returns a config with fields changed, and the rest as `read`; `c` itself is changed."""
  given = set[str]()
  with c.ignore_type(), c.unlocked():
    for name, value in changes:
      *sections, last = name.split('.')
      inside = c
      for section in sections:
        if section not in inside:
          inside[section] = ConfigDict()
        inside = inside[section]
      if sections == ['grid'] and last not in inside:
        raise InputError(_no_axis(last, value, inside))
      inside[last] = ConfigDict(value, allow_dotted_keys=True) if isinstance(value, dict) else value  # names of sources
      given.add(name)
  values = c.to_dict()
  if values.get('pretrain', {}).get('init'):
    from dipaco_jax.huggingface import pretrained

    for section in ('model', 'tokenizer'):
      values.setdefault(section, {})
    pretrained.fill(values, given, workdir)
  _check_tokenizer(values.get('tokenizer', {}), given)
  return values


def _check_tokenizer(tokenizer: Any, given: set[str]):
  """Raises InputError if the command line names a tokenizer and, beside it, how to train one."""
  trained = sorted(name for name in given if name.startswith('tokenizer.') and name != 'tokenizer.model_file')
  if isinstance(tokenizer, dict) and tokenizer.get('model_file') and trained:
    problem = f'is for a tokenizer that is trained, and config.tokenizer.model_file={tokenizer["model_file"]} is given'
    raise InputError(f'config.{trained[0]} {problem}: leave one of the two out')


def find(named: str) -> tuple[pathlib.Path, list[str]]:
  """Returns the config's file, and its variant if one is named. Raises InputError."""
  name, *variant = named.split(':', 1)
  if pathlib.Path(name).is_file():
    return pathlib.Path(name), variant
  if name in shipped():
    return SHIPPED / f'{name}.py', variant
  near, ours = difflib.get_close_matches(pathlib.Path(name).stem, shipped(), 1), ', '.join(shipped())
  fix = f'--config={near[0]} is included in dipaco_jax' if near else f'name a file, or one of {ours}'
  wrong = ' is a folder' if pathlib.Path(name).is_dir() else ': there is no such file'
  raise InputError(f'--config={name}{wrong}; {fix}')


def load(file: pathlib.Path, variant: Sequence[str], workdir: str = '') -> ConfigDict:
  """Runs a config file and returns what its get_config() returns. Raises InputError with the line of an error in it.

  A get_config with a parameter `workdir` gets the run's.
  """
  try:
    get_config = runpy.run_path(str(file), run_name='config_config').get('get_config')  # a file may import a `config`
    if not callable(get_config):
      raise InputError('a config is a Python file with a function get_config(), as docs/configs.md shows')
    signature = inspect.signature(get_config)
    named = {'workdir': workdir} if 'workdir' in signature.parameters else {}
    try:
      signature.bind(*variant, **named)
    except TypeError as e:
      fix = f'it has no variants: leave out :{variant[0]}' if variant else 'name a variant, as --config=FILE:VARIANT'
      raise InputError(f'get_config{signature}: {fix}') from e
    c = get_config(*variant, **named)
    if c is None:
      raise InputError('get_config() returns nothing: end it with `return c`')
    if not isinstance(c, (ConfigDict, dict)):
      kind = type(c).__name__
      raise InputError(f'get_config() returns {kind}; it should return ConfigDict(settings.Settings().to_dict())')
    return c if isinstance(c, ConfigDict) else ConfigDict(c)
  except Exception as e:  # a config is anybody's program
    raise InputError(f'--config={file}{_line(e, str(file))}: {_message_of(e)}') from e


def _line(error: Exception, file: str) -> str:
  if isinstance(error, SyntaxError) and error.filename == file:
    return f', line {error.lineno}'
  lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
  return f', line {lines[-1]}' if lines else ''


def _message_of(error: Exception) -> str:
  """Returns the message of an error of a config file; ConfigDict's messages are reworded."""
  said = ' '.join(str(error).split())
  if match := re.match(r"Could not override field '(\w+)' \(.*?\)\. (.*) is of original type", said):
    return _wrong_type(*match.groups())
  if match := re.search(r'Did you mean "(.*)" instead of "(.*)"', said):
    return f'{match[2]!r}: there is no such field; the nearest is {match[1]!r}'
  plain = type(error) in (ValueError, InputError) or isinstance(error, SyntaxError)
  return (getattr(error, 'msg', '') or said) if plain else f'{type(error).__name__}: {said}'


def _wrong_type(last: str, value: str) -> str:
  """Says what type a field should have; ConfigDict gives its name without the section, so it may be one of several."""
  kinds = {
    fields.describe_kind(name, kind_of(name), ABOUT[name].example) for name in FIELDS if name.split('.')[-1] == last
  }
  fix = f': write {value[:-2]}' if kinds == {'a whole number'} and re.fullmatch(r'\d+\.0', value) else ''
  return f'{last}={value} should be {" or ".join(sorted(kinds)) or "a section, with fields of its own"}{fix}'


def kind_of(name: str) -> Any:
  """Returns the type of a field. Raises InputError that names the nearest if there is none."""
  if name in FIELDS:
    kind: Any = settings.Settings
    for part in name.split('.'):
      kind = typing.get_type_hints(kind)[part]
    return kind
  if name.startswith('grid.'):
    return int
  inside = [field for field in FIELDS if field.startswith(name + '.')]
  if inside:
    raise InputError(f'--config.{name} is a section: name a field of it, as --config.{inside[0]}={example(inside[0])}')
  same = [f'--config.{field}' for field in FIELDS if field.split('.')[-1] == name.split('.')[-1]]
  nearest = same or [f'--config.{difflib.get_close_matches(name, FIELDS, 1, 0)[0]}']
  raise InputError(f'--config.{name}: there is no such field; the nearest is {" or ".join(nearest)}')


def example(name: str) -> str:
  """Returns an example of a field's value, as it is typed on a command line."""
  if name.startswith('grid.'):
    return '4'
  if kind_of(name) in fields.OF_GLOBS:
    return f"'{','.join(ast.literal_eval(ABOUT[name].example))}'"
  return f'"{ABOUT[name].example}"' if ABOUT[name].example else f'{FIELDS[name]}' or 'TEXT'


def value_of(name: str, text: str) -> Any:
  kind = kind_of(name)
  try:
    if kind is str:
      return text
    if kind is bool:
      return TRUTH[text.lower()]
    if kind is float:
      return float(text)
    if kind is int:
      return int(text) if re.fullmatch(r'\s*[-+]?[\d_]+\s*', text) else _to_integer(float(text))
  except (ValueError, KeyError, OverflowError) as e:
    expected = fields.describe_kind(name, kind, ABOUT[name].example if name in ABOUT else '')
    raise InputError(f'--config.{name}={text} should be {expected}') from e
  if kind in fields.OF_GLOBS and text[:1] not in ('(', '[', '{'):
    return tuple(part for part in text.split(',') if part)
  return _literal(name, text)


def from_python(name: str, value: Any) -> Any:
  """Returns the value of a field that a program changes; text is read as it is typed. Raises InputError."""
  kind_of(name)
  return value_of(name, value) if isinstance(value, str) else value


def _to_integer(value: float) -> int:
  if not value.is_integer():
    raise ValueError
  return int(value)


def _literal(name: str, text: str) -> Any:
  """Reads the grid, or a field that is a tuple."""
  with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
    value = ast.literal_eval(text)
    if isinstance(value, dict) and kind_of(name) == fields.MIXABLE:
      return value
    if name != 'grid':
      return tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if isinstance(value, dict) and all(isinstance(axis, str) for axis in value):
      return value
  fix = f'--config.{name}={example(name)}'
  if name == 'grid':
    fix = f'{fix}, or the size of one, as --config.grid.a=4'
    raise InputError(f'--config.grid={text}: give all axes, by the names that config.levels has, as {fix}')
  raise InputError(f'--config.{name}={text}: write it as {fix}')


def _no_axis(axis: str, size: Any, grid: ConfigDict) -> str:
  axes = ', '.join(grid.keys()) or 'none'
  full_grid = {**grid.to_dict(), axis: size}
  problem = f'the axes of this config are {axes}; to have others, give all'
  return f'--config.grid.{axis}: {problem}, as --config.grid="{full_grid}"'


def _joined(overrides: Sequence[Override]) -> list[Override]:
  """Joins the values of a field of globs that were given one by one; of other fields the last counts."""
  joined: dict[str, Override] = {}
  for name, text in overrides:
    before = joined.pop(name, None)
    together = before and before.text and text and kind_of(name) in fields.OF_GLOBS
    joined[name] = Override(name, f'{before.text},{text}' if before and together else text)
  return list(joined.values())
