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
import traceback
from collections.abc import Iterator
from typing import Any

from dipaco_jax.core import fields
from dipaco_jax.core.errors import InputError
from dipaco_jax.core.fields import is_reference as is_reference


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
    raise InputError(f'config.{name}={reference!r} raises {in_words(e)}') from e


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
  module = reference.partition(':')[0]
  try:
    spec = importlib.util.find_spec(module)
    source = spec.loader.get_source(module) if spec else None  # type: ignore[union-attr]
  except Exception as e:
    raise _not_there(name, reference, e) from e
  if source is None:
    why = ImportError(f'no source of {module} is found')
    raise _not_there(name, reference, why)
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
  return {reference.partition(':')[0]: (name, reference) for name, reference in references(settings).items()}


def _not_there(name: str, reference: str, e: Exception) -> InputError:
  words = 'run this where Python finds it: in its folder, or with its folder in PYTHONPATH'
  return InputError(f'config.{name}={reference!r} cannot be imported, {in_words(e)}; {words}')


def in_words(e: Exception) -> str:
  """Says what an error is and, in the user's own file, where."""
  [*_, last] = traceback.extract_tb(e.__traceback__) or [None]
  where = f' (line {last.lineno} of {last.filename})' if last and last.filename != __file__ else ''
  return f'{type(e).__name__}: {e}{where}'
