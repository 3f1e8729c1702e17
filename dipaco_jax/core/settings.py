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

from dipaco_jax.core import extension, fields, settings_checks, streaming, text_settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.core.fields import Source, field

MOST_WARMUP_STEPS = 1000  # where a config does not say; as in the paper


@dataclasses.dataclass(frozen=True)
class Data:
  """Source of documents."""

  source: str = field(
    'auto',
    "Source of the training text. 'auto' is 'files' if data.train or data.validation is set, 'seqio' if data.module "
    "is set, 'tfds' if data.name has a version, and otherwise 'stdlib', Python's own source code and documentation.",
    choices='auto files stdlib tfds seqio',
    extensible=True,
  )
  train: tuple[str | Source, ...] = field(
    (),
    'Files to train on: globs of .txt, .jsonl, .parquet, .arrow, .tar or .bin files, or a mixture of (name, globs, '
    'weight), weighted by bytes of text. Empty if the text comes from another source.',
    example="('books/*.txt',)",
  )
  validation: tuple[str | Source, ...] = field(
    (),
    'Files to validate on, written as in data.train. If empty, part of the training text is held back.',
    example="('books/*.txt',)",
  )
  name: str = field(
    '', "Name of a TensorFlow Datasets dataset with its version, such as 'c4/en:3.0.1', or of a SeqIO task or mixture."
  )
  data_dir: str = field(
    '', 'Folder or gs:// URL with prepared TensorFlow Datasets; required for tfds, optional for seqio.'
  )
  module: str = field('', 'Python module to import; it must register the SeqIO task or mixture. Empty imports none.')
  validation_fraction: float = field(
    0.02, 'Fraction of the text held back for validation if the source has no validation split.', below=1
  )
  min_validation_tokens: int = field(
    1000,
    'Minimum number of validation tokens per path. More text is held back to reach it, up to '
    'data.max_validation_fraction. 0 means no minimum.',
    zero=True,
  )
  max_validation_fraction: float = field(
    0.1, 'Largest fraction of the text that may be held back to reach data.min_validation_tokens.', below=1
  )
  max_validation_documents: int = field(
    1000, 'Maximum number of validation documents, sampled from all if they are in files. 0 means all.', zero=True
  )
  max_documents: int = field(
    0, 'Maximum number of documents to read, including those held back. 0 reads all.', zero=True
  )
  parts: int = field(
    1, 'Number of parts in which text is tokenized. Results depend on it, but not on the number of processes.'
  )
  text_key: str = field('text', "Key of a document's text in a record. 'a.b' is the key b inside a.")
  domain_key: str = field(
    'domain',
    "Key of a document's domain in a record; perplexity is reported by domain. Documents of files without it have "
    'their folder or file name as domain.',
  )
  plain_suffixes: tuple[str, ...] = field(
    (), 'Suffixes of additional files that are read as plain text.', example="('.py', '.log')", added=True
  )
  skip_bad_records: bool = field(
    False,
    'Whether to skip and count records that have no text or are not valid JSON or UTF-8. If False, they are errors.',
    may_change=True,
    added=True,
  )
  holdout_fraction: float = field(
    0.01, 'Fraction of the training documents held out for early stopping [2.7].', zero=True, below=1
  )


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A given tokenizer, or one trained on a seeded sample of the training text."""

  model_file: str = field(
    '', 'Existing tokenizer: a SentencePiece .model or a tokenizer.json. If empty, one is trained.'
  )
  kind: str = field(
    'sentencepiece',
    "Kind of tokenizer to train: a SentencePiece BPE model, or byte-level BPE for 'bytes'.",
    choices='sentencepiece bytes',
    extensible=True,
    added=True,
  )
  vocab_size: int = field(32_000, 'Vocabulary size of the tokenizer to train.')
  sample_bytes: int = field(
    20_000_000, 'Size of the random sample of training text that the tokenizer is trained on, in bytes.'
  )


@dataclasses.dataclass(frozen=True)
class Model:
  """A decoder-only transformer; the defaults are the 150M path of the paper [7.1], in Llama's shape."""

  width: int = field(896, 'Width of the hidden state between blocks.')
  num_layers: int = field(12, 'Number of transformer blocks.')
  num_heads: int = field(16, 'Number of attention heads.')
  head_dim: int = field(64, 'Size of each attention head; it must be even.')
  mlp_dim: int = field(2432, 'Width of the hidden layer of the gated MLP.')
  seq_len: int = field(
    1024, 'Length of a training row in tokens. Longer documents are cut into sequences of at most this length.'
  )
  tied: bool = field(
    True, 'Whether the output head uses the transposed embedding matrix instead of parameters of its own.'
  )
  dtype: str = field(
    'auto',
    "Dtype of computation; 'auto' is float32 on CPUs and bfloat16 elsewhere. Parameters are float32.",
    choices='auto float32 bfloat16',
  )
  attention: str = field(
    'auto',
    "Attention implementation; 'auto' is 'splash' on TPUs, 'flash' (or 'xla' where it is not supported) on GPUs, and "
    "'blocked' on CPUs.",
    choices='auto xla blocked flash cudnn splash',
  )
  product_dtype: str = field(
    'auto',
    "Dtype of matrix products of bfloat16 arrays before rounding; 'auto' is float32 on CPUs and bfloat16 elsewhere.",
    choices='auto float32 bfloat16',
    added=True,
  )
  layers: str = field(
    'auto',
    "How blocks are compiled: 'unrolled' compiles each block; 'scanned' compiles repeated blocks once, but copies "
    "their matrices. 'auto' is 'scanned' on TPUs.",
    choices='auto scanned unrolled',
  )
  remat: str = field(
    'none',
    "Activations to recompute in the backward pass: 'full' recomputes all of a block, 'dots' all but results of "
    'matrix products, splash and flash.',
    choices='none full dots',
  )
  loss_chunk: int = field(1024, 'Maximum number of tokens whose logits are in memory at once.')
  vocab_chunk: int = field(
    0, 'Maximum number of vocabulary entries whose logits are in memory at once. 0 means all.', zero=True, added=True
  )
  rope_base: float = field(10_000.0, 'Base of the frequencies of the rotary embedding (RoPE).')
  norm_epsilon: float = field(1e-6, 'Epsilon that RMSNorm adds to the mean square.')
  num_kv_heads: int = field(
    0,
    'Number of heads of keys and values, a divisor of model.num_heads. 0 means model.num_heads.',
    zero=True,
    added=True,
  )
  qk_norm: str = field(
    'none',
    "RMSNorm of queries and keys: of each head ('head') or of all heads together ('all').",
    choices='none head all',
    added=True,
  )
  qkv_bias: bool = field(False, 'Whether the projections to queries, keys and values have biases.', added=True)
  norms: str = field(
    'before',
    'Position of RMSNorm: before attention and MLP, after them, or both.',
    choices='before after both',
    added=True,
  )
  norm_from_one: bool = field(
    False, 'Whether RMSNorm multiplies by 1 + its scale parameter instead of by the parameter itself.', added=True
  )
  activation: str = field(
    'silu', "Activation function of the MLP's gate; 'gelu' is the tanh approximation.", choices='silu gelu', added=True
  )
  embed_scale: bool = field(False, 'Whether embeddings are multiplied by sqrt(model.width).', added=True)
  query_scale: float = field(
    0.0, 'Number by whose square root attention logits are divided. 0 means model.head_dim.', zero=True, added=True
  )
  attention_cap: float = field(
    0.0, 'Soft cap of attention logits: cap * tanh(logits / cap). 0 disables it.', zero=True, added=True
  )
  window: int = field(
    0,
    'Size of the sliding attention window in tokens, including the token itself. 0 means no window.',
    zero=True,
    added=True,
  )
  full_every: int = field(
    0, 'Every n-th block attends to all earlier tokens in spite of model.window. 0 means none.', zero=True, added=True
  )
  rope_scaling: str = field(
    'none',
    'Method that scales the rotary embedding (RoPE) to contexts longer than in pretraining.',
    choices='none linear llama3 yarn',
    added=True,
  )
  rope_factor: float = field(1.0, 'Factor by which RoPE scaling extends the context length.', added=True)
  rope_original_len: int = field(
    0, "Context length in tokens before RoPE scaling, which 'llama3' and 'yarn' require.", zero=True, added=True
  )
  rope_low: float = field(
    1.0,
    "RoPE scaling 'llama3' and 'yarn': frequencies with at most this many rotations in the original context are "
    'scaled by the full factor.',
    added=True,
  )
  rope_high: float = field(
    4.0,
    "RoPE scaling 'llama3' and 'yarn': frequencies with at least this many rotations in the original context are not "
    'scaled.',
    added=True,
  )
  rope_attention: float = field(
    0.0,
    "Factor of rotated queries and keys in RoPE scaling 'yarn'. 0 means 0.1 ln(rope_factor) + 1.",
    zero=True,
    added=True,
  )
  rope_local_base: float = field(
    0.0,
    'RoPE base of blocks with a sliding window, not scaled. 0 means the RoPE of other blocks.',
    zero=True,
    added=True,
  )
  no_rope_every: int = field(
    0, 'Every n-th block has no rotary embedding. 0 means that all blocks have it.', zero=True, added=True
  )
  block: str = field(
    '',
    "Your own transformer block, as 'package.module:name'. Empty means the built-in block.",
    extensible=True,
    added=True,
  )


