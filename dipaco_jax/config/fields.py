"""Descriptions and bounds of the settings' fields, which checks and `--help` use."""

import dataclasses
import difflib
import math
import typing
from collections.abc import ItemsView, Iterator, Mapping
from typing import Any, NamedTuple

from dipaco_jax.algorithm.grid import Axis
from dipaco_jax.core.errors import InputError

PLAIN = {int: 'a whole number', float: 'a number', bool: 'True or False', str: 'a text'}


class Source(NamedTuple):
  """A source of a mixture of texts; its name is the domain of its documents."""

  name: str
  globs: tuple[str, ...]
  weight: float  # share of the bytes of text, relative to the sum of all weights


MIXABLE = tuple[str | Source, ...]  # globs, or sources of a mixture
OF_GLOBS = (tuple[str, ...], MIXABLE)


def sources(entries: tuple[str | Source, ...]) -> list[Source]:
  """Returns the sources of a mixture; an empty list if the entries are globs."""
  return [entry for entry in entries if isinstance(entry, Source)]


def globs(entries: tuple[str | Source, ...]) -> list[str]:
  """Returns all globs, including those of a mixture's sources."""
  return [glob for entry in entries for glob in ([entry] if isinstance(entry, str) else entry.globs)]


class Field(NamedTuple):
  """A field's description and bounds; numbers must be above 0 unless `zero` is set, and at least `least`."""

  about: str  # one or more sentences that can be understood without the field's name
  zero: bool = False  # whether 0 is allowed
  least: int = 0
  below: float | None = None
  most: float | None = None
  choices: tuple[str, ...] = ()
  extensible: bool = False  # whether users may name a part of their own, as 'package.module:name' (extension.py)
  example: str = ''  # a value as it is written in Python, for fields that are not plain numbers or strings
  may_change: bool = False  # whether it may differ when a run is resumed, because it does not change results
  added: bool = False  # whether runs of this format exist without it: digests leave its default out, so theirs hold


def field(default: Any, about: str, choices: str = '', **bounds: Any) -> Any:
  """Returns a dataclass field with a default and a `Field` as metadata; `choices` are separated by spaces."""
  return dataclasses.field(default=default, metadata={'field': Field(about, choices=tuple(choices.split()), **bounds)})


def fields(settings: Any, prefix: str = '') -> Iterator[tuple[str, Field]]:
  """Yields dotted names and descriptions of all fields of a dataclass and of the dataclasses inside it."""
  for f in dataclasses.fields(settings):
    if 'field' in f.metadata:
      yield prefix + f.name, f.metadata['field']
    else:
      yield from fields(f.type, f'{prefix}{f.name}.')


