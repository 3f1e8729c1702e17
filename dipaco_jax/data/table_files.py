"""Documents from rows of tables: Parquet files, and Arrow files as `datasets` saves them.

Only the columns of text and domain are read, one row group or record batch at a time, which bounds memory.
"""

import functools
import os
from collections.abc import Iterator
from typing import Any

from dipaco_jax.config import settings
from dipaco_jax.core import json_text
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import compressed_files, json_files, source
from dipaco_jax.storage import remote_files

ROWS = 1024  # rows that are converted to Python strings at a time
ARROW_FILE = b'ARROW1'  # first bytes of an Arrow file, but not of a stream
SAVED = 'state.json'  # file in every folder that `datasets.save_to_disk` writes


def parquet(path: str, data: settings.Data, name: str) -> source.Documents:
  """Yields the rows of a Parquet file, numbered from 1; `name` is the domain of rows without one."""
  pyarrow = _library(path)
  with compressed_files.reading(path, pyarrow.ArrowException, UnicodeDecodeError), remote_files.open_file(path) as f:
    table = pyarrow.parquet.ParquetFile(f)
    columns = _columns(pyarrow, table.schema_arrow, data, path)
    groups = range(table.num_row_groups)
    batches = (b for g in groups for b in table.iter_batches(ROWS, row_groups=[g], columns=[*columns]))
    yield from _rows(batches, columns, path, data, name)


def arrow(path: str, data: settings.Data, name: str) -> source.Documents:
  """Yields the rows of an Arrow file or stream, numbered from 1; `name` is the domain of rows without one."""
  pyarrow = _library(path)
  with compressed_files.reading(path, pyarrow.ArrowException, UnicodeDecodeError), remote_files.open_file(path) as f:
    is_file = f.read(len(ARROW_FILE)) == ARROW_FILE
    f.seek(0)
    if is_file:
      table = pyarrow.ipc.open_file(f)
      batches = (table.get_batch(i) for i in range(table.num_record_batches))
    else:
      batches = table = pyarrow.ipc.open_stream(f)
    columns = _columns(pyarrow, table.schema, data, path)
    checked = (_check_batch(pyarrow, batch, columns) for batch in batches)
    parts = (batch.slice(start, ROWS) for batch in checked for start in range(0, batch.num_rows, ROWS))
    yield from _rows(parts, columns, path, data, name)


def _check_batch(pyarrow: Any, batch: Any, columns: dict[str, Any]) -> Any:
  """Returns a batch; raises ArrowInvalid where its offsets lead out of it, which pyarrow follows unchecked."""
  for key in columns:
    column = batch.column(key if key in batch.schema.names else key.partition('.')[0])
    try:
      column.validate(full=True)
    except pyarrow.ArrowInvalid as e:
      # Texts that are not UTF-8 are named by row. Offsets are checked before texts, but not those of other parts.
      if 'UTF8' not in str(e) or not isinstance(column, pyarrow.StringArray | pyarrow.LargeStringArray):
        raise
  return batch


def saved_files(folder: str) -> list[str] | None:
  """Returns the files of a dataset written by `datasets.save_to_disk`, or None if the folder is not such a dataset."""
  if not os.path.isfile(os.path.join(folder, SAVED)):
    return None
  try:
    with open(os.path.join(folder, SAVED), encoding='utf-8') as f:
      return [os.path.join(folder, file['filename']) for file in json_text.parse(f.read())['_data_files']]
  except (ValueError, KeyError, TypeError) as e:
    raise InputError(f'{folder}/{SAVED}: not as datasets.save_to_disk writes it ({e}): save the dataset again') from e


def _library(path: str) -> Any:
  try:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet
  except ImportError as e:
    raise InputError(f"{path}: reading it needs pyarrow: pip install 'dipaco_jax[parquet]'") from e
  return pyarrow


