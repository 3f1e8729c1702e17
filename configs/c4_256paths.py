"""DiPaCo of 16x16 paths of 150 M parameters on C4, as in the paper's Table 3: perplexity 12.22 routed once, 11.38
re-routed every 64 tokens [4.3].

    python -m dipaco_jax.main --config=configs/c4_256paths.py --compile_only --topology=v5e:16x16   estimates the cost
    python -m dipaco_jax.main --config=configs/c4_256paths.py --distributed --workdir=DIR

Run the second command on every host, in a directory with C4's files (or with --config.data.source=tfds, see
docs/own_text.md), and with a DIR that all hosts share. It has not been run yet at this size: --compile_only estimates
50 to 80 hours on v5e:16x16, with one path per chip, which takes 8 of 16 GiB. The paper's dense model of 1.3B has 11.41.
Blocks 0, 5, 6, 11, the embedding and the last norm are path-specific; half of the other blocks vary over each axis of
the grid. The variant `:shared` has no path-specific modules; its embedding and last norm vary over axis b. No level is
shared by all paths, so in islands a path waits only for the 30 paths with which it shares a module.
"""

from ml_collections import ConfigDict

from dipaco_jax import settings


def get_config(variant: str = 'ends') -> ConfigDict:
  """variant: 'ends' or 'shared'."""
  if variant not in ('ends', 'shared'):
    raise ValueError(f"variant {variant!r}: there are 'ends' and 'shared'")
  c = ConfigDict(settings.Settings().to_dict())
  c.data.update(source='files', train=('c4-train.*.json.gz',), validation=('c4-validation.*.json.gz',), parts=64)
  c.grid = ConfigDict({'a': 16, 'b': 16})
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
  c.routing.update(method='discriminative', first='product_kmeans', router_fraction=0.005, top_n=2)
  c.evaluate.update(seq_len=2048, batch_size=256, every_phases=16, reroute_every=(64,), chunk_router_steps=2000)
  return c
