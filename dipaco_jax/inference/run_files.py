"""The files of a run, in a folder, s3:// or gs://: read as they were written, or rejected."""

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import safetensors.numpy

from dipaco_jax.storage import object_store, remedies, seals

PATIENCE_S = 30  # for a bucket that does not answer


class RunFiles:
  """Reads files of a run by name. Raises object_store.Missing, or seals.Damaged if one is not as it was written."""

  def __init__(self, workdir: str):
    self.workdir = workdir
    self.storage = object_store.open_storage(workdir, PATIENCE_S)

  def read(self, name: str, sha256: str = '') -> bytes:
    """Reads a file; without a sha256, its seal says which it should have."""
    folder, _, file = f'./{name}'.rpartition('/')

    def read_seal(beside: str) -> str | None:
      try:
        return bytes(self.storage.fetch(f'{folder}/{beside}'[2:])).decode(errors='replace')
      except object_store.Missing:
        return None

    data = bytes(self.storage.fetch(name))
    expected = sha256 or seals.recorded(file, read_seal)
    if expected and hashlib.sha256(data).hexdigest() != expected:
      raise self.damaged(name)
    return data

  def read_json(self, name: str, *needed: str) -> dict[str, Any]:
    """Reads a JSON object that should have the keys `needed`."""
    if (content := seals.loads(self.read(name), *needed)) is None:
      raise self.damaged(name)
    return content

  def read_arrays(self, name: str, sha256: str = '') -> dict[str, np.ndarray]:
    try:
      return safetensors.numpy.load(self.read(name, sha256))
    except safetensors.SafetensorError as e:
      raise self.damaged(name) from e

  def required_arrays(self, name: str, sha256: str = '') -> dict[str, np.ndarray]:
    with self.required(name):
      return self.read_arrays(name, sha256)

  def damaged(self, name: str) -> seals.Damaged:
    """Returns the error that explains a problem with a file, and the fix if there is one."""
    file = self.storage.local_path(name)
    message = remedies.explain(file) if file else f'{self.storage.url_of(name)} is missing or damaged'
    return seals.Damaged(name, message)

  @contextlib.contextmanager
  def required(self, name: str) -> Iterator[None]:
    """Makes a missing file a damaged run: a finished stage has written it."""
    try:
      yield
    except object_store.Missing as e:
      raise self.damaged(name) from e
