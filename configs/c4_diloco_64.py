"""DiLoCo with 64 workers on C4 (arXiv 2311.08105): one model, its copies trained apart for 150 steps at a time.

    python -m dipaco_jax.main --config=configs/c4_diloco_64.py --compile_only --topology=v5e:8x8   estimates the cost
    python -m dipaco_jax.main --config=configs/c4_diloco_64.py --distributed --workdir=DIR         on every host

Perplexity 14.96 in the DiPaCo paper. Not run yet. --compile_only estimates 50 to 80 hours on v5e:8x8, with
one worker per chip.
"""

from ml_collections import ConfigDict

from dipaco_jax import settings


def get_config() -> ConfigDict:
  """An axis that no level varies over; shards are i.i.d., and the average is uniform and not rescaled."""
  c = ConfigDict(settings.Settings().to_dict())
  c.data.update(source='files', train=('c4-train.*.json.gz',), validation=('c4-validation.*.json.gz',), parts=64)
  c.grid = ConfigDict({'worker': 64})
  c.levels = (('all', '.*', ()),)
  c.model.update(remat='dots', loss_chunk=4096, vocab_chunk=3200)
  c.train.microbatch = 4
  c.inner.rewarm_steps = 1000
  c.routing.method = 'random'
  c.outer.update(rescale=False, reweigh=False)
  c.evaluate.update(seq_len=2048, batch_size=64, every_phases=16)
  return c
