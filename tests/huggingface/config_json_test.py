"""config.json of published models is read, unknown keys are named, and written files can be read again."""

import dataclasses
import json

import pytest
import shapes_of_families

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.huggingface import config_json

COMMON = dict(
  attention_dropout=0.0, bos_token_id=0, eos_token_id=0, hidden_act='silu', initializer_range=0.02,
  torch_dtype='bfloat16', transformers_version='4.40.1', use_cache=True,
)  # fmt: skip
LLAMA3 = dict(
  factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192, rope_type='llama3'
)
KINDS = (['sliding_attention'] * 5 + ['full_attention']) * 3

# As the models' authors publish them: {name: (config.json, what is not the default of config.model)}.
PUBLISHED = {
  'Llama-2-7b': (
    dict(
      architectures=['LlamaForCausalLM'], hidden_size=4096, intermediate_size=11008, max_position_embeddings=4096,
      model_type='llama', num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, pretraining_tp=1,
      rms_norm_eps=1e-5, rope_scaling=None, tie_word_embeddings=False, vocab_size=32000,
    ),
    dict(width=4096, mlp_dim=11008, num_heads=32, num_layers=32, head_dim=128, norm_epsilon=1e-5, tied=False),
  ),
  'Llama-3.2-1B': (
    dict(
      architectures=['LlamaForCausalLM'], attention_bias=False, head_dim=64, hidden_size=2048, intermediate_size=8192,
      max_position_embeddings=131072, mlp_bias=False, model_type='llama', num_attention_heads=32, num_hidden_layers=16,
      num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=LLAMA3, rope_theta=500000.0,
      tie_word_embeddings=True, vocab_size=128256,
    ),
    dict(
      width=2048, mlp_dim=8192, num_heads=32, num_layers=16, num_kv_heads=8, norm_epsilon=1e-5, rope_base=5e5,
      rope_scaling='llama3', rope_factor=32.0, rope_original_len=8192,
    ),
  ),
  'SmolLM2-135M': (
    dict(
      architectures=['LlamaForCausalLM'], attention_bias=False, hidden_size=576, intermediate_size=1536,
      is_llama_config=True, max_position_embeddings=8192, mlp_bias=False, model_type='llama', num_attention_heads=9,
      num_hidden_layers=30, num_key_value_heads=3, pretraining_tp=1, rms_norm_eps=1e-5, rope_interleaved=False,
      rope_scaling=None, rope_theta=100000, tie_word_embeddings=True, vocab_size=49152,
    ),
    dict(width=576, mlp_dim=1536, num_heads=9, num_layers=30, num_kv_heads=3, norm_epsilon=1e-5, rope_base=1e5),
  ),
  'SmolLM3-3B': (
    dict(
      architectures=['SmolLM3ForCausalLM'], attention_bias=False, hidden_size=2048, intermediate_size=11008,
      layer_types=['full_attention'] * 36, max_position_embeddings=65536, max_window_layers=28, mlp_bias=False,
      model_type='smollm3', no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, num_attention_heads=16,
      num_hidden_layers=36, num_key_value_heads=4, pad_token_id=128004, pretraining_tp=2, rms_norm_eps=1e-6,
      rope_scaling=None, rope_theta=5000000.0, sliding_window=None, use_sliding_window=False, vocab_size=128256,
    ),
    dict(
      width=2048, mlp_dim=11008, num_heads=16, head_dim=128, num_layers=36, num_kv_heads=4, rope_base=5e6,
      no_rope_every=4,
    ),
  ),
  'Mistral-7B-v0.1': (
    dict(
      architectures=['MistralForCausalLM'], hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768,
      model_type='mistral', num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-5,
      rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False, vocab_size=32000,
    ),
    dict(
      width=4096, mlp_dim=14336, num_heads=32, num_layers=32, num_kv_heads=8, head_dim=128, norm_epsilon=1e-5,
      tied=False, window=4096,
    ),
  ),
  'Qwen2.5-0.5B': (
    dict(
      architectures=['Qwen2ForCausalLM'], hidden_size=896, intermediate_size=4864, max_position_embeddings=32768,
      max_window_layers=24, model_type='qwen2', num_attention_heads=14, num_hidden_layers=24, num_key_value_heads=2,
      rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=True, use_mrope=False,
      use_sliding_window=False, vocab_size=151936,
    ),
    dict(mlp_dim=4864, num_heads=14, num_layers=24, num_kv_heads=2, rope_base=1e6, qkv_bias=True),
  ),
  'Qwen3-0.6B': (
    dict(
      architectures=['Qwen3ForCausalLM'], attention_bias=False, head_dim=128, hidden_size=1024, intermediate_size=3072,
      max_position_embeddings=40960, max_window_layers=28, model_type='qwen3', num_attention_heads=16,
      num_hidden_layers=28, num_key_value_heads=8, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000,
      sliding_window=None, tie_word_embeddings=True, use_sliding_window=False, vocab_size=151936,
    ),
    dict(width=1024, mlp_dim=3072, head_dim=128, num_layers=28, num_kv_heads=8, rope_base=1e6, qk_norm='head'),
  ),
  'OLMo-2-0425-1B': (
    dict(
      architectures=['Olmo2ForCausalLM'], attention_bias=False, hidden_size=2048, intermediate_size=8192,
      max_position_embeddings=4096, model_type='olmo2', num_attention_heads=16, num_hidden_layers=16,
      num_key_value_heads=16, pad_token_id=100277, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=500000,
      tie_word_embeddings=False, vocab_size=100352,
    ),
    dict(
      width=2048, mlp_dim=8192, num_layers=16, head_dim=128, rope_base=5e5, tied=False, norms='after', qk_norm='all',
    ),
  ),
  'gemma-3-270m': (
    dict(
      _sliding_window_pattern=6, architectures=['Gemma3ForCausalLM'], attention_bias=False, attn_logit_softcapping=None,
      final_logit_softcapping=None, head_dim=256, hidden_activation='gelu_pytorch_tanh', hidden_size=640,
      intermediate_size=2048, layer_types=KINDS, max_position_embeddings=32768, model_type='gemma3_text',
      num_attention_heads=4, num_hidden_layers=18, num_key_value_heads=1, pad_token_id=0, query_pre_attn_scalar=256,
      rms_norm_eps=1e-6, rope_local_base_freq=10000.0, rope_scaling=None, rope_theta=1000000.0, sliding_window=512,
      use_bidirectional_attention=False, vocab_size=262144,
    ),
    dict(
      width=640, mlp_dim=2048, num_layers=18, num_heads=4, num_kv_heads=1, head_dim=256, rope_base=1e6, window=512,
      full_every=6, rope_local_base=1e4, qk_norm='head', norms='both', norm_from_one=True, activation='gelu',
      embed_scale=True,
    ),
  ),
  'Mixtral-8x7B-v0.1': (
    dict(
      architectures=['MixtralForCausalLM'], hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768,
      model_type='mixtral', num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32, num_key_value_heads=8,
      num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-5, rope_theta=1000000.0,
      router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False, vocab_size=32000,
    ),
    dict(
      width=4096, mlp_dim=14336, num_heads=32, num_layers=32, num_kv_heads=8, head_dim=128, norm_epsilon=1e-5,
      rope_base=1e6, tied=False, num_experts=8, experts_per_token=2, normalize_gates=True,
    ),
  ),
  'Qwen3-30B-A3B': (
    dict(
      architectures=['Qwen3MoeForCausalLM'], attention_bias=False, decoder_sparse_step=1, head_dim=128,
      hidden_size=2048, intermediate_size=6144, max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[],
      model_type='qwen3_moe', moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32, num_experts=128,
      num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4, output_router_logits=False,
      rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None,
      tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936,
    ),
    dict(
      width=2048, mlp_dim=768, num_heads=32, num_layers=48, num_kv_heads=4, head_dim=128, rope_base=1e6, tied=False,
      qk_norm='head', num_experts=128, experts_per_token=8, normalize_gates=True,
    ),
  ),
  'OLMoE-1B-7B-0924': (
    dict(
      architectures=['OlmoeForCausalLM'], attention_bias=False, clip_qkv=None, hidden_size=2048, intermediate_size=1024,
      max_position_embeddings=4096, model_type='olmoe', norm_topk_prob=False, num_attention_heads=16, num_experts=64,
      num_experts_per_tok=8, num_hidden_layers=16, num_key_value_heads=16, output_router_logits=False, pad_token_id=1,
      rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0, router_aux_loss_coef=0.01, tie_word_embeddings=False,
      vocab_size=50304,
    ),
    dict(
      width=2048, mlp_dim=1024, num_layers=16, head_dim=128, norm_epsilon=1e-5, tied=False, qk_norm='all',
      num_experts=64, experts_per_token=8,
    ),
  ),
}  # fmt: skip


