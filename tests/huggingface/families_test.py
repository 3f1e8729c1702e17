"""Parameters in the layout of every family: converted and back they are the same."""

import dataclasses
import re

import numpy as np
import pytest
import shapes_of_families

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.huggingface import config_json, families
from dipaco_jax.models import transformer

MODEL = settings.Model(width=12, num_layers=2, num_heads=4, head_dim=4, mlp_dim=20, seq_len=16)
V = 30


def of(name: str, **changes) -> settings.Model:
  changes = {'width': 16} | changes if name == 'olmoe' else changes  # its heads are as wide together
  return dataclasses.replace(MODEL, **shapes_of_families.FAMILIES[name] | changes)


@pytest.mark.parametrize('tied', [True, False])
@pytest.mark.parametrize('name', shapes_of_families.FAMILIES)
def test_weights_converted_and_back_are_the_same(name, tied):
  model = of(name, tied=tied)
  shapes = transformer.shapes(transformer.make_model(model, V))
  rng = np.random.default_rng(0)
  params = {name: rng.normal(size=x.shape).astype('f') for name, x in shapes.items()}
  family, _ = config_json.write(model, V, {})
  theirs = families.to_theirs(family, params)
  D = model.width
  assert len(theirs) == len(params) and theirs['model.embed_tokens.weight'].shape == (V, D)
  assert theirs['model.layers.1.self_attn.o_proj.weight'].shape == (D, 4 * 4)
  assert theirs['model.layers.1.self_attn.v_proj.weight'].shape == (4 * (model.num_kv_heads or 4), D)
  assert all(x.shape in ((20, D), (D, 20)) for name, x in theirs.items() if re.search(r'mlp\.(\w+_proj|experts)', name))
  for name, x in params.items():
    called = families.their_name(family, name)
    np.testing.assert_array_equal(families.to_ours(name, theirs[called], x.shape), x)


def test_heads_are_rows_one_after_the_other():
  q_DHK = np.arange(12 * 3 * 4, dtype='f').reshape(12, 3, 4)
  found = families.to_theirs(families.FAMILIES[0], {'block_0/attention/q': q_DHK})
  np.testing.assert_array_equal(found['model.layers.0.self_attn.q_proj.weight'][4:8], q_DHK[:, 1].T)


def test_what_a_family_does_not_have_is_named():
  with pytest.raises(InputError, match='SmolLM2 has no block_0/attention/q_norm/scale'):
    families.their_name(families.FAMILIES[0], 'block_0/attention/q_norm/scale')
