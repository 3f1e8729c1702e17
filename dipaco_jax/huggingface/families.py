"""The families of models that a path may be of, in Hugging Face's transformers; names and shapes of parameters. Pure.

Their matrices are [out, in] with heads one after the other in rows or columns, ours are [in, out] with heads as a
dimension: our q of [D, H, K] is theirs of [H * K, D]. Both rotate dimension i of a head with dimension i + K/2.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.core.errors import InputError

Arrays = Mapping[str, np.ndarray]


class Family(NamedTuple):
  """What config.json of a family says, and what its parameters are called."""

  title: str
  model_type: str
  architecture: str
  has: Mapping[str, Any]  # fields of settings.Model that all models of the family have
  names: Mapping[str, str]  # in a block, beside MATRICES; {} is the number of an expert
  defaults: Mapping[str, Any]  # of its config.json, where they are not everybody's
  plain: Mapping[str, Any]  # fields of config.json that it writes, and that have to be so
  # Blocks that have a window: 'all'; 'switched': by use_sliding_window; 'unturned': likewise, of blocks that have no
  # rotary embedding; 'layers': by block.
  windows: str = ''
  fields: Mapping[str, str] = {}  # more fields of config.json: those of settings.Model
  has_whole_heads: bool = False  # whether all heads together are as wide as the hidden state
  ignored: Sequence[str] = ()  # fields of config.json of which no value changes what a model of the family computes


ENDS = {
  'embed/tokens': 'model.embed_tokens.weight',
  'final_norm/scale': 'model.norm.weight',
  'head/kernel': 'lm_head.weight',
}
MATRICES = {f'attention/{x}': f'self_attn.{x}_proj.weight' for x in 'qkvo'} | {
  f'mlp/{x}': f'mlp.{x}_proj.weight' for x in ('gate', 'up', 'down')
}
BEFORE = {'attention_norm/scale': 'input_layernorm.weight', 'mlp_norm/scale': 'post_attention_layernorm.weight'}
EXPERTS = {'mlp/router': 'mlp.gate.weight'} | {
  f'mlp/expert/{x}': f'mlp.experts.{{}}.{x}_proj.weight' for x in ('gate', 'up', 'down')
}
MIXTRAL_EXPERTS = {'mlp/router': 'block_sparse_moe.gate.weight'} | {
  f'mlp/expert/{ours}': f'block_sparse_moe.experts.{{}}.{theirs}.weight'
  for ours, theirs in (('gate', 'w1'), ('up', 'w3'), ('down', 'w2'))
}
AFTER = {
  'attention_post_norm/scale': 'post_attention_layernorm.weight',
  'mlp_post_norm/scale': 'post_feedforward_layernorm.weight',
}
BOTH = BEFORE | AFTER | {'mlp_norm/scale': 'pre_feedforward_layernorm.weight'}
BIASES = {f'attention/{x}_bias': f'self_attn.{x}_proj.bias' for x in 'qkv'}
QK_NORMS = {f'attention/{x}_norm/scale': f'self_attn.{x}_norm.weight' for x in 'qk'}

SILU = {'hidden_act': 'silu'}
NO_BIAS = {'attention_bias': False}
GEMMA = {
  'norms': 'both', 'norm_from_one': True, 'activation': 'gelu', 'embed_scale': True, 'qk_norm': 'head',
}  # fmt: skip
GEMMA_DEFAULTS = {
  'tie_word_embeddings': True, 'rope_theta': 1e6, 'rope_local_base_freq': 1e4, 'head_dim': 256,
  'num_key_value_heads': 4, 'query_pre_attn_scalar': 256, 'sliding_window': 4096, 'sliding_window_pattern': 6,
}  # fmt: skip
GEMMA_PLAIN = {
  'hidden_activation': 'gelu_pytorch_tanh', 'attn_logit_softcapping': None, 'final_logit_softcapping': None,
  'use_bidirectional_attention': False,
}  # fmt: skip
MISTRAL_DEFAULTS = {'num_key_value_heads': 8, 'sliding_window': 4096}
OLMO2_DEFAULTS = {'rms_norm_eps': 1e-5}
QWEN_DEFAULTS = {'num_key_value_heads': 32, 'sliding_window': 4096, 'max_window_layers': 28}
SMOLLM3_DEFAULTS = {
  'tie_word_embeddings': True, 'rope_theta': 2e6, 'num_key_value_heads': 4, 'no_rope_layer_interval': 4,
}  # fmt: skip
QK_AFTER = {'norms': 'after', 'qk_norm': 'all'}
EXPERTS_FIELDS = {
  'num_experts': 'num_experts', 'num_experts_per_tok': 'experts_per_token', 'norm_topk_prob': 'normalize_gates',
}  # fmt: skip
NUMBERS_OF_EXPERTS = {'num_experts', 'num_local_experts'}  # names of the same field
MIXTRAL_FIELDS = {'num_local_experts': 'num_experts', 'num_experts_per_tok': 'experts_per_token'}
MIXTRAL_DEFAULTS = {
  'num_key_value_heads': 8, 'sliding_window': None, 'num_local_experts': 8, 'num_experts_per_tok': 2,
  'rms_norm_eps': 1e-5, 'rope_theta': 1e6,
}  # fmt: skip
QWEN3_MOE_FIELDS = EXPERTS_FIELDS | {'moe_intermediate_size': 'mlp_dim'}
QWEN3_MOE_DEFAULTS = {
  'num_key_value_heads': 4, 'num_experts': 128, 'num_experts_per_tok': 8, 'norm_topk_prob': False,
  'moe_intermediate_size': 768,
}  # fmt: skip
QWEN3_MOE_PLAIN = SILU | NO_BIAS | {'decoder_sparse_step': 1, 'mlp_only_layers': [], 'use_sliding_window': False}
OLMOE_DEFAULTS = {
  'num_experts': 64, 'num_experts_per_tok': 8, 'norm_topk_prob': False, 'rms_norm_eps': 1e-5,
}  # fmt: skip
FLEX_OLMO_DEFAULTS = {
  'num_experts': 7, 'num_experts_per_tok': 5, 'norm_topk_prob': False, 'rope_theta': 5e5,
}  # fmt: skip
ROUTER_LOSS = ('router_aux_loss_coef', 'output_router_logits')

# A path is exported as the first that has all of it.
FAMILIES = (
  Family('Llama 2 and 3, SmolLM2', 'llama', 'LlamaForCausalLM', {}, BEFORE, {}, SILU | NO_BIAS | {'mlp_bias': False}),
  Family('Mistral', 'mistral', 'MistralForCausalLM', {}, BEFORE, MISTRAL_DEFAULTS, SILU, 'all'),
  Family(
    'Qwen 2.5', 'qwen2', 'Qwen2ForCausalLM', {'qkv_bias': True}, BEFORE | BIASES, QWEN_DEFAULTS, SILU, 'switched',
  ),
  Family(
    'Qwen 3', 'qwen3', 'Qwen3ForCausalLM', {'qk_norm': 'head'}, BEFORE | QK_NORMS, QWEN_DEFAULTS | {'head_dim': 128},
    SILU | NO_BIAS, 'switched',
  ),
  Family(
    'SmolLM3', 'smollm3', 'SmolLM3ForCausalLM', {}, BEFORE, SMOLLM3_DEFAULTS, SILU | NO_BIAS | {'mlp_bias': False},
    'unturned',
  ),
  Family('OLMo 2', 'olmo2', 'Olmo2ForCausalLM', QK_AFTER, AFTER | QK_NORMS, OLMO2_DEFAULTS, SILU | NO_BIAS),
  Family(
    'Gemma 3 (text)', 'gemma3_text', 'Gemma3ForCausalLM', GEMMA, BOTH | QK_NORMS, GEMMA_DEFAULTS,
    GEMMA_PLAIN | NO_BIAS, 'layers',
  ),
  Family(
    'Mixtral', 'mixtral', 'MixtralForCausalLM', {'normalize_gates': True}, BEFORE | MIXTRAL_EXPERTS, MIXTRAL_DEFAULTS,
    SILU | {'router_jitter_noise': 0.0}, 'all', MIXTRAL_FIELDS, False, ROUTER_LOSS,
  ),
  Family(
    'Qwen 3 MoE', 'qwen3_moe', 'Qwen3MoeForCausalLM', {'qk_norm': 'head'}, BEFORE | QK_NORMS | EXPERTS,
    QWEN3_MOE_DEFAULTS, QWEN3_MOE_PLAIN, '', QWEN3_MOE_FIELDS, False,
    (*ROUTER_LOSS, 'intermediate_size', 'sliding_window', 'max_window_layers'),
  ),
  Family(
    'OLMoE', 'olmoe', 'OlmoeForCausalLM', {'qk_norm': 'all'}, BEFORE | QK_NORMS | EXPERTS, OLMOE_DEFAULTS,
    SILU | NO_BIAS, '', EXPERTS_FIELDS, True, ROUTER_LOSS,
  ),
  Family(
    'FlexOlmo', 'flex_olmo', 'FlexOlmoForCausalLM', QK_AFTER, AFTER | QK_NORMS | EXPERTS, FLEX_OLMO_DEFAULTS,
    SILU | NO_BIAS, '', EXPERTS_FIELDS, False, ROUTER_LOSS,
  ),
)  # fmt: skip

DERIVED = r'(.*rotary_emb\.inv_freq)'  # of older files: computed here


def their_name(family: Family, name: str) -> str:
  """Returns the family's name of a parameter of ours; raises InputError if it has none."""
  if not (match := re.fullmatch(r'block_(\d+)/(.*)', name)):
    return ENDS[name]
  in_block, expert = {**MATRICES, **family.names}, re.fullmatch(r'mlp/expert_(\d+)/(\w+)', match[2])
  ours = f'mlp/expert/{expert[2]}' if expert else match[2]
  if ours not in in_block:
    raise InputError(f'{family.title} has no {name}')
  theirs = in_block[ours].format(expert[1]) if expert else in_block[ours]
  return f'model.layers.{match[1]}.{theirs}'


