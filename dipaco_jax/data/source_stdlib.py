"""Documents of the running Python: real text on every machine, with nothing to download."""

import ast
import functools
import os
import re
import sysconfig
from collections.abc import Callable

from dipaco_jax.core import settings
from dipaco_jax.data import source, text_files

TOPICS = 'pydoc_data/topics.py'  # the language reference, as a dict of texts


def items(data: settings.Data, split: str, part=source.WHOLE, side: source.Side | None = None) -> source.Items | None:
  """Yields all documents for training; None for validation, of which there is no split."""
  return source.take(_items(), part) if split == 'train' else None


def _items() -> source.Items:
  """Yields sources, tests and documentation of the standard library, in the order of a hash: any prefix is fair."""
  root = sysconfig.get_path('stdlib')
  found: dict[str, Callable[[], str]] = {}
  for folder, folders, names in os.walk(root):
    folders[:] = [f for f in folders if f not in ('site-packages', 'dist-packages', '__pycache__')]
    for file in names:
      name = os.path.relpath(os.path.join(folder, file), root).replace(os.sep, '/')
      if name.endswith(('.py', '.txt', '.rst')) and name != TOPICS:
        found[name] = functools.partial(_plain, os.path.join(folder, file))
  if os.path.exists(topics := os.path.join(root, TOPICS)):
    with open(topics, encoding='utf-8') as f:
      texts = ast.literal_eval(ast.parse(f.read()).body[-1].value)  # type: ignore[attr-defined]
    found |= {f'{TOPICS}/{name}': functools.partial(str, text) for name, text in texts.items()}
  for name in sorted(found, key=lambda name: source.uniform(f'order of {name}')):  # not that of the split
    code = 'code' if name.endswith('.py') else 'docs'
    domain = 'tests' if re.search(r'(^|/)(idle_)?tests?/', name) else code
    for number, piece in enumerate(text_files.pieces(iter([found[name]()]))):
      read = functools.partial(source.already_read, piece, domain)
      yield source.Item(f'{name}#{number}', source.uniform(name), read, is_piece=True)


def _plain(path: str) -> str:
  """Returns a file's text, '' where it is not UTF-8, as some of Python's own test data are."""
  try:
    return ''.join(text_files.decode(path))
  except ValueError:
    return ''
