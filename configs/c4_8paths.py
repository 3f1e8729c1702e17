"""DiPaCo of 2x4 paths of 150 M parameters on C4: the smallest grid of the paper's Table 1, on one TPU v5e-8.

    python -m dipaco_jax.main --config=configs/c4_8paths.py --compile_only --topology=v5e:2x4     estimates the cost
    python -m dipaco_jax.main --config=configs/c4_8paths.py --workdir=DIR                         on the TPU's host

Hardware: v5e:2x4, one host, one path per chip. --compile_only estimates 52 to 84 hours. The perplexity in the paper is
14.86, and 16.23 for its dense model of one path's size. It has not been run yet; docs/tpu.md has all steps, beginning
with a Google Cloud account. Blocks 0 to 5 are in two modules. Blocks 6 to 11, the embedding and the last norm are in
four, as the paper's 0.5B parameters of all modules imply: if all paths shared the embedding, there would be 0.4B. The
variant `:tenth` has a tenth of the steps and of the text; the paper has no perplexity for it.
"""

from ml_collections import ConfigDict

from dipaco_jax import settings


def get_config(variant: str = 'paper') -> ConfigDict:
  """variant: 'paper' or 'tenth'."""
  if variant not in ('paper', 'tenth'):
    raise ValueError(f"variant {variant!r}: there are 'paper' and 'tenth'")
  c = ConfigDict(settings.Settings().to_dict())
  c.data.update(source='files', train=('c4-train.*.json.gz',), validation=('c4-validation.*.json.gz',))
  c.data.parts = 8  # one after the other, on one host: a preemption takes back no more than one of them
  c.grid = ConfigDict({'a': 2, 'b': 4})
  c.levels = (
    ('low', 'block_[0-5]/', ('a',)),
    ('high', 'embed|final_norm|head|block_([6-9]|1[01])/', ('b',)),
  )
  c.model.update(remat='dots', loss_chunk=4096, vocab_chunk=3200)
  c.train.microbatch = 4
  c.routing.update(method='discriminative', first='product_kmeans', router_fraction=0.005)
  c.evaluate.update(seq_len=2048, batch_size=16, every_phases=16)
  if variant == 'tenth':
    c.data.max_documents = 36_500_000
    c.pretrain.steps, c.train.phases, c.inner.warmup_steps = 2400, 43, 200
  return c
