"""Lines about audits, suspended workers and replays of islands, from entries of the report."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

SHOWN = 3  # modules that differ


def in_words(report: Mapping[str, Any]) -> list[str]:
  """Returns lines about the entries `audits`, `suspended` and `replay` of a report, if it has them."""
  lines = []
  if audits := report.get('audits'):
    at = f' ({", ".join(audits["different_at"])})' if audits['different_at'] else ''
    lines.append(
      f'audits: {audits["equal"]} equal, {audits["different"]} different{at}, {audits["given_up"]} given up, '
      f'{audits["seconds"]:.0f} s of workers'
    )
  for entry in report.get('suspended', []):
    lines.append(f'suspended: {entry["worker"]}, by {entry["by"]}: {entry["why"]}')
    lines += [f'  since its last good audit: {_describe(each)}' for each in entry['contributions']]
  return lines + ([describe_replay(report['replay'])] if 'replay' in report else [])


def describe_replay(replay: Mapping[str, Any]) -> str:
  """Returns a line about how a replay compares with its run."""
  count, differing = replay['modules'], replay['differing']
  if not differing:
    return f'replay: all {count} versions of modules are those of the run, to the bit'
  first = ', '.join(f'{key} in version {version}' for key, version in differing[:SHOWN])
  return (
    f'replay: {len(differing)} of {count} versions of modules differ from those of the run, first {first}; this '
    'machine or its libraries compute differently, or the text is another'
  )


def _describe(entry: dict[str, Any]) -> str:
  by_versions: dict[str, list[str]] = {}
  for module, versions in entry['modules'].items():
    by_versions.setdefault(ranges(versions), []).append(module)
  where = '; '.join(f'versions {versions} of {", ".join(modules)}' for versions, modules in by_versions.items())
  return f'path {entry["path"]}, phases {ranges(entry["phases"])}, in {where or "no version of a module"}'


def ranges(numbers: Iterable[int]) -> str:
  """Returns rising numbers in words: '1-3, 5'."""
  groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
  runs = [[number for _, number in group] for _, group in groups]
  return ', '.join(str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)
