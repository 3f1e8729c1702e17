"""A path in Hugging Face's Llama layout, and back: names and shapes of weights, config.json. Pure.

Theirs are matrices [out, in] with heads one after the other in rows or columns, ours are [in, out] with heads as a
dimension: our q of [D, H, K] is theirs of [H * K, D]. Both rotate dimension i of a head with dimension i + K/2.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from dipaco_jax.core import settings
from dipaco_jax.core.errors import InputError

Arrays = Mapping[str, np.ndarray]
ENDS = {
  'embed/tokens': 'model.embed_tokens.weight',
  'final_norm/scale': 'model.norm.weight',
  'head/kernel': 'lm_head.weight',
}
IN_BLOCK = {
  'attention_norm/scale': 'input_layernorm.weight',
  'mlp_norm/scale': 'post_attention_layernorm.weight',
  **{f'attention/{x}': f'self_attn.{x}_proj.weight' for x in 'qkvo'},
  **{f'mlp/{x}': f'mlp.{x}_proj.weight' for x in ('gate', 'up', 'down')},
}
FIELDS = {  # of LlamaConfig: of settings.Model
  'hidden_size': 'width', 'num_hidden_layers': 'num_layers', 'num_attention_heads': 'num_heads', 'head_dim': 'head_dim',
  'intermediate_size': 'mlp_dim', 'tie_word_embeddings': 'tied', 'rms_norm_eps': 'norm_epsilon',
  'rope_theta': 'rope_base',
}  # fmt: skip
PLAIN = {'hidden_act': 'silu', 'attention_bias': False, 'mlp_bias': False}  # of LlamaConfig, as of a path
# For what config.json leaves out.
DEFAULTS: dict[str, Any] = PLAIN | {'tie_word_embeddings': False, 'rms_norm_eps': 1e-6, 'rope_theta': 10_000.0}


def their_name(name: str) -> str:
  """Returns the name in their layout of a parameter of ours."""
  if match := re.fullmatch(r'block_(\d+)/(.*)', name):
    return f'model.layers.{match[1]}.{IN_BLOCK[match[2]]}'
  return ENDS[name]


def to_theirs(params: Arrays) -> dict[str, np.ndarray]:
  """Converts a path's parameters to their names and shapes."""
  return {their_name(name): _to_theirs(name.split('/')[-1], x) for name, x in params.items()}


def _to_theirs(kind: str, x: np.ndarray) -> np.ndarray:
  if kind in ('q', 'k', 'v'):
    x = x.reshape(len(x), -1)
  elif kind == 'o':
    x = x.reshape(-1, x.shape[-1])
  return x if kind in ('tokens', 'scale') else np.ascontiguousarray(x.T)


def to_ours(name: str, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Converts one of their weights to our parameter of this name and shape, float32.

  Keys and values that several heads share are repeated for each of them; rows of the embedding and of the head behind
  the end of the vocabulary are left out. Raises InputError where the shapes don't fit.
  """
  kind, x = name.split('/')[-1], x.astype(np.float32)
  wrong = InputError(f'{their_name(name)} is of shape {x.shape}, which contradicts its config.json')
  if x.ndim != (1 if kind == 'scale' else 2):
    raise wrong
  if kind in ('tokens', 'kernel'):
    x = x[: shape[0 if kind == 'tokens' else 1]]
  x = x if kind in ('tokens', 'scale') else x.T
  if kind in ('k', 'v') and x.size and x.shape[1] % shape[2] == 0:
    x_DHK = x.reshape(len(x), -1, shape[2])
    x = np.repeat(x_DHK, max(1, shape[1] // x_DHK.shape[1]), axis=1).reshape(len(x), -1)
  flat = (shape[0] * shape[1], shape[2]) if kind == 'o' else (shape[0], int(np.prod(shape[1:])))
  if x.shape != flat[: x.ndim]:
    raise wrong
  return np.ascontiguousarray(x).reshape(shape)


def make_config(model: settings.Model, vocab_size: int, special_ids: Mapping[str, int]) -> dict[str, Any]:
  """Returns the config.json of a path, without the dtype, which the writer of the weights adds."""
  ours = {theirs: getattr(model, field) for theirs, field in FIELDS.items()}
  return {
    'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'vocab_size': vocab_size, **ours,
    'num_key_value_heads': model.num_heads, **PLAIN, 'max_position_embeddings': model.seq_len, 'rope_scaling': None,
    **{f'{name}_token_id': special_ids.get(name) for name in ('bos', 'eos', 'pad')},
  }  # fmt: skip


def misfits(theirs: Mapping[str, Any], model: settings.Model) -> list[str]:
  """Lists what keeps a model with this config.json from being a path; of fields as 'set config.model...'."""
  rope = theirs.get('rope_parameters') or theirs.get('rope_scaling') or {}
  theirs = DEFAULTS | {name: x for name, x in (*theirs.items(), *rope.items()) if x is not None}
  plain = {'model_type': 'llama'} | PLAIN
  found = [f'its {name} is {theirs.get(name)!r}, not {x!r}' for name, x in plain.items() if theirs.get(name) != x]
  kind = rope.get('rope_type', rope.get('type', 'default'))
  found += [f'its rope scaling is {kind!r}, and we have none'] if kind != 'default' else []
  if found:
    return found
  if missing := [name for name in (*FIELDS, 'vocab_size') if name != 'head_dim' and name not in theirs]:
    return [f'its config.json has no {missing[0]}']
  theirs.setdefault('head_dim', theirs['hidden_size'] // theirs['num_attention_heads'])
  wanted = {field: type(getattr(model, field))(theirs[name]) for name, field in FIELDS.items()}
  return [f'set config.model.{field}={x!r}' for field, x in wanted.items() if getattr(model, field) != x]
