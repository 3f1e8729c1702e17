"""config.json of a model of a family, read as fields of config.model, and written. Pure.

Every field has to be understood: one that says what cannot be computed here, or that is not known, is refused by name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dipaco_jax.core import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.huggingface import families
from dipaco_jax.models import layers

Config = Mapping[str, Any]
FIELDS = {  # of config.json: of settings.Model
  'hidden_size': 'width', 'num_hidden_layers': 'num_layers', 'num_attention_heads': 'num_heads', 'head_dim': 'head_dim',
  'intermediate_size': 'mlp_dim', 'tie_word_embeddings': 'tied', 'rms_norm_eps': 'norm_epsilon',
  'rope_theta': 'rope_base', 'num_key_value_heads': 'num_kv_heads',
}  # fmt: skip
DEFAULTS: Config = {'tie_word_embeddings': False, 'rms_norm_eps': 1e-6, 'rope_theta': 10_000.0}
# Fields of config.json that say nothing about what is computed here.
SILENT = frozenset(
  'architectures model_type vocab_size transformers_version torch_dtype dtype use_cache bos_token_id eos_token_id '
  'pad_token_id initializer_range pretraining_tp max_position_embeddings cache_implementation _name_or_path '
  'is_llama_config dipaco_jax'.split()
)
NEUTRAL = {  # others', that have to be so where they are there
  'attention_dropout': 0.0, 'rope_interleaved': False, 'use_mrope': False, 'mlp_bias': False, 'attention_bias': False,
  'quantization_config': None, 'hidden_act': 'silu', 'partial_rotary_factor': 1.0, 'is_decoder': True,
  'clip_qkv': None, 'attn_logit_softcapping': None, 'final_logit_softcapping': None,
}  # fmt: skip
OF_WINDOWS = (
  'sliding_window use_sliding_window max_window_layers layer_types sliding_window_pattern _sliding_window_pattern'
).split()
ROPES = {'default': 'none', 'linear': 'linear', 'llama3': 'llama3', 'yarn': 'yarn'}
ROPE_FIELDS = {  # of rope_scaling, by its type: of settings.Model
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


def family_of(theirs: Config) -> families.Family:
  """Returns the family of a config.json; raises InputError where it is none of them."""
  found = [family for family in families.FAMILIES if family.model_type == theirs.get('model_type')]
  if not found:
    known = ', '.join(family.model_type for family in families.FAMILIES)
    raise InputError(f'its model_type is {theirs.get("model_type")!r}, not one of {known}')
  return found[0]


def read_config(theirs: Config) -> dict[str, Any]:
  """Returns the fields of settings.Model that a config.json says.

  Raises InputError that names every field that is not understood, or is of a model that cannot be computed here.
  """
  family = family_of(theirs)
  defaults = {**DEFAULTS, **family.defaults}
  theirs = defaults | {name: x for name, x in theirs.items() if x is not None or name not in defaults}
  rope, theirs = _rope(theirs)
  if missing := [name for name in (*FIELDS, 'vocab_size') if name not in theirs and name not in OPTIONAL]:
    raise InputError(f'its config.json has no {missing[0]}')
  own = {'query_pre_attn_scalar', 'rope_local_base_freq'} if family.windows == 'layers' else set()
  own |= {'no_rope_layers', 'no_rope_layer_interval'} if family.model_type == 'smollm3' else set()
  plain = {**NEUTRAL, **family.plain}
  odd = [f'its {name} is {x!r}, not {plain[name]!r}' for name, x in theirs.items() if x != plain.get(name, x)]
  known = {*SILENT, *FIELDS, *OF_WINDOWS, *plain, *own}
  odd += [f'its {name} is {x!r}, which is not understood' for name, x in theirs.items() if name not in known]
  if odd:
    raise InputError(', '.join(odd))
  found = {field: _as(field, theirs[name]) for name, field in FIELDS.items() if theirs.get(name) is not None}
  found.setdefault('head_dim', found['width'] // found['num_heads'])
  if found.get('num_kv_heads') == found['num_heads']:
    del found['num_kv_heads']
  return found | dict(family.has) | rope | _windows(family, theirs) | _own(family, theirs, found)


OPTIONAL = ('head_dim', 'num_key_value_heads')


def _as(field: str, value: Any) -> Any:
  """Returns a value in the type of a field of settings.Model."""
  return type(getattr(settings.Model(), field))(value)


def _rope(theirs: Config) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns fields of rotary embedding and the config.json without those of scaling, as older ones have it."""
  theirs = dict(theirs)
  given = theirs.pop('rope_parameters', None) or theirs.pop('rope_scaling', None) or {}
  theirs.pop('rope_scaling', None)
  if 'full_attention' in given:  # by kind of block
    local = given.get('sliding_attention') or {}
    if local.get('rope_type', 'default') != 'default' or {*local} - {'rope_type', 'rope_theta'}:
      raise InputError(f'its rotary embedding of blocks with a window is {local!r}, which is not understood')
    theirs['rope_local_base_freq'] = local.get('rope_theta', theirs.get('rope_local_base_freq'))
    given = given['full_attention']
  given = {name: x for name, x in given.items() if x is not None}
  theirs['rope_theta'] = given.pop('rope_theta', theirs['rope_theta'])
  kind = given.pop('rope_type', given.pop('type', 'default'))
  given.pop('type', None)
  if kind not in ROPES:
    raise InputError(f'its rope scaling is {kind!r}, not one of {", ".join(ROPES)}')
  scaling = ROPES[kind]
  if scaling == 'none':
    given = {name: x for name, x in given.items() if name not in ('factor', 'original_max_position_embeddings')}
  fields = ROPE_FIELDS[scaling]
  if scaling == 'yarn':
    given = {**YARN_DEFAULTS, **given}
    given.setdefault('original_max_position_embeddings', theirs.get('max_position_embeddings'))
  if odd := {*given} - {*fields} - {'truncate'} or given.get('truncate', True) is not True:
    raise InputError(f'its rope scaling has {odd if odd is not True else "truncate=False"}, which is not understood')
  if missing := [name for name in fields if name not in given and name != 'attention_factor']:
    raise InputError(f'its rope scaling has no {missing[0]}')
  found = {field: _as(field, given[name]) for name, field in fields.items() if name in given}
  return ({'rope_scaling': scaling} | found if scaling != 'none' else {}), theirs