@dataclasses.dataclass(frozen=True)
class Pretrain:
  """The base model, from which every path starts [2.6]."""

  steps: int = field(24_000, 'Number of training steps of the base model. 0 does not train it.', zero=True)
  batch_size: int = field(512, 'Number of rows per step in the training of the base model.')
  init: str = field(
    '', 'Pretrained model to start from: a Hugging Face folder or Hub name. Empty means random initialization.'
  )


@dataclasses.dataclass(frozen=True)
class Train:
  """Algorithm 1: phases of tau inner steps, each followed by an outer step [2.5, 2.6]."""

  phases: int = field(
    427, 'Number of phases, each ending with an outer step. Raise it to train a finished run further.', may_change=True
  )
  steps_per_phase: int = field(150, 'Number of inner steps in a phase, between two outer steps (tau in the papers).')
  batch_size: int = field(512, 'Number of rows per path and inner step.')
  learning_rate: float = field(0.0, 'Peak inner learning rate of the paths. 0 means inner.learning_rate.', zero=True)
  microbatch: int = field(
    0, 'Maximum number of rows that a device computes at once; gradients are accumulated. 0 means all.', zero=True
  )
  steps_per_dispatch: int = field(
    8,
    'Maximum number of inner steps in one compiled program. The largest divisor of train.steps_per_phase up to it is '
    'used.',
  )
  early_stopping: bool = field(
    True,
    'Whether each path uses its version with the lowest hold-out loss instead of the last one [2.7]. Replicas of a '
    'path choose together.',
  )
  max_holdout_rows: int = field(
    512, 'Maximum number of hold-out rows per path for early stopping. 0 means all.', zero=True
  )
  paths_per_phase: int = field(
    0, 'Number of paths drawn to train in each phase (path sampling [2.6.2]). 0 means all.', zero=True
  )
  schedule: tuple[tuple[int, tuple[int, ...]], ...] = field(
    (),
    'Paths that train in each phase, as (first phase, paths); each entry holds until the next one. If empty, '
    'train.paths_per_phase decides.',
    example='((0, (0, 1)), (8, (2, 3)))',
  )
  offload: bool = field(
    False, 'Whether to keep optimizer states of paths that wait for a device in host memory.', may_change=True
  )


