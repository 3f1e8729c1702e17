"""Sections of the settings: training, routing, evaluation, and where a run works."""

import dataclasses

from dipaco_jax.core.fields import field

MOST_WARMUP_STEPS = 1000  # where a config does not say; as in the paper


@dataclasses.dataclass(frozen=True)
class Train:
  """Algorithm 1: phases of tau inner steps, each followed by an outer step [2.5, 2.6]."""

  phases: int = field(
    427, 'Number of phases; each ends with an outer step. Raise it to train a finished run further.', may_change=True
  )
  steps_per_phase: int = field(150, 'tau: number of inner steps between two outer steps.')
  batch_size: int = field(512, 'Number of rows in a batch of each path.')
  learning_rate: float = field(0.0, 'Peak learning rate of the paths. 0 means inner.learning_rate.', zero=True)
  microbatch: int = field(0, 'Number of rows that a device computes at one time. 0 means all.', zero=True)
  steps_per_dispatch: int = field(
    8, 'Largest number of inner steps in one compiled program; the largest divisor of tau up to it is used.'
  )
  early_stopping: bool = field(
    True, 'Uses the version of each path with the lowest hold-out loss [2.7]; replicas count as one path.'
  )
  max_holdout_rows: int = field(
    512, "Number of rows of a path's hold-out that are scored for early stopping. 0 means all.", zero=True
  )
  paths_per_phase: int = field(
    0, 'Number of paths that train in a phase, drawn by seed and phase (path sampling [2.6.2]). 0 means all.', zero=True
  )
  schedule: tuple[tuple[int, tuple[int, ...]], ...] = field(
    (),
    'Which paths train from which phase on, as tuples (first phase, paths). Overrides paths_per_phase.',
    example='((0, (0, 1)), (8, (2, 3)))',
  )
  offload: bool = field(False, 'Keeps the AdamW states of waiting paths in host memory.', may_change=True)