def published(name: str) -> dict:
  theirs = {k: x for k, x in COMMON.items() if not (k == 'hidden_act' and 'gemma' in name)}
  return json.loads(json.dumps(theirs | PUBLISHED[name][0]))


@pytest.mark.parametrize('name', PUBLISHED)
def test_models_that_are_out_there_are_read(name):
  found = config_json.read_config(published(name))
  model = dataclasses.replace(settings.Model(), **found)
  expected = dataclasses.replace(settings.Model(), **PUBLISHED[name][1])
  assert config_json.canonical(model) == config_json.canonical(expected)
  assert config_json.misfits(published(name), model) == {}
  assert config_json.misfits(published(name), dataclasses.replace(model, width=8)) == {'width': model.width}


TYPES = {'llama2': 'llama', 'llama3': 'llama', 'smollm2': 'llama', 'gemma3': 'gemma3_text'}


@pytest.mark.parametrize('name', shapes_of_families.FAMILIES)
def test_what_is_written_is_read_back_as_the_same(name):
  width = 16 if name == 'olmoe' else 12  # its heads are as wide together
  sizes = dict(width=width, num_layers=4, num_heads=4, head_dim=4, mlp_dim=20)
  model = settings.Model(**sizes | shapes_of_families.FAMILIES[name])
  family, theirs = config_json.write(model, 30, {'bos': 1, 'eos': 2})
  assert family.model_type == TYPES.get(name, name) and theirs['vocab_size'] == 30
  assert (theirs['bos_token_id'], theirs['eos_token_id'], theirs['pad_token_id']) == (1, 2, None)
  found = dataclasses.replace(settings.Model(), **config_json.read_config(json.loads(json.dumps(theirs))))
  assert config_json.canonical(found) == config_json.canonical(model)
  assert config_json.misfits(theirs, model) == {}


