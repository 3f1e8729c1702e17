"""How a command starts and ends: flags, then status 0 when done, 2 with one clear line for a wrong flag or input."""

import contextlib
import difflib
import errno
import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from absl import app, flags

import dipaco_jax
from dipaco_jax.config import fields
from dipaco_jax.core import errors, printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import display, processes, stopping
from dipaco_jax.storage import object_store
from dipaco_jax.training import devices

TRY_AGAIN = stopping.TRY_AGAIN  # exit status: a disk, bucket, text or database is full or away
MOST_BYTES = 1 << 26  # of a text or a list that an option names
DIVERGED = 65  # exit status: training cannot continue
AFTER_DIVERGENCE = (
  'the same command resumes from the last checkpoint before that, which helps if a machine was at fault; '
  'otherwise use another --workdir and a lower learning rate'
)
# Errors of a file that the user can mend.
USER_ERRNOS = (
  errno.ENOENT,
  errno.ENOTDIR,
  errno.EISDIR,
  errno.EACCES,
  errno.EPERM,
  errno.EROFS,
  errno.ENAMETOOLONG,
  errno.ELOOP,
)


def run(main: Callable[[], int | None]):
  """Parses flags and runs `main`; an InputError from it is the user's to mend. Define the flags first."""
  devices.hide_unused_libtpu()

  def parse(argv: list[str]) -> list[str]:
    show_all_flags(argv[0])
    try:
      rest = flags.FLAGS(['--help' if arg == '-h' else arg for arg in argv])
    except flags.Error as e:
      fail(explain(e, {}))
    except SystemExit:  # --help was printed, which absl takes for a failure
      sys.exit(0)
    if rest[1:]:
      fail(f'{rest[1]!r} is not an option: write --name=value, in quotes if it contains spaces')
    return rest

  def guarded(argv: list[str]) -> int | None:
    del argv
    try:
      return main()
    except Exception as e:
      if not (message_and_status := ending(e)):
        raise
      fail(*message_and_status)

  display.STDERR.only_terminal = True  # a command's output may go to another program: progress is for terminals only
  with processes.ending(), stopping.listening():
    if '--version' in sys.argv and 'version' not in flags.FLAGS:  # otherwise it is an error of a run's modules
      print(f'dipaco_jax {dipaco_jax.__version__}')
    else:
      app.run(guarded, flags_parser=parse)


def show_all_flags(program: str):
  """Has --help show the flags that other files of this package define for a command, as well as its own."""
  values = flags.FLAGS
  for file, defined in values.flags_by_module_dict().items():
    if not file.startswith('absl.'):
      for flag in defined:
        values.register_key_flag_for_module(program, flag)


def define_trust():
  """Defines the option for modules outside the package that a run's config may name."""
  about = 'Python modules that the config of the run may import; their code is executed. Separate names by commas.'
  flags.DEFINE_list('trust_modules', [], about)


def ending(e: Exception) -> tuple[str, int] | None:
  """Returns the line and the status with which an error ends a command, or None if that is a traceback."""
  if isinstance(e, InputError):
    return ' '.join(str(e).split()), 2
  if isinstance(e, errors.Unavailable):
    return errors.parting(e), TRY_AGAIN
  if isinstance(e, RuntimeError) and str(e).startswith('Symlink loop'):  # Path.resolve before Python 3.13
    return f'{e}: remove the link, or name another folder', 2
  if not isinstance(e, OSError):
    return None
  if e.errno is None:
    return str(e), 2  # in our words: an object of a run is missing or corrupt
  if errors.disk_is_full(e):
    return f'{e.filename or "the disk"}: {e.strerror}; run it again when there is space', TRY_AGAIN
  if e.filename is None and e.strerror and '://' in e.strerror:
    return e.strerror, 2  # of storage, in our words
  if e.errno in USER_ERRNOS:
    return f'{e.filename2 or e.filename}: {e.strerror}; check its name and permissions', 2
  return None


def check_workdir(workdir: str, scratch: str | os.PathLike | None):
  """Raises InputError if one job cannot keep a run under this name."""
  printable.check_name('--workdir', workdir, 4096)
  if '://' in workdir:
    object_store.open_storage(workdir)
  elif scratch:
    raise InputError(f'--scratch={scratch} is for a --workdir in a bucket: leave it out')


def check_reuse(reuse: str | os.PathLike | None):
  """Raises InputError if there is no run to take stages from."""
  if reuse and not (pathlib.Path(reuse) / 'config.json').is_file():
    raise InputError(f'--reuse={reuse}: there is no run (no config.json); name the directory of one')


@contextlib.contextmanager
def full_disk_told(where: str) -> Iterator[None]:
  """Raises Unavailable, which says where the disk is, where the block fails because it is full."""
  try:
    yield
  except Exception as e:
    if not errors.disk_is_full(e):
      raise
    raise errors.Unavailable(f'the disk of {where} is full; run it again when there is space') from e


def check_out(option: str, file: str | None):
  """Raises InputError, before any work, if the file that an option names cannot be written."""
  if not file:
    return
  path = pathlib.Path(file)
  parent = next(folder for folder in (path.absolute().parent, *path.absolute().parents) if folder.exists())
  if '://' in file or path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
    raise InputError(f'--{option}={file} cannot be written: name a file of this machine, in a folder of yours')


