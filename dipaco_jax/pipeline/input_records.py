"""`inputs.json` of a workdir: digests of what its stages have read from outside it. Loads no JAX."""

import logging
import pathlib
from typing import Any, NamedTuple

from dipaco_jax.storage import publishing, seals

FILE = 'inputs.json'


class Inputs(NamedTuple):
  """Recorded inputs of a run."""

  files: dict[str, list[Any]]  # of files on this machine, see `content.Digests`
  stages: dict[str, dict[str, dict[str, Any]]]  # {stage: {field: {'digest', 'files': {path: digest}}}}

  def digests(self, stage: str) -> dict[str, str]:
    """Returns {field: digest} of the inputs that a stage has read."""
    return {field: about['digest'] for field, about in self.stages.get(stage, {}).items()}


def read_inputs(workdir: pathlib.Path) -> Inputs:
  """Returns the recorded inputs of a run; they are empty if it has read none."""
  file = workdir / FILE
  if not file.exists():
    return Inputs({}, {})
  try:
    record = seals.read_json(file, 'files', 'stages')
  except seals.Damaged:
    logging.warning('%s is damaged: it is unknown whether text and models have changed since the run began', file)
    return Inputs({}, {})
  return Inputs(record['files'], record['stages'])


def write_inputs(workdir: pathlib.Path, inputs: Inputs) -> None:
  """Writes the inputs of a run."""
  publishing.write_json(workdir / FILE, inputs._asdict())
