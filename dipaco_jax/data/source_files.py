"""Documents in files: plain text, cut into pieces, and JSON with a document a line; on disk or in a bucket.

Neighbouring pieces of a text say much of each other. So what is held back of plain text are whole files, where there
are WHOLE_FILES or more of them, and of fewer a stretch at the end of each. A line of JSON is a text of its own.
"""

import codecs
import dataclasses
import errno
import functools
import glob
import gzip
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from dipaco_jax.core import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import source
from dipaco_jax.storage import remote_files

ENDINGS = ('.txt', '.jsonl', '.jsonl.gz', '.jsonl.zst', '.json', '.json.gz', '.json.zst')
PIECE_CHARS = 10_000  # a long text is cut at the first blank line after so many
ONE_A_LINE = {b'[': "jq -c '.[]' makes lines of an array", b'{': 'jq -c . makes a line of each object'}
CHUNK_BYTES = 1 << 20
CHECK_BYTES = 1 << 20  # of each file are looked at before any work
SMALL_BYTES = 64 << 20
WHOLE_FILES = 20  # of plain text: of so many, whole ones are held back
LARGE = 0.1  # of all plain text: a file that is more is not held back as a whole
SHORT_CHARS = 200  # a piece is not cut into less
EXTENSION = r'\.(txt|jsonl?)?(\.gz|\.zst)?$'
NAMED_FILES = 20  # in one folder: so many are domains by their names, where documents name none


def items(
  data: settings.Data, split: str, part: source.Part = source.WHOLE, side: source.Side | None = None
) -> Iterator[source.Item] | None:
  """Those of the globs of a split; None for validation without any."""
  globs = data.validation if split == 'validation' else data.train
  if not globs:
    return None
  files = _find(globs)
  draws, names = _draws(files), domains([path for _, path in files])
  if draws and side:
    draws = {path: draw for path, draw in draws.items() if (draw < side.fraction) == side.is_validation}
    files = [(name, path) for name, path in files if path in draws or _is_json(path)]
  mine, part = source.deal(files, part)
  return source.take(_of_files(data, mine, draws, names, side.fraction if side else 0.0), part)


def held_back(data: settings.Data) -> str:
  """What of the text is validation text: of plain text 'files' or 'ends' of files, of JSON 'documents'."""
  files = _find(data.train)
  return 'documents' if all(_is_json(path) for _, path in files) else 'files' if _draws(files) else 'ends'


def listing(data: settings.Data) -> list[tuple[str, int]]:
  """(name, bytes) of every file; 0 in a bucket."""
  files = _find(data.train) + _find(data.validation)
  return [(name, 0 if remote_files.is_remote(path) else os.path.getsize(path)) for name, path in files]


def check(data: settings.Data) -> None:
  """Looks at the beginning of every file.

  Raises:
    InputError: one line that names the config field or the file, and the fix.
  """
  for globs in (data.train, data.validation):
    for _, path in _find(globs):
      _check_file(path, data)


def is_small(data: settings.Data) -> bool:
  """Whether all files can be read in a second or so."""
  return sum(size or SMALL_BYTES for _, size in listing(data)) <= SMALL_BYTES


def _find(globs: tuple[str, ...]) -> list[tuple[str, str]]:
  """(name, path) of all files that the globs match, by name: the path below the glob's first wildcard."""
  found: dict[str, str] = {}
  for pattern in globs:
    pattern = os.path.expanduser(pattern.strip())
    root = os.path.dirname(re.split(r'[*?[]', pattern)[0])
    if remote_files.is_remote(pattern):
      paths = remote_files.find(pattern)
    else:
      paths = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    if not paths:
      raise InputError(f'{pattern!r} {_why_none(pattern)} config.data.train or config.data.validation')
    found |= {path: os.path.relpath(path, root or '.') for path in paths}
  return sorted((name, path) for path, name in found.items())


def _why_none(pattern: str) -> str:
  """Why a pattern matches no file, and what may be meant."""
  folder = pattern.rstrip('/')
  if remote_files.is_remote(pattern):
    return 'matches no object: mend' if re.search(r'[*?[]', pattern) else f"is no object: write '{folder}/*' in"
  if '://' in pattern:
    return 'is no file here, nor of gs:// or s3://: fetch it, and mend'
  if not os.path.isdir(pattern):
    return 'matches no file: mend'
  for below in ('*', '**/*'):
    for ending in ENDINGS:
      if glob.glob(f'{folder}/{below}{ending}', recursive=True):
        return f"is a folder: write '{folder}/{below}{ending}' in"
  return f"is a folder: write a pattern of files, as '{folder}/*.txt', in"


