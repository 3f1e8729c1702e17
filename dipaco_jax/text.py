"""Documents from files or from the running Python: deterministic, streaming, splittable.

A source lists its documents as `Item`s in a fixed order; an item is cheap until it is read, so that a part of a stream
costs little more than its share. Whether an item is training or validation text depends on its name alone.
"""

import ast
import codecs
import functools
import glob
import gzip
import hashlib
import itertools
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

from dipaco_jax import settings

PIECE_CHARS = 10_000  # a long text is cut at the first blank line after so many
CHUNK_BYTES = 1 << 20
CHECK_BYTES = 1 << 20  # of each file are looked at before any work
GOLDEN = (5**0.5 - 1) / 2


class Document(NamedTuple):
  """One text; `domain` is '' where the source names none."""

  id: str
  text: str
  domain: str


class Item(NamedTuple):
  """A document not yet read: its id, where its split's draw lies in [0, 1), and how to get (text, domain)."""

  id: str
  draw: float
  read: Callable[[], tuple[str, str]]


def documents(data: settings.Data, split: str, part: tuple[int, int] = (0, 1)) -> Iterator[Document]:
  """The documents of a split, in the same order every time.

  Args:
    data: where they come from, and how many.
    split: 'train' or 'validation'; without validation globs the two share a source, and a document is validation
      where a hash of its name is below `validation_fraction`.
    part: (k, n) gives documents k, k + n, k + 2n...; the n parts together are the whole.

  Raises:
    ValueError: a file is missing, damaged, not UTF-8 or not the JSON it should be; or the split is empty.
  """
  number = -1
  for number, item in enumerate(_items(data, split)):
    if number % part[1] == part[0]:
      yield Document(item.id, *item.read())
  if number < 0 and split == 'validation':
    raise ValueError(
      f'no document is left for validation: name some in config.data.validation, or raise '
      f'config.data.validation_fraction={data.validation_fraction}'
    )
  if number < 0:
    raise ValueError('no document is left for training: add text, or lower config.data.validation_fraction')


def check(data: settings.Data) -> None:
  """Looks at the beginning of every file and at the first document of each split.

  Raises:
    ValueError: one line that names the config field or the file, and the fix.
  """
  for globs in (data.train, data.validation) if data.source == 'files' else ():
    for name, path in _find(globs):
      _check_file(name, path, data)
  for split in ('train', 'validation'):
    next(documents(data, split))


def _items(data: settings.Data, split: str) -> Iterator[Item]:
  """Those of one split, no more than the config allows."""
  own_files = data.source == 'files' and bool(data.validation)
  if own_files and split == 'validation':
    return _first(_files(data, data.validation), data.max_validation_documents)
  items = _first(_stdlib() if data.source == 'stdlib' else _files(data, data.train), data.max_documents)
  if own_files:
    return items
  chosen = (item for item in items if (item.draw < data.validation_fraction) == (split == 'validation'))
  return _first(chosen, data.max_validation_documents if split == 'validation' else 0)


def _first(items: Iterator[Item], count: int) -> Iterator[Item]:
  return itertools.islice(items, count or None)


def _as_read(text: str, domain: str) -> tuple[str, str]:
  return text, domain


def _hash(name: str) -> float:
  """Uniform in [0, 1), the same on every machine."""
  return int.from_bytes(hashlib.blake2b(name.encode('utf-8', 'replace'), digest_size=8).digest(), 'big') / 2**64


def _spread(name: str, number: int) -> float:
  """A draw for each document of one file. Golden-ratio steps leave no long gaps: one book has its validation too."""
  return (_hash(name) + number * GOLDEN) % 1


# Files.


def _find(globs: tuple[str, ...]) -> list[tuple[str, str]]:
  """(name, path) of all files that the globs match, by name: the path below the glob's first wildcard."""
  found: dict[str, str] = {}
  for pattern in globs:
    pattern = os.path.expanduser(pattern.strip())
    root = os.path.dirname(re.split(r'[*?[]', pattern)[0])
    paths = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    if not paths:
      raise ValueError(f'{pattern!r} matches no file: mend config.data.train or config.data.validation')
    found |= {path: os.path.relpath(path, root or '.') for path in paths}
  return sorted((name, path) for path, name in found.items())


def _files(data: settings.Data, globs: tuple[str, ...]) -> Iterator[Item]:
  files = _find(globs)
  # A text's pieces stay on one side of the split, unless files are so few that a side could be left without any.
  whole = len(files) * data.validation_fraction >= 5
  for name, path in files:
    if _is_json(path):
      for number, line in _lines(path):
        yield Item(f'{name}:{number}', _spread(name, number), functools.partial(_parse, path, number, line, data))
    else:
      for number, piece in enumerate(_pieces(_decode(path))):
        draw = _hash(name) if whole else _spread(name, number)
        yield Item(f'{name}#{number}', draw, functools.partial(_as_read, piece, ''))


def _is_json(path: str) -> bool:
  return re.search(r'\.jsonl?(\.gz|\.zst)?$', path) is not None


def _open(path: str) -> IO[bytes]:
  if path.endswith('.gz'):
    return gzip.open(path, 'rb')  # type: ignore[return-value]
  if not path.endswith('.zst'):
    return open(path, 'rb')
  try:
    import zstandard
  except ImportError as e:
    raise ValueError(f"{path}: reading .zst needs the zstandard library: pip install 'dipaco_jax[zstd]'") from e
  return zstandard.open(path, 'rb')