def _windows(family: families.Family, theirs: Config) -> dict[str, Any]:
  """Returns the window and which blocks have none. Raises InputError where these are no pattern that is known."""
  window, num_layers = theirs.get('sliding_window'), theirs['num_hidden_layers']
  if not window or not family.windows or (family.windows == 'switched' and not theirs.get('use_sliding_window')):
    if window and not family.windows:
      raise InputError(f'its sliding_window is {window!r}, which {family.model_type} does not have')
    return {}
  every = theirs.get('sliding_window_pattern') or theirs.get('_sliding_window_pattern') or 6
  kinds = theirs.get('layer_types')
  if kinds is None and family.windows == 'layers':
    kinds = ['full_attention' if (n + 1) % every == 0 else 'sliding_attention' for n in range(num_layers)]
  elif kinds is None:
    first = theirs.get('max_window_layers', 0) if family.windows == 'switched' else 0
    kinds = ['full_attention' if n < first else 'sliding_attention' for n in range(num_layers)]
  full = [n + 1 for n, kind in enumerate(kinds) if kind == 'full_attention']
  if len(full) == num_layers:
    return {}
  found = {'window': int(window)} | ({'full_every': full[0]} if full else {})
  if full != [n for n in range(1, num_layers + 1) if full and n % full[0] == 0]:
    raise InputError(f'its blocks {full} have no window, which is not every block of some number')
  return found


def _own(family: families.Family, theirs: Config, found: Config) -> dict[str, Any]:
  """Returns what one family alone has."""
  own: dict[str, Any] = {}
  if family.windows == 'layers':
    own['rope_local_base'] = float(theirs['rope_local_base_freq'])
    scale = theirs.get('query_pre_attn_scalar', 256)
    own |= {} if scale == found['head_dim'] else {'query_scale': float(scale)}
    if not _windows(family, theirs):
      del own['rope_local_base']
  if family.model_type == 'smollm3':
    every, num_layers = theirs.get('no_rope_layer_interval', 4), found['num_layers']
    turned = theirs.get('no_rope_layers') or [int((n + 1) % every != 0) for n in range(num_layers)]
    still = [n + 1 for n, turns in enumerate(turned) if not turns]
    if still != [n for n in range(1, num_layers + 1) if still and n % still[0] == 0]:
      raise InputError(f'its blocks {still} have no rotary embedding, which is not every block of some number')
    own |= {'no_rope_every': still[0]} if still else {}
  return own


