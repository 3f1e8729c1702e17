"""config.json of a model of a family, read as fields of config.model, and written. Pure.

Every key has to be understood, except those that compute nothing (`silent_keys`): one that states what cannot be
computed here, or that is not known, is rejected by name.
If one is missing, it is what the family's class in transformers has then.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.huggingface import block_kinds, families, json_fields, rope_json, silent_keys
from dipaco_jax.huggingface.json_fields import DEFAULT, Config

FIELDS = {  # of config.json: of settings.Model
  'hidden_size': 'width', 'num_hidden_layers': 'num_layers', 'num_attention_heads': 'num_heads', 'head_dim': 'head_dim',
  'intermediate_size': 'mlp_dim', 'tie_word_embeddings': 'tied', 'rms_norm_eps': 'norm_epsilon',
  'rope_theta': 'rope_base', 'num_key_value_heads': 'num_kv_heads',
}  # fmt: skip
DERIVED = ('head_dim', 'num_key_value_heads')  # from others, where they are null
DEFAULTS: Config = {'tie_word_embeddings': False, 'rms_norm_eps': 1e-6, 'rope_theta': 10_000.0} | dict.fromkeys(DERIVED)
NEUTRAL: Config = {  # keys of other families, which must have these values if they occur
  'attention_dropout': 0.0, 'rope_interleaved': False, 'use_mrope': False, 'mlp_bias': False, 'attention_bias': False,
  'quantization_config': None, 'hidden_act': 'silu', 'partial_rotary_factor': 1.0, 'clip_qkv': None,
  'attn_logit_softcapping': None, 'final_logit_softcapping': None, 'is_causal': True, 'is_encoder_decoder': False,
  'add_cross_attention': False, 'chunk_size_feed_forward': 0, 'cross_attention_hidden_size': None,
  'tie_encoder_decoder': False, 'pruned_heads': {}, 'quantization': None, 'compression_config': None,
}  # fmt: skip


def family_of(theirs: Config) -> families.Family:
  """Returns the family of a config.json; raises InputError if it is none of them."""
  if 'model_type' not in theirs and {'grid', 'levels'} <= {*theirs}:
    raise InputError(
      'it is a run, not a model: export a path of it with python -m dipaco_jax.export, and name that folder'
    )
  matching_families = [family for family in families.FAMILIES if family.model_type == theirs.get('model_type')]
  if not matching_families:
    known = ', '.join(family.model_type for family in families.FAMILIES)
    raise InputError(f'its model_type is {theirs.get("model_type")!r}, not one of {known}')
  family, named = matching_families[0], theirs.get('architectures') or [matching_families[0].architecture]
  if named != [family.architecture]:
    raise InputError(f'its architectures are {named!r}, not {[family.architecture]!r}')
  return family


def read_config(theirs: Config) -> dict[str, Any]:
  """Returns the fields of settings.Model that a config.json says.

  Raises InputError that names every field that is not understood, or is of a model that cannot be computed here.
  """
  family = family_of(theirs)
  named = _with_own_names(theirs, family)
  rope, theirs = rope_json.read({**DEFAULTS, **family.defaults} | named, family.windows == 'layers')
  field_names = _fields(family)
  if missing := [name for name in (*field_names, 'vocab_size') if name not in theirs]:
    raise InputError(f'it has no {missing[0]}')
  _check_known(theirs, family)
  json_fields.check_integer('vocab_size', theirs['vocab_size'])
  given = {name: field for name, field in field_names.items() if theirs[name] is not None or name not in DERIVED}
  values = {field: json_fields.value(name, theirs[name], field) for name, field in given.items()}
  values.setdefault('head_dim', values['width'] // values['num_heads'])
  if family.has_whole_heads and values['num_heads'] * values['head_dim'] != values['width']:
    raise InputError(f'its head_dim is {values["head_dim"]}, but {family.title} has hidden_size / num_attention_heads')
  heads, shared = values['num_heads'], values.get('num_kv_heads', values['num_heads'])
  if heads % shared:
    raise InputError(f'its num_key_value_heads is {shared}, which does not divide its num_attention_heads, {heads}')
  if shared == heads:
    values.pop('num_kv_heads', None)
  return values | dict(family.has) | rope | block_kinds.read(family, theirs, values)


def _fields(family: families.Family) -> dict[str, str]:
  """Returns the fields of config.json that a family has: those of settings.Model."""
  return {name: field for name, field in FIELDS.items() if name not in family.ignored} | dict(family.fields)


def _with_own_names(theirs: Config, family: families.Family) -> dict[str, Any]:
  """Returns a config.json in which the number of experts has the family's name; transformers takes either of two."""
  named = dict(theirs)
  for name in family.fields.keys() & families.NUMBERS_OF_EXPERTS:
    (other,) = families.NUMBERS_OF_EXPERTS - {name}
    if other in named and named.setdefault(name, named[other]) != named.pop(other):
      raise InputError(f'its {name} and {other} differ: remove one of them')
  return named


