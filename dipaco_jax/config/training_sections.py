"""Sections of the settings: training, routing, evaluation, and where a run works."""

import dataclasses

from dipaco_jax.config.fields import field

MOST_WARMUP_STEPS = 1000  # where a config does not say; as in the paper


@dataclasses.dataclass(frozen=True)
class Train:
  """Algorithm 1: phases of tau inner steps, each followed by an outer step [2.5, 2.6]."""

  phases: int = field(
    427,
    'Number of phases, each ending with an outer step. Raise it to train a finished run further.',
    may_change=True,
    most=10**6,
  )
  steps_per_phase: int = field(150, 'Number of inner steps in a phase, between two outer steps (tau in the papers).')
  phase_s: float = field(
    0.0,
    'Seconds after which a phase of a path ends if it has not taken train.steps_per_phase inner steps by then, so '
    'that nobody waits for a slow worker; for islands. 0 means that all phases have train.steps_per_phase steps.',
    zero=True,
    added=True,
  )
  batch_size: int = field(512, 'Number of rows per path and inner step.')
  learning_rate: float = field(0.0, 'Peak inner learning rate of the paths. 0 means inner.learning_rate.', zero=True)
  microbatch: int = field(
    0, 'Maximum number of rows that a device computes at once; gradients are accumulated. 0 means all.', zero=True
  )
  loss_on_prefix: bool = field(
    False,
    'Whether the training loss also counts the tokens that the router reads. Evaluation never counts them.',
    added=True,
  )
  steps_per_dispatch: int = field(
    8,
    'Maximum number of inner steps in one compiled program. The largest divisor of train.steps_per_phase '
    'up to it is used.',
  )
  early_stopping: bool = field(
    True,
    'Whether each path uses its version with the lowest hold-out loss instead of the last one [2.7]. '
    'Replicas of a path choose together.',
  )
  max_holdout_rows: int = field(
    512, 'Maximum number of hold-out rows per path for early stopping. 0 means all.', zero=True
  )
  paths_per_phase: int = field(
    0, 'Number of paths drawn to train in each phase (path sampling [2.6.2]). 0 means all.', zero=True
  )
  schedule: tuple[tuple[int, tuple[int, ...]], ...] = field(
    (),
    'Paths that train in each phase, as (first phase, paths); each entry holds until the next one. If '
    'empty, train.paths_per_phase decides.',
    example='((0, (0, 1)), (8, (2, 3)))',
  )
  offload: bool = field(
    False, 'Whether to keep optimizer states of paths that wait for a device in host memory.', may_change=True
  )

  @property
  def phase_length(self) -> str:
    """The length of a phase, in words."""
    steps = f'{self.steps_per_phase:,} steps'
    return f'{self.phase_s:g} s and at most {steps}' if self.phase_s else steps


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
    0,
    'Number of steps of a second linear warm-up after pretraining, as in DiLoCo. 0 means none.',
    zero=True,
  )
  decay_steps: int = field(
    0,
    'Length of the learning rate schedule in steps. 0 means the whole run, pretraining included.',
    zero=True,
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
    "Inner optimizer. 'muon' applies Muon to matrices of blocks and AdamW to the rest; 'sgd' is for "
    'comparison with data-parallel SGD.',
    choices='adamw muon sgd',
    extensible=True,
  )
  muon_momentum: float = field(0.95, "Momentum of the inner optimizer 'muon'.", zero=True, below=1)
  schedule: str = field(
    'cosine',
    "Learning rate schedule; 'wsd' (warmup-stable-decay) is constant until a linear decay at the end.",
    choices='cosine wsd',
    extensible=True,
  )
  decay_fraction: float = field(0.2, "Fraction of the learning rate schedule 'wsd' in which the rate decays.", most=1)
  keep_state: bool = field(
    True,
    'Whether a path keeps its optimizer state from phase to phase, as a worker of DiLoCo does. If False, '
    'each phase begins with a fresh state.',
  )
  frozen: str = field(
    '',
    'Parameters that are not trained: a regular expression that matches anywhere in their names, as in config.levels. '
    'Empty means none. MFU and estimated FLOPs count all parameters.',
    added=True,
  )
  inherit_state: bool = field(True, "Whether paths start with the base model's optimizer state instead of a fresh one.")
  max_skipped: int = field(
    10,
    'Maximum number of consecutive steps that are skipped because loss or gradient is not finite. Further'
    ' ones are applied, and the path is then excluded from the outer step. 0 skips none.',
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
    0.7,
    "Outer learning rate. 1.0 with 'sgd' and outer.rescale=False averages the paths' parameters.",
    most=10,
  )
  momentum: float = field(
    0.9, "Momentum of the outer optimizers 'nesterov' and 'momentum', and b1 of 'adam'.", zero=True, below=1
  )
  b2: float = field(
    0.99, "Exponential decay rate of the second moment of the outer optimizer 'adam'.", zero=True, below=1
  )
  epsilon: float = field(0.1, "Epsilon of the outer optimizer 'adam'.")
  rescale: bool = field(
    True,
    'Whether to multiply averaged outer gradients by sqrt(number of contributing paths) [2.7].',
  )
  reweigh: bool = field(
    True, 'Whether to weight paths by the number of tokens in their shards (loss reweighing) [2.7].'
  )
  row_weights: bool = field(
    False,
    'Whether to also weight paths in each row of a parameter by the size of their gradients in it (not in'
    " the papers). It requires inner.optimizer='adamw' and outer.rescale=False.",
  )
  max_weight: float = field(
    1.0,
    'Largest share of one owner in the mean outer gradient of a module that several share; of one path, where the grid '
    'has no owners. Larger shares are lowered to it. 1 sets no limit.',
    most=1,
    added=True,
  )
  floor: float = field(
    0.0,
    'A contribution that raises the loss of its path on public text by more than this, in nats per target, is left out '
    'of the outer step, in islands (docs/audit.md). 0 sets no limit.',
    zero=True,
    added=True,
  )
  floor_rows: int = field(
    64, 'Number of rows of public text on which contributions are judged, with outer.floor.', added=True
  )
  quorum: float = field(
    1.0,
    'Share of the paths of a module whose outer gradients its outer step needs, in islands. Paths that have not sent '
    'theirs outer.grace_s seconds later take no part in the phase. 1 means that all are awaited.',
    most=1,
    added=True,
  )
  grace_s: float = field(
    0.0, 'Seconds for which an outer step waits for the other paths, with outer.quorum.', zero=True, added=True
  )
  exclude_above: float = field(
    10.0,
    'Outer gradients longer than this multiple of the usual length are excluded. 0 sets no limit.',
    zero=True,
  )
  max_excluded: int = field(
    3, 'Maximum number of consecutive phases in which a path may be excluded before the run stops.', zero=True
  )
  lost: float = field(
    0.0, "Probability that a path's outer gradient is lost in transit, as in the DiLoCo paper.", zero=True, below=1
  )
  # What follows is in algorithm/compression.py and algorithm/streaming.py; 'auto', and -1, is what `wire` says.
  wire: str = field(
    'lan',
    "Preset for the network between machines, which determines the following fields where they are 'auto'"
    " or -1: 'lan' sends full precision at the end of a phase; 'wan' sends int8 and streams; 'thin' sends"
    ' int4, streams and overlaps (see docs/slow_networks.md).',
    choices='lan wan thin',
  )
  compress: str = field(
    'auto',
    "Format in which outer gradients and modules are sent; 'auto' follows outer.wire. int2 sends modules in 3 bits.",
    choices='auto none int8 int4 int2',
  )
  whole_every: int = field(
    16,
    'Islands with compression publish every n-th version of a module in full, the others as differences.',
  )
  stream: str = field(
    'auto',
    "Whether each level is exchanged at its own step of a phase; 'auto' follows outer.wire.",
    choices='auto on off',
  )
  closed_every: int = field(16, 'With streaming, all levels are exchanged together at the end of every n-th phase.')
  overlap_steps: int = field(
    -1,
    'With streaming, number of inner steps from sending a level to taking over its new module. -1 follows'
    ' outer.wire: a fifth of a phase for thin, otherwise 0.',
    least=-1,
    zero=True,
  )
  overlap: str = field(
    'auto',
    "How a path takes over a module after outer.overlap_steps: 'keep' keeps the steps made meanwhile; "
    "'mix' averages the path's parameters with the module, as in Streaming DiLoCo. 'auto' is 'keep' for "
    "wire='thin' and 'mix' otherwise.",
    choices='auto keep mix',
  )
  mix: float = field(
    -1.0,
    "Share of a path's own parameters (alpha) when it takes over a new module after overlap. -1 means 0 "
    "for overlap='keep' and 0.5 for 'mix'.",
    least=-1,
    zero=True,
    below=1,
  )


