"""The amount of training in each stage of a run, from its settings, for its first log lines and its ETA.

Nothing here imports JAX.
"""

from collections.abc import Collection

from dipaco_jax.config import dense_control, settings as settings_lib
from dipaco_jax.pipeline import stage as stage_lib


def training_tokens(s: settings_lib.Settings) -> dict[str, int]:
  """Returns the tokens of every stage that trains, in their order, padding included."""
  t, tokens_per_step = s.train, s.train.batch_size * s.model.seq_len
  tokens = {
    'pretrain': s.pretrain.steps * s.pretrain.batch_size * s.model.seq_len,
    'train': dense_control.count_path_phases(s) * t.steps_per_phase * tokens_per_step,
  }
  if s.evaluate.control:
    tokens[stage_lib.CONTROL] = t.phases * dense_control.steps_per_phase(s) * tokens_per_step
  return tokens


def later_work(s: settings_lib.Settings, stage: str) -> float:
  """Returns the training after a stage, in multiples of the stage's own; 0 for the last one.

  A token costs about the same in each, as a path has the shape of the base; other work is not counted.
  """
  tokens = training_tokens(s)
  names = list(tokens)
  later = sum(tokens[name] for name in names[names.index(stage) + 1 :])
  return later / tokens[stage] if tokens[stage] else 0.0


def describe(s: settings_lib.Settings, done: Collection[str]) -> str:
  """Describes the stages of a run in a line; `done` are those that are complete."""
  t = s.train
  control_steps = t.phases * dense_control.steps_per_phase(s)
  each = f'{t.phases:,} phases of {t.steps_per_phase:,} steps'
  texts = {
    'tokenize': 'tokenize',
    'pretrain': f'pretrain ({s.pretrain.steps:,} steps)',
    'route': 'route',
    'train': f'train ({s.num_paths:,} path{"s" * (s.num_paths > 1)}, {each})',
    stage_lib.CONTROL: f'dense control ({control_steps:,} steps; config.evaluate.control)',
    'evaluate': 'evaluate',
  }
  if not s.evaluate.control:
    del texts[stage_lib.CONTROL]
  return 'stages: ' + ', '.join(f'{text}{" [done]" * (name in done)}' for name, text in texts.items())
