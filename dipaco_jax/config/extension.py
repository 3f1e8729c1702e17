"""Parts of a run that users write: a field that names one of several may name theirs, as 'package.module:name'.

The named function is called with the field's section of the settings, and returns the part: an Optax transformation, a
schedule, a router, a block. Nothing is imported here: a module can be used once it is admitted, which
storage/user_modules.py does for modules that the user trusts. The name in a run's config alone imports nothing.
"""

import contextlib
import functools
import re
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from dipaco_jax.config import fields
from dipaco_jax.core.errors import InputError

PACKAGE = __file__.removesuffix('config/extension.py')
_importers: dict[str, Callable[[], ModuleType]] = {}  # of the modules that are admitted


def is_reference(value: Any) -> bool:
  """Returns whether a field's value has the form 'package.module:name'."""
  return isinstance(value, str) and re.fullmatch(r'[^\W\d][\w.]*:[^\W\d]\w*', value) is not None


def module_of(reference: str) -> str:
  """Returns 'package.module' of 'package.module:name'."""
  return reference.partition(':')[0]


def admit(module: str, importer: Callable[[], ModuleType]) -> None:
  """Lets fields refer to a module, which `importer` imports when a part of it is first needed."""
  _importers[module] = importer


def is_admitted(module: str) -> bool:
  """Returns whether fields may refer to a module."""
  return module in _importers


def make(name: str, reference: str, section: Any, *more: Any) -> Any:
  """Calls what a field refers to with its section of the settings, and returns what it makes.

  Args:
    name: of the field, as 'outer.optimizer'.
    reference: 'package.module:name'.
    section: of the settings; `more` stands behind it.

  Raises InputError, naming the field, if it is not admitted, cannot be imported or raises anything.
  """
  function = load(name, reference)
  with blaming(name, reference):
    return function(section, *more)


@contextlib.contextmanager
def blaming(name: str, reference: str) -> Iterator[None]:
  """Turns errors of a user's part into an InputError that names the field, and the line in the user's file."""
  try:
    yield
  except InputError:
    raise
  except Exception as e:
    own = _importers[module_of(reference)]().__file__
    raise InputError(f'config.{name}={reference!r} raises {in_words(e, own)}') from e


@functools.cache
def load(name: str, reference: str) -> Any:
  """Returns what a field refers to, its module imported; raises InputError, naming the field."""
  module, _, attribute = reference.partition(':')
  if not is_admitted(module):
    raise untrusted(name, reference)
  try:
    part = getattr(_importers[module](), attribute, None)
  except Exception as e:
    raise not_importable(name, reference, e) from e
  if not callable(part):
    raise InputError(f'config.{name}={reference!r}: {module} has no function {attribute}')
  return part


def references(settings: Any) -> dict[str, str]:
  """Returns {field: reference} of the fields of a Settings that name a part of the user's, and may not change later."""
  values = fields.flatten(settings.to_dict())
  names = [name for name, field in fields.fields(type(settings)) if field.extensible and not field.may_change]
  return {name: values[name] for name in names if is_reference(values[name])}


def untrusted(name: str, reference: str, where: str = '') -> InputError:
  """Returns the error of a module that nobody trusts; `where` says which file it is."""
  module = module_of(reference)
  return InputError(
    f'config.{name}={reference!r} of this run would execute the code of {where or f"the module {module}"}, which this '
    f'command does not name: read that code, and add --trust_modules={module} (in Python, trust_modules) to allow it'
  )


def not_importable(name: str, reference: str, e: Exception) -> InputError:
  """Returns the error of a module that cannot be imported."""
  fix = 'run this where Python finds it: in its folder, or with its folder in PYTHONPATH'
  return InputError(f'config.{name}={reference!r} cannot be imported, {in_words(e)}; {fix}')


def in_words(e: Exception, own: str | None = None) -> str:
  """Says what an error is and where: in the file `own`, if it came through that, else in the last file of others."""
  frames: list[Any] = [f for f in traceback.extract_tb(e.__traceback__) if 'importlib' not in f.filename]
  inside = [f for f in frames if f.filename == own] or [f for f in frames if not f.filename.startswith(PACKAGE)]
  where = f' (line {inside[-1].lineno} of {inside[-1].filename})' if inside else ''
  return f'{type(e).__name__}: {e}{where}'
