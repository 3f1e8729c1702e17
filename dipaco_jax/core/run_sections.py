"""Sections of the settings: checkpoints, devices and metrics of a run."""

import dataclasses

from dipaco_jax.core.fields import field


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """Checkpoints of training."""

  every_steps: int = field(
    50,
    'Number of inner steps between checkpoints, counted over all turns; in islands, of one path. Shorter phases are '
    'saved at their end.',
    may_change=True,
  )
  keep: int = field(
    2,
    'Number of newest checkpoints to keep, besides the last one at the end of a phase. Islands do not use it for '
    'paths.',
    may_change=True,
  )
  state_every_phases: int = field(
    16,
    'Number of phases after which islands publish the AdamW state of a path, which otherwise only its worker has. '
    'Results do not depend on it. With streaming, it is published after the next phase in which all levels exchange '
    '(outer.closed_every).',
    added=True,
  )


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Layout of devices."""

  data: int = field(
    0,
    'Number of devices that share the batches of one path. 0 means as many as let all paths train at the same time '
    'and divide all batches.',
    zero=True,
  )
  shard_states: bool = field(
    False, 'Shards parameters and optimizer states over the devices of a path. Otherwise each device has a copy.'
  )


@dataclasses.dataclass(frozen=True)
class Metrics:
  """Destinations of metrics in addition to metrics.jsonl."""

  sinks: tuple[str, ...] = field(
    ('tensorboard',),
    'Where metrics are written besides metrics.jsonl.',
    choices='tensorboard wandb mlflow',
    extensible=True,
    example="('tensorboard', 'wandb')",
    may_change=True,
    added=True,
  )
  project: str = field(
    'dipaco_jax', 'Project in Weights & Biases, or experiment in MLflow.', may_change=True, added=True
  )
  run: str = field(
    '', "Name of the run in Weights & Biases or MLflow. If empty, the workdir's name.", may_change=True, added=True
  )
