"""Your own text on your own machine: 4x4 paths with path-specific ends, about an hour on a few cores.

    python -m dipaco_jax.main --config=configs/text.py --workdir=runs/text --config.data.train='books/*.txt'

Files may be .txt, .jsonl, .parquet and others (docs/own_text.md), compressed or not; name validation files in
`--config.data.validation`, or leave it to the program: of .txt, whole files or ends of files are held back. Longer is
better: `--config.train.phases=40`.
Variants: `:dense` is the control, the same base trained on as one path. `:small` is 2x2 smaller paths, minutes on two
cores, for one to some megabytes of text; `:small-dense` is its control.
"""

from ml_collections import ConfigDict

from dipaco_jax import settings


def get_config(variant: str = 'grid') -> ConfigDict:
  """variant: 'grid', 'dense', 'small' or 'small-dense'."""
  if variant not in ('grid', 'dense', 'small', 'small-dense'):
    raise ValueError(f"variant {variant!r}: there are 'grid', 'dense', 'small' and 'small-dense'")
  c = ConfigDict(settings.Settings().to_dict())
  c.data.update(source='files', holdout_fraction=0.004, max_validation_documents=400)
  c.tokenizer.vocab_size = 4096
  c.model.update(width=128, num_layers=6, num_heads=4, head_dim=32, mlp_dim=344, seq_len=256)
  c.pretrain.update(steps=400, batch_size=16)
  c.train.update(phases=16, steps_per_phase=24, batch_size=8, steps_per_dispatch=4)
  c.inner.update(learning_rate=1e-2, warmup_steps=30)
  c.outer.update(optimizer='sgd', learning_rate=1.0, rescale=False)  # plain averages; see docs/averaging.md
  c.routing.sample = 10_000
  c.checkpoint.every_steps = 200
  if variant.startswith('small'):
    shrink(c)
  if variant.endswith('dense'):
    c.routing.method = 'single'
    return c
  c.evaluate.control = True
  if variant == 'small':
    c.grid = ConfigDict({'a': 2, 'b': 2})
    c.levels = (
      ('shared', 'embed|final_norm', ()),
      ('low', 'block_[0-1]/', ('a',)),
      ('own', 'block_[2-3]/', ('a', 'b')),
    )
  else:
    c.grid = ConfigDict({'a': 4, 'b': 4})
    c.levels = (
      ('shared', 'embed|final_norm', ()),
      ('first', 'block_0/', ('a', 'b')),
      ('low', 'block_[12]/', ('a',)),
      ('high', 'block_[34]/', ('b',)),
      ('last', 'block_5/', ('a', 'b')),
    )
  return c


def shrink(c: ConfigDict):
  """Makes model and run smaller, for text that is too small for paths of the full size."""
  c.data.holdout_fraction = 0.02
  c.tokenizer.vocab_size = 2048
  c.model.update(width=96, num_layers=4, num_heads=3, head_dim=32, mlp_dim=256, seq_len=128)
  c.pretrain.update(steps=200, batch_size=16)
  c.train.update(phases=12, steps_per_phase=16)
  c.inner.warmup_steps = 20