@dataclasses.dataclass(frozen=True)
class Inner:
  """AdamW inside a path, with a cosine over the global step, pretraining included [7.1]."""

  learning_rate: float = field(4e-4, 'Peak learning rate.')
  warmup_steps: int = field(
    -1,
    'Number of steps of linear warm-up. -1 means 1,000, or a tenth of the schedule if that is less.',
    least=-1,
    zero=True,
  )
  rewarm_steps: int = field(
    0,
    'Number of steps of a second warm-up, from the first step after pretraining on, as in DiLoCo. 0 means none.',
    zero=True,
  )
  decay_steps: int = field(
    0,
    'Length of the learning rate schedule in steps. 0 means pretrain.steps + train.phases * train.steps_per_phase.',
    zero=True,
  )
  final_fraction: float = field(
    0.05, 'Learning rate at the end of the schedule, as a fraction of the peak. 1 means no decay.', zero=True, most=1
  )
  b1: float = field(0.9, "Decay rate of AdamW's first moment.", zero=True, below=1)
  b2: float = field(0.95, "Decay rate of AdamW's second moment; the paper does not give it.", zero=True, below=1)
  epsilon: float = field(1e-8, 'Epsilon of AdamW.')
  weight_decay: float = field(0.1, 'Weight decay of matrices; the scales of norms do not decay.', zero=True)
  clip_norm: float = field(1.0, 'Global norm to which gradients are clipped. 0 disables clipping.', zero=True)
  optimizer: str = field(
    'adamw',
    "Inner optimizer. 'muon' applies to the matrices of blocks, AdamW to all else; 'sgd' is for checks "
    'against data-parallel SGD.',
    choices='adamw muon sgd',
    extensible=True,
  )
  muon_momentum: float = field(0.95, 'Momentum of Muon.', zero=True, below=1)
  schedule: str = field(
    'cosine',
    "Learning rate schedule. 'wsd' is constant and decays linearly at the end.",
    'cosine wsd',
    extensible=True,
  )
  decay_fraction: float = field(0.2, "Fraction of all steps in which the 'wsd' schedule decays.", most=1)
  keep_state: bool = field(True, "Keeps each path's AdamW state across outer steps, as DiLoCo does.")
  inherit_state: bool = field(True, 'Starts paths with the AdamW state of the base model.')
  max_skipped: int = field(
    10, 'Number of steps in a row that are skipped if the loss or the gradient is not finite. 0 skips none.', zero=True
  )

  def warmup(self, decay_steps: int) -> int:
    """Returns the steps of the warm-up in a schedule of `decay_steps` global steps."""
    return self.warmup_steps if self.warmup_steps >= 0 else min(MOST_WARMUP_STEPS, decay_steps // 10)


@dataclasses.dataclass(frozen=True)
class Outer:
  """Outer optimizer, and its treatment of the averaged outer gradients [2.5, 2.7]."""

  optimizer: str = field(
    'nesterov',
    "Outer optimizer. For small models 'sgd' is better (docs/averaging.md).",
    choices='nesterov momentum sgd adam',
    extensible=True,
  )
  learning_rate: float = field(
    0.7,
    "Constant learning rate of the outer optimizer. 1.0 with 'sgd' and without rescale is plain averaging.",
    most=10,
  )
  momentum: float = field(
    0.9, "Momentum of 'nesterov' and 'momentum', and b1 of 'adam'. 'sgd' does not use it.", zero=True, below=1
  )
  b2: float = field(0.99, "Decay rate of the second moment of 'adam'.", zero=True, below=1)
  epsilon: float = field(0.1, "Epsilon of 'adam'.")
  rescale: bool = field(
    True,
    "Multiplies outer gradients by the square root of the number of the module's active paths (norm rescaling [2.7]).",
  )
  reweigh: bool = field(True, 'Weights paths by the number of tokens in their shards (loss reweighing [2.7]).')
  row_weights: bool = field(
    False, "Also weights each row of a parameter by the size of the path's gradients there (algorithm/outer.py)."
  )
  exclude_above: float = field(
    10.0,
    'Excludes a path from the outer step if its outer gradient is this many times as long as usual. 0 '
    'excludes only what is not finite.',
    zero=True,
  )
  max_excluded: int = field(
    3, 'Number of phases in a row in which a path may be excluded before the run stops.', zero=True
  )
  lost: float = field(
    0.0, "Probability that an outer gradient is lost in transit, as in DiLoCo's ablation.", zero=True, below=1
  )
  # What follows is in algorithm/compression.py and algorithm/streaming.py; 'auto', and -1, is what `wire` says.
  wire: str = field(
    'lan',
    "Preset for the network between paths. 'wan' sends int8 and streams levels; 'thin' sends int4 and "
    'overlaps the exchange with training too.',
    'lan wan thin',
  )
  compress: str = field(
    'auto',
    "Compression of outer gradients and new modules. 'auto' follows outer.wire.",
    choices='auto none int8 int4',
  )
  whole_every: int = field(
    16, 'Islands publish every n-th version of a compressed module whole, and the others as differences.'
  )
  stream: str = field(
    'auto',
    "Lets levels exchange at different steps of a phase. 'auto' follows outer.wire.",
    choices='auto on off',
  )
  closed_every: int = field(16, 'With streaming, all levels exchange together at the end of every n-th phase.')
  overlap_steps: int = field(
    -1,
    'Number of inner steps between sending an outer gradient and using the new module. -1 follows outer.wire.',
    least=-1,
    zero=True,
  )
  overlap: str = field(
    'auto',
    "What happens to the inner steps made meanwhile: 'keep' adds them to the new module, 'mix' averages "
    "with it. 'auto' follows outer.wire.",
    choices='auto keep mix',
  )
  mix: float = field(
    -1.0,
    "Weight of a path's own parameters when it takes over a new module after overlap. -1 follows outer.overlap.",
    least=-1,
    zero=True,
    below=1,
  )


@dataclasses.dataclass(frozen=True)
class Routing:
  """Routing of sequences to paths [2.4]."""

  method: str = field(
    'kmeans',
    'Routing of sequences to paths: k-means [2.4.1], product k-means [7.3], discriminative [2.4.2], '
    'random, or a single path.',
    choices='kmeans product_kmeans discriminative random single',
    extensible=True,
  )
  prefix_tokens: int = field(
    32, 'Number of tokens at the beginning of a sequence that the router reads; they are not scored.'
  )
  top_n: int = field(1, 'Number of paths to which each training sequence is assigned [2.4.4].')
  sample: int = field(100_000, 'Number of sequences on which k-means is fitted.')
  restarts: int = field(3, 'Number of runs of k-means from different initial centroids; the best is kept.')
  iterations: int = field(50, 'Maximum number of iterations of k-means.')
  capacity: float = field(0.0, 'Maximum size of a shard, as a multiple of the mean. 0 sets no limit.', zero=True)
  # Discriminative routing: paths score router data, a classifier learns the best path, all text is sharded anew.
  router_fraction: float = field(
    0.0, 'Fraction of documents that are router data and are not trained on; 0.005 in the paper.', zero=True, below=1
  )
  first: str = field('kmeans', 'Routing before the first round of re-sharding.', choices='kmeans product_kmeans random')
  rounds: int = field(1, "Number of rounds of re-sharding, approximate EM, with method 'discriminative'.")
  phases_per_round: int = field(16, 'Number of phases before each round of re-sharding.')
  hidden: int = field(0, 'Width of the hidden layer of the routing classifier. 0 means a linear classifier.', zero=True)
  calibrate: bool = field(
    True, 'Adds a bias to the router so that predicted frequencies of paths match those of the labels.'
  )


@dataclasses.dataclass(frozen=True)
class Evaluate:
  """Routed perplexity on validation documents."""

  seq_len: int = field(0, 'Number of tokens of each document that are scored. 0 means model.seq_len.', zero=True)
  batch_size: int = field(0, 'Number of rows in a batch of evaluation. 0 means train.batch_size.', zero=True)
  every_phases: int = field(
    1, 'Number of phases between measurements of perplexity during training. 0 measures only at the end.', zero=True
  )
  control: bool = field(
    False, 'Also trains a dense control: one model that continues from the base on all text.', may_change=True
  )
  control_budget: str = field(
    'steps',
    "Training of the dense control: 'steps' trains it for as many steps as one path, 'flops' on as many "
    'tokens, and so FLOPs, as all paths together.',
    choices='steps flops',
    may_change=True,
  )
  matrix: bool = field(False, 'Reports the loss of every path on the hold-out of every shard.', may_change=True)
  reroute_every: tuple[int, ...] = field(
    (),
    'Numbers of tokens after which a path is chosen again during evaluation [2.4.3].',
    example='(64, 32)',
    may_change=True,
  )
  chunk_router_steps: int = field(
    0,
    'Number of training steps of the learned router of chunks; 2,000 in the paper. 0 trains none.',
    zero=True,
    may_change=True,
  )
  refit_router: bool = field(
    False, "Fits the router again after training, to each path's losses on router data.", may_change=True
  )
  samples: int = field(
    6,
    'Number of validation texts that the base, the dense control and the paths continue, in the report '
    'and during training. 0 means none.',
    zero=True,
    may_change=True,
  )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """Checkpoints of training, by Orbax; of paths in islands, by workers."""

  every_steps: int = field(
    50,
    'Number of inner steps between checkpoints, counted over all turns; in islands, of one path. Shorter '
    'phases are saved at their end.',
    may_change=True,
  )
  keep: int = field(
    2,
    'Number of newest checkpoints to keep, besides the last one at the end of a phase. Islands do not use it.',
    may_change=True,
  )
  state_every_phases: int = field(
    16,
    'Number of phases after which islands publish the AdamW state of a path, which otherwise only its '
    'worker has. Results do not depend on it. With streaming, it is published after the next phase in '
    'which all levels exchange (outer.closed_every).',
  )


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Layout of devices; zeros are filled in from the devices at hand."""

  data: int = field(
    0, 'Number of devices that share the batch of one path. 0 chooses it from the devices at hand.', zero=True
  )
  shard_states: bool = field(
    False, 'Shards parameters and AdamW states over the devices of a path. Otherwise each has a copy.'
  )


@dataclasses.dataclass(frozen=True)
class Metrics:
  """Where metrics go beside metrics.jsonl."""

  sinks: tuple[str, ...] = field(
    ('tensorboard',),
    'Where metrics are written besides metrics.jsonl.',
    choices='tensorboard wandb mlflow',
    extensible=True,
    example="('tensorboard', 'wandb')",
    may_change=True,
  )
  project: str = field('dipaco_jax', 'Project in Weights & Biases, or experiment in MLflow.', may_change=True)
  run: str = field('', "Name of the run in Weights & Biases or MLflow. If empty, the workdir's name.", may_change=True)