def check_readable(option: str, file: str):
  """Raises InputError if the local file that an option names has no end, as a pipe or a device, or is too large."""
  if not os.path.exists(file) or os.path.isdir(file):
    return  # reading it raises a clear error; or it is in a bucket
  if not os.path.isfile(file):
    raise InputError(f'--{option}={file} is a pipe or a device: write its content to a file, and name that')
  if (size := os.path.getsize(file)) > MOST_BYTES:
    raise InputError(f'--{option}={file} has {size} bytes: name a file of {MOST_BYTES} bytes or less')


def decode_text(data: bytes, option: str) -> str:
  """Returns the text that an option names, as '--file=notes.txt'. Raises InputError if it is not UTF-8."""
  try:
    return data.decode()
  except UnicodeDecodeError as e:
    raise InputError(f'{option} is not UTF-8 ({e.reason} at byte {e.start}): convert it') from e


def check_devices() -> None:
  """Shows the devices, and warns of a fall back to the CPU; raises InputError, in one line, where JAX finds none.

  JAX's own error has many lines, or none.
  """
  import jax

  try:
    jax.devices()
  except (RuntimeError, AssertionError) as e:
    named = os.environ.get('JAX_PLATFORMS', '')
    why = (str(e).splitlines() or ['it has no such platform'])[0].partition(' (set JAX_PLATFORMS')[0]
    fix = 'unset it to use any device, or set it to cpu' if named else 'set JAX_PLATFORMS=cpu to run without it'
    raise InputError(f'JAX_PLATFORMS={named}: JAX has no device: {why}; {fix}') from e
  if processes.is_first():
    devices.show()


def quiet() -> None:
  """Silences the libraries' logs in a process of ours; warnings of this package stay."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  logging.basicConfig(level=logging.WARNING, force=True, handlers=[log_handler()])
  silence_libraries()


def silence_libraries() -> Callable[[], None]:
  """Silences the libraries' logs; returns what sets their levels back."""
  from absl import logging as absl_logging

  verbosity, jax = absl_logging.get_verbosity(), logging.getLogger('jax')
  level = jax.level
  absl_logging.set_verbosity(absl_logging.FATAL)  # Orbax logs the errors that it raises
  jax.setLevel(logging.ERROR)

  def set_back():
    absl_logging.set_verbosity(verbosity)
    jax.setLevel(level)

  return set_back


def log_handler() -> logging.Handler:
  """Returns what writes logs to stderr, as this package's commands have them."""
  handler = logging.StreamHandler()
  handler.setFormatter(Plain('dipaco_jax: %(message)s'))
  return handler


class Plain(logging.Formatter):
  """Formats log records, without control characters of outside text and without passwords."""

  def format(self, record: logging.LogRecord) -> str:
    return display.STDERR.cleared + printable.redacted(printable.text(super().format(record)))


def keep_programs() -> None:
  """Keeps compiled programs in the user's cache, for commands that use a trained run."""
  from dipaco_jax.training import compilation_cache

  compilation_cache.keep(least_s=0.1)


def fail(message: str, status: int = 2) -> NoReturn:
  stopping.say(printable.redacted(printable.text(message)))
  sys.exit(status)


def explain(error: Exception, meant: Mapping[str, str]) -> str:
  """Explains wrong options in one line. `meant` maps names in other programs to the names here."""
  if isinstance(error, flags.UnrecognizedFlagError):
    name = error.flagname
    ours = [flag for flag in flags.FLAGS if not str(flags.FLAGS.find_module_defining_flag(flag)).startswith('absl')]
    near = difflib.get_close_matches(name, ours, 1)
    hint = meant.get(name) or (f'did you mean --{near[0]}?' if near else '--help lists all options')
    return f'--{name}: there is no such option; {hint}'
  if match := re.fullmatch(r'Missing value for flag --?(.*)', str(error)):
    return f'--{match[1]}: give a value, such as --{match[1]}=...'
  if match := re.match(r'flag --([^=]+)=(.*?): ', str(error), re.DOTALL):
    return f'--{match[1]}={match[2]} should be {_describe_parser(flags.FLAGS[match[1]].parser)}'
  return ' '.join(str(error).split())


def _describe_parser(parser: flags.ArgumentParser) -> str:
  if isinstance(parser, flags.EnumParser):
    return ' or '.join(parser.enum_values)
  if isinstance(parser, flags.BooleanParser):
    return fields.PLAIN[bool]
  least = getattr(parser, 'lower_bound', None)
  kind = fields.PLAIN[int if isinstance(parser, flags.IntegerParser) else float]
  return kind if least is None else f'{kind}, {least} or more'


def check_processes(coordinator: str | None, num_processes: int | None, process_id: int | None):
  """Raises InputError if the options of a job of several processes are not all there, or none, or make no sense."""
  if coordinator is None and num_processes is None and process_id is None:
    return
  if num_processes is None or process_id is None or not re.fullmatch(r'.+:\d+', coordinator or ''):
    raise InputError(f'--distributed needs all of {processes.OPTIONS}; on Cloud TPU none')
  if not 0 <= process_id < num_processes:
    raise InputError(f'--process_id={process_id} should be from 0 to {num_processes - 1}, of --num_processes')
