"""DiPaCo and DiLoCo in JAX: one language model trained on many small, scattered islands of accelerators."""

import signal
import sys
from typing import Any

__version__ = '0.1.0'
__all__ = ['load', 'load_router']

# A command of ours is being loaded: its imports' callbacks would swallow an exception, and it hears signals only later.
if sys.argv[:1] == ['-m'] and any(arg.split('.')[0] == __name__ for arg in sys.orig_argv):
  signal.signal(signal.SIGINT, signal.SIG_DFL)


def __getattr__(name: str) -> Any:
  """What `trained` has; only now, as it loads JAX."""
  if name not in __all__:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  from dipaco_jax.inference import trained_run

  return getattr(trained_run, name)