@dataclasses.dataclass(frozen=True)
class Inner:
  """AdamW inside a path, with a cosine over the global step, pretraining included [7.1]."""

  learning_rate: float = field(4e-4, 'Peak learning rate of the inner optimizer.')
  warmup_steps: int = field(
    -1,
    'Number of linear warm-up steps. -1 means 1,000, or a tenth of the schedule if that is less.',
    least=-1,
    zero=True,
  )
  rewarm_steps: int = field(
    0, 'Number of steps of a second linear warm-up after pretraining, as in DiLoCo. 0 means none.', zero=True
  )
  decay_steps: int = field(
    0, 'Length of the learning rate schedule in steps. 0 means the whole run, pretraining included.', zero=True
  )
  final_fraction: float = field(
    0.05, 'Final learning rate as a fraction of the peak. 1 means no decay.', zero=True, most=1
  )
  b1: float = field(0.9, "Exponential decay rate of AdamW's first moment.", zero=True, below=1)
  b2: float = field(
    0.95, "Exponential decay rate of AdamW's second moment; the papers do not state it.", zero=True, below=1
  )
  epsilon: float = field(1e-8, 'Epsilon in the denominator of AdamW.')
  weight_decay: float = field(
    0.1, 'Decoupled weight decay of matrices; scales of norms and other vectors have none.', zero=True
  )
  clip_norm: float = field(1.0, 'Maximum global norm of the gradient. 0 disables clipping.', zero=True)
  optimizer: str = field(
    'adamw',
    "Inner optimizer. 'muon' applies Muon to matrices of blocks and AdamW to the rest; 'sgd' is for comparison with "
    'data-parallel SGD.',
    choices='adamw muon sgd',
    extensible=True,
  )
  muon_momentum: float = field(0.95, "Momentum of the inner optimizer 'muon'.", zero=True, below=1, added=True)
  schedule: str = field(
    'cosine',
    "Learning rate schedule; 'wsd' (warmup-stable-decay) is constant until a linear decay at the end.",
    choices='cosine wsd',
    extensible=True,
    added=True,
  )
  decay_fraction: float = field(
    0.2, "Fraction of the learning rate schedule 'wsd' in which the rate decays.", most=1, added=True
  )
  keep_state: bool = field(
    True,
    'Whether a path keeps its optimizer state from phase to phase, as a worker of DiLoCo does. If False, each phase '
    'begins with a fresh state.',
  )
  inherit_state: bool = field(True, "Whether paths start with the base model's optimizer state instead of a fresh one.")
  max_skipped: int = field(
    10,
    'Maximum number of consecutive steps that are skipped because loss or gradient is not finite. Further ones are '
    'applied, and the path is then excluded from the outer step. 0 skips none.',
    zero=True,
  )

  def warmup(self, decay_steps: int) -> int:
    """Returns the steps of the warm-up in a schedule of `decay_steps` global steps."""
    return self.warmup_steps if self.warmup_steps >= 0 else min(MOST_WARMUP_STEPS, decay_steps // 10)


@dataclasses.dataclass(frozen=True)
class Outer:
  """Outer optimizer, and its treatment of the averaged outer gradients [2.5, 2.7]."""

  optimizer: str = field(
    'nesterov',
    "Outer optimizer [2.5]. The papers use 'nesterov'; 'sgd' suits small models (see docs/averaging.md).",
    choices='nesterov momentum sgd adam',
    extensible=True,
  )
  learning_rate: float = field(
    0.7, "Outer learning rate. 1.0 with 'sgd' and outer.rescale=False averages the paths' parameters.", most=10
  )
  momentum: float = field(
    0.9, "Momentum of the outer optimizers 'nesterov' and 'momentum', and b1 of 'adam'.", zero=True, below=1
  )
  b2: float = field(
    0.99, "Exponential decay rate of the second moment of the outer optimizer 'adam'.", zero=True, below=1, added=True
  )
  epsilon: float = field(0.1, "Epsilon of the outer optimizer 'adam'.")
  rescale: bool = field(
    True, 'Whether to multiply averaged outer gradients by sqrt(number of contributing paths) [2.7].'
  )
  reweigh: bool = field(
    True, 'Whether to weight paths by the number of tokens in their shards (loss reweighing) [2.7].'
  )
  row_weights: bool = field(
    False,
    'Whether to also weight paths in each row of a parameter by the size of their gradients in it (not in the '
    "papers). It requires inner.optimizer='adamw' and outer.rescale=False.",
  )
  exclude_above: float = field(
    10.0, 'Outer gradients longer than this multiple of the usual length are excluded. 0 sets no limit.', zero=True
  )
  max_excluded: int = field(
    3, 'Maximum number of consecutive phases in which a path may be excluded before the run stops.', zero=True
  )
  lost: float = field(
    0.0, "Probability that a path's outer gradient is lost in transit, as in the DiLoCo paper.", zero=True, below=1
  )
  # See core/compression.py and core/streaming.py; `wire` determines what is 'auto' or -1.
  wire: str = field(
    'lan',
    "Preset for the network between machines, which determines the following fields where they are 'auto' or -1: "
    "'lan' sends full precision at the end of a phase; 'wan' sends int8 and streams; 'thin' sends int4, streams and "
    'overlaps (see docs/slow_networks.md).',
    choices='lan wan thin',
    added=True,
  )
  compress: str = field(
    'auto',
    "Format in which outer gradients and modules are sent; 'auto' follows outer.wire.",
    choices='auto none int8 int4 e3m0',
    added=True,
  )
  whole_every: int = field(
    16,
    'Islands with compression publish every n-th version of a module in full, the others as differences.',
    added=True,
  )
  stream: str = field(
    'auto',
    "Whether each level is exchanged at its own step of a phase; 'auto' follows outer.wire.",
    choices='auto on off',
    added=True,
  )
  closed_every: int = field(
    16, 'With streaming, all levels are exchanged together at the end of every n-th phase.', added=True
  )
  overlap_steps: int = field(
    -1,
    'With streaming, number of inner steps from sending a level to taking over its new module. -1 follows outer.wire: '
    'a fifth of a phase for thin, otherwise 0.',
    least=-1,
    zero=True,
    added=True,
  )
  overlap: str = field(
    'auto',
    "How a path takes over a module after outer.overlap_steps: 'keep' keeps the steps made meanwhile; 'mix' averages "
    "the path's parameters with the module, as in Streaming DiLoCo. 'auto' is 'keep' for wire='thin' and 'mix' "
    'otherwise.',
    choices='auto keep mix',
    added=True,
  )
  mix: float = field(
    -1.0,
    "Share of a path's own parameters (alpha) when it takes over a new module after overlap. -1 means 0 for "
    "overlap='keep' and 0.5 for 'mix'.",
    least=-1,
    zero=True,
    below=1,
    added=True,
  )


@dataclasses.dataclass(frozen=True)
class Routing:
  """Routing of sequences to paths [2.4]."""

  method: str = field(
    'kmeans',
    'How sequences are routed to paths: by k-means [2.4.1], product k-means [7.3] or a discriminative classifier '
    "[2.4.2] of their features, by a hash of the document ('random'), or to the only path ('single').",
    choices='kmeans product_kmeans discriminative random single',
    extensible=True,
  )
  prefix_tokens: int = field(
    32, 'Number of tokens at the beginning of a sequence that the router reads. They do not count in any loss.'
  )
  top_n: int = field(1, 'Number of paths that train on each sequence (overlapping shards [2.4.4]).')
  sample: int = field(100_000, 'Maximum number of training sequences, drawn at random, that k-means is fitted on.')
  restarts: int = field(3, 'Number of runs of k-means from different initial centroids; the best one is used.')
  iterations: int = field(50, 'Maximum number of iterations in a run of k-means.')
  arrange: str = field(
    'none',
    "Placement of k-means clusters on the grid: 'alike' lets similar clusters share modules, 'unlike' lets dissimilar "
    'ones.',
    choices='none alike unlike',
  )
  capacity: float = field(
    0.0,
    'Maximum size of a shard as a multiple of the mean. Other sequences go to their next best path. 0 means no limit.',
    zero=True,
  )
  # Discriminative routing: paths score router data, a classifier learns the best path, all text is sharded anew.
  router_fraction: float = field(
    0.0,
    'Fraction of documents kept as router data, on which no path trains; 0.005 in the paper. 0 means none.',
    zero=True,
    below=1,
  )
  first: str = field(
    'kmeans', 'Routing method before the first discriminative re-sharding.', choices='kmeans product_kmeans random'
  )
  rounds: int = field(1, 'Number of rounds of discriminative re-sharding (approximate EM).')
  phases_per_round: int = field(16, 'Number of phases before each round of discriminative re-sharding.')
  labels: str = field(
    'exact',
    "Labels for discriminative routing: 'exact' scores router data with all paths; 'coordinate' varies one axis of "
    'the grid at a time and needs fewer scores.',
    choices='exact coordinate',
  )
  hidden: int = field(
    0, 'Width of the hidden layer of the discriminative classifier. 0 means a linear classifier.', zero=True
  )
  calibrate: bool = field(
    True, 'Whether the discriminative classifier gets a bias so that it predicts each path as often as its labels do.'
  )


@dataclasses.dataclass(frozen=True)
class Evaluate:
  """Routed perplexity on validation documents."""

  seq_len: int = field(0, 'Maximum number of tokens per validation document. 0 means model.seq_len.', zero=True)
  batch_size: int = field(0, 'Number of rows per path and evaluation step. 0 means train.batch_size.', zero=True)
  every_phases: int = field(
    1, 'Number of phases between evaluations during training. 0 evaluates only at the end.', zero=True
  )
  control: bool = field(
    False, 'Whether to also train a dense control: one model, from the base on, on all text.', may_change=True
  )
  control_budget: str = field(
    'steps',
    "Amount of training of the dense control: 'steps' is as many steps as one path takes, 'flops' as many tokens, and "
    'so FLOPs, as all paths together.',
    choices='steps flops',
    may_change=True,
    added=True,
  )
  matrix: bool = field(
    False, "Whether to report every path's loss on every hold-out. It requires train.early_stopping.", may_change=True
  )
  reroute_every: tuple[int, ...] = field(
    (),
    'Numbers of tokens after which a path is chosen again; perplexity is measured for each [2.4.3]. Empty measures '
    'none.',
    example='(64, 32)',
    may_change=True,
  )
  chunk_router_steps: int = field(
    0,
    'Number of training steps of the learned router for evaluate.reroute_every; 2,000 in the paper. 0 trains none.',
    zero=True,
    may_change=True,
  )
  refit_router: bool = field(
    False, "Whether to refit the router after training to each path's loss on router data.", may_change=True, added=True
  )
  mixture: int = field(
    0,
    'Maximum number of paths whose predictions are mixed in evaluation. 0 means no mixtures.',
    zero=True,
    may_change=True,
  )
  samples: int = field(
    6,
    'Number of validation texts that base, dense control and paths continue, shown in the report and during training. '
    '0 means none.',
    zero=True,
    may_change=True,
    added=True,
  )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """Checkpoints of training."""

  every_steps: int = field(
    50,
    'Number of inner steps between checkpoints, summed over the turns in which paths train (in islands, of one path). '
    'Shorter phases are saved only at their end.',
    may_change=True,
  )
  keep: int = field(
    2, 'Number of newest checkpoints to keep, in addition to the newest one from the end of a phase.', may_change=True
  )
  state_every_phases: int = field(
    16,
    'Number of phases after which islands publish the optimizer state of a path, which otherwise only its worker has. '
    'Results do not depend on it. With streaming, states wait for the next phase closed by outer.closed_every.',
    added=True,
  )


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Layout of devices."""

  data: int = field(
    0, 'Number of devices per path. 0 means as many as let all paths train at once and divide all batches.', zero=True
  )
  shard_states: bool = field(
    False, "Whether to shard parameters and optimizer states over a path's devices instead of replicating them."
  )


@dataclasses.dataclass(frozen=True)
class Metrics:
  """Destinations of metrics in addition to metrics.jsonl."""

  sinks: tuple[str, ...] = field(
    ('tensorboard',),
    'Destinations of metrics in addition to metrics.jsonl.',
    choices='tensorboard wandb mlflow',
    extensible=True,
    example="('tensorboard', 'wandb')",
    may_change=True,
    added=True,
  )
  project: str = field(
    'dipaco_jax', 'Name of the project in Weights & Biases or experiment in MLflow.', may_change=True, added=True
  )
  run: str = field(
    '', "Name of the run in Weights & Biases or MLflow. Empty means the workdir's name.", may_change=True, added=True
  )


@dataclasses.dataclass(frozen=True)
class Settings:
  """A run. `grid` maps axis names to sizes; `levels` are (name, pattern, axes): every parameter matches exactly one."""

  seed: int = field(
    0, 'Seed of all random draws. The same seed gives the same modules, bit for bit.', zero=True, most=2**63 - 1
  )
  extensions: tuple[tuple[str, str], ...] = field(
    (),
    'Modules with code of your own and the SHA-256 of their source, filled in by the program.',
    example="(('my_module', 'sha256'),)",
    added=True,
  )
  other_code: str = field(
    'warn',
    'What a role of islands does if its dipaco_jax source, Python or libraries differ from those that began the run: '
    "'warn' logs a warning, 'reject' ends the role with exit status 2.",
    choices='warn reject',
    may_change=True,
    added=True,
  )
  grid: tuple[tuple[str, int], ...] = field(
    (), 'Grid axes and their sizes; every combination is a path. Empty means one path.', example="{'a': 4, 'b': 4}"
  )
  levels: tuple[tuple[str, str, tuple[str, ...]], ...] = field(
    (('all', '.*', ()),),
    'Levels as (name, pattern, axes). The pattern is a regular expression that selects parameters by name; a level '
    'has one module for each coordinate along its axes.',
    example="(('all', '.*', ()),)",
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
  is_streaming = streaming.make_wire(settings.outer, settings.train).stream
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
