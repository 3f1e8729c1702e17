"""DiPaCo and DiLoCo in JAX: one language model trained on many small, scattered islands of accelerators."""

import signal
import sys
from typing import Any

__version__ = '0.1.0'
__all__ = ['Settings', 'load', 'load_router', 'settings']

# A command of ours is being loaded: its imports' callbacks would swallow an exception, and it hears signals only later.
if sys.argv[:1] == ['-m'] and any(arg.split('.')[0] == __name__ for arg in sys.orig_argv):
  signal.signal(signal.SIGINT, signal.SIG_DFL)


def __getattr__(name: str) -> Any:
  """Loads what is public when it is first asked for: `load` and `load_router` import JAX."""
  if name not in __all__:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  if name in ('settings', 'Settings'):
    from dipaco_jax.core import settings

    return settings if name == 'settings' else settings.Settings
  from dipaco_jax.inference import trained_run

  return getattr(trained_run, name)
