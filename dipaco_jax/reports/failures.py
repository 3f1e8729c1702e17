"""Failures that a run survived: paths left out of outer steps, and inner steps that were skipped."""

import pathlib
from typing import Any, NamedTuple

from dipaco_jax.telemetry import metrics_log

MARKS = b'"excluded": {', b'"skipped_by_path": ['


class Failures(NamedTuple):
  excluded: list[dict[str, Any]]  # phase (from 1), step, path, why, and in islands worker; in the order of phases
  skipped: dict[int, int]  # inner steps that were not finite, by path


def read_failures(workdir: pathlib.Path) -> Failures:
  """Reads the rows of phases in metrics.jsonl."""
  excluded, skipped = [], dict[int, int]()
  for row in metrics_log.read_rows(workdir, *MARKS):
    about = {'phase': row['phase'], 'step': row['step']}
    for path, why in row.get('excluded', {}).items():
      reason = why if isinstance(why, dict) else {'why': why}
      excluded.append(about | {'path': int(path)} | reason)
    for path, count in enumerate(row.get('skipped_by_path', [])):
      if count:
        skipped[path] = skipped.get(path, 0) + count
  return Failures(excluded, skipped)


def in_words(failures: Failures, most: int = 5) -> list[str]:
  """Returns a line for each failure; of many, the last ones, with how many there were."""
  lines = [
    f'path {x["path"]} was left out of the outer step of phase {x["phase"]} (step {x["step"]:,}'
    + (f', worker {x["worker"]}' if x.get('worker') else '')
    + f'): {x["why"]}'
    for x in failures.excluded
  ]
  if len(lines) > most:
    lines = [f'{len(lines)} times a path was left out of an outer step; the last {most}:', *lines[-most:]]
  if failures.skipped:
    paths = ', '.join(f'{count} of path {path}' for path, count in sorted(failures.skipped.items())[:most])
    lines.append(f'inner steps whose loss or gradient was not finite were skipped: {paths}')
  return lines