def _draws(files: Sequence[tuple[str, str]]) -> dict[str, float]:
  """path -> draw of files of plain text, where they are enough to be held back whole: the share of text before them.

  In the order of a hash of their names. Files that are LARGE come last, and are never drawn.
  """
  sizes = {(name, path): _size(path) for name, path in files if not _is_json(path)}
  if len(sizes) < WHOLE_FILES:
    return {}
  total = sum(sizes.values())
  large = {file for file, size in sizes.items() if size > LARGE * total}
  order = sorted(sizes.keys() - large, key=lambda file: (source.uniform(file[0]), file))
  before = itertools.accumulate((sizes[file] for file in order), initial=0)
  found = {path: size / total for (_, path), size in zip(order, before, strict=False)}
  return found | {path: math.nextafter(1, 0) for _, path in large}


def _size(path: str) -> int:
  """Bytes, at least 1; in a bucket all files count alike."""
  return 1 if remote_files.is_remote(path) else max(1, os.path.getsize(path))


def domains(paths: Sequence[str]) -> dict[str, str]:
  """path -> what stands for its domain where documents name none.

  Of files in several folders the folder, from where they part; of NAMED_FILES or fewer in one folder the file; else
  nothing.
  """
  folders = [os.path.dirname(path).split('/') for path in paths]
  if len({*map(tuple, folders)}) > 1:
    common = sum(1 for _ in itertools.takewhile(lambda names: len({*names}) == 1, zip(*folders, strict=False)))
    names = ['/'.join(folder[common:] or folder[-1:]) for folder in folders]
    return dict(zip(paths, names, strict=True))
  few = 1 < len(paths) <= NAMED_FILES
  return {path: re.sub(EXTENSION, '', os.path.basename(path)) if few else '' for path in paths}


def _of_files(
  data: settings.Data,
  files: Sequence[tuple[str, str]],
  draws: Mapping[str, float],
  names: Mapping[str, str],
  fraction: float,
) -> Iterator[source.Item]:
  for name, path in files:
    if _is_json(path):
      for number, line in _lines(path):
        read = functools.partial(_parse, path, number, line, data, names[path])
        yield source.Item(f'{name}:{number}', source.spread(name, number), read)
    else:
      whole = ((piece, draws[path]) for piece in pieces(decode(path))) if path in draws else None
      for number, (piece, draw) in enumerate(whole or placed(path, fraction)):
        read = functools.partial(source.as_read, piece, names[path])
        yield source.Item(f'{name}#{number}', draw, read, is_piece=True)


def placed(path: str, fraction: float = 0.0) -> Iterator[tuple[str, float]]:
  """The pieces of a text, and which share of it lies behind the middle of each; it falls towards the text's end.

  The piece in which the last `fraction` of the text begins is cut there: a short text has few pieces.
  """
  total, done, behind, read = length(path), 0, 1.0, Read()

  def place(chars: float) -> float:
    return chars * read.bytes / max(1, read.chars) / max(1, total)

  for piece in pieces(decode(path, read)):
    begin, end = place(done), place(done + len(piece))
    parts = [piece]
    if fraction and begin < 1 - fraction < end:
      at = _break(piece, int(len(piece) * (1 - fraction - begin) / (end - begin)), len(piece))
      parts = [piece[:at], piece[at:]] if SHORT_CHARS < at < len(piece) - SHORT_CHARS else parts
    for part in parts:
      # Bytes of a character may change from place to place, so that a place is not quite exact.
      behind = min(behind, max(0.0, 1 - place(done + len(part) / 2)))
      done += len(part)
      yield part, behind


def length(path: str) -> int:
  """Bytes of a text, decompressed. What does not say is read for it, once."""
  if remote_files.is_remote(path):
    return _counted(path, 0)
  found = os.stat(path)
  return _counted(path, found.st_mtime_ns) if path.endswith(('.gz', '.zst')) else found.st_size


@functools.lru_cache(64)
def _counted(path: str, modified_ns: int) -> int:
  return sum(map(len, _chunks(path)))


@dataclasses.dataclass
class Read:
  """How far a text is read."""

  bytes: int = 0
  chars: int = 0


def _is_json(path: str) -> bool:
  return re.search(r'\.jsonl?(\.gz|\.zst)?$', path) is not None


def _open(path: str) -> IO[bytes]:
  file = remote_files.open_file(path) if remote_files.is_remote(path) else path
  if path.endswith('.gz'):
    return gzip.open(file, 'rb')  # type: ignore[return-value]
  if not path.endswith('.zst'):
    return open(path, 'rb') if isinstance(file, str) else file
  try:
    import zstandard
  except ImportError as e:
    raise InputError(f"{path}: reading .zst needs the zstandard library: pip install 'dipaco_jax[zstd]'") from e
  return zstandard.open(file, 'rb')