def test_what_no_family_has_is_not_exported():
  with pytest.raises(InputError, match=r'Llama 2 and 3, SmolLM2 has no config\.model\.attention_cap=5\.0'):
    config_json.write(settings.Model(attention_cap=5.0), 30, {})
  with pytest.raises(InputError, match=r"Mistral has no config\.model\.activation='gelu'"):
    config_json.write(settings.Model(window=7, activation='gelu'), 30, {})


UNSAID = LLAMA3 | {'original_max_position_embeddings': None}
WITHOUT_KINDS = {'layer_types': None}  # null in a config.json is as missing
ROPE = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 4096}


@pytest.mark.parametrize(
  'name, changes, words',
  [
    ('Llama-3.2-1B', {'rope_scaling': {'rope_type': 'dynamic', 'factor': 2.0}}, "its rope scaling is 'dynamic'"),
    ('Llama-3.2-1B', {'rope_scaling': {'rope_type': 'linear'}}, 'its rope scaling has no factor'),
    ('Llama-3.2-1B', {'rope_scaling': LLAMA3 | {'odd': 1}}, 'its rope scaling has odd, which is not understood'),
    ('Llama-3.2-1B', {'rope_scaling': ROPE | {'truncate': False}}, 'its rope scaling has truncate=False'),
    ('Llama-3.2-1B', {'rope_scaling': ROPE | {'mscale': 1.0}}, 'its rope scaling has mscale, which'),
    ('Llama-3.2-1B', {'rope_parameters': {'rope_type': 'default', 'rope_theta': 9.0}}, 'it has both rope_scaling'),
    ('Llama-2-7b', {'rope_parameters': {'partial_rotary_factor': 0.5}}, 'has partial_rotary_factor=0.5'),
    ('Llama-2-7b', {'rope_parameters': {'full_attention': {}}}, 'its rope scaling has full_attention, which'),
    ('Llama-2-7b', {'rope_parameters': 3}, 'its rope_parameters is 3, which is not an object'),
    ('Llama-2-7b', {'rope_scaling': {'rope_type': ['x']}}, "its rope scaling is ['x'], not one of default"),
    ('Llama-2-7b', {'rope_scaling': {'type': 'linear', 'factor': '2'}}, "scaling factor is '2', which is not a number"),
    ('Llama-2-7b', {'architectures': ['LlamaForSequenceClassification']}, "its architectures are ['LlamaForSequ"),
    ('Llama-2-7b', {'is_causal': False}, 'its is_causal is False, not True'),
    ('Llama-2-7b', {'odd': 1, 'odder': 2}, 'its odder is 2, which is not understood: remove fields from config.json'),
    ('Llama-2-7b', {'tie_word_embeddings': 'false'}, "its tie_word_embeddings is 'false', which is neither true nor"),
    ('Llama-2-7b', {'hidden_size': 4096.5}, 'its hidden_size is 4096.5, which is not an integer of 1 or more'),
    ('Llama-2-7b', {'num_attention_heads': 0}, 'its num_attention_heads is 0, which is not an integer'),
    ('Llama-2-7b', {'num_key_value_heads': 5}, 'its num_key_value_heads is 5, which does not divide its num_attention'),
    ('Llama-2-7b', {'rms_norm_eps': None}, 'its rms_norm_eps is None, which is not a number above 0'),
    ('Llama-2-7b', {'vocab_size': '32000'}, "its vocab_size is '32000', which is not an integer"),
    ('Llama-2-7b', {'layer_types': ['sliding_attention'] * 32}, 'but its sliding_window is None'),
    ('Llama-2-7b', {'layer_types': ['linear_attention'] * 32}, 'which is not sliding_attention or'),
    ('Llama-2-7b', {'layer_types': ['full_attention']}, "its layer_types is ['full_attention'], which is not"),
    ('Llama-3.2-1B', {'attention_bias': True}, 'its attention_bias is True, not False'),
    ('Llama-3.2-1B', {'sliding_window': 4096}, 'its sliding_window is 4096, not None'),
    ('Llama-3.2-1B', {'quantization_config': {'bits': 4}}, "its quantization_config is {'bits': 4}, not None"),
    ('Llama-3.2-1B', {'residual_multiplier': 0.2}, 'its residual_multiplier is 0.2, which is not understood'),
    ('Llama-3.2-1B', {'attention_multiplier': 0.5}, 'its attention_multiplier is 0.5, which is not understood'),
    ('Llama-3.2-1B', {'use_qk_norm': False}, 'its use_qk_norm is False, which is not understood'),
    ('Llama-3.2-1B', {'num_local_experts': 8}, 'its num_local_experts is 8, which is not understood'),
    ('Llama-3.2-1B', {'auto_map': {'AutoModel': 'own.Model'}}, "its auto_map is {'AutoModel': 'own.Model'}, which is"),
    ('Llama-3.2-1B', {'quantization': {'bits': 4}}, "its quantization is {'bits': 4}, not None"),
    ('Llama-3.2-1B', {'pruned_heads': {'0': [1]}}, "its pruned_heads is {'0': [1]}, not {}"),
    ('Llama-3.2-1B', {'attention_dropout': 0.1}, 'its attention_dropout is 0.1, not 0.0'),
    ('Llama-3.2-1B', {'hidden_act': 'gelu'}, "its hidden_act is 'gelu', not 'silu'"),
    ('Llama-3.2-1B', {'model_type': 'gpt_neox'}, "its model_type is 'gpt_neox', not one of llama, mistral, qwen2"),
    ('Qwen2.5-0.5B', {'use_mrope': True}, 'its use_mrope is True, not False'),
    ('Qwen2.5-0.5B', {'use_sliding_window': True, 'max_window_layers': 5}, 'its blocks [1, 2, 3, 4, 5] have no window'),
    ('Qwen2.5-0.5B', {'layer_types': ['sliding_attention'] * 24}, 'but its sliding_window is 32768, its use_sliding_w'),
    ('Qwen2.5-0.5B', {'use_sliding_window': 'no'}, "its use_sliding_window is 'no', which is neither true nor false"),
    ('SmolLM3-3B', {'no_rope_layers': [0] + [1] * 35}, 'its blocks [1] have no rotary embedding'),
    ('SmolLM3-3B', {'no_rope_layers': [1, 0]}, 'its no_rope_layers is [1, 0], which is not 0 or 1 for each'),
    ('SmolLM3-3B', WITHOUT_KINDS | {'use_sliding_window': True, 'sliding_window': 9}, 'its blocks [1, 2, 3, 5, 6, 7'),
    ('gemma-3-270m', WITHOUT_KINDS | {'_sliding_window_pattern': 2}, 'its _sliding_window_pattern is 2, its'),
    ('gemma-3-270m', {'rope_parameters': {'full_attention': {'rope_type': 'default'}, 'odd': {}}}, 'has odd, which is'),
    ('gemma-3-270m', {'rope_parameters': {'full_attention': {}, 'sliding_attention': {'type': 'yarn'}}}, "'yarn'}"),
    ('gemma-3-270m', {'final_logit_softcapping': 30.0}, 'its final_logit_softcapping is 30.0, not None'),
    ('gemma-3-270m', {'use_bidirectional_attention': True}, 'its use_bidirectional_attention is True'),
    ('gemma-3-270m', {'hidden_size': None}, 'it has no hidden_size'),
  ],
)  # fmt: skip
def test_what_is_not_understood_is_named(name, changes, words):
  theirs = {k: x for k, x in (published(name) | changes).items() if x is not None or k != 'hidden_size'}
  with pytest.raises(InputError) as e:
    config_json.read_config(theirs)
  assert words in str(e.value)


