"""The card of an exported path: how it was trained, what was measured, how to load it (templates/model_card.md)."""

import dataclasses
from typing import Any

import dipaco_jax
from dipaco_jax.core import extension, fields, outer, settings
from dipaco_jax.huggingface import families
from dipaco_jax.reports import headline, pages


@dataclasses.dataclass(frozen=True)
class Facts:
  settings: settings.Settings
  number: int
  coordinates: tuple[int, ...]
  version: int
  modules: dict[str, str]  # by level, its name in the workdir
  measured: bool  # whether the report is about this version of the path
  report: dict[str, Any]  # what report.json holds; nothing where there is none yet
  dtype: str
  parameters: int
  family: families.Family
  adds_bos: bool  # the tokenizer puts a token in front of a text
  has_pieces: bool  # it is a SentencePiece model


def render(facts: Facts) -> str:
  """Returns README.md, with the heading that model hubs read."""
  about = {'settings': facts.settings, 'paths': facts.settings.num_paths, 'version': dipaco_jax.__version__}
  return pages.render('model_card.md', facts=facts, training=_training(facts), evaluation=_evaluation(facts), **about)


def _training(f: Facts) -> dict[str, str]:
  s, t = f.settings, f.settings.train
  trained = [bool(outer.active_paths(t, s.num_paths, s.seed, phase)[f.number]) for phase in range(f.version)]
  steps = t.steps_per_phase * sum(trained)
  base = f'{s.pretrain.steps:,} steps of {s.pretrain.batch_size:,} rows on all text' if s.pretrain.steps else 'no steps'
  base += f', from `{s.pretrain.init}`' if s.pretrain.init else ''
  tokens = (s.pretrain.steps * s.pretrain.batch_size + steps * t.batch_size) * s.model.seq_len
  grid = ' x '.join(f'{name} {size}' for name, size in s.grid)
  place = ', '.join(f'{name}={i}' for (name, _), i in zip(s.grid, f.coordinates, strict=True))
  return {
    'text': _source(s.data),
    'base model': base,
    **({'grid of paths': grid, 'this path': f'{f.number}, at {place}'} if s.grid else {}),
    'modules': ', '.join(f'`{name}`' for name in f.modules.values()),
    'version': f'{f.version}: as many outer steps, {t.steps_per_phase:,} inner steps apart',
    'steps of this path': f'{steps:,} of {t.batch_size:,} rows, after those of the base',
    'tokens read, with the base': f'{tokens:,}',
    'routing': _routing(s.routing),
    'optimizers': f'{s.inner.optimizer} inside the path, {s.outer.optimizer} between paths',
  }


def _routing(routing: settings.Routing) -> str:
  prefix = f'the first {routing.prefix_tokens} tokens'
  if extension.is_reference(routing.method):
    return f"`{routing.method}`, of its trainer's own; no loss counts {prefix}"
  return f'{routing.method}, by {prefix}, which no loss counts'


def _source(data: settings.Data) -> str:
  if extension.is_reference(data.source):
    return f"documents of `{data.source}`, of its trainer's own"
  if data.source == 'files':
    return ', '.join(f'`{pattern}`' for pattern in fields.globs(data.train))
  return {'stdlib': "Python's own source and documentation"}.get(data.source, f'`{data.name}` by {data.source}')


def _evaluation(f: Facts) -> dict[str, str]:
  """Returns perplexities by what they are of; {} where nothing was measured yet."""
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
