"""Samples on a page: the same beginnings of texts, continued by each model side by side (templates/samples.html)."""

from collections.abc import Mapping, Sequence
from typing import Any


def page_content(samples: Mapping[str, Any] | None, report: Mapping[str, Any]) -> dict[str, Any] | None:
  """Returns what templates/samples.html shows; None if a run has no samples yet."""
  if not samples:
    return None
  latest = samples['while_training'][-1] if samples['while_training'] else None
  if 'paths' in samples['texts']:
    newest, when = {'paths': samples['paths'], 'texts': samples['texts']['paths']}, ''
  elif latest:
    newest, when = latest, f'after phase {latest["phase"]}'
  else:
    return None
  return {
    'when': when,
    'temperature': samples['temperature'],
    'texts': [
      {
        'domain': prompt['domain'],
        'prompt': prompt['prompt'],
        'rows': _rows(i, prompt, samples['texts'], newest, report['paths'] > 1),
        'earlier': [
          (f'phase {entry["phase"]}, {_path(entry["paths"], i, report["paths"] > 1)}', entry['texts'][i])
          for entry in samples['while_training']
          if entry is not newest
        ],
      }
      for i, prompt in enumerate(samples['prompts'])
    ],
  }


def _rows(
  i: int, prompt: Mapping[str, Any], texts: Mapping[str, Any], newest: Mapping[str, Any], many: bool
) -> list[tuple[str, str]]:
  """Returns (whose, text) of a prompt's continuations."""
  control = [('dense control', texts['control'][i])] if 'control' in texts else []
  own = (_path(newest['paths'], i, many), newest['texts'][i])
  return [('original', prompt['original']), ('base', texts['base'][i]), *control, own]


def _path(paths: Sequence[int], i: int, many: bool) -> str:
  return f'path {paths[i]}' if many else 'path'
