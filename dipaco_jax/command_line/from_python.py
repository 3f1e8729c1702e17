"""`dipaco_jax.train`: the command `main` as a function, in a program that continues afterwards.

It leaves the program as it was: its handlers of signals and of logs, JAX's configuration, no thread, no lock, no flag.
"""

import contextlib
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from dipaco_jax.command_line import command, config_file
from dipaco_jax.config import extension, settings as settings_lib
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import display, processes, stopping
from dipaco_jax.storage import user_modules
from dipaco_jax.training import devices

Config: TypeAlias = str | os.PathLike | settings_lib.Settings | ConfigDict | Mapping[str, Any]

GOES_ON = 'stopped; make the same call to resume'

_imported: dict[str, str] = {}  # sha256 of the modules of users, as they were when a run imported them
_one = threading.Lock()  # a run has all devices, the display and JAX's configuration to itself


def train(
  config: Config,
  workdir: str | os.PathLike,
  overrides: Mapping[str, Any] | None = None,
  *,
  reuse: str | os.PathLike | None = None,
  scratch: str | os.PathLike | None = None,
  progress: bool = True,
) -> dict[str, Any]:
  """Trains a DiPaCo from text to report, as the command does; returns what report.json holds.

  The same call again continues the run from where it stopped, for any reason; for a finished run, it returns the
  report.

  Args:
    config: as --config names it ('tiny', 'my/config.py:variant', 'upcycle:MODEL'); or Settings; or a dict or ConfigDict
      of their sections, in which missing fields have their defaults.
    workdir: folder of the run, created if it does not exist, or s3://BUCKET/... or gs://BUCKET/...
    overrides: fields of the config to change, as {'train.phases': 8, 'grid': {'a': 4}}; text is read as on the command
      line.
    reuse: another run, to reuse its base model and shards if the settings are equal.
    scratch: local folder for a run in a bucket; by default in the user's cache.
    progress: whether to show progress on stderr. Warnings are always logged.

  Raises:
    InputError: the config or the text is wrong; raised before any work if possible. The message names the fix.
    Diverged: training cannot continue; earlier checkpoints remain.
    Unavailable: the disk is full, gone or read-only, text cannot be read for now, or the bucket cannot be written.
    KeyboardInterrupt: Ctrl-C, in the main thread; training is saved. A second one does not wait for that.
    SystemExit: SIGTERM or SIGHUP, in the main thread; the same.
  """
  with _alone():
    place = os.fspath(workdir)
    command.check_workdir(place, scratch)
    command.check_reuse(reuse)
    settings = _settings(config, place, overrides or {})
    with _shown(progress), _logged():
      return _train(settings, place, _call(config, place, overrides), reuse, scratch)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
  """Lets one run at a time train in this process; raises InputError if another one does."""
  if processes.joined():
    raise InputError('train is for one process: of several, each runs python -m dipaco_jax.main --distributed')
  if not _one.acquire(blocking=False):
    raise InputError('another run trains in this process: wait for it, or train in a process of its own')
  try:
    yield
  finally:
    devices.restore_libtpu()
    _one.release()


def _train(
  settings: settings_lib.Settings,
  workdir: str,
  call: str,
  reuse: str | os.PathLike | None,
  scratch: str | os.PathLike | None,
) -> dict[str, Any]:
  with stopping.interrupting(GOES_ON) as signals:
    devices.hide_unused_libtpu()
    with display.doing('loading JAX', tells=False):
      from dipaco_jax.command_line import whole_run
      from dipaco_jax.training import compilation_cache

    _import_again(settings)
    with compilation_cache.set_back():
      return whole_run.train(whole_run.Call(workdir, call, reuse, scratch), settings, signals)


def _settings(config: Config, workdir: str, overrides: Mapping[str, Any]) -> settings_lib.Settings:
  if isinstance(config, (str, os.PathLike)):
    c = config_file.load(*config_file.find(os.fspath(config)), workdir)
  elif isinstance(config, (settings_lib.Settings, ConfigDict)):
    c = ConfigDict(config.to_dict(), allow_dotted_keys=True)
  elif isinstance(config, Mapping):
    c = ConfigDict({str(name): x for name, x in config.items()}, allow_dotted_keys=True)
  else:
    raise InputError(f'config is of type {type(config).__name__}: give the name of a config, Settings, or a dict')
  changes = [(str(name), config_file.from_python(str(name), value)) for name, value in overrides.items()]
  importlib.invalidate_caches()  # a notebook may just have written a module
  return user_modules.admit_own(settings_lib.from_dict(config_file.change(c, changes, workdir)), workdir)


def _import_again(settings: settings_lib.Settings):
  """Imports user modules again that have changed since their import, because a run records their present source."""
  changed = [name for name, sha256 in settings.extensions if name in sys.modules and _imported.get(name) != sha256]
  for name in changed:
    del sys.modules[name]
  if changed:
    from dipaco_jax.models import block, decoding
    from dipaco_jax.pipeline import features

    for by_config in (extension.load, block.blocks, decoding.position_axes, features.program):
      by_config.cache_clear()
    sys.modules['jax'].clear_caches()
  _imported.update(settings.extensions)


def _call(config: Config, workdir: str, overrides: Mapping[str, Any] | None) -> str:
  """Returns the call, for command.txt: the config itself is in config.json."""
  named = repr(os.fspath(config)) if isinstance(config, (str, os.PathLike)) else f'{type(config).__name__}(...)'
  arguments = [named, repr(workdir), *([repr(dict(overrides))] if overrides else [])]
  return printable.redacted(f'dipaco_jax.train({", ".join(arguments)})')


@contextlib.contextmanager
def _shown(progress: bool) -> Iterator[None]:
  before, display.STDERR.silent = display.STDERR.silent, not progress
  try:
    yield
  finally:
    display.STDERR.silent = before


@contextlib.contextmanager
def _logged() -> Iterator[None]:
  """Silences the libraries' logs; warnings go to the program's handlers, or to stderr where it has none."""
  root = logging.getLogger()
  handler = command.log_handler()
  set_back = command.silence_libraries()
  if not root.handlers:  # else logging would add one, for good
    root.addHandler(handler)
  try:
    yield
  finally:
    root.removeHandler(handler)
    set_back()
