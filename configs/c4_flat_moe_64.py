"""The paper's flat mixture of 64 experts on C4 [2.6.3]: every path has a model of its own, and nothing is exchanged.

    python -m dipaco_jax.main --config=configs/c4_flat_moe_64.py --compile_only --topology=v5e:8x8   estimates the cost
    python -m dipaco_jax.main --config=configs/c4_flat_moe_64.py --distributed --workdir=DIR         on every host

Perplexity 12.76 in the paper. Not run yet. --compile_only estimates 50 to 80 hours on v5e:8x8, with one path per
chip.
"""

from ml_collections import ConfigDict

from dipaco_jax import settings


def get_config() -> ConfigDict:
  """Path-specific modules alone; the outer optimizer acts on them too [2.6.1]."""
  c = ConfigDict(settings.Settings().to_dict())
  c.data.update(source='files', train=('c4-train.*.json.gz',), validation=('c4-validation.*.json.gz',), parts=64)
  c.grid = ConfigDict({'expert': 64})
  c.levels = (('all', '.*', ('expert',)),)
  c.model.update(remat='dots', loss_chunk=4096, vocab_chunk=3200)
  c.train.microbatch = 4
  c.routing.update(method='discriminative', router_fraction=0.005)
  c.evaluate.update(seq_len=2048, batch_size=64, every_phases=16)
  return c