def _columns(pyarrow: Any, schema: Any, data: settings.Data, path: str) -> dict[str, Any]:
  """Returns {key: type} of the text and domain columns in the schema. Raises InputError if there is no text."""
  types = {}
  text_key = json_files.text_key(data)
  for key in (text_key, data.domain_key):
    if key and (kind := _kind(pyarrow, schema, key)) is not None:
      types[key] = kind
  if json_files.has_messages(data):
    if text_key not in types or not _is_list(pyarrow, types[text_key]):
      found = f'lists are under {sorted(field.name for field in schema if _is_list(pyarrow, field.type))}'
      raise InputError(f'{path}: no messages under {text_key!r}; {found}: set config.data.text_key')
  elif not _is_text(pyarrow, types.get(text_key)):
    fix = json_files.which_key(sorted(_text_keys(pyarrow, schema)))
    raise InputError(f'{path}: no text under {data.text_key!r}; {fix}')
  return types


def _kind(pyarrow: Any, fields: Any, key: str) -> Any:
  """Returns the type of a column, or of a field inside one as 'meta.source'; None if there is none."""
  names = [field.name for field in fields]
  if key in names:
    return fields.field(key).type
  outer, dot, inner = key.partition('.')
  if dot and outer in names and pyarrow.types.is_struct(kind := fields.field(outer).type):
    return _kind(pyarrow, kind, inner)
  return None


def _is_text(pyarrow: Any, kind: Any) -> bool:
  if kind is None:
    return False
  t = pyarrow.types
  kind = kind.value_type if t.is_dictionary(kind) else kind
  return t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind)


def _is_list(pyarrow: Any, kind: Any) -> bool:
  t = pyarrow.types
  return any(is_kind(kind) for is_kind in (t.is_list, t.is_large_list, t.is_fixed_size_list, t.is_list_view))


def _text_keys(pyarrow: Any, fields: Any, prefix: str = '') -> Iterator[str]:
  for field in fields:
    if pyarrow.types.is_struct(field.type):
      yield from _text_keys(pyarrow, field.type, f'{prefix}{field.name}.')
    elif _is_text(pyarrow, field.type):
      yield prefix + field.name


def _rows(batches: Any, columns: dict[str, Any], path: str, data: settings.Data, name: str) -> source.Documents:
  number = 0
  for batch in batches:
    keys = json_files.text_key(data), data.domain_key
    texts, domains = (_values(batch, key) if key in columns else None for key in keys)
    for i, text in enumerate(texts or ()):
      number += 1
      domain = domains[i] if domains else None
      yield number, functools.partial(_row, path, number, text, name if domain is None else domain, data)


def _values(batch: Any, key: str) -> list[Any]:
  """Returns the values of a column or of a field inside one; a value that is not UTF-8 is its UnicodeDecodeError."""
  if key in batch.schema.names:
    return _to_python(batch.column(key))
  outer, _, inner = key.partition('.')
  values = _to_python(batch.column(outer))
  return [value if isinstance(value, UnicodeDecodeError) else json_files.value_of(value, inner) for value in values]


def _to_python(column: Any) -> list[Any]:
  try:
    return column.to_pylist()
  except UnicodeDecodeError:
    return [_scalar_to_python(scalar) for scalar in column]


def _scalar_to_python(scalar: Any) -> Any:
  try:
    return scalar.as_py()
  except UnicodeDecodeError as e:
    return e


def _row(path: str, number: int, text: Any, domain: Any, data: settings.Data) -> tuple[str, str]:
  for value in (text, domain):
    if isinstance(value, UnicodeDecodeError):
      raise source.BadRecord(f'{path}: row {number} is not UTF-8 at byte {value.start} of a text: convert the file')
  if json_files.has_messages(data):
    return json_files.as_conversation(text, f'{path}: row {number}', data), str(domain)
  if text is None:
    raise source.BadRecord(f'{path}: row {number} has no text under {data.text_key!r}')
  return text, str(domain)