def flatten(nested: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Turns `{'a': {'b': 1}}` into `{'a.b': 1}`."""
  flat: dict[str, Any] = {}
  for key, value in nested.items():
    flat |= flatten(value, f'{prefix}{key}.') if isinstance(value, Mapping) else {prefix + key: value}
  return flat


def build(cls: Any, values: Any, prefix: str = '') -> Any:
  """Builds a dataclass from nested dicts; raises InputError for a wrong type or an unknown field."""
  if not isinstance(values, Mapping):
    raise InputError(f'config.{prefix[:-1]}={values!r} should be a dict of fields')
  kinds = {f.name: f for f in dataclasses.fields(cls)}
  for name in values:
    if name not in kinds:
      near = difflib.get_close_matches(name, kinds, 1, 0)
      raise InputError(f'config.{prefix}{name}: there is no such field; the nearest is config.{prefix}{near[0]}')
  examples = {name: f.metadata['field'].example if f.metadata else '' for name, f in kinds.items()}
  return cls(**{name: _convert(x, kinds[name].type, prefix + name, examples[name]) for name, x in values.items()})


def _convert(value: Any, kind: Any, name: str, example: str) -> Any:
  if dataclasses.is_dataclass(kind):
    return build(kind, value, name + '.')
  expected = describe_kind(name, kind, example)
  if name == 'grid':
    return _grid(value.items() if isinstance(value, Mapping) else value, expected)
  if name.startswith(('data.', 'metrics.')) and isinstance(value, str) and kind in OF_GLOBS:
    value = tuple(value.split(',')) if value else ()
  if kind == MIXABLE:
    if isinstance(value, Mapping) or (isinstance(value, (tuple, list)) and any(not isinstance(v, str) for v in value)):
      return _mixture(value, name)
    kind = tuple[str, ...]
  if typing.get_origin(kind) is tuple:
    return _tuple(value, kind, name, example)
  if kind is float and type(value) is int:
    value = float(value)
  if type(value) is not kind:
    raise InputError(f'config.{name}={value!r} should be {expected}')
  return value


def _mixture(value: Any, name: str) -> tuple[Source, ...]:
  """Converts {name: globs}, {name: (globs, weight)} or (name, globs, weight)... to sources; left out, a weight is 1."""
  expected = (
    "should map names to globs and weights, such as {'books': ('books/*.txt', 2.0), 'code': ('code/*.jsonl', 1.0)}"
  )
  mixture = []
  entries = value.items() if isinstance(value, Mapping) else value
  for entry in entries:
    if not isinstance(entry, (tuple, list)) or len(entry) < 2:
      raise InputError(f'config.{name}={value!r} {expected}')
    source, globs, *weight = entry
    is_list = isinstance(value, Mapping) and isinstance(globs, (tuple, list))
    if is_list and globs and isinstance(globs[-1], (int, float)):
      globs, *weight = globs[0] if len(globs) == 2 else globs[:-1], globs[-1]
    globs = tuple(globs.split(',')) if isinstance(globs, str) else globs
    globs = _convert(globs, tuple[str, ...], f'{name}[{source!r}]', "('books/*.txt',)")
    weight = weight or [1.0]
    is_number = len(weight) == 1 and type(weight[0]) in (int, float) and 0 < weight[0] < math.inf
    if not isinstance(source, str) or not source or not globs or not is_number:
      raise InputError(f'config.{name}: {entry!r} {expected}')
    mixture.append(Source(source, globs, float(weight[0])))
  if len({source.name for source in mixture}) < len(mixture):
    raise InputError(f'config.{name} names a source twice: {", ".join(source.name for source in mixture)}')
  return tuple(mixture)


def _grid(axes: Any, expected: str) -> tuple[tuple[str, Axis], ...]:
  """Converts axes and their sizes or names, sorted by axis; `expected` describes the expected value for errors."""
  if not isinstance(axes, (ItemsView, tuple, list)):
    raise InputError(f'config.grid={axes!r} should be {expected}')
  pairs = [tuple(axis) if isinstance(axis, (tuple, list)) else (axis,) for axis in axes]
  if any(len(pair) != 2 for pair in pairs):
    raise InputError(f'config.grid={tuple(pairs)!r} should be {expected}')
  names = [_convert(axis, str, 'grid axis', '') for axis, _ in pairs]
  if len({*names}) < len(names):
    raise InputError(f'config.grid={tuple(pairs)!r} names an axis twice')
  return tuple(sorted((axis, _axis(axis, size)) for axis, size in pairs))


def _axis(name: str, size: Any) -> Axis:
  """Converts the size of a grid's axis, or the names of its coordinates."""
  if isinstance(size, tuple | list):
    return _convert(size, tuple[str, ...], f'grid.{name}', "{'owner': ('clinic', 'court')}")
  return _convert(size, int, f'grid.{name}', '')


def _tuple(value: Any, kind: Any, name: str, example: str) -> tuple:
  if not isinstance(value, (tuple, list)):
    raise InputError(f'config.{name}={value!r} should be {describe_kind(name, kind, example)}')
  kinds = typing.get_args(kind)
  kinds = kinds[:1] * len(value) if kinds[1:] == (Ellipsis,) else kinds
  if len(kinds) != len(value):
    raise InputError(f'config.{name}={value!r} should have {len(kinds)} entries: {_written(name, example)}')
  return tuple(_convert(v, k, f'{name}[{i}]', example) for i, (v, k) in enumerate(zip(value, kinds, strict=True)))


def describe_kind(name: str, kind: Any, example: str) -> str:
  """Describes the expected value of a field or of one of its entries."""
  return PLAIN.get(kind) or f'a {"dict" if name == "grid" else "tuple"}: {_written(name, example)}'


def _written(name: str, example: str) -> str:
  return f'config.{name.split("[")[0]} is written as {example}'
