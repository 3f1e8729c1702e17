"""The card of an exported path: its training, its measurements and how to load it (templates/model_card.md)."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import dipaco_jax
from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.config import choices, extension, fields, owners, settings
from dipaco_jax.huggingface import families, origin
from dipaco_jax.reports import headline, pages
from dipaco_jax.storage import remote_files


@dataclasses.dataclass(frozen=True)
class Facts:
  settings: settings.Settings
  number: int
  coordinates: tuple[int, ...]
  version: int
  modules: dict[str, str]  # by level, its name in the workdir
  measured: bool  # whether the report is about this version of the path
  report: dict[str, Any]  # what report.json holds; nothing if there is none yet
  dtype: str
  parameters: int
  family: families.Family
  adds_bos: bool  # the tokenizer puts a token in front of a text
  has_pieces: bool  # it is a SentencePiece model
  origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the base: see `model_folder.load_params`

  @property
  def base_name(self) -> str:
    """The name of the model that the run started from, '' if it started from none."""
    init = self.settings.pretrain.init
    return self.origin.get('name') or (origin.last_name(init) if init else '')

  @property
  def owner(self) -> str:
    """The owner of the path, '' if paths have none."""
    if self.settings.routing.method != 'owner':
      return ''
    grid = Grid(self.settings.grid)
    return next(owner for owner in owners.names(grid) if self.number in owners.paths_of(grid, owner))

  @property
  def base_positions(self) -> int:
    """The longest text of the model that the run started from, as its config.json states it; 0 if that is unknown."""
    return self.origin.get('max_positions', 0)


def render(facts: Facts) -> str:
  """Returns README.md, with the heading that model hubs read."""
  about = {'settings': facts.settings, 'paths': facts.settings.num_paths, 'version': dipaco_jax.__version__}
  return pages.render(
    'model_card.md',
    facts=facts,
    heading=_heading(facts),
    training=_training(facts),
    evaluation=_evaluation(facts),
    **about,
  )


def _heading(f: Facts) -> dict[str, str]:
  """Returns lines of the heading that model hubs read; for unknown values, a comment that says what to fill in."""
  if f.base_name:
    is_plain = re.fullmatch(r'[\w./-]+', f.base_name)
    note = '' if '/' in f.base_name else '  # a folder: write its name on the Hub, as user/model'
    base_model = f'base_model: {f.base_name if is_plain else json.dumps(f.base_name)}{note}\n'
  else:
    base_model = ''
  known = f.origin.get('license')
  of_license = f'license: {known}  # of the base model' if known else '# license: not known; name one, as apache-2.0'
  return {'base_model': base_model, 'license': of_license}


def _training(f: Facts) -> dict[str, str]:
  s, t = f.settings, f.settings.train
  trained = [bool(choices.active_paths(t, s.num_paths, s.seed, phase)[f.number]) for phase in range(f.version)]
  steps = t.steps_per_phase * sum(trained)
  read = 'public text' if s.data.own_text else 'all text'
  base = f'{s.pretrain.steps:,} steps of {s.pretrain.batch_size:,} rows on {read}' if s.pretrain.steps else 'no steps'
  base += f', from `{f.base_name}`' if f.base_name else ''
  tokens = (s.pretrain.steps * s.pretrain.batch_size + steps * t.batch_size) * s.model.seq_len
  most = 'at most ' if t.phase_s or s.outer.quorum < 1 else ''
  grid = ' x '.join(f'{name} {size}' for name, size in s.grid)
  place = ', '.join(f'{name}={i}' for (name, _), i in zip(s.grid, f.coordinates, strict=True))
  return {
    'text': f'that of {f.owner}, which stays with it' if s.data.own_text else _source(s.data),
    'base model': base,
    **({'grid of paths': grid, 'this path': f'{f.number}, at {place}'} if s.grid else {}),
    'modules': ', '.join(f'`{name}`' for name in f.modules.values()),
    'version': f'{f.version}: as many outer steps, after phases of {t.phase_length}',
    'steps of this path': f'{most}{steps:,} of {t.batch_size:,} rows, after those of the base',
    **({'tokens read in this run': f'{most}{tokens:,}, after those of `{f.base_name}`'} if f.base_name else {}),
    **({} if f.base_name else {'tokens read, with the base': f'{most}{tokens:,}'}),
    'routing': _routing(s),
    'optimizers': f'{s.inner.optimizer} inside the path, {s.outer.optimizer} between paths',
  }


def _routing(s: settings.Settings) -> str:
  routing = s.routing
  if routing.method == 'owner':
    return 'none: each owner has its own paths'
  prefix = f'the first {routing.prefix_tokens} tokens'
  if s.data.format == 'messages':
    return f"{routing.method}, by {prefix} of the user's messages before the first answer"
  if extension.is_reference(routing.method):
    return f"`{routing.method}`, of its trainer's own; {prefix} are not scored"
  return f'{routing.method}, by {prefix}, which are not scored'


def _source(data: settings.Data) -> str:
  if extension.is_reference(data.source):
    return f"documents of `{data.source}`, of its trainer's own"
  if data.source == 'files':
    return ', '.join(f'`{_public_name(pattern)}`' for pattern in fields.globs(data.train))
  return {'stdlib': "Python's own source and documentation"}.get(data.source, f'`{data.name}` by {data.source}')


def _public_name(pattern: str) -> str:
  """Returns a pattern of files as a card may show it: those of the Hub whole, of others the last two names at most.

  A name of wildcards alone, as *.txt, says nothing without its folder.
  """
  if pattern.startswith(remote_files.HUB):
    return pattern
  path = pattern.partition('://')[2] or pattern
  parts = [part for part in path.split('/') if part not in ('', '.', '..')]
  return '/'.join(parts[-2:] if parts[-1:] and parts[-1].startswith('*') else parts[-1:])


def _evaluation(f: Facts) -> dict[str, str]:
  """Returns {description: perplexity}; {} if nothing was measured yet."""
  report = f.report
  if report.get('perplexity') is None:
    return {}
  own = _perplexity(report['perplexity_by_path'][f.number], 'none was')
  rows = {
    'this path, on the documents routed to it': own if f.measured else 'measured of another version only',
    'all paths, each document under its own': _perplexity(report['perplexity']),
    'the base model, on all documents': _perplexity(report['base_perplexity']),
  }
  if report.get('control_perplexity') is not None:
    rows[f'{headline.dense(report)}, on all documents'] = _perplexity(report['control_perplexity'])
  return rows


def _perplexity(x: float | None, instead: str = 'not measured') -> str:
  return instead if x is None else f'{x:.2f}'