@pytest.mark.parametrize(
  'name, without, changes, expected',
  [
    ('Llama-2-7b', ['head_dim', 'num_key_value_heads', 'architectures'], {}, {'num_kv_heads': 0, 'head_dim': 128}),
    ('Mistral-7B-v0.1', ['num_key_value_heads', 'sliding_window'], {}, {'num_kv_heads': 8, 'window': 4096}),
    ('Mistral-7B-v0.1', [], {'sliding_window': None}, {'window': 0}),
    ('Qwen2.5-0.5B', ['max_window_layers'], {'use_sliding_window': True}, {'window': 0}),
    ('Qwen2.5-0.5B', [], {'use_sliding_window': True, 'max_window_layers': 0}, {'window': 32768, 'full_every': 0}),
    ('Qwen3-0.6B', ['head_dim', 'tie_word_embeddings'], {}, {'head_dim': 128, 'tied': False}),
    ('OLMo-2-0425-1B', ['rms_norm_eps'], {}, {'norm_epsilon': 1e-5}),
    ('SmolLM3-3B', ['no_rope_layers', 'tie_word_embeddings'], {}, {'no_rope_every': 4, 'tied': True}),
    ('gemma-3-270m', ['layer_types', 'sliding_window', 'rope_theta'], {}, {'window': 4096, 'full_every': 6}),
    ('gemma-3-270m', ['layer_types'], {'sliding_window_pattern': 3, '_sliding_window_pattern': 3}, {'full_every': 3}),
    ('Llama-3.2-1B', [], {'rope_scaling': UNSAID}, {'rope_original_len': 131072}),
    ('Llama-2-7b', [], {'rope_parameters': {'partial_rotary_factor': 1.0, 'rope_theta': 5}}, {'rope_base': 5}),
    ('Llama-2-7b', [], {'is_decoder': False, 'eos_token_id': [1, 2], 'dtype': 'bfloat16'}, {'width': 4096}),
  ],
)  # fmt: skip
def test_what_is_missing_is_what_transformers_takes(name, without, changes, expected):
  theirs = {key: x for key, x in published(name).items() if key not in without} | changes
  found = dataclasses.replace(settings.Model(), **config_json.read_config(theirs))
  assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize(
  'key, value',
  [
    ('_model_name_or_path', 'Smollm2 135M 8k Lc100K Mix1 Ep2'), ('_name_or_path', 'x/y'), ('unk_token_id', 0),
    ('image_token_id', 7), ('bad_words_ids', [[1]]), ('unsloth_version', '2025.1'), ('torch_dtype', 'float16'),
    ('_commit_hash', 'abc'), ('forced_eos_token_id', 2), ('temperature', 0.7), ('tokenizer_class', 'X'),
    ('quantization_config', None), ('pruned_heads', {}),
  ],
)  # fmt: skip
def test_keys_that_compute_nothing_are_ignored(key, value):
  theirs = published('Llama-2-7b')
  assert config_json.read_config(theirs | {key: value}) == config_json.read_config(theirs)