def _check_known(theirs: Config, family: families.Family):
  """Raises InputError that names the fields that are not understood, or not as they have to be."""
  plain = {**NEUTRAL, **block_kinds.plain(family), **family.plain}
  plain = {name: x for name, x in plain.items() if name not in family.ignored}
  odd = [f'its {name} is {x!r}, not {plain[name]!r}' for name, x in theirs.items() if x != plain.get(name, x)]
  known = {'architectures', *_fields(family), *plain, *block_kinds.names(family), *family.ignored}
  strange = {name: x for name, x in theirs.items() if name not in known and not silent_keys.is_silent(name)}
  if unknown := [f'its {name} is {x!r}, which is not understood' for name, x in strange.items()]:
    unknown[-1] += ': remove fields from config.json that do not affect the computation'
  if odd + unknown:
    raise InputError(', '.join(odd + unknown))


def write(
  model: settings.Model, vocab_size: int, special_ids: Mapping[str, int]
) -> tuple[families.Family, dict[str, Any]]:
  """Returns the first family that has all of a model, and the config.json, without the dtype of the weights.

  Raises InputError if no family has all of it.
  """
  canonical_model, nearest = canonical(model), ('', {'model': ''})
  for family in families.FAMILIES:
    if bool(family.fields) != bool(model.num_experts):
      continue
    if family.has_whole_heads and model.num_heads * model.head_dim != model.width:
      continue
    theirs = _of_family(family, model) | {'vocab_size': vocab_size}
    values = read_config(theirs)
    differ = {name: x for name, x in canonical_model.items() if values.get(name, DEFAULT[name]) != x}
    if not differ:
      ids = {f'{name}_token_id': special_ids.get(name) for name in ('bos', 'eos', 'pad')}
      return family, theirs | ids
    if not nearest[0] or len(differ) < len(nearest[1]):
      nearest = family.title, differ
  fields = ', '.join(f'config.model.{name}={x!r}' for name, x in nearest[1].items())
  raise InputError(
    f'no model family has all features of this model, which therefore cannot be exported: {nearest[0]} has no {fields}'
  )


def _of_family(family: families.Family, model: settings.Model) -> dict[str, Any]:
  """Returns a model's config.json as one of a family, but for its vocabulary."""
  theirs: dict[str, Any] = {'architectures': [family.architecture], 'model_type': family.model_type}
  theirs |= {name: getattr(model, field) for name, field in (FIELDS | _fields(family)).items()} | dict(family.plain)
  theirs['num_key_value_heads'] = model.num_kv_heads or model.num_heads
  theirs |= {'max_position_embeddings': model.seq_len, 'rope_scaling': rope_json.write(model)}
  return theirs | block_kinds.write(family, model)


COMPUTED = (  # how, not what; or in training alone
  'seq_len', 'dtype', 'product_dtype', 'attention', 'experts', 'layers', 'remat', 'loss_chunk', 'vocab_chunk',
  'balance_loss', 'router_z_loss',
)  # fmt: skip
READ = [name for name in DEFAULT if name not in COMPUTED]


def canonical(model: settings.Model) -> dict[str, Any]:
  """Returns what a model computes: its fields, those at one value where they say the same."""
  values = {name: x for name, x in dataclasses.asdict(model).items() if name in READ}
  if model.num_kv_heads == model.num_heads:
    values['num_kv_heads'] = 0
  if not model.num_experts:
    values['experts_per_token'] = DEFAULT['experts_per_token']
  if model.query_scale == model.head_dim:
    values['query_scale'] = 0.0
  for name in ('full_every', 'no_rope_every'):
    if values[name] > model.num_layers:
      values[name] = 0
  said = rope_json.FIELDS[model.rope_scaling].values()
  return values | {
    name: DEFAULT[name] for fields in rope_json.FIELDS.values() for name in fields.values() if name not in said
  }


def misfits(theirs: Config, model: settings.Model) -> dict[str, Any]:
  """Returns the fields of settings.Model, with their values, in which a model differs from a config.json.

  Keys and values may have more heads here, each a copy, where they have no biases or norms of all heads. Raises
  InputError as `read_config`.
  """
  expected = canonical(dataclasses.replace(model, **{name: DEFAULT[name] for name in READ} | read_config(theirs)))
  ours = canonical(model)
  differ = {name: x for name, x in expected.items() if ours[name] != x}
  heads = model.num_kv_heads or model.num_heads
  if differ.keys() == {'num_kv_heads'} and heads % differ['num_kv_heads'] == 0:
    return differ if model.qkv_bias or model.qk_norm == 'all' else {}
  return differ
