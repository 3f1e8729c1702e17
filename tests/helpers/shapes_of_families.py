"""Small models with what families of models have, by name: fields of config.model."""

HEADS = {'num_heads': 4, 'num_kv_heads': 2}
MIXTURE = {'num_experts': 4, 'experts_per_token': 2}
ROPE = {'rope_original_len': 12, 'rope_factor': 4.0, 'rope_base': 50.0}  # short, so that tests are beyond it

FAMILIES = {
  'llama2': {},
  'llama3': HEADS | ROPE | {'rope_scaling': 'llama3', 'rope_low': 0.5, 'rope_high': 1.5},
  'smollm2': HEADS | {'rope_base': 1e5, 'norm_epsilon': 1e-5},
  'mistral': HEADS | {'window': 7, 'tied': False},
  'smollm3': HEADS | {'no_rope_every': 2},
  'qwen2': HEADS | ROPE | {'qkv_bias': True, 'rope_scaling': 'yarn', 'rope_low': 0.3, 'rope_high': 2.0},
  'qwen3': HEADS | {'qk_norm': 'head', 'rope_scaling': 'linear', 'rope_factor': 4.0},
  'olmo2': {'qk_norm': 'all', 'norms': 'after'},
  'gemma3': HEADS
  | {
    'qk_norm': 'head', 'norms': 'both', 'norm_from_one': True, 'activation': 'gelu', 'embed_scale': True, 'window': 5,
    'full_every': 2, 'query_scale': 12.0, 'rope_local_base': 30.0, 'rope_base': 200.0,
  },
  'mixtral': HEADS | MIXTURE | {'normalize_gates': True, 'tied': False},
  'qwen3_moe': HEADS | MIXTURE | {'qk_norm': 'head', 'normalize_gates': True},
  'olmoe': MIXTURE | {'qk_norm': 'all'},
  'flex_olmo': MIXTURE | {'qk_norm': 'all', 'norms': 'after', 'experts_per_token': 3},
}  # fmt: skip
MORE = {
  'capped': HEADS | {'attention_cap': 2.0, 'window': 9},
  'shared expert': MIXTURE | {'shared_expert_dim': 12, 'experts_per_token': 1},
  'yarn of its own': ROPE | {'rope_scaling': 'yarn', 'rope_attention': 1.3},
}
