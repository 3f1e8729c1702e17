"""Tables of a report: each model by kind of text and by path, with the differences' intervals."""

from collections.abc import Callable
from typing import Any

from dipaco_jax.reports import headline

MAX_ROWS = 64
Table = tuple[list[tuple[str, ...]], tuple[str, ...]]  # rows, head


def by_kind(r: dict[str, Any]) -> Table | None:
  """Returns a row for each kind of text that was validated on, the largest first; None where that is not known."""
  documents = r['validation_documents_by_domain'] or {}
  tokens = r['validation_tokens_by_domain'] or {}
  kinds = sorted((kind for kind, n in documents.items() if n), key=lambda kind: -tokens.get(kind, 0))
  return _table(r, 'kind', 'by_domain', [(kind, kind) for kind in kinds[:MAX_ROWS]])


def by_path(r: dict[str, Any]) -> Table | None:
  """Returns a row for each path that validation text was routed to; None where that is not known, or of one path."""
  documents = r['validation_documents_by_path'] or []
  paths = [path for path, n in enumerate(documents) if n]
  return _table(r, 'path', 'by_path', [(f'path {path}', path) for path in paths[:MAX_ROWS]]) if r['paths'] > 1 else None


def _table(r: dict[str, Any], what: str, suffix: str, groups: list[tuple[str, Any]]) -> Table | None:
  if not groups:
    return None

  def value(name: str, group: Any) -> Any:
    found = r.get(f'{name}_{suffix}')
    return None if found is None else found.get(group) if isinstance(found, dict) else found[group]

  def perplexity(name: str) -> Callable[[Any], str]:
    return lambda group: '-' if (x := value(name, group)) is None else f'{x:.2f}'

  def change(name: str) -> Callable[[Any], str]:
    return lambda group: headline.signed_change(value(name, group), value(f'{name}_interval', group))

  has_control = r['ratio_to_control'] is not None
  columns: list[tuple[str, Callable[[Any], str]]] = [
    ('documents', lambda group: f'{value("validation_documents", group):,}'),
    ('base', perplexity('base_perplexity')),
    *([('dense', perplexity('control_perplexity'))] if has_control else []),
    ('paths', perplexity('perplexity')),
    *([('paths against dense', change('ratio_to_control'))] if has_control else []),
    ('paths against base', change('ratio_to_base')),
  ]
  rows = [(name, *(cell(group) for _, cell in columns)) for name, group in groups]
  return rows, (what, *(name for name, _ in columns))
