"""Tables of a report: each model by kind of text and by path, with the differences' intervals, and its training."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dipaco_jax.reports import headline
from dipaco_jax.reports.amounts import count
from dipaco_jax.reports.plot_style import Curve
from dipaco_jax.reports.run_data import Run

MAX_ROWS = 64
Table = tuple[list[tuple[str, ...]], tuple[str, ...]]  # rows, head


def by_kind(r: dict[str, Any], what: str = 'kind') -> Table | None:
  """Returns a row for each kind of text that was validated on, the largest first; None if that is not known.

  `what`: what kinds of text are called, such as 'owner'.
  """
  documents = r['validation_documents_by_domain'] or {}
  tokens = r['validation_tokens_by_domain'] or {}
  kinds = sorted((kind for kind, n in documents.items() if n), key=lambda kind: -tokens.get(kind, 0))
  return _table(r, what, 'by_domain', [(kind, kind) for kind in kinds[:MAX_ROWS]])


def by_path(r: dict[str, Any], names: Sequence[str]) -> Table | None:
  """Returns a row for each path that validation text was routed to; None if that is not known, or of one path.

  `names`: what paths are called.
  """
  documents = r['validation_documents_by_path'] or []
  paths = [path for path, n in enumerate(documents) if n]
  return _table(r, 'path', 'by_path', [(names[path], path) for path in paths[:MAX_ROWS]]) if r['paths'] > 1 else None


def by_answer(r: dict[str, Any]) -> Table | None:
  """Returns a row for the first answers of conversations, for the second ones...; None if text is no conversation."""
  base, paths = r['base_perplexity_by_answer'], r['perplexity_by_answer']
  if not base or not paths:
    return None
  rows: list[tuple[str, ...]] = [(place, f'{base[place]:.2f}', f'{paths[place]:.2f}') for place in paths]
  return rows, ('answer', 'base', 'paths')


def _table(r: dict[str, Any], what: str, suffix: str, groups: list[tuple[str, Any]]) -> Table | None:
  if not groups:
    return None

  def value(name: str, group: Any) -> Any:
    figure = r.get(f'{name}_{suffix}')
    return None if figure is None else figure.get(group) if isinstance(figure, dict) else figure[group]

  def perplexity(name: str) -> Callable[[Any], str]:
    return lambda group: '-' if (x := value(name, group)) is None else f'{x:.2f}'

  def change(name: str) -> Callable[[Any], str]:
    return lambda group: headline.signed_change(value(name, group), value(f'{name}_interval', group))

  has_control = r['ratio_to_control'] is not None
  columns: list[tuple[str, Callable[[Any], str]]] = [
    ('documents', lambda group: f'{value("validation_documents", group):,}'),
    ('base', perplexity('base_perplexity')),
    *([('dense control', perplexity('control_perplexity'))] if has_control else []),
    ('paths', perplexity('perplexity')),
    *([('paths against dense control', change('ratio_to_control'))] if has_control else []),
    ('paths against base', change('ratio_to_base')),
  ]
  rows = [(name, *(cell(group) for _, cell in columns)) for name, group in groups]
  return rows, (what, *(name for name, _ in columns))


def of_training(run: Run, best_of_control: int | None, best_of_paths: tuple[list[int], int] | None) -> Table | None:
  """Returns how base, each path and dense control were trained, side by side; None before the paths are trained.

  `best_of_control` is the phase that early stopping takes the control from, `best_of_paths` the same for all paths,
  with the last phase.
  """
  r = run.report
  s = run.settings
  h = run.history
  if not r['steps']:
    return None
  rates = *h.learning_rate, h.control_learning_rate
  losses = h.base, h.training, h.control_training
  by_path = r['epochs_by_path']
  rows = [
    ('sequential steps', _number(r['pretrain_steps']), _number(r['steps']), _number(r['control_steps'])),
    ('rows in a step', _number(s.pretrain.batch_size), _number(s.train.batch_size), _number(s.train.batch_size)),
    ('tokens read', count(r['pretrain_tokens']), f'{count(r["paths_tokens"])} (all paths)', count(r['control_tokens'])),
    ('times that its text was read', _epochs(r['pretrain_epochs']), _epochs(by_path), _epochs(r['control_epochs'])),
    ('highest learning rate', *(_rate(curve, np.max) for curve in rates)),
    ('last learning rate', *(_rate(curve, lambda values: values[-1]) for curve in rates)),
    ('last training loss, nats', *(_last_loss(curve) for curve in losses)),
    ('taken from phase', 'not stopped early', _phases(best_of_paths), _number(best_of_control)),
  ]
  size = 4 if r['control_steps'] else 3
  names = 'base', 'each path' if r['paths'] > 1 else 'path', 'dense control'
  return [row[:size] for row in rows], ('', *names)[:size]


def _number(value: int | None) -> str:
  return '-' if value is None else f'{value:,}'


def _epochs(value: Any) -> str:
  return '-' if not value else headline.span(value if isinstance(value, list) else [value])


def _rate(curve: Curve, choose: Callable[[np.ndarray], float]) -> str:
  return f'{choose(np.ravel(curve.values)):.3g}' if len(curve.values) else '-'


def _last_loss(curve: Curve) -> str:
  values = np.ravel(curve.values[-1:])
  known = values[np.isfinite(values)].tolist()
  return headline.span(known) if known else '-'


def _phases(best: tuple[list[int], int] | None) -> str:
  if best is None:
    return '-'
  versions, last = best
  low = min(versions)
  return f'{last}' if low == last else f'{low} to {max(versions)} of {last}'