def test_gemma_as_newer_libraries_write_it():
  """Rotary embedding by kind of block."""
  theirs = published('gemma-3-270m')
  for key in ('rope_theta', 'rope_local_base_freq', 'rope_scaling'):
    del theirs[key]
  kinds = {'rope_type': 'linear', 'rope_theta': 1e6, 'factor': 8.0}, {'rope_type': 'default', 'rope_theta': 1e4}
  theirs['rope_parameters'] = dict(zip(('full_attention', 'sliding_attention'), kinds, strict=True))
  found = config_json.read_config(theirs)
  assert (found['rope_base'], found['rope_local_base'], found['rope_scaling'], found['rope_factor']) == (
    1e6, 1e4, 'linear', 8.0,
  )  # fmt: skip


def test_keys_of_fewer_heads_may_be_copied():
  model = dataclasses.replace(settings.Model(), **config_json.read_config(published('SmolLM2-135M')))
  assert config_json.misfits(published('SmolLM2-135M'), dataclasses.replace(model, num_kv_heads=0)) == {}
  assert config_json.misfits(published('SmolLM2-135M'), dataclasses.replace(model, num_kv_heads=1))
  biased = settings.Model(**config_json.read_config(published('Qwen2.5-0.5B')))
  assert config_json.misfits(published('Qwen2.5-0.5B'), dataclasses.replace(biased, num_kv_heads=0))


