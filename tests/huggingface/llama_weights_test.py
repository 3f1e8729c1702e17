"""Weights in Llama's layout: converted and back they are the same, and a config.json that fits has no misfits."""

import dataclasses

import numpy as np
import pytest

from dipaco_jax.core import settings
from dipaco_jax.huggingface import llama_weights
from dipaco_jax.models import transformer

MODEL = settings.Model(width=12, num_layers=2, num_heads=3, head_dim=4, mlp_dim=20, seq_len=16)
V = 30


@pytest.mark.parametrize('tied', [True, False])
def test_weights_converted_and_back_are_the_same(tied):
  shapes = transformer.shapes(transformer.make_model(dataclasses.replace(MODEL, tied=tied), V))
  rng = np.random.default_rng(0)
  params = {name: rng.normal(size=x.shape).astype('f') for name, x in shapes.items()}
  theirs = llama_weights.to_theirs(params)
  assert len(theirs) == len(params) and theirs['model.embed_tokens.weight'].shape == (V, 12)
  assert theirs['model.layers.1.self_attn.o_proj.weight'].shape == (12, 3 * 4)
  assert theirs['model.layers.0.mlp.down_proj.weight'].shape == (12, 20)
  for name, x in params.items():
    again = llama_weights.to_ours(name, theirs[llama_weights.their_name(name)], x.shape)
    np.testing.assert_array_equal(again, x)


def test_heads_are_rows_one_after_the_other():
  q_DHK = np.arange(12 * 3 * 4, dtype='f').reshape(12, 3, 4)
  theirs = llama_weights.to_theirs({'block_0/attention/q': q_DHK})['model.layers.0.self_attn.q_proj.weight']
  np.testing.assert_array_equal(theirs[4:8], q_DHK[:, 1].T)


def test_a_written_config_fits_and_another_is_told_what_to_set():
  config = llama_weights.make_config(MODEL, V, {'bos': 1, 'eos': 2})
  assert llama_weights.misfits(config, MODEL) == []
  assert (config['bos_token_id'], config['eos_token_id'], config['pad_token_id']) == (1, 2, None)
  found = llama_weights.misfits(config, dataclasses.replace(MODEL, num_layers=3, norm_epsilon=1e-3))
  assert found == ['set config.model.num_layers=2', f'set config.model.norm_epsilon={MODEL.norm_epsilon!r}']


def test_what_a_config_leaves_out_is_llama_s_default():
  config = llama_weights.make_config(dataclasses.replace(MODEL, rope_base=10_000.0), V, {})
  kept = {name: x for name, x in config.items() if name not in ('rope_theta', 'head_dim', 'hidden_act')}
  assert llama_weights.misfits(kept, dataclasses.replace(MODEL, rope_base=10_000.0)) == []
  assert llama_weights.misfits(kept, dataclasses.replace(MODEL, rope_base=5e3)) == [
    'set config.model.rope_base=10000.0'
  ]
