"""Every field of a run and its default.

Defaults live here and in the sections (model_sections.py, training_sections.py), each beside its help text. A config
file fills a ConfigDict made from `Settings().to_dict()`, which `from_dict` turns back. Section numbers refer to the
DiPaCo paper, arXiv 2403.10616.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import dipaco_jax
from dipaco_jax.algorithm.grid import Axis, Grid
from dipaco_jax.config import extension, fields, settings_checks, text_settings
from dipaco_jax.config.fields import Source as Source, field
from dipaco_jax.config.model_sections import Data as Data, Model as Model, Pretrain as Pretrain, Tokenizer as Tokenizer
from dipaco_jax.config.run_sections import (
  Audit as Audit,
  Checkpoint as Checkpoint,
  Mesh as Mesh,
  Metrics as Metrics,
)
from dipaco_jax.config.training_sections import (
  Evaluate as Evaluate,
  Inner as Inner,
  Outer as Outer,
  Routing as Routing,
  Train as Train,
)
from dipaco_jax.core.errors import InputError

FORMAT = 2  # of workdirs and registries: a run is continued and read by versions of its format alone
WRITTEN_BY = 'written_by'  # beside the settings of a run: its version and format
BESIDE = (WRITTEN_BY, 'seal')
SECTIONS = {'model', 'levels', 'train', 'outer'}  # some of those that the settings of a run have in any format


@dataclasses.dataclass(frozen=True)
class Settings:
  """A run. `grid` has sizes or names by axis; `levels` are (name, pattern, axes): each parameter matches just one."""

  seed: int = field(
    0, 'Seed of all random draws. The same seed gives the same modules, bit for bit.', zero=True, most=2**63 - 1
  )
  extensions: tuple[tuple[str, str], ...] = field(
    (),
    'Modules with code of your own and the SHA-256 of their source, filled in by the program.',
    example="(('my_module', 'sha256'),)",
  )
  other_code: str = field(
    'warn',
    'What a role of islands does if its dipaco_jax source, Python or libraries differ from those that '
    "began the run: 'warn' logs a warning, 'reject' ends the role with exit status 2.",
    choices='warn reject',
    may_change=True,
  )
  grid: tuple[tuple[str, Axis], ...] = field(
    (),
    'Grid axes and their sizes, or the names of their coordinates; every combination is a path. Empty means one path.',
    example="{'a': 4, 'b': 4}",
  )
  levels: tuple[tuple[str, str, tuple[str, ...]], ...] = field(
    (('all', '.*', ()),),
    'Levels as (name, pattern, axes). The pattern is a regular expression that selects parameters by '
    'name; a level has one module for each coordinate along its axes.',
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
  audit: Audit = Audit()
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
    return Grid(self.grid).num_paths

  @property
  def num_untrained_tokens(self) -> int:
    """Number of tokens at the beginning of a sequence that the training loss does not count."""
    return 0 if self.train.loss_on_prefix else self.num_unscored_tokens

  @property
  def num_unscored_tokens(self) -> int:
    """Number of tokens at the beginning of a sequence that no evaluation counts: of conversations, answers count."""
    return 0 if self.data.format == 'messages' else self.routing.prefix_tokens

  @property
  def rounds(self) -> int:
    """Number of rounds of re-sharding."""
    return self.routing.rounds if self.routing.method == 'discriminative' else 0

  def dense(self) -> 'Settings':
    """Returns the settings of one model: the empty grid, and an outer step that only takes over what AdamW did."""
    takes_over = Outer('sgd', 1.0, rescale=False, reweigh=False, exclude_above=0.0)
    train = dataclasses.replace(self.train, schedule=(), paths_per_phase=0, learning_rate=0.0)
    return dataclasses.replace(self, grid=(), levels=(('all', '.*', ()),), outer=takes_over, train=train)

  def alone(self) -> 'Settings':
    """Returns the settings of one path that trains alone: those of `dense`, with the learning rate of the paths."""
    dense = self.dense()
    return dataclasses.replace(dense, train=dataclasses.replace(dense.train, learning_rate=self.train.learning_rate))

  def batch_sizes(self, stage: str) -> dict[str, int]:
    """Rows per path that the devices inside a path divide among them, by the field that says so."""
    train = getattr(self, stage).batch_size
    return {f'{stage}.batch_size': train, 'evaluate.batch_size': self.evaluate.batch_size or self.train.batch_size}


def from_dict(values: Mapping[str, Any]) -> Settings:
  """Makes settings from nested dicts, `data.source` filled in.

  Raises InputError for an unknown field, a wrong type or a value out of range.
  """
  if isinstance(values, Mapping):
    values = {name: value for name, value in values.items() if name not in BESIDE}
  settings = fields.build(Settings, values)
  settings = dataclasses.replace(settings, data=text_settings.resolve_source(settings.data))
  settings_checks.check(settings)
  return settings


def recorded(settings: Settings) -> dict[str, Any]:
  """Returns what a run records of its settings, in config.json or the registry, for `of_run`."""
  return {WRITTEN_BY: {'dipaco_jax': dipaco_jax.__version__, 'format': FORMAT}} | settings.to_dict()


def of_run(values: Mapping[str, Any] | None) -> Settings:
  """Makes settings from what `recorded` has made of them; None stands for a file that is damaged.

  Raises InputError if the values are not those of a run, or were written in another format.
  """
  advice = 'name another directory, or, if it was that of a run, remove it, and the command of the run makes it again'
  try:
    if values is None or not values.keys() >= SECTIONS:
      raise InputError('the file lacks a section, or is damaged')
    written_by = values.get(WRITTEN_BY, {'dipaco_jax': '0.1', 'format': 1})
    if written_by['format'] == FORMAT:
      return from_dict(values)
  except (ValueError, AttributeError, TypeError, KeyError) as e:
    raise InputError(f'its config.json is not that of a run, or damaged ({e}); {advice}') from e
  raise InputError(
    f'dipaco_jax {written_by["dipaco_jax"]} wrote this run in format {written_by["format"]}, and this version, '
    f'{dipaco_jax.__version__}, reads format {FORMAT} alone: use that version, or another --workdir'
  )


def digest(settings: Settings, *prefixes: str) -> str:
  """Returns the sha256 of the canonical JSON of the fields that start with one of `prefixes` (none: all)."""
  values = fields.flatten(settings.to_dict())
  defaults = fields.flatten(Settings().to_dict())
  omitted = {name for name, f in fields.fields(Settings) if f.added and values[name] == defaults[name]}
  chosen = {
    name: value for name, value in values.items() if name not in omitted and (not prefixes or name.startswith(prefixes))
  }
  named = {extension.module_of(value) for value in chosen.values() if extension.is_reference(value)}
  chosen |= {f'extensions.{module}': sha256 for module, sha256 in settings.extensions if module in named}
  return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def differences(old: Settings, new: Settings) -> dict[str, tuple[Any, Any]]:
  """Returns the fields that differ and may not: `{name: (old, new)}`."""
  may_change = {name for name, f in fields.fields(Settings) if f.may_change}
  a, b = fields.flatten(old.to_dict()), fields.flatten(new.to_dict())
  return {k: (a.get(k), b.get(k)) for k in sorted(a | b) if a.get(k) != b.get(k) and k not in may_change}


def in_words(changes: Mapping[str, tuple[Any, Any]]) -> str:
  """Names the fields that differ, {name: (old, new)}, and modules with a different source."""
  changes = dict(changes)
  was, now = map(dict, changes.pop('extensions', ((), ())))
  modules = [f'the source of {name} has changed' for name in was if name in now and was[name] != now[name]]
  return '; '.join([*(f'config.{name} was {a!r}, is {b!r}' for name, (a, b) in changes.items()), *modules])
