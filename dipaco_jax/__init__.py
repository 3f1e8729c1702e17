"""DiPaCo and DiLoCo in JAX: one language model trained on many small, scattered islands of accelerators."""

import importlib
import os
import signal
import sys
from typing import Any

__version__ = '0.2.0'

__all__ = [
  'Diverged', 'InputError', 'Settings', 'Unavailable', 'algorithm', 'grid', 'load', 'load_router', 'settings', 'train',
]  # fmt: skip

HOMES = {  # of public names
  'train': 'command_line.from_python',
  'load': 'inference.trained_run',
  'load_router': 'inference.trained_run',
  'Settings': 'config.settings',
  'InputError': 'core.errors',
  'Diverged': 'core.errors',
  'Unavailable': 'core.errors',
}
FILES = {'algorithm': 'algorithm', 'grid': 'algorithm.grid', 'settings': 'config.settings'}

# A command of ours is being loaded: its imports' callbacks would swallow an exception, and it hears signals only later.
IS_MODULE = sys.argv[:1] == ['-m'] and any(arg.split('.')[0] == __name__ for arg in sys.orig_argv)
if IS_MODULE or os.path.basename(sys.argv[0] if sys.argv else '') == 'dipaco':
  signal.signal(signal.SIGINT, signal.SIG_DFL)
if IS_MODULE and not sys.flags.safe_path:
  sys.path.append(sys.path.pop(0))  # the current folder, whose files must not take the place of libraries


def __getattr__(name: str) -> Any:
  """Loads public names at their first use, because most of them import JAX."""
  if name not in __all__:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  if name in HOMES:
    return getattr(importlib.import_module(f'{__name__}.{HOMES[name]}'), name)
  return importlib.import_module(f'{__name__}.{FILES[name]}')


def __dir__() -> list[str]:
  return __all__
