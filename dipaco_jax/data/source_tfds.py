"""Documents of a dataset that TensorFlow Datasets has prepared, such as C4: tfrecord or array_record, on disk or gs://.

Only `load_library` imports TensorFlow, when such text is read.
"""

import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import source
from dipaco_jax.storage import records

READ_RECORDS = 256  # at one time
BUFFER_BYTES = 8 << 20


def items(data: settings.Data, split: str, part=source.WHOLE, side: source.Side | None = None) -> source.Items | None:
  """Yields examples in the order of the dataset's files; None if it has no split for validation.

  A document's id is its number in the split, in any format and files of the dataset. Raises InputError if
  the extra is not installed; there is no such dataset, split or text; or a file is damaged.
  """
  if '://' not in data.data_dir and not os.path.isdir(os.path.expanduser(data.data_dir)):  # before slow imports
    raise InputError(f'config.data.data_dir={data.data_dir!r}: there is no such folder')
  tf, tfds = load_library('tensorflow', data.source), load_library('tensorflow_datasets', data.source)
  info = _builder(tfds, data.name, data.data_dir).info
  if split not in info.splits:
    if split == 'validation':
      return None
    raise InputError(f'config.data.name={data.name!r} has no split {split!r}: it has {sorted(info.splits)}')
  texts = sorted(key for key, feature in info.features.items() if isinstance(feature, tfds.features.Text))
  if data.text_key not in texts:
    raise InputError(f'{data.name}: no text under {data.text_key!r}; texts are under {texts}: set config.data.text_key')
  parse = functools.partial(_parse_example, tf.train.Example, data, dict(info.features.items()).get(data.domain_key))
  split_info = info.splits[split]
  firsts = itertools.accumulate(split_info.shard_lengths, initial=0)
  paths = zip(map(os.fspath, split_info.filepaths), firsts, split_info.shard_lengths, strict=False)
  files, part = source.deal_files(list(paths), part)
  return (
    source.Item(f'{split}:{number}', None, functools.partial(parse, number, record))
    for number, record in source.take(itertools.chain.from_iterable(_records(tf, *file) for file in files), part)
  )


def content_digest(data: settings.Data) -> str:
  """Returns a digest of a dataset's description, which has its splits, and of its files' names and sizes.

  Raises InputError if it is not prepared.
  """
  tfds = load_library('tensorflow_datasets', data.source)
  folder = tfds.core.Path(_builder(tfds, data.name, data.data_dir).data_dir)
  listed = sorted((file.name, file.stat().length) for file in folder.iterdir() if not file.is_dir())
  described = [(name, (folder / name).read_text()) for name, _ in listed if name.endswith('.json')]
  return hashlib.sha256(json.dumps([listed, described]).encode()).hexdigest()


@functools.cache
def load_library(module: str, name: str) -> Any:
  """Imports a library for the source `name`, TensorFlow kept off accelerators; raises InputError without the extra."""
  try:
    with _mute():
      tf = importlib.import_module('tensorflow')
      loaded = importlib.import_module(module)
  except ImportError as e:
    raise InputError(f"config.data.source={name!r} needs {e.name}: pip install 'dipaco_jax[c4]'") from e
  for kind in ('GPU', 'TPU'):
    tf.config.set_visible_devices([], kind)
  return loaded


@contextlib.contextmanager
def _mute() -> Iterator[None]:
  """Silences stderr: TensorFlow writes to it as it loads, past Python and at any log level."""
  sys.stderr.flush()
  kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
  os.dup2(null, 2)
  try:
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
    os.close(null)


@functools.cache
def _builder(tfds: Any, name: str, data_dir: str) -> Any:
  """Opens a dataset by its own description; downloads and prepares nothing."""
  folder, where = tfds.core.Path(data_dir).expanduser(), f'config.data.data_dir={data_dir!r}'
  if not folder.exists():
    raise InputError(f'{where}: there is no such folder')
  builder_folder = folder / name.replace(':', '/')
  if not (builder_folder / 'dataset_info.json').exists():
    known = [file.parent for depth in ('*', '*/*', '*/*/*') for file in folder.glob(f'{depth}/dataset_info.json')]
    names = sorted(f'{path.parent.relative_to(folder)}:{path.name}' for path in known)
    raise InputError(f'config.data.name={name!r}: it has not been prepared in {where}; there are {names}')
  return tfds.builder_from_directory(builder_folder)


def _records(tf: Any, path: str, first: int, expected: int) -> Iterator[tuple[int, bytes]]:
  """Yields (number in the split, serialized example) of a file."""
  count, fault = 0, ''
  read = _array_records(path) if '.array_record' in os.path.basename(path) else _tf_records(tf, path)
  try:
    for count, record in enumerate(read, 1):
      yield first + count - 1, record
  except (tf.errors.OpError, RuntimeError, ValueError) as e:
    fault = f': {e}'[:200]
  if count != expected:
    raise InputError(f'{path}: {count} of {expected} documents can be read{fault}; prepare the dataset again')


def _tf_records(tf: Any, path: str) -> Iterator[bytes]:
  records = tf.data.TFRecordDataset(path, buffer_size=BUFFER_BYTES)
  for batch in records.batch(READ_RECORDS).prefetch(1).as_numpy_iterator():  # one at a time takes 5 times as long
    yield from batch


def _array_records(path: str) -> Iterator[bytes]:
  reader = ArrayRecordReader(path, records.RANDOM_ACCESS)
  for start in range(0, reader.num_records(), READ_RECORDS):
    yield from reader.read(start, min(start + READ_RECORDS, reader.num_records()))


def _parse_example(example: Any, data: settings.Data, domain: Any, number: int, record: bytes) -> tuple[str, str]:
  """Returns (text, domain) of a serialized example; a label's name is a domain too."""
  features = example.FromString(record).features.feature
  texts = features[data.text_key].bytes_list.value
  if not texts:
    raise source.BadRecord(f'{data.name}: document {number} has no text under {data.text_key!r}')
  text = texts[0].decode('utf-8', 'replace')
  if hasattr(domain, 'int2str') and (labels := features[data.domain_key].int64_list.value):
    return text, domain.int2str(labels[0])
  values = features[data.domain_key].bytes_list.value
  return text, values[0].decode('utf-8', 'replace') if values else ''