def write(
  model: settings.Model, vocab_size: int, special_ids: Mapping[str, int]
) -> tuple[families.Family, dict[str, Any]]:
  """Returns the first family that has all of a model, and the config.json, without the dtype of the weights.

  Raises InputError where no family has all of it.
  """
  wanted, nearest = canonical(model), ('', {'model': ''})
  for family in families.FAMILIES:
    theirs = _of_family(family, model) | {'vocab_size': vocab_size}
    found = read_config(theirs)
    differ = {name: x for name, x in wanted.items() if found.get(name, DEFAULT[name]) != x}
    if not differ:
      ids = {f'{name}_token_id': special_ids.get(name) for name in ('bos', 'eos', 'pad')}
      return family, theirs | ids
    if not nearest[0] or len(differ) < len(nearest[1]):
      nearest = family.title, differ
  fields = ', '.join(f'config.model.{name}={x!r}' for name, x in nearest[1].items())
  raise InputError(f'no family of models has all of this one, which cannot be exported: {nearest[0]} has no {fields}')


def _of_family(family: families.Family, model: settings.Model) -> dict[str, Any]:
  """Returns a model's config.json as one of a family, but for its vocabulary."""
  theirs: dict[str, Any] = {'architectures': [family.architecture], 'model_type': family.model_type}
  theirs |= {name: getattr(model, field) for name, field in FIELDS.items()} | dict(family.plain)
  theirs['num_key_value_heads'] = model.num_kv_heads or model.num_heads
  theirs |= {'max_position_embeddings': model.seq_len, 'rope_scaling': _scaling(model)}
  found = [layers.layer(model, n) for n in range(model.num_layers)]
  if family.windows == 'layers':
    kinds = ['sliding_attention' if one.window else 'full_attention' for one in found]
    theirs |= {'sliding_window': model.window or None, 'layer_types': kinds}
    theirs |= {'rope_local_base_freq': model.rope_local_base or model.rope_base}
    theirs['query_pre_attn_scalar'] = _whole(model.query_scale) or model.head_dim
  elif family.windows:
    theirs['sliding_window'] = model.window or None
    theirs |= {'use_sliding_window': False} if family.windows == 'switched' else {}
  if family.model_type == 'smollm3':
    theirs['no_rope_layers'] = [int(one.turns) for one in found]
  return theirs


def _whole(value: float) -> float | int:
  """Returns a whole number as int, which transformers insists on."""
  return int(value) if value == int(value) else value


def _scaling(model: settings.Model) -> dict[str, Any] | None:
  if model.rope_scaling == 'none':
    return None
  fields = ROPE_FIELDS[model.rope_scaling]
  found = {name: getattr(model, field) for name, field in fields.items()}
  if not found.get('attention_factor', 1):
    del found['attention_factor']
  return {'rope_type': model.rope_scaling} | found


DEFAULT: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(settings.Model)}
COMPUTED = ('seq_len', 'dtype', 'attention', 'layers', 'remat', 'loss_chunk')  # how, not what
READ = [name for name in DEFAULT if name not in COMPUTED]


def canonical(model: settings.Model) -> dict[str, Any]:
  """Returns what a model computes: its fields, those at one value where they say the same."""
  found = {name: x for name, x in dataclasses.asdict(model).items() if name in READ}
  if model.num_kv_heads == model.num_heads:
    found['num_kv_heads'] = 0
  if model.query_scale == model.head_dim:
    found['query_scale'] = 0.0
  for name in ('full_every', 'no_rope_every'):
    if found[name] > model.num_layers:
      found[name] = 0
  said = ROPE_FIELDS[model.rope_scaling].values()
  return found | {
    name: DEFAULT[name] for fields in ROPE_FIELDS.values() for name in fields.values() if name not in said
  }


def misfits(theirs: Config, model: settings.Model) -> dict[str, Any]:
  """Returns the fields of settings.Model, with their values, in which a model differs from a config.json.

  Keys and values may have more heads here, each a copy. Raises InputError as `read_config`.
  """
  wanted = canonical(dataclasses.replace(model, **{name: DEFAULT[name] for name in READ} | read_config(theirs)))
  ours = canonical(model)
  differ = {name: x for name, x in wanted.items() if ours[name] != x}
  heads = model.num_kv_heads or model.num_heads
  if 'num_kv_heads' in differ and differ.keys() == {'num_kv_heads'} and heads % differ['num_kv_heads'] == 0:
    return {}
  return differ
