"""Documents in files: plain text, cut into pieces, and records with a document each; on disk or in a bucket.

Neighbouring pieces of a text predict each other. So whole files of plain text are held back, if there are
WHOLE_FILES or more, else a stretch at the end of each. A record, as a line of JSON, is a text of its own.
"""

import collections
import contextlib
import functools
import glob
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dipaco_jax.config import fields, settings
from dipaco_jax.core.errors import InputError, Unavailable
from dipaco_jax.data import compressed_files, equality, file_kinds, source, table_files, text_files, token_files
from dipaco_jax.storage import remote_files

ENDINGS = [  # in the order in which they are looked for in a folder
  kind + ending
  for kind in ('.txt', '.jsonl', '.parquet', '.arrow', '.json', '.ndjson', '.tar', '.md')
  for ending in ('', *compressed_files.ENDINGS)
] + [file_kinds.TOKENS]
SMALL_BYTES = 64 << 20
WHOLE_FILES = 20  # if there are this many files of plain text or more, whole files are held back
LARGE = 0.1  # of all plain text; a larger file is never held back whole
SHORT_CHARS = 200  # no piece is cut into less
EXTENSION = r'\.(txt|text|md|jsonl?|ndjson|parquet|arrow|tar|bin)?(\.gz|\.zstd?|\.bz2|\.xz)?$'
NAMED_FILES = 20  # up to this many files in one folder are domains of documents that name none


def items(data: settings.Data, split: str, part=source.WHOLE, side: source.Side | None = None) -> source.Items | None:
  """Yields the items of the globs of a split; None for validation without any."""
  globs = data.validation if split == 'validation' else data.train
  if not globs:
    return None
  files = _find(globs, data)
  draws, names = _draws(files, data), domains_of([path for _, path in files])
  if draws and side:
    draws = {path: draw for path, draw in draws.items() if (draw < side.fraction) == side.is_validation}
    files = [(name, path) for name, path in files if path in draws or not file_kinds.is_one_text(path, data)]
  mine, part = source.deal_files(files, part)
  return source.take(_items_of(data, mine, draws, names, side.fraction if side else 0.0), part)


def held_back(data: settings.Data) -> str:
  """Returns what validation text consists of: 'files' or 'ends' of files of plain text, 'documents' of records."""
  files = _find(data.train, data)
  records = not any(file_kinds.is_one_text(path, data) for _, path in files)
  return 'documents' if records else 'files' if _draws(files, data) else 'ends'


def has_tokens_and_text(data: settings.Data) -> bool:
  """Returns whether some files hold tokens, and others text."""
  kinds = {
    file_kinds.suffix(path) == file_kinds.TOKENS for _, path in _find(data.train, data) + _find(data.validation, data)
  }
  return len(kinds) > 1


def listing(data: settings.Data) -> list[tuple[str, int]]:
  """Lists (name, bytes) of every file; 0 bytes in a bucket."""
  files = _find(data.train, data) + _find(data.validation, data)
  return [(name, 0 if remote_files.is_remote(path) else os.path.getsize(path)) for name, path in files]


def list_with_domains(data: settings.Data, split: str) -> list[tuple[str, str, str]]:
  """Lists (name, path, domain) of the files of a split, including indices of token files; [] if it names no files."""
  globs = data.validation if split == 'validation' else data.train
  files = _find(globs, data) if globs else []
  domains = domains_of([path for _, path in files])
  indices = [(name, f'{os.path.splitext(path)[0]}{file_kinds.INDEX}') for name, path in files if _is_tokens(path)]
  with_index = [(f'{name}{file_kinds.INDEX}', path, '') for name, path in indices if remote_files.can_open(path)]
  return [*((name, path, domains[path]) for name, path in files), *with_index]


def _is_tokens(path: str) -> bool:
  return file_kinds.suffix(path) == file_kinds.TOKENS


def list_present(globs: tuple[str | fields.Source, ...]) -> list[str]:
  """Lists the files that globs match and can be listed now; none of a glob whose disk or bucket is away."""
  present: list[str] = []
  for pattern in fields.globs(globs):
    with contextlib.suppress(OSError, InputError, Unavailable):
      present += _paths(os.path.expanduser(pattern.strip()))
  return present


def check_beginnings(data: settings.Data) -> None:
  """Reads the beginning of every file. Raises InputError that names the config field or the file, and the fix."""
  train, validation = _find(data.train, data), _find(data.validation, data)
  _check_apart(train, validation)
  for _, path in train + validation:
    file_kinds.check_beginning(path, data)


def _check_apart(train: Sequence[tuple[str, str]], validation: Sequence[tuple[str, str]]) -> None:
  """Raises InputError if a file is in training and in validation, perhaps through links."""
  trained = {os.path.realpath(path) for _, path in train}
  if both := [path for _, path in validation if os.path.realpath(path) in trained]:
    problem = 'is both in config.data.train and in config.data.validation'
    raise InputError(
      f'{both[0]} {problem}: remove it from one of them, or leave out config.data.validation to hold out some text'
    )


