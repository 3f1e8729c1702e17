"""Blocks repeat after their period, and are told apart within."""

from dipaco_jax.core import settings
from dipaco_jax.models import layers


def test_blocks_repeat_after_their_period():
  config = settings.Model(window=8, full_every=6, no_rope_every=4, rope_local_base=1e4)
  assert layers.period(config) == 12 and layers.period(settings.Model()) == 1
  for n in range(20):
    found = layers.layer(config, n)
    assert found == layers.layer(config, n % 12)
    assert found == layers.Layer(0 if n % 6 == 5 else 8, n % 6 != 5, n % 4 != 3)
  assert layers.layer(settings.Model(window=8, rope_local_base=0.0), 5) == layers.Layer(8, False, True)
