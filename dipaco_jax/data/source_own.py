"""Documents of a user-defined source, 'package.module:name' in config.data.source.

make(config.data, split) returns the documents of a split, (id, text) or (id, text, domain), always the same in the same
order; None, or none of them, for 'validation' if there is no such split. A text may be a function that returns it,
so that a document costs little until it is read: every process goes through all of them, and reads its share.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

from dipaco_jax.config import extension, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import source

FIELD = 'data.source'
MOST_IDS = 1 << 20  # repetitions among these ids are found
LISTED_TWICE = 100  # documents, before any work
END = object()


def items(data: settings.Data, split: str, part=source.WHOLE, side: source.Side | None = None) -> source.Items | None:
  """Yields the items of a part; None for validation without documents. What is wrong with one is an InputError."""
  listed = _documents(data, split)
  first = next(listed, END)
  if first is END:
    return None if split == 'validation' else iter(())
  return source.take(_as_items(data, split, itertools.chain([first], listed)), part)


def check(data: settings.Data) -> None:
  """Raises InputError if the first documents differ when they are listed again."""

  def ids() -> list[str]:
    listed = _as_items(data, 'train', _documents(data, 'train'))
    return [item.id for item in itertools.islice(listed, LISTED_TWICE)]

  once, again = ids(), ids()
  for number, (a, b) in enumerate(itertools.zip_longest(once, again)):
    if a != b:
      problem = f'document {number} is {a!r} at first, but {b!r} when documents are listed again'
      raise _wrong(data, f'{problem}: the order should always be the same')


def _documents(data: settings.Data, split: str) -> Iterator[Any]:
  """Yields what the user's source does; errors in it become an InputError."""
  own_source = extension.make(FIELD, data.source, data, split)
  if own_source is None:
    return
  with extension.blaming(FIELD, data.source):
    rest = iter(own_source)
  while True:
    with extension.blaming(FIELD, data.source):
      document = next(rest, END)
    if document is END:
      return
    yield document


def _as_items(data: settings.Data, split: str, listed: Iterator[Any]) -> source.Items:
  seen: set[int] = set()
  for number, document in enumerate(listed):
    if not isinstance(document, tuple | list) or len(document) not in (2, 3):
      kind = type(document).__name__
      raise _wrong(data, f'document {number} of {split} is a {kind}: expected a tuple (id, text) or (id, text, domain)')
    name, text, domain = (*document, '')[:3]
    if not isinstance(name, str) or not name:
      raise _wrong(
        data, f'document {number} of {split} has the id {name!r}: expected a str, different for each document'
      )
    if len(seen) < MOST_IDS:
      if hash(name) in seen:
        raise _wrong(data, f'document {number} of {split} has the id {name!r}, as an earlier one: ids should be unique')
      seen.add(hash(name))
    yield source.Item(name, None, functools.partial(_read, data, name, text, domain))


def _read(data: settings.Data, name: str, text: Any, domain: Any) -> tuple[str, str]:
  if callable(text):
    with extension.blaming(FIELD, data.source):
      text = text()
  if not isinstance(text, str) or not isinstance(domain, str):
    kinds = f'{type(text).__name__} and {type(domain).__name__}'
    raise source.BadRecord(_in_words(data, f'text and domain of document {name!r} are {kinds}: expected str'))
  try:
    text.encode()
  except UnicodeEncodeError as e:
    problem = f'the text of document {name!r} has a lone surrogate (half a character) at {e.start}'
    raise source.BadRecord(_in_words(data, problem)) from e
  return text, domain


def _wrong(data: settings.Data, problem: str) -> InputError:
  return InputError(_in_words(data, problem))


def _in_words(data: settings.Data, problem: str) -> str:
  return f'config.{FIELD}={data.source!r}: {problem}'
