"""Sections of the settings: checkpoints, audits, devices and metrics of a run."""

import dataclasses

from dipaco_jax.config.fields import field


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """Checkpoints of training, by Orbax; of paths in islands, by workers."""

  every_steps: int = field(
    50,
    'Number of inner steps between checkpoints, summed over the turns in which paths train (in islands, '
    'of one path). Shorter phases are saved only at their end.',
    may_change=True,
  )
  keep: int = field(
    2,
    'Number of newest checkpoints to keep, in addition to the newest one from the end of a phase.',
    may_change=True,
  )
  state_every_phases: int = field(
    16,
    'Number of phases after which islands publish the optimizer state of a path, which otherwise only its'
    ' worker has. Results do not depend on it. With streaming, states wait for the next phase closed by '
    'outer.closed_every.',
  )


@dataclasses.dataclass(frozen=True)
class Audit:
  """Audits of islands: phases of paths that another worker trains again, to compare the results (docs/audit.md)."""

  fraction: float = field(
    0.0,
    'Probability with which each phase of each path is trained again by another worker, in islands. 0 disables audits.',
    zero=True,
    most=1,
    may_change=True,
    added=True,
  )
  tolerance: float = field(
    0.0,
    'Largest relative difference between the contribution of a path and its audit that counts as equal. 0 compares '
    'digests, which suits CPUs; elsewhere, derive it from the differences between honest workers (docs/audit.md).',
    zero=True,
    below=1,
    may_change=True,
    added=True,
  )


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Layout of devices; zeros are filled in from the devices at hand."""

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
  )
  project: str = field(
    'dipaco_jax', 'Name of the project in Weights & Biases or experiment in MLflow.', may_change=True
  )
  run: str = field(
    '', "Name of the run in Weights & Biases or MLflow. Empty means the workdir's name.", may_change=True
  )
