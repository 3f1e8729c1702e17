"""The paper's dense baseline of 150M parameters on C4: AdamW alone, for 88,000 steps, or eight times as many.

    python -m dipaco_jax.main --config=configs/c4_dense.py --compile_only --topology=v5e:4x4   estimates the cost
    python -m dipaco_jax.main --config=configs/c4_dense.py --distributed --workdir=DIR         on every host

Variants: `:1x` (perplexity 16.23 in the paper), `:8x`, eight times the steps (14.72).
Not run yet. --compile_only estimates 4 to 7 hours for `:1x` on v5e:4x4, where 16 chips share each batch.
"""

from ml_collections import ConfigDict

from dipaco_jax import settings


def get_config(variant: str = '1x') -> ConfigDict:
  """variant: '1x' or '8x'."""
  if variant not in ('1x', '8x'):
    raise ValueError(f"variant {variant!r}: there are '1x' and '8x'")
  c = ConfigDict(settings.Settings().to_dict())
  c.data.update(source='files', train=('c4-train.*.json.gz',), validation=('c4-validation.*.json.gz',), parts=64)
  c.model.update(remat='dots', loss_chunk=4096, vocab_chunk=3200)
  c.train.microbatch = 4
  c.train.phases = {'1x': 427, '8x': 4533}[variant]  # of 150 steps, after 24,000
  c.routing.method = 'single'
  c.outer.update(optimizer='sgd', learning_rate=1.0, rescale=False)  # AdamW continues as if there were no phases
  c.evaluate.update(seq_len=2048, batch_size=64, every_phases=16)
  return c
