"""The smallest DiPaCo worth looking at: 2x2 paths of 0.6 M parameters, on text that every Python has.

    python -m dipaco_jax.main --config=configs/tiny.py --workdir=runs/tiny          the grid of paths
    python -m dipaco_jax.main --config=configs/tiny.py:dense --workdir=runs/dense   its dense control, as a run

The grid's run trains that control too, and compares itself with it.
"""

from ml_collections import ConfigDict

from dipaco_jax import settings


def get_config(variant: str = 'grid') -> ConfigDict:
  """variant: 'grid', or 'dense': the same base trained on for as many steps, as one path."""
  c = ConfigDict(settings.Settings().to_dict())
  c.data.update(max_documents=900, max_validation_documents=200, validation_fraction=0.2)
  c.tokenizer.update(vocab_size=2048, sample_bytes=3_000_000)
  c.model.update(width=96, num_layers=4, num_heads=3, head_dim=32, mlp_dim=256, seq_len=128)
  c.pretrain.update(steps=120, batch_size=32)
  c.train.update(phases=6, steps_per_phase=16, batch_size=16)
  c.routing.sample = 4000
  c.inner.update(learning_rate=1e-2, warmup_steps=20)
  c.outer.update(optimizer='sgd', learning_rate=1.0, rescale=False)  # plain averages, see docs/averaging.md
  c.checkpoint.every_steps = 100
  if variant == 'grid':
    c.evaluate.control = True
    c.grid = ConfigDict({'a': 2, 'b': 2})
    c.levels = (('shared', 'embed|final_norm', ()), ('low', 'block_[01]/', ('a',)), ('high', 'block_[23]/', ('b',)))
  elif variant == 'dense':
    c.routing.method = 'single'
  else:
    raise ValueError(f"variant {variant!r}: there are 'grid' and 'dense'")
  return c
