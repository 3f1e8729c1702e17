"""Documents as lines of JSON, and the fields of a record, which are also used for other formats.

With `data.format='messages'`, a document is a conversation (`conversation.Conversation`).
"""

import functools
import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from dipaco_jax.config import settings
from dipaco_jax.core import json_text
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import compressed_files, source
from dipaco_jax.data.conversation import Conversation, for_training
from dipaco_jax.data.tokenizer import replace_surrogates

BLANK = b'\xef\xbb\xbf \t\r\n'  # with the bytes of a byte order mark
MAX_LINE_BYTES = 64 << 20  # parsed, a line takes several times its size
ONE_A_LINE = {b'[': "jq -c '.[]' makes lines of an array", b'{': 'jq -c . makes a line of each object'}


def documents(path: str, data: settings.Data, name: str) -> source.Documents:
  """Yields the documents of a file with an object a line; `name` is the domain of those that have none."""
  for number, line in lines(path):
    yield number, functools.partial(parse_line, path, number, line, data, name)


def lines(path: str) -> Iterator[tuple[int, bytes]]:
  """Yields (number from 1, bytes) of the lines that are not blank. Raises InputError, at once, for an array.

  Of a line that is longer than MAX_LINE_BYTES, a little more than these bytes come.
  """
  parts: list[bytes] = []  # of a line, joined where it ends: it may be long
  size = 0  # of the parts
  number, begun = 0, False
  for chunk in itertools.chain(compressed_files.chunks(path), [b'\n']):
    if not begun and (beginning := chunk.lstrip(BLANK)):
      begun = True
      if beginning[:1] == b'[':
        raise InputError(f'{path}: an array instead of one object per line; {ONE_A_LINE[b"["]}')
    if size <= MAX_LINE_BYTES or b'\n' in chunk:  # the rest of a line that is too long is skipped
      parts.append(chunk)
      size += len(chunk)
    if b'\n' in chunk:
      *complete_lines, rest = b''.join(parts).split(b'\n')
      parts, size = [rest], len(rest)
      for line in complete_lines:
        number += 1
        if line.strip():
          yield number, line


def parse_line(path: str, number: int, line: bytes, data: settings.Data, name: str) -> tuple[str, str]:
  """Parses a line of JSON into (text, domain). Raises BadRecord, or InputError if lines are not records at all."""
  where = f'{path}:{number}'
  if len(line) > MAX_LINE_BYTES:
    raise source.BadRecord(
      f'{where}: the line is longer than {MAX_LINE_BYTES >> 20} MiB: each line is one document, split it'
    )
  try:
    record = json_text.parse(line.decode('utf-8-sig' if number == 1 else 'utf-8'))
  except UnicodeDecodeError as e:
    raise source.BadRecord(f'{where}: not UTF-8 at byte {e.start} of the line: convert the file') from e
  except ValueError as e:
    reason = f'{where}: not JSON ({e}): each line should be one object'
    if line.strip() in ONE_A_LINE:  # an object or array over several lines, in which no line is a record
      raise InputError(f'{reason}; {ONE_A_LINE[line.strip()]}') from e
    raise source.BadRecord(reason) from e
  if not isinstance(record, dict):
    raise source.BadRecord(f'{where}: not a JSON object, as each line should be; {ONE_A_LINE[b"["]}')
  if has_messages(data):
    return as_conversation(value_of(record, text_key(data)), where, data), domain_of(record, data, name)
  text = value_of(record, data.text_key)
  if not isinstance(text, str):
    raise source.BadRecord(f'{where}: no text under {data.text_key!r}; {which_key(sorted(text_keys(record)))}')
  return as_text(text, path), domain_of(record, data, name)


def has_messages(data: settings.Data) -> bool:
  """Returns whether documents are conversations."""
  return data.format == 'messages'


def text_key(data: settings.Data) -> str:
  """Returns the key of a document's text in a record, or of its messages."""
  return 'messages' if has_messages(data) and data.text_key == 'text' else data.text_key


def as_conversation(messages: Any, where: str, data: settings.Data) -> Conversation:
  """Returns the conversation of a record; raises BadRecord, which names the record by `where`."""
  key = text_key(data)
  if messages is None:
    raise source.BadRecord(f'{where}: no messages under {key!r}: name their key in config.data.text_key')
  try:
    return for_training(messages)
  except InputError as e:
    raise source.BadRecord(f'{where}: {str(e).replace("messages", key, 1)}') from e


def value_of(record: Any, key: str) -> Any:
  """Returns the value of a key in a record, or of a path of keys such as 'meta.pile_set_name', or None."""
  if isinstance(record, Mapping) and key in record:
    return record[key]
  outer, dot, inner = key.partition('.')
  return value_of(record[outer], inner) if dot and isinstance(record, Mapping) and outer in record else None


def domain_of(record: Mapping[str, Any], data: settings.Data, name: str) -> str:
  """Returns a record's domain, `name` where it has none."""
  domain = value_of(record, data.domain_key)
  return name if domain is None else replace_surrogates(str(domain))


def text_keys(record: Mapping[str, Any], prefix: str = '') -> Iterator[str]:
  """Yields the keys under which a record has texts, dotted where they are inside other objects."""
  for key, value in record.items():
    if isinstance(value, Mapping):
      yield from text_keys(value, f'{prefix}{key}.')
    elif isinstance(value, str):
      yield prefix + key


def which_key(keys: list[str]) -> str:
  """Says under which keys there are texts."""
  return f'texts are under {keys}: set config.data.text_key' if keys else 'no other key has one: leave out this file'


def as_text(text: str, path: str) -> str:
  """Returns a text as UTF-8 can express it: JSON can have half of a surrogate pair, which becomes U+FFFD.

  Logs a warning, once for each file.
  """
  replaced = replace_surrogates(text)
  if replaced != text:
    _warn_of_surrogates(path)
  return replaced


@functools.cache
def _warn_of_surrogates(path: str):
  logging.warning('%s: lone surrogates (halves of characters) in its texts are replaced by U+FFFD', path)
