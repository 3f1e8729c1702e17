"""Where JAX keeps compiled programs, so that a resumed run need not compile them again.

A compiled program is native code that JAX executes without further checks. So it belongs to the user and the kind of
machine, never to a workdir or a bucket, which may be somebody else's.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import platform
import stat
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from dipaco_jax.storage import files

FOLDER, LEAST_S, OTHERS = OPTIONS = (
  'jax_compilation_cache_dir',
  'jax_persistent_cache_min_compile_time_secs',
  'jax_persistent_cache_enable_xla_caches',
)
OF_CPU = ('model name', 'flags', 'CPU part', 'Features')  # lines of /proc/cpuinfo that decide which code a CPU runs


def keep(least_s: float = 0.0):
  """Keeps programs that take `least_s` to compile in the user's cache, or where JAX_COMPILATION_CACHE_DIR says.

  Logs a warning, and keeps nothing, where another user can write into the user's cache.
  """
  if not getattr(jax.config, FOLDER):
    folder = user_folder()
    if why := make_private(folder):
      logging.warning('compiled programs are not cached: %s; JAX_COMPILATION_CACHE_DIR can name another folder', why)
      return
    jax.config.update(FOLDER, str(folder))
  jax.config.update(LEAST_S, least_s)
  jax.config.update(OTHERS, 'none')  # else the names of programs depend on where the folder is


def user_folder() -> pathlib.Path:
  """Returns the folder of this user's compiled programs for this kind of CPU; a home may be shared by machines."""
  try:
    lines = {line for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines() if line.startswith(OF_CPU)}
  except OSError:
    lines = set()
  kind = hashlib.sha256('\n'.join(sorted({platform.machine(), *lines})).encode()).hexdigest()
  return files.user_cache() / f'xla-{kind[:12]}'


def make_private(folder: pathlib.Path) -> str:
  """Makes a folder that only this user can write into; returns why it is not one, or ''."""
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
      folder.mkdir(mode=0o700)
    real = folder.resolve()
    status = real.stat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
      return f'{folder} should be a folder that only this user can write to: remove it'
    for parent in real.parents:
      if (mode := parent.stat().st_mode) & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return f'everyone can replace the contents of {parent}'
  except OSError as e:
    return f'{folder}: {e.strerror}'
  return ''


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
