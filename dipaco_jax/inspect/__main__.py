"""Shows which path reads what in a text, and what it gains on the base model.

    python -m dipaco_jax.inspect --workdir=DIR --text='Some text'
    python -m dipaco_jax.inspect --workdir=DIR --file=notes.txt --every=16 --html=notes.html

The workdir may be s3:// or gs://.
"""

# This folder has no __init__.py: a file inspect.py, or a package, would hide Python's module `inspect` from a program
# that is run in this folder's parent.

import os
import pathlib
import sys

from absl import flags

from dipaco_jax.command_line import command
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import display


def read_text(text: str | None, file: str | None) -> str:
  """Returns the text that the options give; raises InputError if there is none."""
  from dipaco_jax.storage import remote_files

  if (text is None) == (file is None):
    raise InputError('give a text: --text=WORDS or --file=FILE; --file=- is standard input')
  if file is None:
    return text or ''
  command.check_readable('file', file)
  try:
    data = sys.stdin.buffer.read() if file == '-' else remote_files.read(file)
  except OSError as e:
    raise InputError(f'--file={file}: {e.strerror or e}; name a file, or give the text by --text') from e
  return command.decode_text(data, f'--file={file}')


def main():
  options = flags.FLAGS
  if not options.workdir:
    raise InputError('name a run with --workdir=DIR')
  text = read_text(options.text, options.file)
  command.check_out('html', options.html)
  command.quiet()
  with display.doing('loading JAX and the run', tells=False):
    from dipaco_jax.inference import excerpts
    from dipaco_jax.inference.trained_run import TrainedRun
    from dipaco_jax.pipeline import excerpt_choice
    from dipaco_jax.reports import excerpt_views
    from dipaco_jax.storage import files

    run = TrainedRun(options.workdir, options.trust_modules)
    command.check_devices()
    command.keep_programs()
  every = excerpt_choice.chunk_tokens(run.settings) if options.every is None else options.every
  path = None if options.path is None else run.number(options.path)
  text_excerpts = excerpts.of_text(run, text, every, path, options.version)
  grid = run.layout.grid
  if options.html:
    files.write_file(pathlib.Path(options.html), excerpt_views.to_page(text_excerpts, grid, options.workdir))
  print(excerpt_views.to_text(text_excerpts, grid, sys.stdout.isatty() and not os.environ.get('NO_COLOR')))


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'Workdir of the run: a folder, s3://BUCKET/... or gs://BUCKET/...')
  command.define_trust()
  flags.DEFINE_string('text', None, 'Text to read.')
  flags.DEFINE_string('file', None, 'File with the text to read; - means standard input.')
  about = 'Number of tokens after which the path may change. By default, evaluate.reroute_every, or else 32.'
  flags.DEFINE_integer('every', None, about, lower_bound=1)
  flags.DEFINE_string(
    'path',
    None,
    'Path that reads the whole text, as a number such as 3, a name or coordinates such as 1,0. By default, the router'
    ' chooses.',
  )
  flags.DEFINE_integer(
    'version', None, 'Version of the modules. By default, the version that early stopping chose for each path.'
  )
  flags.DEFINE_string('html', None, 'HTML file to write, in addition to the printed output.')
  command.run(main)
