"""An owner's store: a folder or a bucket with all that must not leave the owner, beside the place that all share.

To its worker the two are one storage: the name of an object says where it is. In the store are the text, tokenized and
sharded, the states of the owner's paths, and the modules that only one path goes through. An owner's worker writes
nothing to the shared place but what its paths send of levels that they share with others.
"""

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dipaco_jax.algorithm import grid as grids
from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.config import owners, settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.islands.island import DIFFERENCES, OBJECTS, OUTER, OWN_TREES, STATES
from dipaco_jax.storage import files, remedies
from dipaco_jax.storage.object_store import Storage

MARK = remedies.OWNERS_MARK
KEY = 'own_text.key'
SENT = f'{OBJECTS}/paths/'  # of what paths send


class OwnerStorage:
  """The storage of an owner's worker: what `is_private` in the store, all else in the shared place."""

  def __init__(self, shared: Storage, store: Storage, settings: settings_lib.Settings):
    self.shared, self.store = shared, store
    self.levels = private_levels(settings)
    store.verified_trees = self.verified_trees = shared.verified_trees
    self.url, self.patience_s = shared.url, shared.patience_s
    self.reading, self.writing = shared.reading, shared.writing

  @property
  def bytes_in(self) -> int:
    """Bytes that were read from the shared place."""
    return self.shared.bytes_in

  @property
  def bytes_out(self) -> int:
    """Bytes that were written to the shared place."""
    return self.shared.bytes_out

  def of(self, name: str) -> Storage:
    """Returns where an object or a directory is."""
    return self.store if is_private(name, self.levels) else self.shared

  def to(self, name: str) -> Storage:
    """Returns where an object is written. Raises PermissionError if it would leave the owner and should not."""
    storage = self.of(name)
    if storage is self.shared and (not name.startswith(SENT) or level_sent(name) in self.levels):
      raise PermissionError(f'{name} would leave the store of its owner')
    return storage

  def write(self, name: str, data: files.Data, sha256: str = '') -> str:
    return self.to(name).write(name, data, sha256)

  def write_file(self, name: str, file: Path) -> str:
    return self.to(name).write_file(name, file)

  def read(self, name: str, sha256: str) -> memoryview:
    return self.of(name).read(name, sha256)

  def read_file(self, name: str, sha256: str, file: Path):
    self.of(name).read_file(name, sha256, file)

  def fetch(self, name: str) -> memoryview:
    return self.of(name).fetch(name)

  def exists(self, name: str) -> bool:
    return self.of(name).exists(name)

  def delete(self, name: str):
    self.to(name).delete(name)

  def names(self, prefix: str) -> list[str]:
    return self.of(prefix).names(prefix)

  def local_path(self, name: str) -> Path | None:
    return self.of(name).local_path(name)

  def url_of(self, name: str) -> str:
    return self.of(name).url_of(name)

  def upload_tree(self, folder: Path, prefix: str, others: Callable[[], dict[str, str]] = dict) -> str:
    return self.to(prefix).upload_tree(folder, prefix, others)

  def download_tree(self, prefix: str, folder: Path, sha256: str = ''):
    self.of(prefix).download_tree(prefix, folder, sha256)


def private_levels(s: settings_lib.Settings) -> frozenset[str]:
  """Returns the levels whose modules only one path goes through."""
  grid = Grid(s.grid)
  return frozenset(level.name for level in grids.make_levels(grid, s.levels) if grid.paths_through(level) == 1)


def is_private(name: str, levels: frozenset[str]) -> bool:
  """Returns whether an object or a directory is of an owner's text, of a path's state, or of a module of one path.

  Modules of version 0 are parts of the public base model.
  """
  kind, *rest = name.removeprefix(f'{OBJECTS}/').split('/')
  if not name.startswith(f'{OBJECTS}/'):
    return kind in OWN_TREES or name in [f'{tree}.index.json' for tree in OWN_TREES]
  if kind in ('modules', DIFFERENCES, OUTER):
    return len(rest) > 1 and rest[0] != '0' and rest[1] in levels
  return kind == STATES


def level_sent(name: str) -> str:
  """Returns the level of a message, from the name of its object, `objects/paths/PHASE/PATH-LEVEL-DIGEST`."""
  return name.rpartition('/')[2].partition('-')[2].rpartition('-')[0]


def check_options(owner: str, globs: tuple[str, ...], store: str, s: settings_lib.Settings):
  """Raises InputError, before any work, if the options of an owner's worker do not fit the config or each other."""
  if not s.data.own_text:
    if owner:
      fix = "set config.data.own_text=True and config.routing.method='owner', or leave out --owner"
      raise InputError(f'--owner={owner}: the text of this config is in one place; {fix}')
    return
  if not owner:
    return
  if owner not in (known := owners.names(Grid(s.grid))):
    fix = f'to join the run, ask its keeper for `python -m dipaco_jax.owners add {owner}`'
    raise InputError(f'--owner={owner}: this run has the owners {", ".join(known)}; {fix}')
  if not globs:
    raise InputError(f"--data is missing: name the text of {owner}, as --data='my/*.txt'")
  if not store:
    raise InputError(f'--store is missing: name a folder or a bucket of {owner}, which nobody else can read')


def check_apart(storage: Storage, store: Storage):
  """Raises InputError if one of store and workdir is inside the other, or they are the same."""
  shared_url, store_url = (f'{place.url.rstrip("/")}/' for place in (storage, store))
  if shared_url.startswith(store_url) or store_url.startswith(shared_url):
    raise InputError(f'--store={store.url} and --workdir={storage.url} should be apart: name another store')


def check_free(store: Storage, local: Path):
  """Raises InputError if a store has other files than those of a run."""
  here = {file.name for file in local.iterdir() if file.name[0] != '.'} if local.exists() else set()
  is_begun = store.exists(MARK) or 'config.json' in here
  if store.local_path('') is not None and not is_begun and (others := here - {'lost+found'}):
    raise InputError(f'--store={store.url} contains other files ({min(others)}): name a folder of its own')


def settle(store: Storage, run_id: str, owner: str):
  """Marks a store as that of an owner in a run. Raises InputError if it is of another."""
  mark = json.dumps({'owner': owner, 'run': run_id}).encode()
  if (standing := store.agree(MARK, mark)) != mark:
    raise InputError(
      f'--store={store.url} is that of {_describe(standing)}: name another store for {owner} in this run'
    )


class Key(NamedTuple):
  """The secret of a store, by which digests of its text are keyed, so that nobody else can compare them."""

  secret: str  # hexadecimal
  replaces: str  # sha256 of the fact of this text that was there when the key was made: of a store that was lost


def take_key(store: Storage, published: str) -> Key:
  """Returns the key of a store, made once. `published`: sha256 of the fact of its owner's text, '' if there is none."""
  new = json.dumps({'key': secrets.token_hex(32), 'replaces': published}).encode()
  try:
    about: Any = json.loads(store.agree(KEY, new))
    return Key(str(about['key']), str(about['replaces']))
  except (ValueError, KeyError, TypeError) as e:
    raise InputError(f'{store.url_of(KEY)} is damaged: remove it, and a new key is made') from e


def _describe(mark: bytes) -> str:
  """Says whose store has this mark."""
  try:
    about: Any = json.loads(mark)
    return f'{about["owner"]} in run {about["run"]}'
  except (ValueError, KeyError, TypeError):
    return 'another run'