def test_the_number_of_experts_has_either_name():
  theirs = published('Qwen3-30B-A3B')
  found = config_json.read_config(theirs)
  both = theirs | {'num_local_experts': 128}
  other = {name: x for name, x in both.items() if name != 'num_experts'}
  assert config_json.read_config(both) == config_json.read_config(other) == found
  with pytest.raises(InputError, match='num_experts and num_local_experts differ'):
    config_json.read_config(both | {'num_experts': 64})


@pytest.mark.parametrize(
  'field, value', [('mlp_only_layers', [0]), ('decoder_sparse_step', 2), ('use_sliding_window', True)]
)
def test_mixtures_with_other_blocks_are_rejected(field, value):
  with pytest.raises(InputError, match=f'its {field} is'):
    config_json.read_config(published('Qwen3-30B-A3B') | {field: value})


def test_olmoe_has_heads_as_wide_as_the_hidden_state():
  """Its norms of queries and keys have the width of the hidden state, whatever the heads have."""
  model = settings.Model(qk_norm='all', num_experts=8, width=96, num_heads=4, head_dim=32)
  with pytest.raises(InputError, match='no model family has all features'):
    config_json.write(model, 30, {})
  assert config_json.write(dataclasses.replace(model, head_dim=24), 30, {})[0].title == 'OLMoE'
  with pytest.raises(InputError, match='its head_dim is 64, but OLMoE has hidden_size / num_attention_heads'):
    config_json.read_config(published('OLMoE-1B-7B-0924') | {'head_dim': 64})
