"""What a workdir says of its run and its stages, for whoever reads it: status, reports and roles. Loads no JAX."""

import contextlib
import pathlib
from collections.abc import Sequence
from typing import Any

from dipaco_jax.core import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import seals

MANY = 4  # paths more than these are not named


def read_settings(workdir: pathlib.Path) -> settings.Settings:
  """Raises InputError where there is no run, or one of another program or version."""
  file = workdir / 'config.json'
  if not file.exists():
    raise InputError(f'--workdir={workdir}: there is no run here (no config.json); name the directory of one')
  try:
    return settings.of_run(seals.loads(file.read_bytes()))
  except (ValueError, AttributeError, TypeError) as e:
    raise InputError(
      f'--workdir={workdir}: its config.json is not that of a run, or damaged ({e}); name another directory, or, if it '
      'was that of a run, remove it, and the command of the run makes it again'
    ) from e


def read_stages(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
  """{stage: {'digest', 'wall_s', 'result'}} of the stages that are complete, in their order."""
  files = {name: workdir / 'stages' / f'{name}.json' for name in settings.STAGES}
  found = {name: file for name, file in files.items() if file.exists()}
  return {name: seals.read_json(file, 'digest', 'wall_s', 'result') for name, file in found.items()}


def read_results(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
  """{stage: what it found}; where text was sharded anew, 'route' tells of the last shards."""
  results = {name: stage['result'] for name, stage in read_stages(workdir).items()}
  for found in results.get('train', {}).get('rounds', []):
    results['route'] = results['route'] | found
  return results


def read_environment(workdir: pathlib.Path) -> dict[str, Any]:
  """What the run is made on; empty where that is not known."""
  try:
    return seals.read_json(workdir / 'environment.json')
  except seals.Damaged:
    return {}


def read_seconds(workdir: pathlib.Path) -> dict[str, float]:
  """{stage: seconds so far} of one that is not complete."""
  found = {}
  for name in settings.STAGES:
    with contextlib.suppress(OSError, ValueError):
      found[name] = float((workdir / 'stages' / f'{name}.seconds').read_text())
  return found


def too_little(tokens_by_path: Sequence[int], floor: int) -> str:
  """Names paths with less validation text than `data.min_validation_tokens`; nothing where all have enough."""
  short = [path for path, tokens in enumerate(tokens_by_path) if tokens < floor]
  if not short:
    return ''
  named = ', '.join(f'path {path} has {tokens_by_path[path]:,}' for path in short[:MANY])
  others = len(short) - MANY
  more = f', {others} more {"path has" if others == 1 else "paths have"} fewer too' if others > 0 else ''
  return (
    f'validation text is short of config.data.min_validation_tokens={floor:,} tokens for {len(short)} of '
    f'{len(tokens_by_path)} paths ({named}{more}): their figures may be chance; give more text, or fewer paths'
  )
