"""Every field of a run and its default.

This is the one place where defaults live. A config file fills a ConfigDict made from `Settings().to_dict()`; `main.py`
turns it back with `from_dict`, and everything below takes these frozen dataclasses. Section numbers refer to the DiPaCo
paper, arXiv 2403.10616.
"""

import dataclasses
import difflib
import hashlib
import json
import typing
from collections.abc import Mapping
from typing import Any

from dipaco_jax.core import settings_checks
from dipaco_jax.core.errors import InputError


@dataclasses.dataclass(frozen=True)
class Data:
  """Where documents come from."""

  source: str = 'stdlib'  # the running Python's own source and documentation; or 'files', 'tfds', 'seqio'
  train: tuple[str, ...] = ()  # globs of .txt, and .jsonl or .json with a document a line, as they are, .gz, .zst
  validation: tuple[str, ...] = ()  # globs; none: part of the text, of .txt whole files or ends of files
  name: str = ''  # of tfds: a dataset and its version, as 'c4/en:3.0.1'; of seqio: a task or a mixture
  data_dir: str = ''  # where tfds has prepared datasets: a folder, or gs://
  module: str = ''  # that registers the task of seqio
  validation_fraction: float = 0.02  # of the text, held back to validate on where the source has none for that
  min_validation_tokens: int = 1000  # for each path, and at least 10 times that: more is held back for it; 0: no floor
  max_validation_fraction: float = 0.1  # that is held back for that floor
  max_validation_documents: int = 1000  # drawn from all of them; 0: all
  max_documents: int = 0  # 0: all; the first so many, of training and validation together
  parts: int = 1  # that text is tokenized in, by as many processes as there are; what is made depends on this alone
  text_key: str = 'text'  # of a document, in a line of JSON
  domain_key: str = 'domain'  # in a line of JSON, if it is there: perplexity is told by domain
  holdout_fraction: float = 0.01  # of the documents, held back from every shard for early stopping [2.7]; see shards.py


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """SentencePiece: a given model, or one trained on a seeded sample of the training text."""

  model_file: str = ''  # for instance T5's 32,000 pieces
  vocab_size: int = 32_000  # of the model to train
  sample_bytes: int = 20_000_000  # of text to train it on


@dataclasses.dataclass(frozen=True)
class Model:
  """A decoder-only transformer in Llama's shape; the defaults are the 150M path of the paper [7.1]."""

  width: int = 896  # of the vectors between blocks
  num_layers: int = 12  # blocks
  num_heads: int = 16  # of attention
  head_dim: int = 64  # of each head; even
  mlp_dim: int = 2432  # width inside the MLP
  seq_len: int = 1024  # tokens in a row of training
  tied: bool = True  # the head is the embedding, transposed
  dtype: str = 'auto'  # of compute: 'float32', 'bfloat16', 'auto' (float32 on CPU); parameters are float32
  attention: str = 'auto'  # 'splash' (TPU), 'cudnn' (GPU), 'xla', 'auto': by device
  layers: str = 'auto'  # 'scanned' (TPU): compiled once for all blocks; 'unrolled'; 'auto': by device
  remat: str = 'none'  # 'none', 'full' (each block), 'dots' (keep what matrix products and splash make)
  loss_chunk: int = 1024  # tokens whose logits exist at one time
  rope_base: float = 10_000.0  # of rotary embedding
  norm_epsilon: float = 1e-6  # of RMSNorm


@dataclasses.dataclass(frozen=True)
class Pretrain:
  """The base model, from which every path starts [2.6]."""

  steps: int = 24_000  # of AdamW, before there are paths
  batch_size: int = 512  # rows
  init: str = ''  # a folder in Hugging Face's Llama layout that the base starts from; with steps=0 it is the base


@dataclasses.dataclass(frozen=True)
class Train:
  """Algorithm 1: phases of tau inner steps, each followed by an outer step [2.5]."""

  phases: int = 427  # outer steps; a finished run is trained on by raising it
  steps_per_phase: int = 150  # tau: inner steps between two outer steps
  batch_size: int = 512  # rows per path
  learning_rate: float = 0.0  # of AdamW inside paths, at its highest, where the base has another; 0: the base's
  microbatch: int = 0  # rows on a device whose activations exist at one time, the largest divisor up to this; 0: all
  steps_per_dispatch: int = 8  # inner steps in one compiled program; the largest divisor of tau up to this is used
  early_stopping: bool = True  # each path, replicas as one, points at its version of lowest hold-out loss [2.7]
  max_holdout_rows: int = 512  # of each path's hold-out, over all its documents, for early stopping; 0: all
  paths_per_phase: int = 0  # path sampling [2.6.2]: so many, drawn by (seed, phase); others' data wait; 0: all
  schedule: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (first phase, its paths); overrides paths_per_phase
  offload: bool = False  # AdamW state of waiting paths lives in host memory


