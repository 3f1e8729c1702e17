"""What a config.json says of rotary embedding and its scaling: `rope_theta` with `rope_scaling`, or newer
`rope_parameters`, which have both, by kind of block for families whose windows differ by block. Pure.
"""

from typing import Any

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.huggingface import json_fields
from dipaco_jax.huggingface.json_fields import Config

KINDS = {'default': 'none', 'linear': 'linear', 'llama3': 'llama3', 'yarn': 'yarn'}
FIELDS = {  # of rope_scaling, by its type: of settings.Model
  'none': {},
  'linear': {'factor': 'rope_factor'},
  'llama3': {
    'factor': 'rope_factor', 'original_max_position_embeddings': 'rope_original_len',
    'low_freq_factor': 'rope_low', 'high_freq_factor': 'rope_high',
  },
  'yarn': {
    'factor': 'rope_factor', 'original_max_position_embeddings': 'rope_original_len', 'beta_slow': 'rope_low',
    'beta_fast': 'rope_high', 'attention_factor': 'rope_attention',
  },
}  # fmt: skip
YARN_DEFAULTS: Config = {'beta_slow': 1.0, 'beta_fast': 32.0}
NEUTRAL = {'partial_rotary_factor': 1.0, 'truncate': True}  # that have to be so


def read(theirs: Config, by_kind: bool) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns fields of settings.Model on scaling, and the config.json without it: with `rope_theta`, as older ones.

  Args:
    theirs: a config.json.
    by_kind: blocks with a window have a base of their own, `rope_local_base_freq`.

  Raises InputError that names an unknown key or value.
  """
  theirs = dict(theirs)
  older, newer = theirs.pop('rope_scaling', None), theirs.pop('rope_parameters', None)
  if older and newer:
    raise InputError('it has both rope_scaling and rope_parameters: remove one of them')
  called = 'rope_scaling' if older else 'rope_parameters'
  given = json_fields.table(called, older or newer or {})
  if by_kind and 'full_attention' in given:
    local = json_fields.table('sliding_attention of rope_parameters', given.pop('sliding_attention', {}))
    theirs['rope_local_base_freq'] = local.pop('rope_theta', theirs['rope_local_base_freq'])
    full = json_fields.table('full_attention of rope_parameters', given.pop('full_attention'))
    _check(local, 'default', ())
    if given:
      raise InputError(f'its {called} has {_names(given)}, which is not understood')
    given = full
  theirs['rope_theta'] = given.pop('rope_theta', theirs['rope_theta'])
  return _scaling(given, theirs.get('max_position_embeddings')), theirs


def _scaling(given: dict[str, Any], most_positions: Any) -> dict[str, Any]:
  """Returns the fields of settings.Model; texts were of `most_positions` tokens where their length is not said."""
  kind = given.get('rope_type', given.get('type', 'default'))
  if not isinstance(kind, str) or kind not in KINDS:
    raise InputError(f'its rope scaling is {kind!r}, not one of {", ".join(KINDS)}')
  fields = FIELDS[KINDS[kind]]
  _check(given, kind, fields if kind != 'default' else ('factor', 'original_max_position_embeddings'))
  if kind == 'default':
    return {}
  usual = YARN_DEFAULTS if kind == 'yarn' else {}
  given = {**usual, 'original_max_position_embeddings': most_positions, **given}
  if missing := [name for name in fields if given.get(name) is None and name != 'attention_factor']:
    raise InputError(f'its rope scaling has no {missing[0]}')
  values = {
    field: json_fields.value(f'rope scaling {name}', given[name], field)
    for name, field in fields.items()
    if name in given
  }
  return {'rope_scaling': KINDS[kind]} | values


def _check(given: Config, kind: str, fields: Any):
  """Raises InputError if rotary embedding of this type has other fields than these."""
  if given.get('rope_type', kind) != kind or given.get('type', kind) != kind:
    raise InputError(f'its rotary embedding is {dict(given)!r}, which is not understood')
  if odd := {name: x for name, x in given.items() if x != NEUTRAL.get(name, x)}:
    raise InputError(f'its rope scaling has {", ".join(f"{name}={x!r}" for name, x in odd.items())}: not understood')
  if unknown := {*given} - {*fields} - {*NEUTRAL} - {'rope_type', 'type'}:
    raise InputError(f'its rope scaling has {_names(unknown)}, which is not understood')


def _names(rope_type: Any) -> str:
  return ', '.join(sorted(rope_type))


def write(model: settings.Model) -> dict[str, Any] | None:
  """Returns `rope_scaling` of a model, None for none."""
  if model.rope_scaling == 'none':
    return None
  fields = FIELDS[model.rope_scaling]
  values = {name: getattr(model, field) for name, field in fields.items()}
  if not values.get('attention_factor', 1):
    del values['attention_factor']
  return {'rope_type': model.rope_scaling} | values
