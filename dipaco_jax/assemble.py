r"""Assembles published paths into a workdir, with a router among them that is fitted on public text.

    python -m dipaco_jax.assemble --path=court=FOLDER --path=press=FOLDER2 --base=FOLDER3 \
      --data='public/*.txt' --workdir=DIR

Each FOLDER is a path as `export` writes it, FOLDER3 their base (`export --base`); all have one tokenizer. The router
is fitted to the losses of the public text under each path; a part of the text is held back to measure it. Then
`generate`, `serve` and `route` use DIR. The same command continues one that was stopped. Exit status: 0 done; 2 wrong
input.
"""

import pathlib
import shlex
import sys

from absl import flags

from dipaco_jax.command_line import command
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import display


def parse_paths(given: list[str]) -> dict[str, str]:
  """Returns the folders by the names of their paths. Raises InputError."""
  folders: dict[str, str] = {}
  for option in given:
    name, equals, folder = option.partition('=')
    if not equals or not name.isidentifier() or not folder:
      raise InputError(f'--path={option}: give a name and a folder, as --path=court=exported/court')
    if name in folders:
      raise InputError(f'--path={option}: there is a path {name} already: give each a name of its own')
    folders[name] = folder.rstrip('/')
  return folders


def in_words(report, names: list[str]) -> list[str]:
  """Returns the result in lines."""
  from dipaco_jax.reports import headline

  ratio, interval = report['ratio_to_best'], report['ratio_to_best_interval']
  by_path = zip(names, report['perplexity_by_path'], report['sequences_by_path'], strict=True)
  return [
    f'perplexity on {report["documents"]:,} held-back documents of the public text',
    *(f'{name}: {perplexity:.2f} alone; {count:,} texts are routed to it' for name, perplexity, count in by_path),
    f'routed: {report["perplexity"]:.2f}, against {names[report["best_path"]]} alone '
    f'{headline.signed_change(ratio, interval)}',
  ]


def main():
  f = flags.FLAGS
  folders = parse_paths(f.path)
  for option, what in (('base', 'the folder of their base'), ('workdir', 'a new folder'), ('data', 'public text')):
    if not f[option].value:
      raise InputError(f'--{option} is missing: name {what}')
  if '://' in f.workdir:
    raise InputError(f'--workdir={f.workdir}: name a folder of this machine, and copy it from there')
  command.quiet()
  display.STDERR.only_terminal = False
  with display.doing('loading JAX', tells=False):
    from dipaco_jax.pipeline import published_paths
  command.check_devices()
  command.keep_programs()
  s = published_paths.make_settings(folders, f.base.rstrip('/'), f.data)
  words = f'python -m dipaco_jax.assemble {shlex.join(map(printable.redacted, sys.argv[1:]))}'
  report = published_paths.assemble(pathlib.Path(f.workdir), s, folders, words)
  next_line = f'next: python -m dipaco_jax.serve --workdir={f.workdir}'
  print('\n'.join(map(printable.text, [*in_words(report, list(folders)), next_line])))


if __name__ == '__main__':
  flags.DEFINE_multi_string('path', [], 'NAME=FOLDER of a path, as export writes it; repeat the option for each path.')
  flags.DEFINE_string('base', None, 'Folder of the base that the paths started from, as export --base writes it.')
  flags.DEFINE_list('data', [], 'Files of public text, globs separated by commas.')
  flags.DEFINE_string('workdir', None, 'Folder to make, for generate, serve and route.')
  command.run(main)