@dataclasses.dataclass(frozen=True)
class Inner:
  """AdamW inside a path, with a cosine over the global step, pretraining included [7.1]."""

  learning_rate: float = 4e-4  # at its highest
  warmup_steps: int = 1000  # to that rate, linearly
  rewarm_steps: int = 0  # warm up once more, from the first step after pretraining (as DiLoCo does)
  decay_steps: int = 0  # of the cosine; 0: pretrain.steps + phases * steps_per_phase, which more phases stretch
  final_fraction: float = 0.05  # of learning_rate, at the cosine's end; 1: no decay; open in the paper
  b1: float = 0.9  # of AdamW, for the mean of gradients
  b2: float = 0.95  # for the mean of their squares; open in the paper
  epsilon: float = 1e-8  # of AdamW
  weight_decay: float = 0.1  # of matrices, not of norms' scales
  clip_norm: float = 1.0  # global norm of the gradient; 0: no clipping
  optimizer: str = 'adamw'  # or 'sgd', for checks against data-parallel SGD
  keep_state: bool = True  # AdamW state survives the outer step, as DiLoCo's does on its worker
  inherit_state: bool = True  # paths start with the base model's AdamW state
  max_skipped: int = 10  # steps in a row that are skipped where loss or gradient is not finite; 0: none is


@dataclasses.dataclass(frozen=True)
class Outer:
  """What is done with the averaged outer gradient of a module [2.5, 2.7]."""

  optimizer: str = 'nesterov'  # 'nesterov', 'momentum', 'sgd', 'adam'
  learning_rate: float = 0.7  # constant
  momentum: float = 0.9  # of 'nesterov' and 'momentum'; b1 of 'adam'
  epsilon: float = 0.1  # of adam
  rescale: bool = True  # times sqrt(P_{l,e})
  reweigh: bool = True  # paths weigh as their shards' tokens
  row_weights: bool = False  # and, in each row of a parameter, as the size of their gradients there (see outer.py)
  exclude_above: float = 10.0  # times the usual length of an outer gradient; a longer one takes no part; 0: any length
  max_excluded: int = 3  # phases in a row in which a path may take no part for that; one more stops the run
  lost: float = 0.0  # probability that a path's outer gradient is lost: it goes on from its own parameters [DiLoCo]


@dataclasses.dataclass(frozen=True)
class Routing:
  """How a sequence finds its path [2.4]."""

  method: str = 'kmeans'  # 'kmeans', 'product_kmeans' [7.3], 'discriminative' [2.4.2], 'random', 'single'
  prefix_tokens: int = 32  # which the router sees, and which no loss counts
  top_n: int = 1  # training sequences go to so many paths [2.4.4]
  sample: int = 100_000  # sequences that k-means is fitted on
  restarts: int = 3  # of k-means, from other first centroids; the best is kept
  iterations: int = 50  # of k-means, at most
  arrange: str = 'none'  # clusters of 'kmeans' on the grid: 'alike', 'unlike' share modules; 'none': as they come
  capacity: float = 0.0  # of a shard, in multiples of the mean; 0: no limit
  # Discriminative routing: paths score router data, a classifier learns the best path, all text is sharded anew.
  router_fraction: float = 0.0  # of the documents, kept from all training as router data; 0.005 in the paper
  first: str = 'kmeans'  # how text is routed before the first round: 'kmeans', 'product_kmeans', 'random'
  rounds: int = 1  # of re-sharding: approximate EM
  phases_per_round: int = 16  # trained before each of them
  labels: str = 'exact'  # 'exact': every path scores all router data; 'coordinate': along one axis after another
  hidden: int = 0  # width of the classifier's hidden layer; 0: a linear one
  calibrate: bool = True  # a bias makes predicted frequencies those of the labels


