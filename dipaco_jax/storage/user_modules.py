"""User modules that a config names: found and read without importing anything, and imported if they are trusted.

A module is code, and a run may be somebody else's. A module is trusted if the command's own config names it
(`admit_own`), or the user names it in --trust_modules (`trust`). `check_run` rejects the modules that a run names
beside these. What is imported is the source that was checked, never bytecode that lies next to it.
"""

import dataclasses
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import pathlib
import pkgutil
import re
import sys
import threading
from collections.abc import Collection, Iterable
from types import ModuleType
from typing import Any

from dipaco_jax.config import extension
from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import object_store

_importing = threading.RLock()  # or another thread would get a module whose source still runs
READERS = ('model.block', 'tokenizer.kind', 'routing.method')  # fields whose parts are needed to use a trained run


def trust(modules: str | Iterable[str]) -> None:
  """Admits modules by name, as --trust_modules lists them, for the rest of this process.

  Args:
    modules: names, or one string of names with commas between them.

  Raises InputError if one is no name of a module.
  """
  for module in modules.split(',') if isinstance(modules, str) else modules:
    if not extension.is_reference(f'{module}:make'):
      raise InputError(f'--trust_modules={module} should be names of Python modules, as my_block,package.module')
    extension.admit(module, functools.partial(import_checked, module))


def admit_own(settings: Any, workdir: str = '') -> Any:
  """Admits the modules that a command's own config names; returns the settings with the digests of their source.

  Raises InputError if a module is not there, or lies in the workdir, whose files are data.
  """
  digests = {}
  for module, (name, reference) in _modules(settings).items():
    digests[module] = sha256 = source_digest(name, reference)
    _check_place(name, reference, workdir)
    extension.admit(module, functools.partial(import_checked, module, sha256))
  trust(name for name in _modules_without_digest(settings) if not extension.is_admitted(name))
  return dataclasses.replace(settings, extensions=tuple(sorted(digests.items())))


def check_run(settings: Any, workdir: str, used: Collection[str] = READERS) -> None:
  """Checks the modules that a run needs before any is imported; raises InputError if one is not trusted.

  Args:
    settings: of the run.
    workdir: of the run; no module in it is imported, trusted or not.
    used: the fields whose parts will be used.
  """
  for name, reference in extension.references(settings).items():
    if name in used:
      if not extension.is_admitted(extension.module_of(reference)):
        raise extension.untrusted(name, reference, _describe_file(extension.module_of(reference)))
      _check_place(name, reference, workdir)


def find_changed(settings: Any) -> list[str]:
  """Lists the modules whose source differs from that recorded in the settings of a run."""
  recorded = dict(settings.extensions)
  sources = {module: read_source(module) for module in _modules(settings)}
  return [module for module, source in sources.items() if source and digest(source) != recorded.get(module)]


def source_digest(name: str, reference: str) -> str:
  """Returns the sha256 of the source of a reference's module, of this one file; raises InputError, naming the field."""
  module = extension.module_of(reference)
  if (source := read_source(module)) is None:
    raise extension.not_importable(name, reference, ImportError(f'no source of {module} is found'))
  return digest(source)


def digest(source: str) -> str:
  """Returns the sha256 of a module's source."""
  return hashlib.sha256(source.encode()).hexdigest()


def import_checked(module: str, sha256: str = '') -> ModuleType:
  """Imports a module from its source.

  Args:
    module: full name of the module, with its packages.
    sha256: of the source that was checked. '' accepts any source.

  Raises ImportError if the source is not the one that was checked, and any error of the module.
  """
  with _importing:
    return sys.modules[module] if module in sys.modules else _import(module, sha256)


def _import(module: str, sha256: str) -> ModuleType:
  package, _, last = module.rpartition('.')
  inside = importlib.import_module(package) if package else None
  spec = importlib.util.find_spec(module)
  source = _read(spec, module)
  if spec is None or source is None:
    raise ModuleNotFoundError(f'No module named {module!r} with a source', name=module)
  if sha256 and digest(source) != sha256:
    raise ImportError(f'{spec.origin} has changed since this command began')
  new_module = importlib.util.module_from_spec(spec)
  sys.modules[module] = new_module
  try:
    exec(compile(source, spec.origin or module, 'exec', dont_inherit=True), new_module.__dict__)
  except BaseException:
    del sys.modules[module]
    raise
  if inside:
    setattr(inside, last, new_module)
  return new_module


def read_source(module: str) -> str | None:
  """Returns the source of a module without importing it, or the packages that it is in; None if there is none."""
  return _read(find_spec(module), module)


def find_spec(module: str) -> importlib.machinery.ModuleSpec | None:
  """Finds a module as importlib.util.find_spec does, without importing the packages that it is in."""
  first, *rest = module.split('.')
  finders = [finder for finder in sys.meta_path if hasattr(finder, 'find_spec')]
  spec = next(filter(None, (finder.find_spec(first, None) for finder in finders)), None)
  for part in rest:
    spec = _find_inside(spec, part) if spec else None
  return spec


def _find_inside(package: importlib.machinery.ModuleSpec, part: str) -> importlib.machinery.ModuleSpec | None:
  """Finds a module of a package; folders without __init__.py are packages of several places."""
  name, places = f'{package.name}.{part}', list[str]()
  for folder in package.submodule_search_locations or ():
    finder = pkgutil.get_importer(folder)
    if (spec := finder.find_spec(name) if finder else None) and spec.loader:
      return spec
    places += spec.submodule_search_locations or () if spec else ()
  package_spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
  package_spec.submodule_search_locations = places
  return package_spec if places else None


def _read(spec: importlib.machinery.ModuleSpec | None, module: str) -> str | None:
  """Returns the source of a module that was found."""
  try:
    return spec.loader.get_source(module) if spec and spec.loader else None  # type: ignore[attr-defined]
  except (ImportError, OSError, UnicodeError, SyntaxError):
    return None


def _check_place(name: str, reference: str, workdir: str):
  """Raises InputError if a module lies in the run's own folder."""
  spec = find_spec(extension.module_of(reference))
  if not workdir or ('://' in workdir and not workdir.startswith('file://')) or not spec or not spec.origin:
    return
  config, file = object_store.open_storage(workdir).local_path('config.json'), pathlib.Path(spec.origin)
  places = file.resolve(), file.parent.resolve()  # the file may be a link that leads out of the run
  if config and any(place.is_relative_to(config.parent) for place in places):
    raise InputError(
      f'config.{name}={reference!r} would execute {spec.origin}, a file inside the run itself: read that code, and '
      'move it to a folder of your own, where Python finds it'
    )


def _describe_file(module: str) -> str:
  """Returns 'FILE (sha256 ...)' of a module; '' if it is not found."""
  spec, source = find_spec(module), read_source(module)
  return f'{spec.origin} (sha256 {digest(source)})' if spec and source is not None else ''


def _modules(settings: Any) -> dict[str, tuple[str, str]]:
  """Returns {module: (field, reference)} of the modules that fields name."""
  references = extension.references(settings)
  return {extension.module_of(reference): (name, reference) for name, reference in references.items()}


def _modules_without_digest(settings: Any) -> list[str]:
  """Lists the imported modules whose digests are not recorded: those of sinks, and of a SeqIO task."""
  sinks = [extension.module_of(sink) for sink in settings.metrics.sinks if extension.is_reference(sink)]
  task = settings.data.module
  return [*sinks, *([task] if re.fullmatch(r'[^\W\d][\w.]*', task) else [])]
