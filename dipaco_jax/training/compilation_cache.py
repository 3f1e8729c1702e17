"""Where JAX keeps compiled programs, so that a resumed run need not compile them again."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

FOLDER, LEAST_S, OTHERS = OPTIONS = (
  'jax_compilation_cache_dir',
  'jax_persistent_cache_min_compile_time_secs',
  'jax_persistent_cache_enable_xla_caches',
)


def keep_in(workdir: pathlib.Path):
  """Keeps compiled programs in the workdir, or where JAX is told to, as by JAX_COMPILATION_CACHE_DIR."""
  if not getattr(jax.config, FOLDER):
    jax.config.update(FOLDER, str((workdir / 'cache').absolute()))
  jax.config.update(LEAST_S, 0.0)
  jax.config.update(OTHERS, 'none')  # else a workdir that was moved compiles anew


@contextlib.contextmanager
def set_back() -> Iterator[None]:
  """Sets JAX's options back after the block, of a program that is not ours."""
  before = {name: getattr(jax.config, name) for name in OPTIONS}
  compilation_cache.reset_cache()  # else it stays where it was first used
  try:
    yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()
