"""Documents of a SeqIO task or mixture, which a module of the user's registers."""

import difflib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from dipaco_jax.config import extension, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import source
from dipaco_jax.data.source_tfds import load_library
from dipaco_jax.storage import user_modules

BATCH = 256  # examples read at one time
SEED = 0  # for mixtures and preprocessors that draw


def items(data: settings.Data, split: str, part=source.WHOLE, side: source.Side | None = None) -> source.Items | None:
  """Yields examples as the task makes them, unshuffled; None if it has no split for validation.

  An example's text is its feature `text_key` as it was before it was tokenized (`<text_key>_pretokenized`) where the
  task keeps that, else what its tokens decode to. SeqIO itself divides a task, by files if there are enough. A part
  costs the preprocessing of the whole where the numbers of its examples in the whole are needed: to draw a validation
  split, or in a mixture, whose examples are drawn. Raises InputError if the extra is not installed, the module can't
  be imported, or there is no such task, split or text.
  """
  seqio, tf = load_library('seqio', data.source), load_library('tensorflow', data.source)
  task = _task(seqio, data)
  splits = _as_input_error(data, lambda: task.splits)
  if split not in splits:
    if split == 'validation':
      return None
    raise InputError(f'config.data.name={data.name!r} has no split {split!r}: it has {sorted(splits)}')
  mixture = isinstance(task, seqio.Mixture)
  apart = part != source.WHOLE and not mixture and 'validation' in splits
  shard = {'shard_info': seqio.ShardInfo(*part)} if apart else {}
  dataset = _as_input_error(data, lambda: _dataset(data, task, mixture, split, shard))
  rows = enumerate(_text_rows(tf, data, _strings(tf, data, task, dataset)))
  numbered = ((part[0] + part[1] * i, row) for i, row in rows) if apart else source.take(rows, part)
  return (source.Item(f'{split}:{n}', None, functools.partial(_decode, *row)) for n, row in numbered)


def content_digest(data: settings.Data) -> str:
  """Returns a digest of the source of the task's module, and of its splits with the examples that each has."""
  task = _task(load_library('seqio', data.source), data)
  splits = _as_input_error(data, lambda: {split: task.num_input_examples(split) for split in sorted(task.splits)})
  code = (data.module and user_modules.read_source(data.module)) or ''
  return hashlib.sha256(json.dumps([splits, code]).encode()).hexdigest()


def _task(seqio: Any, data: settings.Data) -> Any:
  if data.data_dir:
    seqio.set_tfds_data_dir_override(data.data_dir)
  if data.module and not extension.is_admitted(data.module):
    raise extension.untrusted('data.module', data.module)
  try:
    if data.module:
      user_modules.import_checked(data.module)
  except ImportError as e:
    raise InputError(f'config.data.module={data.module!r} cannot be imported ({e}): is it on PYTHONPATH?') from e
  known = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
  if data.name not in known:
    near = difflib.get_close_matches(data.name, known, 10, 0)
    raise InputError(
      f'config.data.name={data.name!r}: SeqIO has no such task or mixture; the nearest are {near}; name the module '
      'that registers it in config.data.module'
    )
  return seqio.get_mixture_or_task(data.name)


def _dataset(data: settings.Data, task: Any, is_mixture: bool, split: str, shard: dict[str, Any]) -> Any:
  """Returns a tf.data.Dataset of one epoch, in an order that never changes."""
  get = functools.partial(
    task.get_dataset, sequence_length=None, split=split, shuffle=False, seed=SEED, num_epochs=1,
    trim_output_features=False, try_in_mem_cache=False, **shard,
  )  # fmt: skip
  if not is_mixture:
    return get()
  get = functools.partial(get, passthrough_features=[data.text_key, data.domain_key])
  try:
    return get(copy_pretokenized=True)
  except TypeError:  # not all tasks keep it
    return get()


def _as_input_error(data: settings.Data, action: Callable[[], Any]) -> Any:
  """Returns what `action` returns; turns any error into InputError, as the task is the user's code."""
  try:
    return action()
  except Exception as e:
    raise InputError(f'config.data.name={data.name!r} cannot be read ({type(e).__name__}: {str(e)[:200]})') from e


def _strings(tf: Any, data: settings.Data, task: Any, dataset: Any) -> Any:
  """Returns a tf.data.Dataset of (text, domain)."""
  spec, feature = dataset.element_spec, task.output_features.get(data.text_key)
  strings = [key for key, of in spec.items() if of.dtype == tf.string]
  kept = next((key for key in (f'{data.text_key}_pretokenized', data.text_key) if key in strings), '')
  if not kept and feature is None:
    keys = sorted({*strings, *task.output_features})
    raise InputError(f'{data.name}: no text under {data.text_key!r}; there are {keys}: set config.data.text_key')

  def both(example):
    text = example[kept] if kept else feature.vocabulary.decode_tf(example[data.text_key])
    if data.domain_key not in spec:
      return text, ''
    domain = example[data.domain_key]
    return text, domain if domain.dtype == tf.string else tf.strings.as_string(domain)

  return dataset.map(both, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _text_rows(tf: Any, data: settings.Data, dataset: Any) -> Iterator[tuple[bytes, bytes]]:
  try:
    for batch in dataset.batch(BATCH).as_numpy_iterator():  # an element at a time takes longer
      yield from zip(*batch, strict=True)
  except tf.errors.OpError as e:
    raise InputError(f'config.data.name={data.name!r}: {str(e)[:200]}') from e


def _decode(text: bytes, domain: bytes) -> tuple[str, str]:
  return text.decode('utf-8', 'replace'), domain.decode('utf-8', 'replace')
