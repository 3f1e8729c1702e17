"""How a command starts and ends: flags, then status 0 when done, 2 with one clear line for a wrong flag or input."""

import difflib
import errno
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags

from dipaco_jax import checks, display, plain, processes, settings, stopping

TRY_AGAIN = 75  # exit status where the disk is full
DIVERGED = 65  # where training cannot go on
AFTER_DIVERGENCE = (
  'the same command goes on from the last checkpoint, which is from before: that helps where a machine was at fault; '
  'else use another --workdir and a lower learning rate'
)


def run(main: Callable[[], int | None]):
  """Parses flags and runs `main`; a ValueError from it is the user's to mend. Define the flags first."""

  def parse(argv: list[str]) -> list[str]:
    try:
      rest = flags.FLAGS(argv)
    except flags.Error as e:
      fail(str(e))
    except SystemExit:  # --help was printed, which absl takes for a failure
      sys.exit(0)
    if rest[1:]:
      fail(f'{" ".join(rest[1:])}: every option starts with --')
    return rest

  def guarded(argv: list[str]) -> int | None:
    del argv
    try:
      return main()
    except ValueError as e:
      fail(str(e))
    except OSError as e:
      if e.errno is not None:
        raise
      fail(str(e))  # in our words: an object of a run is missing or corrupt

  display.STDERR.only_terminal = True  # their output goes to other programs
  with processes.ending(), stopping.listening():
    app.run(guarded, flags_parser=parse)


def path_named(words: str) -> int | tuple[int, ...]:
  """What --path says: a path's number, or its coordinates."""
  parts = words.split(',')
  if not all(part.strip().isdecimal() for part in parts):
    raise ValueError(f'--path={words}: give its number, as 3, or its coordinates, as 1,0')
  return tuple(map(int, parts)) if len(parts) > 1 else int(words)


def quiet():
  """Keeps the libraries' chatter off the display; our own warnings stay."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  from absl import logging as absl_logging

  absl_logging.set_verbosity(absl_logging.FATAL)  # Orbax logs the errors that it raises
  logging.getLogger('jax').setLevel(logging.ERROR)
  logging.basicConfig(level=logging.WARNING, force=True)
  for handler in logging.getLogger().handlers:
    handler.setFormatter(Plain('dipaco_jax: %(message)s'))


class Plain(logging.Formatter):
  """What is said of text from outside obeys nothing that stands in it, and tells no passwords."""

  def format(self, record: logging.LogRecord) -> str:
    return display.STDERR.cleared + plain.redacted(plain.text(super().format(record)))


def keep_programs():
  """Compiled programs of commands that may not write into a workdir: in the user's cache, unless JAX is told where."""
  import jax

  if not os.environ.get('JAX_COMPILATION_CACHE_DIR'):
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
    jax.config.update('jax_compilation_cache_dir', os.path.join(cache, 'dipaco_jax'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)


def fail(words: str, status: int = 2) -> NoReturn:
  """One line on stderr, and out."""
  stopping.say(plain.redacted(plain.text(words)))
  sys.exit(status)


def causes(error: BaseException) -> list[BaseException]:
  """An error, what it was raised from, and so on."""
  found = [error]
  while (cause := found[-1].__cause__ or found[-1].__context__) and cause not in found:
    found.append(cause)
  return found


def disk_is_full(error: BaseException) -> bool:
  """Whether a full disk is behind an error; TensorStore says so in words only."""
  full = (errno.ENOSPC, errno.EDQUOT)
  words = [os.strerror(number) for number in full]
  return any(getattr(e, 'errno', None) in full or any(w in str(e) for w in words) for e in causes(error))


def explain(error: BaseException, argv: Sequence[str]) -> str:
  """Why the flags or the config file in `argv` are refused, in one line; the file's own errors with their place."""
  file = _config_file(argv)
  if file is not None and not os.path.isfile(file):
    return f'--config={file}: there is no such file; name one, for instance configs/tiny.py'
  for cause in reversed(causes(error)):
    lines = [frame.lineno for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == file]
    if isinstance(cause, SyntaxError) and cause.filename and os.path.samefile(cause.filename, file or ''):
      return f'--config={file}, line {cause.lineno}: {cause.msg}'
    if lines:
      return f'--config={file}, line {lines[-1]}: {_words(cause)}'
  where = '' if isinstance(error, (ValueError, flags.Error)) else f'--config={file}: '
  return _unknown_override(argv) or where + _words(error)


def _config_file(argv: Sequence[str]) -> str | None:
  """What --config names, without its variant."""
  for arg, after in zip(argv, [*argv[1:], ''], strict=True):
    if match := re.fullmatch('--?config(=(.*))?', arg):
      return (match[2] if match[1] else after).split(':')[0]
  return None


def _unknown_override(argv: Sequence[str]) -> str | None:
  """A --config.field=value whose field is not there, and the nearest that is."""
  fields = checks.flatten(settings.Settings().to_dict())
  for name in re.findall(r'^--?(?:no)?config\.([\w.]+)', '\n'.join(argv), re.MULTILINE):
    if name.startswith('grid.'):
      return f'--config.{name}: this config has no such axis; write config.grid into a config file of your own'
    if name not in fields:
      nearest = difflib.get_close_matches(name, fields, 1, 0)[0]
      return f'--config.{name}: there is no such field; the nearest is --config.{nearest}'
  return None


def _words(error: BaseException) -> str:
  """What an error says, in one line; its type where that is needed to understand it."""
  said = ' '.join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
  return said if isinstance(error, (ValueError, flags.Error)) else f'{type(error).__name__}: {said}'
