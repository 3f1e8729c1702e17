"""Documents of a SeqIO task or mixture, which a module of the user's registers."""

import difflib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from dipaco_jax import settings, sources
from dipaco_jax.sources_tfds import load

SEED = 0  # of mixtures and of preprocessors that draw


def items(data: settings.Data, split: str) -> Iterator[sources.Item] | None:
  """Examples as the task makes them, unshuffled; None where it has no split for validation.

  An example's text is its feature `text_key` as it was before it was tokenized (`<text_key>_pretokenized`) where the
  task keeps that, else what its tokens decode to. A part of the stream costs the task's preprocessing of the whole.

  Raises:
    ValueError: the extra is not installed, the module can't be imported, or there is no such task, split or text.
  """
  seqio, tf = load('seqio', data.source), load('tensorflow', data.source)
  task = _task(seqio, data)
  splits = _opened(data, lambda: task.splits)
  if split not in splits:
    if split == 'validation':
      return None
    raise ValueError(f'config.data.name={data.name!r} has no split {split!r}: it has {sorted(splits)}')
  dataset = _opened(data, lambda: _dataset(data, task, isinstance(task, seqio.Mixture), split))
  read = functools.partial(_read, data, *_text_of(data, dataset.element_spec, task, tf))
  return _items(tf, data, dataset, split, read)


def _task(seqio: Any, data: settings.Data) -> Any:
  if data.data_dir:
    seqio.set_tfds_data_dir_override(data.data_dir)
  try:
    if data.module:
      importlib.import_module(data.module)
  except ImportError as e:
    raise ValueError(f'config.data.module={data.module!r} cannot be imported ({e}): is it on PYTHONPATH?') from e
  known = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
  if data.name not in known:
    near = difflib.get_close_matches(data.name, known, 10, 0)
    raise ValueError(
      f'config.data.name={data.name!r}: SeqIO knows no such task or mixture, but {near}; name the module that '
      f'registers it in config.data.module'
    )
  return seqio.get_mixture_or_task(data.name)


def _dataset(data: settings.Data, task: Any, is_mixture: bool, split: str) -> Any:
  """A tf.data.Dataset of one epoch, in an order that never changes."""
  get = functools.partial(
    task.get_dataset, sequence_length=None, split=split, shuffle=False, seed=SEED, num_epochs=1,
    trim_output_features=False, try_in_mem_cache=False,
  )  # fmt: skip
  if not is_mixture:
    return get()
  get = functools.partial(get, passthrough_features=[data.text_key, data.domain_key])
  try:
    return get(copy_pretokenized=True)
  except TypeError:  # not all tasks keep it
    return get()


def _opened(data: settings.Data, action: Callable[[], Any]) -> Any:
  """What `action` returns; whatever a task of the user's raises is the input's fault."""
  try:
    return action()
  except Exception as e:
    raise ValueError(f'config.data.name={data.name!r} cannot be read ({type(e).__name__}: {str(e)[:200]})') from e


def _text_of(data: settings.Data, spec: Any, task: Any, tf: Any) -> tuple[str, Callable[[Any], str]]:
  """The key of the text in an example, and what makes a text of what is there."""
  strings = [key for key, of in spec.items() if of.dtype == tf.string]
  for key in (f'{data.text_key}_pretokenized', data.text_key):
    if key in strings:
      return key, lambda value: value.decode('utf-8', 'replace')
  feature = task.output_features.get(data.text_key)
  if feature is None:
    keys = sorted({*strings, *task.output_features})
    raise ValueError(f'{data.name}: no text under {data.text_key!r}; there are {keys}: set config.data.text_key')
  return data.text_key, lambda tokens: feature.vocabulary.decode(tokens.tolist())


def _items(tf: Any, data: settings.Data, dataset: Any, split: str, read: Callable) -> Iterator[sources.Item]:
  try:
    for number, example in enumerate(dataset.as_numpy_iterator()):
      draw = sources.spread(f'{data.name}/{split}', number)
      yield sources.Item(f'{split}:{number}', draw, functools.partial(read, example))
  except tf.errors.OpError as e:
    raise ValueError(f'config.data.name={data.name!r}: {str(e)[:200]}') from e


def _read(data: settings.Data, key: str, text_of: Callable[[Any], str], example: Any) -> tuple[str, str]:
  domain = example.get(data.domain_key, b'')
  return text_of(example[key]), domain.decode('utf-8', 'replace') if isinstance(domain, bytes) else str(domain)
