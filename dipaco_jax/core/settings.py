"""Every field of a run and its default.

This is the one place where defaults live. A config file fills a ConfigDict made from `Settings().to_dict()`, which
`from_dict` turns back. Section numbers refer to the DiPaCo paper, arXiv 2403.10616.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from dipaco_jax.core import extension, fields, settings_checks, text_settings, wires
from dipaco_jax.core.errors import InputError
from dipaco_jax.core.fields import Source, field

MOST_WARMUP_STEPS = 1000  # where a config does not say; as in the paper


@dataclasses.dataclass(frozen=True)
class Data:
  """Source of documents."""

  source: str = field(
    'auto',
    "of text; 'auto': what the other fields name, or where they name none 'stdlib', Python's own source and docs",
    choices='auto files stdlib tfds seqio',
    extensible=True,
  )
  train: tuple[str | Source, ...] = field(
    (), 'globs of .txt, .jsonl, .parquet, .arrow, .tar, .bin; or (name, globs, weight)...', example="('books/*.txt',)"
  )
  validation: tuple[str | Source, ...] = field((), 'globs; none: a part of the text', example="('books/*.txt',)")
  name: str = field('', "of tfds: a dataset and its version, as 'c4/en:3.0.1'; of seqio: a task or a mixture")
  data_dir: str = field('', 'where tfds has prepared datasets: a folder, or gs://')
  module: str = field('', 'that registers the task of seqio')
  validation_fraction: float = field(0.02, 'of the text, held back if the source has no split for it', below=1)
  min_validation_tokens: int = field(1000, 'per path; more text is held back to reach it; 0: no floor', zero=True)
  max_validation_fraction: float = field(0.1, 'that is held back for that floor', below=1)
  max_validation_documents: int = field(1000, 'drawn from all of them; 0: all', zero=True)
  max_documents: int = field(0, '0: all; the first so many, of training and validation together', zero=True)
  parts: int = field(1, 'of the text, tokenized by as many processes as there are; the result depends on it')
  text_key: str = field('text', "of a document, in a record; 'a.b' is b inside a")
  domain_key: str = field('domain', 'in a record, if it is there: perplexity is reported by domain')
  plain_suffixes: tuple[str, ...] = field((), 'of further files of plain text', example="('.py', '.log')", added=True)
  skip_bad_records: bool = field(
    False,
    'leaves out, and counts, records without text or not in JSON or UTF-8; else they are errors',
    may_change=True,
    added=True,
  )
  holdout_fraction: float = field(0.01, 'of documents, held back for early stopping [2.7]', zero=True, below=1)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A given tokenizer, or one trained on a seeded sample of the training text."""

  model_file: str = field('', "SentencePiece's .model, for instance T5's 32,000 pieces, or a tokenizer.json")
  kind: str = field(
    'sentencepiece',
    "of the one to train; 'bytes': byte-level BPE",
    choices='sentencepiece bytes',
    extensible=True,
    added=True,
  )
  vocab_size: int = field(32_000, 'of the model to train')
  sample_bytes: int = field(20_000_000, 'of text to train it on')