@dataclasses.dataclass(frozen=True)
class Routing:
  """Routing of sequences to paths [2.4]."""

  method: str = field(
    'kmeans',
    'How sequences are routed to paths: by k-means [2.4.1], product k-means [7.3] or a discriminative '
    "classifier [2.4.2] of their features, by a hash of their numbers ('random'), to the owner that their domain is "
    "named after ('owner'), or to the only path ('single').",
    choices='kmeans product_kmeans discriminative random owner single',
    extensible=True,
  )
  prefix_tokens: int = field(
    32,
    'Number of tokens at the beginning of a sequence that the router reads. No loss counts them, '
    'except that of training with train.loss_on_prefix.',
  )
  by_document: bool = field(
    False,
    'Whether all sequences of a training document go to the path that its first sequence is routed to, as a served '
    'document does. If False, each sequence is routed by its own beginning.',
    added=True,
  )
  top_n: int = field(1, 'Number of paths that train on each sequence (overlapping shards [2.4.4]).')
  sample: int = field(100_000, 'Maximum number of training sequences, drawn at random, that k-means is fitted on.')
  restarts: int = field(3, 'Number of runs of k-means from different initial centroids; the best one is used.')
  iterations: int = field(50, 'Maximum number of iterations in a run of k-means.')
  capacity: float = field(
    0.0,
    'Maximum size of a shard as a multiple of the mean. Other sequences go to their next best path. 0 means no limit.',
    zero=True,
  )
  # Discriminative routing: paths score router data, a classifier learns the best path, all text is sharded again.
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
    "Amount of training of the dense control: 'steps' is as many steps as one path takes, 'flops' as many"
    ' tokens, and so FLOPs, as all paths together.',
    choices='steps flops',
    may_change=True,
  )
  matrix: bool = field(
    False, "Whether to report every path's loss on every hold-out. It requires train.early_stopping.", may_change=True
  )
  reroute_every: tuple[int, ...] = field(
    (),
    'Numbers of tokens after which a path is chosen again; perplexity is measured for each [2.4.3]. Empty'
    ' measures none.',
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
    False, "Whether to refit the router after training to each path's loss on router data.", may_change=True
  )
  samples: int = field(
    6,
    'Number of validation texts that base, dense control and paths continue, shown in the report and '
    'during training. 0 means none.',
    zero=True,
    may_change=True,
  )