def is_small(data: settings.Data) -> bool:
  """Returns whether all files can be read in a second or so."""
  return sum(size or SMALL_BYTES for _, size in listing(data)) <= SMALL_BYTES


def _find(globs: tuple[str | fields.Source, ...], data: settings.Data) -> list[tuple[str, str]]:
  """Lists (name, path) of all files that the globs match; the name is the path below the glob's first wildcard."""
  roots: dict[str, str] = {}
  for pattern in fields.globs(globs):
    pattern = os.path.expanduser(pattern.strip())
    root = _literal_root(pattern)
    if not (paths := file_kinds.without_indices(_paths(pattern))):
      raise InputError(f'{pattern!r} {_why_none(pattern)} config.data.train or config.data.validation')
    for path in paths:
      file_kinds.check_name(path, data)
    roots |= dict.fromkeys(paths, root or '.')
  names = {path: os.path.relpath(path, root) for path, root in roots.items()}
  if len({*names.values()}) < len(names):  # files of one name in the folders of several globs
    names = _names_below_all(roots)
  return sorted((name, path) for path, name in names.items())


def _paths(pattern: str) -> list[str]:
  """Lists the files that a pattern matches, or those of the saved dataset that it is."""
  if remote_files.is_remote(pattern):
    return remote_files.find(pattern)
  if (saved := table_files.saved_files(pattern.rstrip('/'))) is not None:
    return saved
  if os.path.isfile(pattern):  # whose name may have brackets
    return [pattern]
  root = _literal_root(pattern)
  paths = glob.glob(f'{glob.escape(root)}{pattern[len(root) :]}', recursive=True)
  return _without_links(path for path in paths if os.path.isfile(path))


def _literal_root(pattern: str) -> str:
  """Returns the folder before the first wildcard; brackets in the names of folders that exist are no wildcards."""
  root = os.path.dirname(re.split(r'[*?[]', pattern)[0])
  names = pattern[len(root) :].split('/')[1 if root not in ('', '/') else 0 : -1]
  for name in names:
    if not os.path.isdir(below := os.path.join(root, name)):
      break
    root = below
  return root


def _without_links(paths: Iterable[str]) -> list[str]:
  """Returns each file once, by its shortest path: links, and a link to a folder above, lead to some again."""
  shortest: dict[str, str] = {}
  for path in sorted(paths, key=lambda path: (path.count('/'), path)):
    shortest.setdefault(os.path.realpath(path), path)
  return sorted(shortest.values())


def _names_below_all(roots: Mapping[str, str]) -> dict[str, str]:
  """Returns {path: name} with the names below the folder that has all roots; whole paths where none has."""
  if any(map(remote_files.is_remote, roots)):
    return {path: path for path in roots}
  above = os.path.commonpath([os.path.abspath(root) for root in roots.values()])
  return {path: os.path.relpath(path, above) for path in roots}


def _why_none(pattern: str) -> str:
  """Returns why a pattern matches no file, and what may be meant."""
  folder = pattern.rstrip('/')
  if os.path.isfile(f'{folder}/dataset_dict.json'):
    splits = sorted(os.path.basename(os.path.dirname(state)) for state in glob.glob(f'{folder}/*/{table_files.SAVED}'))
    return f"is a dataset of several splits, {splits}: name one, as '{folder}/{splits[0] if splits else 'train'}', in"
  if remote_files.is_remote(pattern):
    return 'matches no object: correct' if re.search(r'[*?[]', pattern) else f"is not an object: write '{folder}/*' in"
  if '://' in pattern:
    return 'is neither a local file nor gs:// or s3://: download it, and correct'
  if not os.path.isdir(pattern):
    matches = [pattern, *glob.glob(pattern, recursive=True)]
    if any(os.path.exists(path) and not os.path.isdir(path) for path in matches):  # text is read more than once
      return 'is a pipe or a device, which is not read: write the text to a file, and name that in'
    return 'matches no file: correct'
  for below in ('*', '**/*'):
    for ending in ENDINGS:
      if glob.glob(f'{folder}/{below}{ending}', recursive=True):
        return f"is a folder: write '{folder}/{below}{ending}' in"
  return f"is a folder: write a pattern of files, as '{folder}/*.txt', in"


def _draws(files: Sequence[tuple[str, str]], data: settings.Data) -> dict[str, float]:
  """Returns {path: draw} of files of plain text, {} if they are too few to be held back whole.

  A draw is the share of all text before the file, in the order of a hash of its beginning: files that begin alike, as
  copies do, are one text and have one draw. LARGE texts come last, undrawn.
  """
  sizes = {  # bytes, at least 1; in a bucket all files count alike
    path: 1 if remote_files.is_remote(path) else max(1, os.path.getsize(path))
    for _, path in files
    if file_kinds.is_one_text(path, data)
  }
  if len(sizes) < WHOLE_FILES:
    return {}
  beginnings = {path: _beginning(path, data) for path in sizes}
  size_of_text = collections.Counter[int]()
  for path, size in sizes.items():
    size_of_text[beginnings[path]] += size
  if len(size_of_text) < WHOLE_FILES:
    return {}
  total = size_of_text.total()
  order = sorted(text for text, size in size_of_text.items() if size <= LARGE * total)
  before = itertools.accumulate((size_of_text[text] for text in order), initial=0)
  draws = {text: size / total for text, size in zip(order, before, strict=False)}
  return {path: draws.get(text, math.nextafter(1, 0)) for path, text in beginnings.items()}


