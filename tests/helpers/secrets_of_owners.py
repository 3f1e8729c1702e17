"""What may not leave an owner, as windows of bytes to look for, and everything that leaves, as bytes to look in."""

import contextlib
import http.client
import json
import pathlib
import re
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import sqlalchemy as sa

from dipaco_jax.data import loader, sequences
from dipaco_jax.islands import island, owner_store, state_facts
from dipaco_jax.registry import database
from dipaco_jax.storage import backends, object_store, tensors

TEXT_BYTES, IDS, ARRAY_BYTES = 24, 16, 64  # in a window
FEWEST_BYTES = 12  # different ones in a window of an array: else it is of zeros or ones, which anyone may have
NUMBERS = re.compile(rf'\d+(?:\s*,\s*\d+){{{IDS - 1},}}')


class Sent:
  """Everything that processes give to the registry and to a place, once it is recorded."""

  def __init__(self):
    self.statements: list[bytes] = []
    self.objects: dict[str, bytes] = {}
    self.requests: list[bytearray] = []  # of each connection to a gateway, all bytes

  def blobs(self) -> list[bytes]:
    return [*self.statements, *self.objects.values(), *map(bytes, self.requests)]

  @contextlib.contextmanager
  def recorded(self, place: pathlib.Path) -> Iterator[None]:
    """Records the parameters of all SQL statements, all objects below a place, and all bytes of HTTP requests."""
    with pytest.MonkeyPatch.context() as patch:
      connect = database._connect

      def connected(*args):
        engine = connect(*args)
        sa.event.listen(engine, 'before_cursor_execute', lambda *given: self.note(given[2], given[3]))
        return engine

      patch.setattr(database, '_connect', connected)
      for name in ('put', 'put_file', 'create'):
        patch.setattr(backends.Folder, name, self.noting(getattr(backends.Folder, name), place))
      patch.setattr(http.client.HTTPConnection, 'send', self.noting_requests(http.client.HTTPConnection.send))
      yield

  def note(self, statement: str, parameters) -> None:
    self.statements.append(f'{statement} {parameters!r}'.encode())

  def noting_requests(self, real):
    def noted(connection, data):
      data = data.read() if hasattr(data, 'read') else bytes(data)
      if 'recorded' not in connection.__dict__:
        connection.recorded = bytearray()
        self.requests.append(connection.recorded)
      connection.recorded.extend(data)
      return real(connection, data)

    return noted

  def noting(self, real, place: pathlib.Path):
    def noted(backend, name, data):
      if backend.root == place.resolve():
        self.objects[name] = data.read_bytes() if isinstance(data, pathlib.Path) else bytes(data)
      return real(backend, name, data)

    return noted


class Secrets:
  """Windows of an owner's text, token ids, rows, private modules and AdamW states, by kind."""

  def __init__(self):
    self.windows: dict[str, set[bytes]] = {}
    self.ids: set[tuple[int, ...]] = set()

  def add(self, kind: str, data: bytes, size: int, step: int = 1) -> None:
    self.windows.setdefault(kind, set()).update(data[i : i + size] for i in range(0, len(data) - size + 1, step))

  def add_ids(self, kind: str, ids: np.ndarray) -> None:
    for dtype in ('<u2', '<i4'):  # int16 is as uint16
      itemsize = np.dtype(dtype).itemsize
      self.add(f'{kind} {dtype}', ids.astype(dtype).tobytes(), IDS * itemsize, itemsize)
    self.ids.update(tuple(ids[i : i + IDS].tolist()) for i in range(len(ids) - IDS + 1))

  def add_array(self, kind: str, array: np.ndarray) -> None:
    data = np.ascontiguousarray(array).tobytes()
    found = (data[i : i + ARRAY_BYTES] for i in range(0, len(data) - ARRAY_BYTES + 1, 4))
    self.windows.setdefault(kind, set()).update(window for window in found if len({*window}) >= FEWEST_BYTES)

  def together(self, other: 'Secrets') -> 'Secrets':
    """The secrets of both, to be looked for at once."""
    both = Secrets()
    both.windows = {kind: windows | other.windows[kind] for kind, windows in self.windows.items()}
    both.ids = self.ids | other.ids
    return both

  def find(self, blobs: Iterable[bytes]) -> set[str]:
    """Returns the kinds of secrets that are in these bytes, at any place."""
    found = set()
    by_size: dict[int, dict[str, set[bytes]]] = {}
    for kind, windows in self.windows.items():
      by_size.setdefault(len(next(iter(windows))), {})[kind] = windows
    for blob in blobs:
      for size, kinds in by_size.items():
        seen = {blob[i : i + size] for i in range(len(blob) - size + 1)}
        found |= {kind for kind, windows in kinds.items() if not seen.isdisjoint(windows)}
      for numbers in NUMBERS.findall(blob.decode(errors='replace')):
        ids = [*map(int, numbers.split(','))]
        if any(tuple(ids[i : i + IDS]) in self.ids for i in range(len(ids) - IDS + 1)):
          found.add('ids in JSON')
    return found


def of_store(file: pathlib.Path, store: pathlib.Path, path: int, seq_len: int, levels: frozenset[str]) -> Secrets:
  """Returns the secrets of an owner with one path: its file of text, and what a run has left in its store."""
  secrets = Secrets()
  for line in file.read_text().splitlines():
    secrets.add('text', json.loads(line)['text'].encode(), TEXT_BYTES)
  train = sequences.Sequences(store / 'sequences', 'train')
  for sequence in train.read(range(len(train))):
    secrets.add_ids('ids', sequence.tokens)
  for name in ('train', 'holdout'):
    rows = store / 'shards' / '0' / str(path) / f'{name}.array_record'
    tokens_NL, _ = loader.read_rows(str(rows), 0, loader.cached_reader(str(rows)).num_records(), seq_len)
    for tokens_L in tokens_NL:
      secrets.add_ids(f'rows of {name}', np.trim_zeros(tokens_L, 'b'))
  storage = object_store.open_storage(str(store))
  names = [name for name in storage.names(island.OBJECTS) if owner_store.is_private(name, levels)]
  for name in names:
    if name.startswith(f'{island.OBJECTS}/modules'):
      for array in tensors.from_bytes(storage.fetch(name)).values():
        secrets.add_array('modules', array)
  states = sorted(name for name in names if name.startswith(f'{island.OBJECTS}/{island.STATES}'))
  for first in [name for name in states if '-0-' in name]:
    phase = first.partition('-0-')[0]
    parts = sorted((n for n in states if n.startswith(f'{phase}-')), key=lambda n: int(n.split('-')[1]))
    state = state_facts.whole([tensors.from_bytes(storage.fetch(part)) for part in parts])
    for place, array in state.items():
      if array.dtype.kind == 'f' and array.size > 1:
        secrets.add_array('weights in states' if place.startswith("['own']") else 'AdamW states', array)
  return secrets
