"""What a config.json says of each block: which has a window, which no rotary embedding, how scores are scaled. Pure."""

from collections.abc import Sequence
from typing import Any

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.huggingface import json_fields
from dipaco_jax.huggingface.families import Family
from dipaco_jax.huggingface.json_fields import Config
from dipaco_jax.models import layers

SLIDING, FULL = 'sliding_attention', 'full_attention'
SWITCHED = ('switched', 'unturned')  # families whose window counts by use_sliding_window alone


def names(family: Family) -> set[str]:
  """Returns the fields of config.json on blocks that a family has, beside those of `plain`."""
  field_names = {'layer_types'} | ({'sliding_window'} if family.windows else set())
  if family.windows in SWITCHED:
    field_names |= {'use_sliding_window', 'max_window_layers'}
  if family.windows == 'layers':
    field_names |= {
      'sliding_window_pattern',
      '_sliding_window_pattern',
      'query_pre_attn_scalar',
      'rope_local_base_freq',
    }
  return field_names | ({'no_rope_layers', 'no_rope_layer_interval'} if family.windows == 'unturned' else set())


def plain(family: Family) -> dict[str, Any]:
  """Returns fields that a family does not have, with the values that they must have if they occur anyway."""
  values: dict[str, Any] = {} if family.windows else {'sliding_window': None}
  return values | ({} if family.windows in SWITCHED else {'use_sliding_window': False})


def read(family: Family, theirs: Config, values: Config) -> dict[str, Any]:
  """Returns fields of settings.Model.

  Args:
    family, theirs: the family of a config.json, and the latter, with what is usual where it says nothing.
    values: its fields of settings.Model so far.

  Raises InputError if blocks differ by no pattern that is known.
  """
  num_layers = values['num_layers']
  turned = _turned(theirs, num_layers) if family.windows == 'unturned' else [True] * num_layers
  still = _every([not turns for turns in turned], 'have no rotary embedding')
  own: dict[str, Any] = {'no_rope_every': still} if still else {}
  if family.windows == 'layers':
    scale = json_fields.number('query_pre_attn_scalar', theirs['query_pre_attn_scalar'])
    own |= {} if scale == values['head_dim'] else {'query_scale': scale}
  windows = _windows(family, theirs, turned)
  if windows and family.windows == 'layers':
    own['rope_local_base'] = json_fields.number('rope_local_base_freq', theirs['rope_local_base_freq'])
  return own | windows


def _turned(theirs: Config, num_layers: int) -> list[bool]:
  """Returns which blocks have rotary embedding."""
  given = theirs.get('no_rope_layers')
  if given is None:
    every = json_fields.check_integer('no_rope_layer_interval', theirs['no_rope_layer_interval'])
    return [(n + 1) % every != 0 for n in range(num_layers)]
  if not isinstance(given, list) or len(given) != num_layers or any(x not in (0, 1) for x in given):
    raise InputError(f'its no_rope_layers is {given!r}, which is not 0 or 1 for each of its {num_layers} blocks')
  return [bool(x) for x in given]


def _windows(family: Family, theirs: Config, turned: Sequence[bool]) -> dict[str, Any]:
  """Returns the window and which blocks have none."""
  window, switch = theirs.get('sliding_window'), theirs.get('use_sliding_window', False)
  if not isinstance(switch, bool):
    raise InputError(f'its use_sliding_window is {switch!r}, which is neither true nor false')
  if window is not None:
    json_fields.check_integer('sliding_window', window)
  is_on = window is not None and (switch or family.windows not in SWITCHED)
  kinds = theirs.get('layer_types')
  if kinds is None:
    kinds = [SLIDING if is_on and slides else FULL for slides in _usual(family, theirs, turned)]
  if not isinstance(kinds, list) or len(kinds) != len(turned) or any(kind not in (SLIDING, FULL) for kind in kinds):
    raise InputError(f'its layer_types is {kinds!r}, which is not {SLIDING} or {FULL} for each of {len(turned)} blocks')
  if SLIDING not in kinds:
    return {}
  if not is_on:
    problem = f'its sliding_window is {window!r}' + (f', its use_sliding_window {switch}' if window else '')
    raise InputError(f'its layer_types has {SLIDING}, but {problem}')
  every = _every([kind == FULL for kind in kinds], 'have no window')
  return {'window': window} | ({'full_every': every} if every else {})


def _usual(family: Family, theirs: Config, turned: Sequence[bool]) -> list[bool]:
  """Returns which blocks have a window, where a config.json names no kinds."""
  if family.windows == 'layers':
    every = json_fields.check_integer('sliding_window_pattern', theirs['sliding_window_pattern'])
    if theirs.get('_sliding_window_pattern', every) != every:
      raise InputError(f'its _sliding_window_pattern is {theirs["_sliding_window_pattern"]!r}, its layer_types missing')
    return [(n + 1) % every != 0 for n in range(len(turned))]
  if family.windows == 'unturned':
    return [not turns for turns in turned]
  first = (
    json_fields.check_integer('max_window_layers', theirs['max_window_layers'], 0)
    if family.windows == 'switched'
    else 0
  )
  return [n >= first for n in range(len(turned))]


def _every(chosen: Sequence[bool], problem: str) -> int:
  """Returns k where every k-th block is chosen, or 0 if none is; raises InputError if that is no pattern."""
  places = [n for n, is_one in enumerate(chosen, 1) if is_one]
  if places and places != list(range(places[0], len(chosen) + 1, places[0])):
    raise InputError(f'its blocks {places} {problem}, which is not every block of some number')
  return places[0] if places else 0


def write(family: Family, model: settings.Model) -> dict[str, Any]:
  """Returns the fields of config.json on blocks, of a model as one of a family."""
  blocks = [layers.layer(model, n) for n in range(model.num_layers)]
  theirs: dict[str, Any] = {'sliding_window': model.window or None} if family.windows else {}
  if family.windows in ('layers', *SWITCHED):
    theirs['layer_types'] = [SLIDING if block.window else FULL for block in blocks]
  if family.windows in SWITCHED:
    theirs['use_sliding_window'] = bool(model.window)
  if family.windows == 'switched':
    theirs['max_window_layers'] = 0 if model.window else model.num_layers
  if family.windows == 'unturned':
    theirs['no_rope_layers'] = [int(block.turns) for block in blocks]
  if family.windows == 'layers':
    theirs['rope_local_base_freq'] = model.rope_local_base or model.rope_base
    theirs['query_pre_attn_scalar'] = _to_integer(model.query_scale) or model.head_dim
  return theirs


def _to_integer(value: float) -> float | int:
  """Returns a whole number as int, which transformers insists on."""
  return int(value) if value == int(value) else value