def _chunks(path: str) -> Iterator[bytes]:
  """The file's bytes, decompressed, as they come."""
  try:
    with _open(path) as f:
      while chunk := f.read(CHUNK_BYTES):
        yield chunk
  except OSError as e:
    raise ValueError(f'{path}: {e.strerror or e}; mend or leave out this file') from e
  except Exception as e:
    if not isinstance(e, (EOFError, zlib.error)) and type(e).__name__ != 'ZstdError':
      raise
    raise ValueError(f'{path}: damaged or cut short ({e}); mend or leave out this file') from e


def _decode(path: str) -> Iterator[str]:
  """The file's text, in chunks."""
  decoder = codecs.getincrementaldecoder('utf-8-sig')()
  offset = 0
  for chunk in itertools.chain(_chunks(path), [b'']):
    if b'\0' in chunk:
      raise ValueError(f'{path}: byte {offset + chunk.index(0)} is NUL, so this is no plain text: leave out this file')
    start = offset - len(decoder.getstate()[0])
    try:
      text = decoder.decode(chunk, final=not chunk)
    except UnicodeDecodeError as e:
      raise ValueError(f'{path}: not UTF-8 at byte {start + e.start}: convert it, or leave out this file') from e
    offset += len(chunk)
    yield text.replace('\r\n', '\n')


def _pieces(chunks: Iterator[str]) -> Iterator[str]:
  """Texts of about PIECE_CHARS, cut after a blank line, else after a line, else after a space, else anywhere."""
  rest = ''
  for chunk in chunks:
    rest, begin = rest + chunk, 0
    while len(rest) - begin >= 2 * PIECE_CHARS:
      ends = (rest.find(mark, begin + PIECE_CHARS, begin + 2 * PIECE_CHARS) for mark in ('\n\n', '\n', ' '))
      end = next((end + 1 for end in ends if end >= 0), begin + PIECE_CHARS)
      yield rest[begin:end]
      begin = end
    rest = rest[begin:]
  if rest.strip():
    yield rest


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
  """(number from 1, bytes) of the lines that are not blank."""
  rest, number = b'', 0
  for chunk in itertools.chain(_chunks(path), [b'\n']):
    *lines, rest = (rest + chunk).split(b'\n')
    for line in lines:
      number += 1
      if line.strip():
        yield number, line


def _parse(path: str, number: int, line: bytes, data: settings.Data) -> tuple[str, str]:
  """(text, domain) of one line of JSON."""
  where = f'{path}:{number}'
  try:
    record = json.loads(line.decode('utf-8-sig' if number == 1 else 'utf-8'))
  except UnicodeDecodeError as e:
    raise ValueError(f'{where}: not UTF-8 at byte {e.start} of the line: convert the file') from e
  except ValueError as e:
    raise ValueError(f'{where}: not JSON ({e}): there should be one object in a line') from e
  if not isinstance(record, dict) or not isinstance(record.get(data.text_key), str):
    keys = sorted(k for k, v in record.items() if isinstance(v, str)) if isinstance(record, dict) else []
    raise ValueError(f'{where}: no text under {data.text_key!r}; texts are under {keys}: set config.data.text_key')
  # JSON can spell half of a surrogate pair, which no tokenizer takes.
  text = record[data.text_key].encode('utf-8', 'replace').decode()
  domain = record.get(data.domain_key)
  return text, '' if domain is None else str(domain)


def _check_file(name: str, path: str, data: settings.Data) -> None:
  """The first CHECK_BYTES, read as the stream will read them."""
  seen, found = 0, False
  if _is_json(path):
    for number, line in _lines(path):
      found |= bool(_parse(path, number, line, data)[0].strip())
      seen += len(line)
      if seen >= CHECK_BYTES:
        break
  else:
    for text in _decode(path):
      found |= bool(text.strip())
      seen += len(text)
      if seen >= CHECK_BYTES:
        break
  if not found:
    raise ValueError(f'{path}: there is no text in it: fill it, or leave out this file')


# The running Python.


def _stdlib() -> Iterator[Item]:
  """Sources, tests and documentation of the standard library, files in the order of a hash: any prefix is fair."""
  root = sysconfig.get_path('stdlib')
  found: dict[str, Callable[[], str]] = {}
  for folder, folders, names in os.walk(root):
    folders[:] = [f for f in folders if f not in ('site-packages', 'dist-packages', '__pycache__')]
    for file in names:
      name = os.path.relpath(os.path.join(folder, file), root).replace(os.sep, '/')
      if name.endswith(('.py', '.txt', '.rst')) and name != TOPICS:
        found[name] = functools.partial(_plain, os.path.join(folder, file))
  for name, text in _topics(os.path.join(root, TOPICS)):
    found[name] = functools.partial(str, text)
  for name in sorted(found, key=lambda name: _hash(f'order of {name}')):  # not that of the split
    for number, piece in enumerate(_pieces(iter([found[name]()]))):
      yield Item(f'{name}#{number}', _hash(name), functools.partial(_as_read, piece, _domain(name)))


TOPICS = 'pydoc_data/topics.py'  # the language reference, as a dict of texts


def _topics(path: str) -> Iterator[tuple[str, str]]:
  """(name, text) of each topic of Python's own help."""
  if os.path.exists(path):
    with open(path, encoding='utf-8') as f:
      texts = ast.literal_eval(ast.parse(f.read()).body[-1].value)  # type: ignore[attr-defined]
    yield from ((f'{TOPICS}/{name}', text) for name, text in texts.items())


def _plain(path: str) -> str:
  """The file's text; none where it is in another encoding, as some of Python's own test data are."""
  try:
    return ''.join(_decode(path))
  except ValueError:
    return ''


def _domain(name: str) -> str:
  if re.search(r'(^|/)(idle_)?tests?/', name):
    return 'tests'
  return 'code' if name.endswith('.py') else 'docs'
