"""DiPaCo and DiLoCo in JAX: one language model trained on many small, scattered islands of accelerators."""

from typing import Any

__version__ = '0.1.0'
__all__ = ['load', 'load_router']


def __getattr__(name: str) -> Any:
  """What `trained` has; only now, as it loads JAX."""
  if name not in __all__:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  from dipaco_jax import trained

  return getattr(trained, name)
