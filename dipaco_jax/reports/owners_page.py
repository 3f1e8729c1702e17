"""The page of a run whose text stays with its owners: perplexities on the owners' own hold-outs."""

from collections.abc import Mapping
from typing import Any

from dipaco_jax.reports import audit_lines, pages

HEAD = 'owner', 'paths', 'documents', 'tokens', 'targets of the hold-out', 'perplexity'


def render(report: Mapping[str, Any]) -> str:
  """Returns the page, from the content of report.json."""
  rows = [_row(owner, about, report['path_names']) for owner, about in report['owners'].items()]
  figures = [
    ['perplexity over all hold-outs', _number(report['perplexity'])],
    ['phases', f'{report["phases"]:,}'],
    ['time', f'{report["wall_s"]:,.0f} s'],
    ['SHA-256 of the shared modules', report['modules_sha256']],
    ['SHA-256 of the config', report['config_sha256']],
  ]
  return pages.render(
    'owners.html', owners=[HEAD, *rows], figures=figures, changes=[*changes(report), *audit_lines.in_words(report)]
  )


def changes(report: Mapping[str, Any]) -> list[str]:
  """Returns a line for each owner that joined or left while the run trained."""
  lines = []
  for owner, about in report['owners'].items():
    if 'joined_in_phase' in about:
      lines.append(f'{owner} joined in phase {about["joined_in_phase"]} of {report["phases"]}')
    if 'left_after_phase' in about:
      lines.append(f'{owner} left after phase {about["left_after_phase"]} of {report["phases"]}')
  return lines


def results(report: Mapping[str, Any]) -> list[str]:
  """Returns the perplexity of each owner in words."""
  measured = [f'{owner}: {_number(about["perplexity"])} on its hold-out' for owner, about in report['owners'].items()]
  return [*measured, *changes(report)]


def _row(owner: str, about: Mapping[str, Any], path_names: list[str]) -> list[str]:
  counts = [f'{about[name]:,.0f}' for name in ('documents', 'tokens', 'holdout_targets')]
  return [owner, ' '.join(path_names[path] for path in about['paths']), *counts, _number(about['perplexity'])]


def _number(value: float | None) -> str:
  return '-' if value is None else f'{value:.2f}'
