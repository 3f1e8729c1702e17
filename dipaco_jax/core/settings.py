"""Every field of a run and its default.

Defaults live here and in the sections (model_sections.py, training_sections.py, run_sections.py), each next to its help
text. A config file fills a ConfigDict made from `Settings().to_dict()`, which `from_dict` converts back. Section
numbers refer to the DiPaCo paper, arXiv 2403.10616.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from dipaco_jax.core import extension, fields, settings_checks, text_settings, wires
from dipaco_jax.core.errors import InputError
from dipaco_jax.core.fields import field
from dipaco_jax.core.model_sections import Data as Data, Model as Model, Pretrain as Pretrain, Tokenizer as Tokenizer
from dipaco_jax.core.run_sections import Checkpoint as Checkpoint, Mesh as Mesh, Metrics as Metrics
from dipaco_jax.core.training_sections import (
  Evaluate as Evaluate,
  Inner as Inner,
  Outer as Outer,
  Routing as Routing,
  Train as Train,
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """A run. `grid` maps axis names to sizes; `levels` are (name, pattern, axes): every parameter matches exactly one."""

  seed: int = field(
    0, 'Seed of everything that is drawn. The same seed gives the same modules, to the bit.', zero=True, most=2**63 - 1
  )
  extensions: tuple[tuple[str, str], ...] = field(
    (),
    "Your own modules that fields name, as 'package.module:name', with digests of their source. Filled in by the "
    'program.',
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
  grid: tuple[tuple[str, int], ...] = field(
    (),
    'Axes of the grid and their sizes; each combination of coordinates is one path. If empty, there is one path.',
    example="{'a': 4, 'b': 4}",
  )
  levels: tuple[tuple[str, str, tuple[str, ...]], ...] = field(
    (('all', '.*', ()),),
    'Levels of the grid, as tuples (name, pattern, axes). The pattern is a regular expression that selects parameters '
    'by name; each parameter must match exactly one. A level has one module for each coordinate along its axes.',
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
