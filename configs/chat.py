"""An instruct model to a grid of 2x2 paths, trained on your conversations.

    python -m dipaco_jax.main --config=chat:MODEL --workdir=runs/chat --config.data.train='conversations/*.jsonl'

MODEL is a folder in the format of Hugging Face's transformers with a chat template, or a name on the Hub, such as
HuggingFaceTB/SmolLM2-135M-Instruct; docs/families.md lists the families. A record of the text is a conversation:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "domain": "cooking"}

Only the answers are trained on, and the user's first turn chooses the path, as it does when the paths are served.
`chat:dense:MODEL` is the control: one path that is trained for the same number of steps.
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

  c.data.update(source='files', format='messages', max_validation_documents=1000)
  c.model.seq_len = 1024  # of a row; longer conversations are cut between exchanges, and shorter ones packed
  c.pretrain.steps = 0  # the base is the model as it is
  c.train.update(phases=20, steps_per_phase=24, batch_size=8)
  c.inner.update(learning_rate=1e-4, warmup_steps=0, rewarm_steps=24, final_fraction=0.1)  # not tuned
  c.outer.update(optimizer='sgd', learning_rate=1.0, rescale=False, row_weights=True)
  c.routing.sample = 10_000
  c.evaluate.control = False  # `dense:` is; the base alone is compared with in any case
  if is_dense:
    c.routing.method = 'single'
    c.outer.row_weights = False  # nothing is averaged
    return c
  c.routing.router_fraction = 0.02
  c.evaluate.refit_router = True
  c.grid = ConfigDict({'a': 2, 'b': 2})
  c.levels = (
    ('ends', 'embed|final_norm|head', ()),
    ('low', blocks(0, half), ('a',)),
    ('high', blocks(half, num_layers), ('b',)),
  )
  return c


def blocks(first: int, end: int) -> str:
  """The pattern of blocks `first` to `end` - 1."""
  return f'block_({"|".join(map(str, range(first, end)))})/'