@dataclasses.dataclass(frozen=True)
class Evaluate:
  """Routed perplexity on validation documents."""

  seq_len: int = 0  # tokens of each document; 0: model.seq_len
  batch_size: int = 0  # rows; 0: train.batch_size
  every_phases: int = 1  # how often it is measured while training; 0: only at the end
  control: bool = False  # the base trained for as many steps more as a path, on all text, to compare the paths with
  matrix: bool = False  # every path's loss on every shard's hold-out, in the report
  reroute_every: tuple[int, ...] = ()  # tokens after which a path is chosen again [2.4.3], for instance (64, 32)
  chunk_router_steps: int = 0  # to train the learned chooser for, on router data; 2,000 in the paper; 0: none
  mixture: int = 0  # perplexity of the mixtures of up to so many paths, by the router's scores


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """Orbax run state."""

  every_steps: int = 50  # inner steps, counted in every turn; in a phase of no more steps than these, at its end
  keep: int = 2  # the newest, and with them the last at the end of a phase


@dataclasses.dataclass(frozen=True)
class Mesh:
  """How devices are laid out; zeros are filled in from the devices at hand."""

  data: int = 0  # devices inside one path's slice
  shard_states: bool = False  # parameters and AdamW state sharded over `data`, else replicated


@dataclasses.dataclass(frozen=True)
class Settings:
  """A run. `grid` maps axis names to sizes; `levels` are (name, pattern, axes): every parameter matches exactly one."""

  seed: int = 0  # of all that is drawn: the same one gives the same modules, to the bit
  grid: tuple[tuple[str, int], ...] = ()  # axes and their sizes, in a config a dict; none: one path
  levels: tuple[tuple[str, str, tuple[str, ...]], ...] = (('all', '.*', ()),)  # (name, pattern, axes): parts of paths
  data: Data = Data()
  tokenizer: Tokenizer = Tokenizer()
  model: Model = Model()
  pretrain: Pretrain = Pretrain()
  train: Train = Train()
  inner: Inner = Inner()
  outer: Outer = Outer()
  routing: Routing = Routing()
  evaluate: Evaluate = Evaluate()
  checkpoint: Checkpoint = Checkpoint()
  mesh: Mesh = Mesh()

  def to_dict(self) -> dict[str, Any]:
    """Nested dicts of plain values, the grid as a dict: what a config file edits and config.json holds."""
    return dataclasses.asdict(self) | {'grid': dict(self.grid)}

  @property
  def decay_steps(self) -> int:
    """Length of the learning rate's cosine, global steps."""
    return self.inner.decay_steps or self.pretrain.steps + self.train.phases * self.train.steps_per_phase

  @property
  def rounds(self) -> int:
    """How often all text is sharded anew."""
    return self.routing.rounds if self.routing.method == 'discriminative' else 0

  def batch_sizes(self, stage: str) -> dict[str, int]:
    """Rows per path that the devices inside a path divide among them, by the field that says so."""
    train = getattr(self, stage).batch_size
    return {f'{stage}.batch_size': train, 'evaluate.batch_size': self.evaluate.batch_size or self.train.batch_size}


# Which fields each stage is the first to depend on; its record's digest covers those before it too.
DEPENDS = {
  'tokenize': ('data', 'tokenizer', 'model.seq_len', 'evaluate.seq_len', 'routing.prefix_tokens', 'seed'),
  'pretrain': ('model', 'pretrain', 'inner', 'train.steps_per_dispatch', 'train.microbatch', 'routing.router_fraction'),
  'route': ('grid', 'routing', 'train.batch_size', 'train.early_stopping'),
  'train': (
    'levels', 'outer', 'train.learning_rate', 'train.steps_per_phase', 'train.schedule', 'train.paths_per_phase',
    'train.max_holdout_rows', 'evaluate.batch_size',
  ),
  'evaluate': ('evaluate',),
}  # fmt: skip
STAGES = tuple(DEPENDS)  # in their order
DOING = ('reading and tokenizing text', 'training the base model', 'routing', 'training the paths', 'evaluating')

# Fields that may change when a run goes on: they only lengthen it, or say how to run it, not what it computes.
MAY_CHANGE = (
  'train.phases', 'train.offload', 'checkpoint.every_steps', 'checkpoint.keep', 'evaluate.control', 'evaluate.matrix',
  'evaluate.reroute_every', 'evaluate.chunk_router_steps', 'evaluate.mixture',
)  # fmt: skip