def _beginning(path: str, data: settings.Data) -> int:
  """Returns the digest of a text's first piece."""
  modified_ns = 0 if remote_files.is_remote(path) else os.stat(path).st_mtime_ns
  return _digest_of_beginning(path, data, modified_ns)


@functools.lru_cache(1 << 20)
def _digest_of_beginning(path: str, data: settings.Data, modified_ns: int) -> int:
  return equality.digest(next((placed.text for placed in _pieces(path, data, None, 0.0)), ''))


def domains_of(paths: Sequence[str]) -> dict[str, str]:
  """Returns {path: domain} for documents that name none.

  Files in several folders have the folder, without what all folders begin with; NAMED_FILES or fewer in one folder the
  file; others ''.
  """
  folders = [os.path.dirname(path).split('/') for path in paths]
  if len({*map(tuple, folders)}) > 1:
    common = sum(1 for _ in itertools.takewhile(lambda names: len({*names}) == 1, zip(*folders, strict=False)))
    names = ['/'.join(folder[common:] or folder[-1:]) for folder in folders]
    return dict(zip(paths, names, strict=True))
  few = 1 < len(paths) <= NAMED_FILES
  return {path: re.sub(EXTENSION, '', os.path.basename(path)) if few else '' for path in paths}


def _items_of(data: settings.Data, files, draws, names: Mapping[str, str], fraction: float) -> source.Items:
  """Yields the items of files (name, path); `draws` and `names` are those of the functions above, by path."""
  for name, path in files:
    if not file_kinds.is_one_text(path, data):
      for number, read in file_kinds.documents(path, data, names[path]):
        yield source.Item(f'{name}:{number}', None, read)
    else:
      for number, (piece, draw, cut) in enumerate(_pieces(path, data, draws.get(path), fraction)):
        read = functools.partial(source.already_read, piece, names[path])
        yield source.Item(f'{name}#{number}', draw, read, is_piece=True, cut=cut)


def _pieces(path: str, data: settings.Data, draw: float | None, fraction: float) -> Iterator[source.Placed]:
  """Yields the pieces of one text, each with a draw: the text's own `draw`, or one that falls towards its end."""
  if file_kinds.suffix(path) == file_kinds.TOKENS:
    if draw is None:
      return token_files.pieces(path, data, fraction)
    return (placed._replace(draw=draw) for placed in token_files.pieces(path, data))
  if draw is not None:
    return (source.Placed(piece, draw) for piece in text_files.pieces(text_files.decode(path)))
  return placed_pieces(path, fraction)


def placed_pieces(path: str, fraction: float = 0.0) -> Iterator[source.Placed]:
  """Yields the pieces of a text, each with the share of the text behind its middle, which falls towards the end.

  The piece in which the last `fraction` of the text begins is cut there, as a short text has few pieces.
  """
  total = text_bytes(path)
  read = text_files.ReadSoFar()
  done = 0  # characters
  behind = 1.0

  def place(chars: float) -> float:
    """Returns the share of the text before a number of characters, with the mean bytes per character so far."""
    return chars * read.bytes / max(1, read.chars) / max(1, total)

  for piece in text_files.pieces(text_files.decode(path, read)):
    begin, end = place(done), place(done + len(piece))
    parts = [piece]
    if fraction and begin < 1 - fraction < end:
      at = text_files.break_at(piece, int(len(piece) * (1 - fraction - begin) / (end - begin)), len(piece))
      parts = [piece[:at], piece[at:]] if SHORT_CHARS < at < len(piece) - SHORT_CHARS else parts
    for i, part in enumerate(parts):
      # Bytes of a character may change from place to place, so that a place is not quite exact.
      behind = min(behind, max(0.0, 1 - place(done + len(part) / 2)))
      done += len(part)
      yield source.Placed(part, behind, equality.Cut(piece, len(parts[0]) * i) if len(parts) > 1 else None)


def text_bytes(path: str) -> int:
  """Returns the bytes of a text, decompressed; a file that does not tell is read for it, once."""
  if remote_files.is_remote(path):
    return _decompressed_bytes(path, 0)
  stat = os.stat(path)
  return _decompressed_bytes(path, stat.st_mtime_ns) if compressed_files.is_compressed(path) else stat.st_size


@functools.lru_cache(64)
def _decompressed_bytes(path: str, modified_ns: int) -> int:
  return sum(map(len, compressed_files.chunks(path)))
