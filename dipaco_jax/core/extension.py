"""Parts of a run that users write: a field that names one of several may name theirs, as 'package.module:name'.

The named function is called with the field's section of the settings, and returns the part: an Optax transformation, a
schedule, a router, a block. It is imported wherever the part is needed, by every command and role. A run records a
digest of each module's source, so that none goes on with another.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import re
import traceback
from collections.abc import Iterator
from typing import Any

from dipaco_jax.core import fields
from dipaco_jax.core.errors import InputError

IMPORTS = (
  '<frozen importlib._bootstrap>',
  '<frozen importlib._bootstrap_external>',
  importlib.__file__,
)  # Python's own


def is_reference(value: Any) -> bool:
  """Returns whether a field's value has the form 'package.module:name'."""
  return isinstance(value, str) and re.fullmatch(r'[^\W\d][\w.]*:[^\W\d]\w*', value) is not None


def module_of(reference: str) -> str:
  """Returns 'package.module' of 'package.module:name'."""
  return reference.partition(':')[0]


def make(name: str, reference: str, section: Any, *more: Any) -> Any:
  """Calls what a field refers to with its section of the settings, and returns what it makes.

  Args:
    name: of the field, as 'outer.optimizer'.
    reference: 'package.module:name'.
    section: of the settings; `more` stands behind it.

  Raises InputError, naming the field, where it cannot be imported or raises anything.
  """
  function = load(name, reference)
  with blaming(name, reference):
    return function(section, *more)


@contextlib.contextmanager
def blaming(name: str, reference: str) -> Iterator[None]:
  """Turns whatever a user's part raises into an InputError that names the field, and the line in their file."""
  try:
    yield
  except InputError:
    raise
  except Exception as e:
    raise InputError(f'config.{name}={reference!r} raises {in_words(e, reference)}') from e


@functools.cache
def load(name: str, reference: str) -> Any:
  """Imports what a field refers to; raises InputError, naming the field."""
  module, _, attribute = reference.partition(':')
  try:
    found = getattr(importlib.import_module(module), attribute, None)
  except Exception as e:
    raise _not_there(name, reference, e) from e
  if not callable(found):
    raise InputError(f'config.{name}={reference!r}: {module} has no function {attribute}')
  return found


def references(settings: Any) -> dict[str, str]:
  """Returns {field: reference} of the fields of a Settings that name a part of the user's, and may not change later."""
  values = fields.flatten(settings.to_dict())
  names = [name for name, field in fields.fields(type(settings)) if field.extensible and not field.may_change]
  return {name: values[name] for name in names if is_reference(values[name])}


def with_digests(settings: Any) -> Any:
  """Returns the settings with the digests of the modules that they name; raises InputError where one is not there."""
  digests = {module: source_digest(*at) for module, at in _modules(settings).items()}
  return dataclasses.replace(settings, extensions=tuple(sorted(digests.items())))


def source_digest(name: str, reference: str) -> str:
  """Returns the sha256 of the source of a reference's module, of this one file; raises InputError, naming the field."""
  module = module_of(reference)
  try:
    spec = importlib.util.find_spec(module)
    source = spec.loader.get_source(module) if spec else None  # type: ignore[union-attr]
  except Exception as e:
    raise _not_there(name, reference, e) from e
  if source is None:
    raise _not_there(name, reference, ImportError(f'no source of {module} is found'))
  return hashlib.sha256(source.encode()).hexdigest()


def changed(settings: Any) -> list[str]:
  """Lists the modules whose source is there, and is not what the settings of a run have recorded."""
  found = []
  for module, at in _modules(settings).items():
    with contextlib.suppress(InputError):
      if source_digest(*at) != dict(settings.extensions).get(module):
        found.append(module)
  return found


def _modules(settings: Any) -> dict[str, tuple[str, str]]:
  """Returns {module: (field, reference)} of the modules that fields name."""
  return {module_of(reference): (name, reference) for name, reference in references(settings).items()}


def _not_there(name: str, reference: str, e: Exception) -> InputError:
  words = 'run this where Python finds it: in its folder, or with its folder in PYTHONPATH'
  return InputError(f'config.{name}={reference!r} cannot be imported, {in_words(e)}; {words}')


def in_words(e: Exception, reference: str = '') -> str:
  """Says what an error is and where: in the file of a reference's module, if it came through there."""
  frames: list[Any] = [f for f in traceback.extract_tb(e.__traceback__) if f.filename not in IMPORTS]
  own = importlib.import_module(module_of(reference)).__file__ if reference else None
  [*_, last] = [frame for frame in frames if frame.filename == own] or frames or [None]
  where = f' (line {last.lineno} of {last.filename})' if last and last.filename != __file__ else ''
  return f'{type(e).__name__}: {e}{where}'