# How fields that are no plain values are written, and what plain ones should be.
EXAMPLES = {
  'grid': "{'a': 4, 'b': 4}",
  'levels': "(('all', '.*', ()),)",
  'data.train': "('books/*.txt',)",
  'data.validation': "('books/*.txt',)",
  'train.schedule': '((0, (0, 1)), (8, (2, 3)))',
  'evaluate.reroute_every': '(64, 32)',
}
PLAIN = {int: 'a whole number', float: 'a number', bool: 'True or False', str: 'a text'}


def from_dict(values: Mapping[str, Any]) -> Settings:
  """Settings from nested dicts.

  Raises:
    InputError: a field is unknown (the nearest one is named), of a wrong type or out of range.
  """
  if isinstance(values, Mapping):
    values = {name: value for name, value in values.items() if name != 'seal'}  # which config.json has beside them
  settings = _build(Settings, values, '')
  settings_checks.check(settings)
  return settings


def of_run(values: Mapping[str, Any] | None) -> Settings:
  """Settings from what a run's config.json holds; None: it could not be read.

  Raises:
    InputError: as `from_dict`, or a section is missing, which every run's config.json has.
  """
  if values is None or not values.keys() >= {field.name for field in dataclasses.fields(Settings)}:
    raise InputError('it is not as it was written')
  return from_dict(values)


def _build(cls, values: Mapping[str, Any], prefix: str):
  if not isinstance(values, Mapping):
    raise InputError(f'config.{prefix[:-1]}={values!r} should be a dict of fields')
  fields = {f.name: f.type for f in dataclasses.fields(cls)}
  for name in values:
    if name not in fields:
      near = difflib.get_close_matches(name, fields, 1, 0)
      raise InputError(f'config.{prefix}{name}: there is no such field; the nearest is config.{prefix}{near[0]}')
  return cls(**{name: _convert(value, fields[name], prefix + name) for name, value in values.items()})


def _convert(value, kind, name: str):
  if dataclasses.is_dataclass(kind):
    return _build(kind, value, name + '.')
  if name == 'grid':
    if not isinstance(value, (Mapping, tuple, list)):
      raise InputError(f'config.grid={value!r} should be {wanted(name, kind)}')
    value = tuple(sorted(value.items() if isinstance(value, Mapping) else value))
    return tuple((_convert(axis, str, 'grid axis'), _convert(size, int, f'grid.{axis}')) for axis, size in value)
  if name.startswith('data.') and isinstance(value, str) and kind == tuple[str, ...]:
    value = tuple(value.split(',')) if value else ()
  if typing.get_origin(kind) is tuple:
    return _tuple(value, kind, name)
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    value = float(value)
  if type(value) is not kind:
    raise InputError(f'config.{name}={value!r} should be {wanted(name, kind)}')
  return value


def wanted(name: str, kind: Any) -> str:
  """What a field, or an entry of one, should be."""
  if kind in PLAIN:
    return PLAIN[kind]
  field = name.split('[')[0]
  return f'a {"dict" if name == "grid" else "tuple"}: config.{field} is written as {EXAMPLES[field]}'


def _tuple(value, kind, name: str) -> tuple:
  if not isinstance(value, (tuple, list)):
    raise InputError(f'config.{name}={value!r} should be {wanted(name, kind)}')
  kinds = typing.get_args(kind)
  kinds = kinds[:1] * len(value) if kinds[1:] == (Ellipsis,) else kinds
  if len(kinds) != len(value):
    field = name.split('[')[0]
    raise InputError(
      f'config.{name}={value!r} should have {len(kinds)} entries: config.{field} is written as {EXAMPLES[field]}'
    )
  return tuple(_convert(v, k, f'{name}[{i}]') for i, (v, k) in enumerate(zip(value, kinds, strict=True)))


def digest(settings: Settings, *prefixes: str) -> str:
  """sha256 over the canonical JSON of the fields whose dotted names start with one of `prefixes` (none: all)."""
  chosen = {
    k: v for k, v in settings_checks.flatten(settings.to_dict()).items() if not prefixes or k.startswith(prefixes)
  }
  return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def differences(old: Settings, new: Settings) -> dict[str, tuple[Any, Any]]:
  """Fields that differ and may not: `{name: (old, new)}`."""
  a, b = settings_checks.flatten(old.to_dict()), settings_checks.flatten(new.to_dict())
  return {k: (a.get(k), b.get(k)) for k in sorted(a | b) if a.get(k) != b.get(k) and k not in MAY_CHANGE}
