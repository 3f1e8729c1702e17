"""Blocks within a period have different layers."""

from dipaco_jax.config import settings
from dipaco_jax.models import layers


def test_what_a_block_is():
  config = settings.Model(window=8, full_every=6, no_rope_every=4, rope_local_base=1e4)
  for n in range(20):
    assert layers.layer(config, n) == layers.Layer(0 if n % 6 == 5 else 8, n % 6 != 5, n % 4 != 3)
  assert layers.layer(settings.Model(window=8, rope_local_base=0.0), 5) == layers.Layer(8, False, True)
