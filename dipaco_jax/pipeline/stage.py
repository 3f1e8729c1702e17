"""The stages of a run: their dependencies, their files, and leftovers of unfinished stages."""

import dataclasses
from typing import NamedTuple

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.data import tokenizer_files

CONTROL = 'control'  # the dense control's folder in the workdir; it is trained before it is evaluated
ALONE = 'alone'  # the folder, in an owner's store, of models of single paths that were trained alone
CONTROLS = {'steps': CONTROL, 'flops': f'{CONTROL}_flops'}  # the stage of its rows and checkpoints, by its budget


class Stage(NamedTuple):
  """A stage of a run; `stages` has the functions that make them."""

  name: str
  doing: str  # what `status` says while it runs
  depends: tuple[str, ...]  # fields that no earlier stage depends on; digests also cover those of earlier stages
  artefacts: tuple[str, ...] = ()  # paths in the workdir that another run may take over
  leftovers: tuple[str, ...] = ()  # globs of files that another config cannot use


STAGES = (
  Stage(
    'tokenize',
    'reading and tokenizing text',
    ('data', 'tokenizer', 'model.seq_len', 'evaluate.seq_len', 'routing.prefix_tokens', 'seed'),
    (*tokenizer_files.FILES, 'sequences'),
    (*(f'{name}*' for name in tokenizer_files.FILES), 'tokenize-*', 'sequences'),
  ),
  Stage(
    'pretrain',
    'training the base model',
    (
      'model',
      'pretrain',
      'inner',
      'train.steps_per_dispatch',
      'train.microbatch',
      'train.loss_on_prefix',
      'routing.router_fraction',
    ),
    ('shards/base', 'base'),
    ('shards/base*', 'base', 'checkpoints/pretrain', 'metrics.jsonl', 'events'),
  ),
  Stage(
    'route',
    'routing',
    ('grid', 'routing', 'train.batch_size', 'train.early_stopping'),
    ('features', 'routing/0', 'shards/0'),
    ('routing', 'shards/0*'),
  ),
  Stage(
    'train',
    'training the paths',
    (
      *(
        'levels',
        'outer',
        'train.learning_rate',
        'train.steps_per_phase',
        'train.schedule',
        'train.paths_per_phase',
      ),
      *('train.phase_s', 'train.max_holdout_rows', 'evaluate.batch_size'),
    ),
  ),
  Stage('evaluate', 'evaluating', ('evaluate',)),
)
NAMES = tuple(stage.name for stage in STAGES)


def control_name(settings: settings_lib.Settings) -> str:
  """Returns the stage of the dense control's rows and checkpoints."""
  return CONTROLS[settings.evaluate.control_budget]


def find(name: str) -> Stage:
  """Returns the named stage."""
  return STAGES[NAMES.index(name)]


def up_to(name: str) -> tuple[Stage, ...]:
  """Returns the stages up to and including the named one."""
  return STAGES[: NAMES.index(name) + 1]


def since(name: str) -> tuple[Stage, ...]:
  """Returns the named stage and those after it."""
  return STAGES[NAMES.index(name) :]


def digest(settings: settings_lib.Settings, name: str) -> str:
  """Returns the sha256 of all fields that a stage's artefacts depend on.

  `data.skip_bad_records` is not one of them: artefacts made without it had no bad record, and are the same with it.
  """
  data = dataclasses.replace(settings.data, skip_bad_records=False)
  settings = dataclasses.replace(settings, data=data)
  return settings_lib.digest(settings, *(field for stage in up_to(name) for field in stage.depends))


def same_base(one: settings_lib.Settings, other: settings_lib.Settings) -> bool:
  """Returns whether base models with equal digests are equal, including schedules and permitted text.

  Their learning rate follows the whole run's cosine, and hold-outs are kept from them too.
  """
  return one.decay_steps == other.decay_steps and one.train.early_stopping == other.train.early_stopping
