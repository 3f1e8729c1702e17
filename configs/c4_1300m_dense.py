"""The paper's dense model of 1.3B parameters on C4, which its 256 paths are compared with [4.3].

    python -m dipaco_jax.main --config=configs/c4_1300m_dense.py --compile_only --topology=v5e:8x8   estimates the cost
    python -m dipaco_jax.main --config=configs/c4_1300m_dense.py --distributed --workdir=DIR         on every host

Perplexity 11.41 in the paper. Parameters and AdamW state are sharded over the chips. Not run yet. --compile_only
estimates 10 to 18 hours on v5e:8x8.
"""

from ml_collections import ConfigDict

from dipaco_jax import settings


def get_config() -> ConfigDict:
  """24 blocks of 2048, 16 heads of 128 [7.1]."""
  c = ConfigDict(settings.Settings().to_dict())
  c.data.update(source='files', train=('c4-train.*.json.gz',), validation=('c4-validation.*.json.gz',), parts=64)
  c.model.update(width=2048, num_layers=24, num_heads=16, head_dim=128, mlp_dim=5504, remat='full')
  c.mesh.shard_states = True
  c.inner.learning_rate = 2e-4
  c.routing.method = 'single'
  c.outer.update(optimizer='sgd', learning_rate=1.0, rescale=False)  # AdamW continues as if there were no phases
  c.evaluate.update(seq_len=2048, batch_size=64, every_phases=16)
  return c