def _chunks(path: str) -> Iterator[bytes]:
  """The file's bytes, decompressed, as they come."""
  try:
    with _open(path) as f:
      while chunk := f.read(CHUNK_BYTES):
        yield chunk
  except OSError as e:
    if e.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
      raise  # nothing is wrong with the file: the same command may go on
    raise InputError(f'{path}: {e.strerror or e}; mend or leave out this file') from e
  except Exception as e:
    if not isinstance(e, (EOFError, zlib.error)) and type(e).__name__ != 'ZstdError':
      raise
    raise InputError(f'{path}: damaged or cut short ({e}); mend or leave out this file') from e


def decode(path: str, read: Read | None = None) -> Iterator[str]:
  """The file's text, in chunks; `read` is told how far."""
  decoder = codecs.getincrementaldecoder('utf-8-sig')()
  offset = 0
  for chunk in itertools.chain(_chunks(path), [b'']):
    if b'\0' in chunk:
      raise InputError(f'{path}: byte {offset + chunk.index(0)} is NUL, so this is no plain text: leave out this file')
    start = offset - len(decoder.getstate()[0])
    try:
      text = decoder.decode(chunk, final=not chunk)
    except UnicodeDecodeError as e:
      raise InputError(f'{path}: not UTF-8 at byte {start + e.start}: convert it, or leave out this file') from e
    offset, text = offset + len(chunk), text.replace('\r\n', '\n')
    if read:
      read.bytes, read.chars = offset, read.chars + len(text)
    yield text


def pieces(chunks: Iterator[str]) -> Iterator[str]:
  """Texts of about PIECE_CHARS, cut after a blank line, else after a line, else after a space, else anywhere."""
  rest = ''
  for chunk in chunks:
    rest, begin = rest + chunk, 0
    while len(rest) - begin >= 2 * PIECE_CHARS:
      end = _break(rest, begin + PIECE_CHARS, begin + 2 * PIECE_CHARS)
      yield rest[begin:end]
      begin = end
    rest = rest[begin:]
  if rest.strip():
    yield rest


def _break(text: str, begin: int, end: int) -> int:
  """Where to cut: after a blank line, else after a line, else after a space, else at `begin`."""
  ends = (text.find(mark, begin, end) for mark in ('\n\n', '\n', ' '))
  return next((at + 1 for at in ends if at >= 0), begin)


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
  """(number from 1, bytes) of the lines that are not blank."""
  rest, number = b'', 0
  for chunk in itertools.chain(_chunks(path), [b'\n']):
    *lines, rest = (rest + chunk).split(b'\n')
    for line in lines:
      number += 1
      if line.strip():
        yield number, line


def _parse(path: str, number: int, line: bytes, data: settings.Data, name: str = '') -> tuple[str, str]:
  """(text, domain) of one line of JSON; one that names no domain has that of its file."""
  where = f'{path}:{number}'
  try:
    record = json.loads(line.decode('utf-8-sig' if number == 1 else 'utf-8'))
  except UnicodeDecodeError as e:
    raise InputError(f'{where}: not UTF-8 at byte {e.start} of the line: convert the file') from e
  except ValueError as e:
    fix = f'; {ONE_A_LINE[line.strip()]}' if line.strip() in ONE_A_LINE else ''
    raise InputError(f'{where}: not JSON ({e}): there should be one object in a line{fix}') from e
  if not isinstance(record, dict):
    raise InputError(f'{where}: no JSON object, which each line should be; {ONE_A_LINE[b"["]}')
  if not isinstance(record.get(data.text_key), str):
    keys = [key for key, value in sorted(record.items()) if isinstance(value, str)]
    fix = f'texts are under {keys}: set config.data.text_key' if keys else 'no other key has one: leave out this file'
    raise InputError(f'{where}: no text under {data.text_key!r}; {fix}')
  # JSON can spell half of a surrogate pair, which no tokenizer takes.
  text = record[data.text_key].encode('utf-8', 'replace').decode()
  domain = record.get(data.domain_key)
  return text, name if domain is None else str(domain)


def _check_file(path: str, data: settings.Data) -> None:
  """The first CHECK_BYTES, read as the stream will read them."""
  seen, found = 0, False
  if _is_json(path):
    for number, line in _lines(path):
      found |= bool(_parse(path, number, line, data)[0].strip())
      seen += len(line)
      if seen >= CHECK_BYTES:
        break
  else:
    for text in decode(path):
      found |= bool(text.strip())
      seen += len(text)
      if seen >= CHECK_BYTES:
        break
  if not found:
    raise InputError(f'{path}: there is no text in it: fill it, or leave out this file')