@dataclasses.dataclass(frozen=True)
class Model:
  """A decoder-only transformer; the defaults are the 150M path of the paper [7.1], in Llama's shape."""

  width: int = field(896, 'of the vectors between blocks')
  num_layers: int = field(12, 'blocks')
  num_heads: int = field(16, 'of attention')
  head_dim: int = field(64, 'of each head; even')
  mlp_dim: int = field(2432, 'width inside the MLP')
  seq_len: int = field(1024, 'tokens in a row of training')
  tied: bool = field(True, 'the head is the embedding, transposed')
  dtype: str = field(
    'auto', "of compute; 'auto': float32 on CPU; parameters are float32", choices='auto float32 bfloat16'
  )
  attention: str = field(
    'auto',
    'splash is for TPUs, flash and cudnn for GPUs, blocked for CPUs',
    choices='auto xla blocked flash cudnn splash',
  )
  product_dtype: str = field(
    'auto',
    "in which products of bfloat16 are summed; 'auto': float32 on CPU",
    choices='auto float32 bfloat16',
    added=True,
  )
  layers: str = field('auto', "'scanned': one block is compiled for all", choices='auto scanned unrolled')
  remat: str = field('none', "'dots' keeps what matrix products, splash and flash make", choices='none full dots')
  loss_chunk: int = field(1024, 'tokens whose logits exist at one time')
  vocab_chunk: int = field(0, 'tokens of the vocabulary, likewise, in inner steps; 0: all', zero=True, added=True)
  rope_base: float = field(10_000.0, 'of rotary embedding')
  norm_epsilon: float = field(1e-6, 'of RMSNorm')
  num_kv_heads: int = field(0, 'of keys and values, each for as many of queries; 0: num_heads', zero=True, added=True)
  qk_norm: str = field(
    'none', 'RMSNorm of queries and keys: of each head, or of all', choices='none head all', added=True
  )
  qkv_bias: bool = field(False, 'queries, keys and values have biases', added=True)
  norms: str = field('before', 'of attention and MLP, where RMSNorm stands', choices='before after both', added=True)
  norm_from_one: bool = field(False, "RMSNorm's scale is 1 + its parameter", added=True)
  activation: str = field('silu', "of the MLP's gate; 'gelu': with tanh", choices='silu gelu', added=True)
  embed_scale: bool = field(False, 'embeddings are multiplied by sqrt(width)', added=True)
  query_scale: float = field(0.0, 'products of queries and keys are over its root; 0: head_dim', zero=True, added=True)
  attention_cap: float = field(0.0, 'c, of c tanh(x / c), of these products; 0: none', zero=True, added=True)
  window: int = field(0, 'tokens that a token sees, itself included; 0: all before it', zero=True, added=True)
  full_every: int = field(0, 'every n-th block sees all tokens all the same; 0: none', zero=True, added=True)
  rope_scaling: str = field('none', 'of rotary embedding', choices='none linear llama3 yarn', added=True)
  rope_factor: float = field(1.0, 'by which it makes texts longer', added=True)
  rope_original_len: int = field(0, 'of texts before that; for llama3 and yarn', zero=True, added=True)
  rope_low: float = field(1.0, 'turns in such a text, up to which a dimension is scaled whole', added=True)
  rope_high: float = field(4.0, 'and from which it is not scaled', added=True)
  rope_attention: float = field(0.0, "yarn's, of queries and keys; 0: 0.1 ln(factor) + 1", zero=True, added=True)
  rope_local_base: float = field(0.0, 'of blocks with a window, unscaled; 0: as of others', zero=True, added=True)
  no_rope_every: int = field(0, 'every n-th block has no rotary embedding; 0: none', zero=True, added=True)
  block: str = field('', "your own, as 'package.module:name', see docs/extend.md", extensible=True, added=True)


@dataclasses.dataclass(frozen=True)
class Pretrain:
  """The base model, from which every path starts [2.6]."""

  steps: int = field(24_000, 'of AdamW, before there are paths', zero=True)
  batch_size: int = field(512, 'rows')
  init: str = field('', "a model to start the base from: a folder of Hugging Face's, or a name on the Hub")


@dataclasses.dataclass(frozen=True)
class Train:
  """Algorithm 1: phases of tau inner steps, each followed by an outer step [2.5, 2.6]."""

  phases: int = field(427, 'outer steps; a finished run is trained on by raising it', may_change=True)
  steps_per_phase: int = field(150, 'tau: inner steps between two outer steps')
  batch_size: int = field(512, 'rows per path')
  learning_rate: float = field(0.0, "peak rate of AdamW inside paths; 0: the base's", zero=True)
  microbatch: int = field(0, 'rows on a device that are computed at one time; 0: all', zero=True)
  steps_per_dispatch: int = field(8, 'inner steps in one compiled program, at most; a divisor of tau is used')
  early_stopping: bool = field(True, 'each path, replicas as one, points at its version of lowest hold-out loss [2.7]')
  max_holdout_rows: int = field(512, "of a path's hold-out, for early stopping; 0: all", zero=True)
  paths_per_phase: int = field(0, 'path sampling [2.6.2]: so many, drawn by seed and phase; 0: all', zero=True)
  schedule: tuple[tuple[int, tuple[int, ...]], ...] = field(
    (), '(first phase, its paths); overrides paths_per_phase', example='((0, (0, 1)), (8, (2, 3)))'
  )
  offload: bool = field(False, 'AdamW state of waiting paths lives in host memory', may_change=True)


