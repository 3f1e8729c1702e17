"""A pretrained model to a grid of 4x4 paths, trained on your text.

    python -m dipaco_jax.main --config=upcycle:MODEL --workdir=runs/mine --config.data.train='text/*.parquet'

MODEL is a folder in the format of Hugging Face's transformers, or a name on the Hub, such as
HuggingFaceTB/SmolLM2-135M; docs/families.md lists the families. The folder determines the sizes, the tokenizer and the
architecture. Every path starts as that model: blocks of its lower half vary over axis a, those of its upper half over
axis b, and all paths share the embedding and the last norm. `upcycle:dense:MODEL` is the control: one path that is
trained for the same number of steps.
"""

from ml_collections import ConfigDict

from dipaco_jax import settings
from dipaco_jax.huggingface import pretrained


def get_config(model: str, workdir: str = '') -> ConfigDict:
  """model: a folder, or a name on the Hub; dense:... is the control. workdir: of the run, which may have begun."""
  c = ConfigDict(settings.Settings().to_dict())
  kind, _, name = model.partition(':')
  is_dense = kind == 'dense'
  c.pretrain.init = name if is_dense else model
  num_layers = pretrained.read_model(pretrained.located(c.pretrain.init), workdir)['num_layers']
  half = num_layers // 2

  c.data.update(source='files', max_validation_documents=1000)
  c.model.seq_len = 512  # of a row; longer documents are cut, and shorter ones packed
  c.pretrain.steps = 0  # the base is the model as it is
  c.train.update(phases=40, steps_per_phase=50, batch_size=8)
  # Its own training ended at a low rate: warm it up again, to about a third of the rate of a new model.
  c.inner.update(learning_rate=3e-4, warmup_steps=0, rewarm_steps=100, final_fraction=0.1)
  # Averages, each row by how much a path uses it. With Nesterov's momentum and rescaling a grid was behind the model
  # that it came from after 150 steps, with these ahead of the control (experiments/LEDGER.md; one seed, a small model).
  c.outer.update(optimizer='sgd', learning_rate=1.0, rescale=False, row_weights=True)
  c.routing.sample = 10_000
  if is_dense:
    c.routing.method = 'single'
    c.outer.row_weights = False  # nothing is averaged
    return c
  # Which path suits a text best is learned anew when paths are trained: by the router that they were trained by, grids
  # of a pretrained base were behind its dense training on beginnings of documents (experiments/TABLES.md, section 5).
  c.routing.router_fraction = 0.02
  c.evaluate.refit_router = True
  c.evaluate.control = False  # `dense:` is; the base alone is compared with in any case
  c.grid = ConfigDict({'a': 4, 'b': 4})
  c.levels = (
    ('ends', 'embed|final_norm|head', ()),
    ('low', blocks(0, half), ('a',)),
    ('high', blocks(half, num_layers), ('b',)),
  )
  return c


def blocks(first: int, end: int) -> str:
  """The pattern of blocks `first` to `end` - 1."""
  return f'block_({"|".join(map(str, range(first, end)))})/'
