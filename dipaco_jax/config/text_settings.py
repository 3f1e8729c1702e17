"""Which source the text of a config comes from, and the fields that each source reads. `data` is a settings.Data."""

import dataclasses
from typing import Any

from dipaco_jax.config.extension import is_reference
from dipaco_jax.config.fields import sources
from dipaco_jax.core.errors import InputError

READ = {  # fields that a source reads, of those that not all of them do
  'stdlib': (),
  'files': ('train', 'validation', 'text_key', 'domain_key', 'plain_suffixes'),
  'tfds': ('name', 'data_dir', 'text_key', 'domain_key'),
  'seqio': ('name', 'data_dir', 'module', 'text_key', 'domain_key'),
}
OF_SOME = sorted({name for names in READ.values() for name in names})
EXAMPLES = {'tfds': 'c4/en:3.0.1', 'seqio': 'my_task'}


def resolve_source(data: Any) -> Any:
  """Returns the settings of text with the source that 'auto' stands for; raises InputError if that is not clear.

  It is 'files' where files are named, 'seqio' where a module is, 'tfds' where the name has a version, else 'stdlib'.
  """
  if data.source != 'auto':
    return data
  if data.train or data.validation:
    return dataclasses.replace(data, source='files')
  if data.module:
    return dataclasses.replace(data, source='seqio')
  if ':' in data.name:
    return dataclasses.replace(data, source='tfds')
  for name in ('name', 'data_dir', 'text_key', 'domain_key', 'plain_suffixes'):
    if getattr(data, name) != _default(data, name):
      fix = 'name files in config.data.train, or set config.data.source to tfds or seqio'
      raise InputError(f'config.data.{name}={getattr(data, name)!r} does not name a text: {fix}')
  return dataclasses.replace(data, source='stdlib')


def check_data(data: Any) -> None:
  """Raises InputError if a source lacks what it needs."""
  if data.source == 'files' and not data.train:
    raise InputError("config.data.train is empty: name the text, for instance 'my/*.txt'")
  train, validation = sources(data.train), sources(data.validation)
  if validation and {source.name for source in validation} != {source.name for source in train}:
    names = ', '.join(source.name for source in train) or 'none'
    raise InputError(f'config.data.validation names sources: they should be those of config.data.train, {names}')
  if data.source not in EXAMPLES:
    return
  example = EXAMPLES[data.source]
  if not data.name:
    raise InputError(f'config.data.name is empty: name what to read, for instance --config.data.name={example}')
  if data.source == 'tfds' and ':' not in data.name:
    raise InputError(f'config.data.name={data.name!r} names no version: add it, as in {example!r}')
  if data.source == 'tfds' and not data.data_dir:
    raise InputError('config.data.data_dir is empty: name the folder, or gs://, where tfds has prepared the dataset')
  for name in ('train', 'validation'):
    if getattr(data, name):
      raise InputError(f"config.data.{name} is for source='files': {data.source} has splits of its own")


def check_all_is_read(data: Any) -> None:
  """Raises InputError if a field is set that the source does not read; one of the user's own may read any."""
  if is_reference(data.source):
    return
  for name in OF_SOME:
    value = getattr(data, name)
    if name not in READ[data.source] and value != _default(data, name):
      readers = ' or '.join(repr(source) for source in READ if name in READ[source])
      problem = f'config.data.source={data.source!r} does not read it, {readers} does: leave one of the two out'
      raise InputError(f'config.data.{name}={_in_short(value)}: {problem}')


def check_tokenizer(tokenizer: Any) -> None:
  """Raises InputError if a tokenizer is given, and another kind is to be trained."""
  default = _default(tokenizer, 'kind')
  if tokenizer.model_file and tokenizer.kind != default:
    problem = 'and the latter is used: leave out one of them'
    raise InputError(
      f'config.tokenizer.kind={tokenizer.kind!r} and config.tokenizer.model_file are both set, {problem}'
    )


def _default(section: Any, name: str) -> Any:
  return next(field.default for field in dataclasses.fields(section) if field.name == name)


def _in_short(value: Any, most: int = 100) -> str:
  text = repr(value)
  return text if len(text) <= most else f'{text[:most]}...'