@dataclasses.dataclass(frozen=True)
class Inner:
  """AdamW inside a path, with a cosine over the global step, pretraining included [7.1]."""

  learning_rate: float = field(4e-4, 'at its highest')
  warmup_steps: int = field(
    -1, 'to that rate, linearly; -1: 1,000, or a tenth of the schedule where that is less', least=-1, zero=True
  )
  rewarm_steps: int = field(0, 'warm up once more, from the first step after pretraining (as DiLoCo does)', zero=True)
  decay_steps: int = field(0, 'of the schedule; 0: pretrain.steps + phases * steps_per_phase', zero=True)
  final_fraction: float = field(0.05, "of learning_rate, at the cosine's end; 1: no decay", zero=True, most=1)
  b1: float = field(0.9, 'of AdamW, for the mean of gradients', zero=True, below=1)
  b2: float = field(0.95, 'for the mean of their squares; open in the paper', zero=True, below=1)
  epsilon: float = field(1e-8, 'of AdamW')
  weight_decay: float = field(0.1, "of matrices, not of norms' scales", zero=True)
  clip_norm: float = field(1.0, 'global norm of the gradient; 0: no clipping', zero=True)
  optimizer: str = field(
    'adamw',
    "'muon': of blocks' matrices; 'sgd': for checks against data-parallel SGD",
    choices='adamw muon sgd',
    extensible=True,
  )
  muon_momentum: float = field(0.95, "of 'muon'", zero=True, below=1, added=True)
  schedule: str = field(
    'cosine', "of the learning rate; 'wsd': constant, linear at the end", 'cosine wsd', extensible=True, added=True
  )
  decay_fraction: float = field(0.2, "of all steps, those of the decay of 'wsd'", most=1, added=True)
  keep_state: bool = field(True, "AdamW state survives the outer step, as DiLoCo's does on its worker")
  inherit_state: bool = field(True, "paths start with the base model's AdamW state")
  max_skipped: int = field(10, 'steps in a row that may be skipped for loss or gradient not finite; 0: none', zero=True)

  def warmup(self, decay_steps: int) -> int:
    """Returns the steps of the warm-up in a schedule of `decay_steps` global steps."""
    return self.warmup_steps if self.warmup_steps >= 0 else min(MOST_WARMUP_STEPS, decay_steps // 10)


@dataclasses.dataclass(frozen=True)
class Outer:
  """Outer optimizer, and its treatment of the averaged outer gradients [2.5, 2.7]."""

  optimizer: str = field(
    'nesterov',
    "of the outer step; for small models 'sgd', see docs/averaging.md",
    choices='nesterov momentum sgd adam',
    extensible=True,
  )
  learning_rate: float = field(0.7, "constant; 1.0 with 'sgd' and without rescale: plain averages", most=10)
  momentum: float = field(0.9, "of 'nesterov' and 'momentum'; b1 of 'adam'; unused by 'sgd'", zero=True, below=1)
  b2: float = field(0.99, "of 'adam'", zero=True, below=1, added=True)
  epsilon: float = field(0.1, "of 'adam'")
  rescale: bool = field(True, "times sqrt(number of the module's paths that take part) [2.7]")
  reweigh: bool = field(True, "paths are weighted by their shards' tokens (loss reweighing) [2.7]")
  row_weights: bool = field(False, 'and, row by row, by the size of their gradients there (algorithm/outer.py)')
  exclude_above: float = field(10.0, 'times the usual length: longer outer gradients take no part; 0: none', zero=True)
  max_excluded: int = field(3, 'phases in a row that a path may be left out for that; more stop the run', zero=True)
  lost: float = field(0.0, 'probability that an outer gradient is lost in transit [DiLoCo]', zero=True, below=1)
  # What follows is in algorithm/compression.py and algorithm/streaming.py; 'auto', and -1, is what `wire` says.
  wire: str = field('lan', "network: 'wan' is int8, streaming; 'thin' int4, overlap too", 'lan wan thin', added=True)
  compress: str = field('auto', 'what is exchanged', choices='auto none int8 int4 e3m0', added=True)
  whole_every: int = field(
    16, 'versions of a module in islands, of which one is whole, the others differences', added=True
  )
  stream: str = field('auto', 'levels exchange at different steps of a phase', choices='auto on off', added=True)
  closed_every: int = field(
    16, 'n: with streaming, all levels exchange together at the end of every n-th phase', added=True
  )
  overlap_steps: int = field(
    -1, 'd: after so many more steps a new module is taken over', least=-1, zero=True, added=True
  )
  overlap: str = field('auto', "steps during overlap: 'keep', or 'mix'", choices='auto keep mix', added=True)
  mix: float = field(
    -1.0, "alpha: the path's share in what is taken over after d steps", least=-1, zero=True, below=1, added=True
  )


@dataclasses.dataclass(frozen=True)
class Routing:
  """Routing of sequences to paths [2.4]."""

  method: str = field(
    'kmeans',
    'of routing: k-means [2.4.1], product k-means [7.3], discriminative [2.4.2]',
    choices='kmeans product_kmeans discriminative random single',
    extensible=True,
  )
  prefix_tokens: int = field(32, 'tokens of a sequence that the router reads; they are not scored')
  top_n: int = field(1, 'training sequences go to so many paths [2.4.4]')
  sample: int = field(100_000, 'sequences that k-means is fitted on')
  restarts: int = field(3, 'of k-means, from other first centroids; the best is kept')
  iterations: int = field(50, 'of k-means, at most')
  capacity: float = field(0.0, 'of a shard, in multiples of the mean; 0: no limit', zero=True)
  # Discriminative routing: paths score router data, a classifier learns the best path, all text is sharded anew.
  router_fraction: float = field(0.0, 'of documents: router data, not trained on; the paper: 0.005', zero=True, below=1)
  first: str = field('kmeans', 'routing before the first round', choices='kmeans product_kmeans random')
  rounds: int = field(1, 'of re-sharding: approximate EM')
  phases_per_round: int = field(16, 'trained before each of them')
  hidden: int = field(0, "width of the classifier's hidden layer; 0: a linear one", zero=True)
  calibrate: bool = field(True, 'a bias makes predicted frequencies those of the labels')


@dataclasses.dataclass(frozen=True)
class Evaluate:
  """Routed perplexity on validation documents."""

  seq_len: int = field(0, 'tokens of each document; 0: model.seq_len', zero=True)
  batch_size: int = field(0, 'rows; 0: train.batch_size', zero=True)
  every_phases: int = field(1, 'how often it is measured while training; 0: only at the end', zero=True)
  control: bool = field(False, 'trains a dense control too: one model, from the base on, on all text', may_change=True)
  control_budget: str = field(
    'steps',
    "how much the dense control is trained: 'steps', for as many steps as one path; 'flops', with as many tokens, and "
    'so FLOPs, as all paths together',
    choices='steps flops',
    may_change=True,
    added=True,
  )
  matrix: bool = field(False, "every path's loss on every shard's hold-out, in the report", may_change=True)
  reroute_every: tuple[int, ...] = field(
    (), 'tokens after which a path is chosen again [2.4.3]', example='(64, 32)', may_change=True
  )
  chunk_router_steps: int = field(0, 'of the learned chooser; the paper: 2,000; 0: none', zero=True, may_change=True)
  refit_router: bool = field(
    False, 'fits a router after training, to what each path loses on router data', may_change=True, added=True
  )
  samples: int = field(
    6,
    'validation texts that base, dense control and paths continue, in the report and while training; 0: none',
    zero=True,
    may_change=True,
    added=True,
  )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """Checkpoints of training, by Orbax; of paths in islands, by workers."""

  every_steps: int = field(
    50, 'inner steps, over all turns, in islands of one path; of shorter phases only the end', may_change=True
  )
  keep: int = field(2, 'the newest, and the last at the end of a phase; unused for paths in islands', may_change=True)
  state_every_phases: int = field(
    16,
    'phases after which islands publish the AdamW state of a path, which otherwise only its worker has; results do not '
    'depend on this number. With streaming: after the next phase in which all levels exchange, see outer.closed_every',
    added=True,
  )


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Layout of devices; zeros are filled in from the devices at hand."""

  data: int = field(0, "devices inside one path's slice", zero=True)
  shard_states: bool = field(False, 'parameters and AdamW state sharded over `data`, else replicated')


@dataclasses.dataclass(frozen=True)
class Metrics:
  """Where metrics go beside metrics.jsonl."""

  sinks: tuple[str, ...] = field(
    ('tensorboard',),
    'that get every row of it',
    choices='tensorboard wandb mlflow',
    extensible=True,
    example="('tensorboard', 'wandb')",
    may_change=True,
    added=True,
  )
  project: str = field('dipaco_jax', 'in W&B; in MLflow, the experiment', may_change=True, added=True)
  run: str = field('', "its name there; '': the workdir's", may_change=True, added=True)


@dataclasses.dataclass(frozen=True)
class Settings:
  """A run. `grid` maps axis names to sizes; `levels` are (name, pattern, axes): every parameter matches exactly one."""

  seed: int = field(
    0, 'of all that is drawn: the same one gives the same modules, to the bit', zero=True, most=2**63 - 1
  )
  extensions: tuple[tuple[str, str], ...] = field(
    (),
    'modules that fields name as package.module:name, and digests of their source; filled in',
    example="(('my_module', 'sha256'),)",
    added=True,
  )
  other_code: str = field(
    'warn',
    'What a role of islands does if its dipaco_jax source, Python or libraries differ from those that began the run: '
    "'warn' logs it, 'reject' ends the role with status 2.",
    choices='warn reject',
    may_change=True,
    added=True,
  )
  grid: tuple[tuple[str, int], ...] = field((), 'axes and their sizes; none: one path', example="{'a': 4, 'b': 4}")
  levels: tuple[tuple[str, str, tuple[str, ...]], ...] = field(
    (('all', '.*', ()),), '(name, pattern, axes)', example="(('all', '.*', ()),)"
  )
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
  metrics: Metrics = Metrics()

  def to_dict(self) -> dict[str, Any]:
    """Returns nested dicts of plain values, the grid as a dict: what a config file edits and config.json holds."""
    return dataclasses.asdict(self) | {'grid': dict(self.grid)}

  @property
  def decay_steps(self) -> int:
    """Length of the learning rate's cosine, global steps."""
    return self.inner.decay_steps or self.num_steps

  @property
  def num_steps(self) -> int:
    """Global steps: those of the base, and of a path after it."""
    return self.pretrain.steps + self.train.phases * self.train.steps_per_phase

  @property
  def num_paths(self) -> int:
    return math.prod(size for _, size in self.grid)

  @property
  def rounds(self) -> int:
    """Number of rounds of re-sharding."""
    return self.routing.rounds if self.routing.method == 'discriminative' else 0

  def dense(self) -> 'Settings':
    """Returns the settings of one model: the empty grid, and an outer step that only takes over what AdamW did."""
    takes_over = Outer('sgd', 1.0, rescale=False, reweigh=False, exclude_above=0.0)
    train = dataclasses.replace(self.train, schedule=(), paths_per_phase=0, learning_rate=0.0)
    return dataclasses.replace(self, grid=(), levels=(('all', '.*', ()),), outer=takes_over, train=train)

  def batch_sizes(self, stage: str) -> dict[str, int]:
    """Rows per path that the devices inside a path divide among them, by the field that says so."""
    train = getattr(self, stage).batch_size
    return {f'{stage}.batch_size': train, 'evaluate.batch_size': self.evaluate.batch_size or self.train.batch_size}


def from_dict(values: Mapping[str, Any]) -> Settings:
  """Makes settings from nested dicts, `data.source` filled in.

  Raises InputError for an unknown field, a wrong type or a value out of range.
  """
  settings = _build(values)
  settings_checks.check_new(settings)
  return settings


def _build(values: Mapping[str, Any]) -> Settings:
  if isinstance(values, Mapping):
    values = {name: value for name, value in values.items() if name != 'seal'}  # which config.json has beside them
  settings = fields.build(Settings, values)
  settings = dataclasses.replace(settings, data=text_settings.resolve_source(settings.data))
  settings_checks.check(settings)
  return settings


def of_run(values: Mapping[str, Any] | None) -> Settings:
  """Makes settings from what a run's config.json holds, None if it could not be read; raises InputError."""
  if values is None or not values.keys() >= _of_first_version():
    raise InputError('the file lacks a section, or is not as it was written')
  settings = _build(values)
  if 'closed_every' in values['outer']:
    return settings
  return dataclasses.replace(
    settings, outer=dataclasses.replace(settings.outer, closed_every=closed_every_of_before(settings))
  )


def closed_every_of_before(settings: Settings) -> int:
  """Returns `outer.closed_every` as of versions without that field: there publishing states closed phases."""
  is_streaming = wires.make_wire(settings.outer, settings.train).stream
  return settings.checkpoint.state_every_phases if is_streaming else Outer().closed_every


def stated(settings: Settings) -> dict[str, Any]:
  """Returns the settings as nested dicts, without added fields at their default, as versions before those had them."""
  nested, usual = settings.to_dict(), fields.flatten(Settings().to_dict())
  usual['outer.closed_every'] = closed_every_of_before(settings)
  for name in (name for name, f in fields.fields(Settings) if f.added):
    section, _, last = name.rpartition('.')
    of_section = nested[section] if section else nested
    if of_section[last] == usual[name]:
      del of_section[last]
  return {name: value for name, value in nested.items() if value != {} or name in _of_first_version()}


def _of_first_version() -> set[str]:
  """Returns the sections, and the fields apart from them, of which not all was added later."""
  return {name.partition('.')[0] for name, f in fields.fields(Settings) if not f.added}


def digest(settings: Settings, *prefixes: str) -> str:
  """Returns the sha256 of the canonical JSON of the fields that start with one of `prefixes` (none: all)."""
  values = fields.flatten(stated(settings))
  chosen = {name: value for name, value in values.items() if not prefixes or name.startswith(prefixes)}
  named = {extension.module_of(value) for value in chosen.values() if extension.is_reference(value)}
  chosen |= {f'extensions.{module}': sha256 for module, sha256 in settings.extensions if module in named}
  return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def differences(old: Settings, new: Settings) -> dict[str, tuple[Any, Any]]:
  """Returns the fields that differ and may not: `{name: (old, new)}`."""
  may_change = {name for name, f in fields.fields(Settings) if f.may_change}
  a, b = fields.flatten(old.to_dict()), fields.flatten(new.to_dict())
  return {k: (a.get(k), b.get(k)) for k in sorted(a | b) if a.get(k) != b.get(k) and k not in may_change}


def in_words(changes: Mapping[str, tuple[Any, Any]]) -> str:
  """Names the fields that differ, {name: (old, new)}, and modules of which the source does."""
  changes = dict(changes)
  was, now = map(dict, changes.pop('extensions', ((), ())))
  modules = [f'the source of {name} has changed' for name in was if name in now and was[name] != now[name]]
  fields_in_words = [f'config.{name} was {a!r}, is {b!r}' for name, (a, b) in changes.items()]
  if (name := 'outer.closed_every') in changes:
    fields_in_words.append(f'a run that an earlier version began continues with --config.{name}={changes[name][0]}')
  return '; '.join(fields_in_words + modules)