def to_theirs(family: Family, params: Arrays) -> dict[str, np.ndarray]:
  """Converts a path's parameters to the family's names and shapes."""
  return {their_name(family, name): _to_theirs(name.split('/')[-1], x) for name, x in params.items()}


def _to_theirs(kind: str, x: np.ndarray) -> np.ndarray:
  if kind in ('q', 'k', 'v'):
    x = x.reshape(len(x), -1)
  elif kind == 'o':
    x = x.reshape(-1, x.shape[-1])
  return x if x.ndim == 1 or kind == 'tokens' else np.ascontiguousarray(x.T)


def fits(name: str, shape: tuple[int, ...], ours: tuple[int, ...]) -> bool:
  """Returns whether one of their parameters, of this shape, can be ours of this name and shape."""
  kind = name.split('/')[-1]
  if len(ours) == 1 or len(shape) != 2:
    return shape == ours
  if kind in ('tokens', 'kernel'):
    V, D = ours if kind == 'tokens' else ours[::-1]
    return shape[0] >= V and shape[1] == D
  if kind in ('k', 'v'):
    D, G, K = ours
    return shape[1] == D and shape[0] > 0 and shape[0] % K == 0 and G * K % shape[0] == 0
  into, out = (ours[:-1], ours[-1:]) if kind == 'o' else (ours[:1], ours[1:])
  return shape == (math.prod(out), math.prod(into))


def to_ours(name: str, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Converts one of their parameters, whose shape fits, to ours of this name and shape, float32.

  Keys and values of fewer heads are repeated; rows of the embedding and of the head behind the end of the vocabulary
  are left out.
  """
  kind, x = name.split('/')[-1], x.astype(np.float32)
  if kind in ('tokens', 'kernel'):
    x = x[: shape[0 if kind == 'tokens' else 1]]
  x = x if kind == 'tokens' else x.T
  if kind in ('k', 'v'):
    x_DGK = x.reshape(len(x), -1, shape[2])
    x = np.repeat(x_DGK, shape[1] // x_DGK.shape[1], axis=1)
  return np.ascontiguousarray(x).reshape(shape)
