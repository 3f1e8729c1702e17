"""DiPaCo of 16x16 paths of 150 M parameters on C4, as in the paper's Table 3: perplexity 12.22 routed once, 11.38
re-routed every 64 tokens [4.3].

    python -m dipaco_jax.main --config=configs/c4_256paths.py --compile_only --topology=v5e:16x16   what it will cost
    python -m dipaco_jax.main --config=configs/c4_256paths.py --distributed --workdir=DIR

The second is for every host, in a directory with C4's files (or with --config.data.source=tfds, see
docs/own_text.md), with DIR where all hosts see it. It has not been run yet at this size: by --compile_only it takes 50
to 80 hours on v5e:16x16, a path to a chip, 8 of 16 GiB. The paper's dense model of 1.3B has 11.41.
Blocks 0, 5, 6, 11 and the embedding are each path's own; of the others, half vary over each axis of the grid. Variants:
`:shared` has no path-specific modules.
"""

from ml_collections import ConfigDict

from dipaco_jax import settings


def get_config(variant: str = 'ends') -> ConfigDict:
  """variant: 'ends' or 'shared'."""
  if variant not in ('ends', 'shared'):
    raise ValueError(f"variant {variant!r}: there are 'ends' and 'shared'")
  own = ('a', 'b') if variant == 'ends' else ()
  c = ConfigDict(settings.Settings().to_dict())
  c.data.update(source='files', train=('c4-train.*.json.gz',), validation=('c4-validation.*.json.gz',), parts=64)
  c.grid = ConfigDict({'a': 16, 'b': 16})
  low, high = ('block_[1-4]/', 'block_([7-9]|10)/') if own else ('block_[0-5]/', 'block_([6-9]|1[01])/')
  c.levels = (('shared', 'final_norm' if own else 'embed|final_norm', ()), ('low', low, ('a',)), ('high', high, ('b',)))
  if own:
    c.levels += (('own', 'embed|block_([056]|11)/', own),)
  c.model.update(remat='dots', loss_chunk=4096, vocab_chunk=3200)
  c.train.microbatch = 4
  c.routing.update(method='discriminative', first='product_kmeans', router_fraction=0.005, top_n=2)
  c.evaluate.update(seq_len=2048, batch_size=256, every_phases=16, reroute_every=(64,), chunk_router_steps=2000)
  return c
