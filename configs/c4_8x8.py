"""The paper's 64-path DiPaCo on C4: 8x8 paths of 150M parameters, routed discriminatively.

    python -m dipaco_jax.main --config=configs/c4_8x8.py --compile_only --topology=v5e:8x8     estimates the cost
    python -m dipaco_jax.main --config=configs/c4_8x8.py --distributed --workdir=DIR           on every host

The variant `:shared` has no path-specific modules: 1.2B parameters, and a perplexity of 13.37 in the paper. In `:ends`,
blocks 0, 5, 6 and 11, the embedding and the last norm are path-specific: 5.1B parameters (5.3B in the paper), and a
perplexity of 12.70 in the paper. In `:shared`, the embedding varies over axis b, as the paper's 1.2B parameters imply;
if all paths shared it, there would be 1.0B. Neither has been run yet. --compile_only estimates 50 to 80 hours on
v5e:8x8, with one path per chip.
"""

from ml_collections import ConfigDict

from dipaco_jax import settings


def get_config(variant: str = 'ends') -> ConfigDict:
  """variant: 'ends' or 'shared'."""
  if variant not in ('ends', 'shared'):
    raise ValueError(f"variant {variant!r}: there are 'ends' and 'shared'")
  c = ConfigDict(settings.Settings().to_dict())
  c.data.update(source='files', train=('c4-train.*.json.gz',), validation=('c4-validation.*.json.gz',), parts=64)
  c.grid = ConfigDict({'a': 8, 'b': 8})
  if variant == 'ends':
    c.levels = (
      ('low', 'block_[1-4]/', ('a',)),
      ('high', 'block_([7-9]|10)/', ('b',)),
      ('own', 'embed|final_norm|head|block_([056]|11)/', ('a', 'b')),
    )
  else:
    c.levels = (
      ('low', 'block_[0-5]/', ('a',)),
      ('high', 'embed|final_norm|head|block_([6-9]|1[01])/', ('b',)),
    )
  c.model.update(remat='dots', loss_chunk=4096, vocab_chunk=3200)
  c.train.microbatch = 4
  c.routing.update(method='discriminative', first='product_kmeans', router_fraction=0.005)
  c.evaluate.update(seq_len=2048, batch_size=64, every_phases=16)
  return c
