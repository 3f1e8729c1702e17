"""Documents of the running Python: real text on every machine, with nothing to download."""

import ast
import functools
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable

from dipaco_jax.config import settings
from dipaco_jax.data import equality, source, text_files

TOPICS = 'pydoc_data/topics.py'  # the language reference, as a dict of texts


def items(data: settings.Data, split: str, part=source.WHOLE, side: source.Side | None = None) -> source.Items | None:
  """Yields all documents for training; returns None for validation, because there is no such split."""
  return source.take(_items(), part) if split == 'train' else None


def content_digest(data: settings.Data) -> str:
  """Returns a digest of all files."""
  total = hashlib.sha256()
  for name, path in sorted(_list_files().items()):
    with open(path, 'rb') as f:
      total.update(f'{name} {hashlib.file_digest(f, "sha256").hexdigest()}\n'.encode())
  return total.hexdigest()


def _list_files() -> dict[str, str]:
  """Returns {name: path} of the standard library's sources and documentation."""
  root = sysconfig.get_path('stdlib')
  files_by_name: dict[str, str] = {}
  for folder, folders, names in os.walk(root):
    folders[:] = [f for f in folders if f not in ('site-packages', 'dist-packages', '__pycache__')]
    for file in names:
      name = os.path.relpath(os.path.join(folder, file), root).replace(os.sep, '/')
      if name.endswith(('.py', '.txt', '.rst')):
        files_by_name[name] = os.path.join(folder, file)
  return files_by_name


def _items() -> source.Items:
  """Yields sources, tests and documentation of the standard library, in the order of a hash: any prefix is fair."""
  files = _list_files()
  topics = files.pop(TOPICS, '')
  readers: dict[str, Callable[[], str]] = {name: functools.partial(_plain, path) for name, path in files.items()}
  if topics:
    with open(topics, encoding='utf-8') as f:
      texts = ast.literal_eval(ast.parse(f.read()).body[-1].value)  # type: ignore[attr-defined]
    readers |= {f'{TOPICS}/{name}': functools.partial(str, text) for name, text in texts.items()}
  for name in sorted(readers, key=lambda name: source.uniform(f'order of {name}')):  # not that of the split
    code = 'code' if name.endswith('.py') else 'docs'
    domain = 'tests' if re.search(r'(^|/)(idle_)?tests?/', name) else code
    text = readers[name]()
    draw = equality.draw(equality.digest(text))
    for number, piece in enumerate(text_files.pieces(iter([text]))):
      read = functools.partial(source.already_read, piece, domain)
      yield source.Item(f'{name}#{number}', draw, read, is_piece=True)


def _plain(path: str) -> str:
  """Returns a file's text, '' if it is not UTF-8, as some of Python's own test data are."""
  try:
    return ''.join(text_files.decode(path))
  except ValueError:
    return ''
