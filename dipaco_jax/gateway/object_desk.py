"""Objects for workers: which may be read, which are accepted, and whether facts name what was accepted.

An offered object lies aside until it was checked; only then it gets its name, and only if there is no such object yet.
Names end in the first digits of the content's sha256, so an object that has another content than its name says is
damaged, and may be replaced.
"""

import collections
import hashlib
import pathlib
import secrets
import threading
from collections.abc import Iterator
from typing import Any, cast

from dipaco_jax.core import json_text
from dipaco_jax.gateway import authority, held_tasks, object_checks, requests
from dipaco_jax.gateway.object_checks import Unexpected
from dipaco_jax.gateway.refusals import Refused, forbidden, malformed
from dipaco_jax.gateway.requests import Body, Caller, take
from dipaco_jax.islands import withdrawals
from dipaco_jax.islands.guard import objects_of
from dipaco_jax.islands.island import OBJECTS, OWN_TEXT, Island
from dipaco_jax.registry.registry import Fact
from dipaco_jax.storage import files, object_store
from dipaco_jax.storage.backends import Bucket, Folder

DIGITS = 16  # of a sha256, in names
KNOWN = 100_000  # digests of objects that were checked
INCOMING = 'gateway_incoming'  # in a bucket: objects that are not checked yet
SIGNED_S = 3600  # for which a URL is valid


class ObjectDesk:
  """The objects of a run. Its threads share one island."""

  def __init__(self, island: Island, aside: pathlib.Path):
    """`aside`: a private folder for objects that are not checked yet, on the disk of a workdir that is a folder."""
    self.island, self.aside = island, aside
    self.backend = cast(Folder | Bucket, island.storage.backend)
    self.checked: collections.OrderedDict[str, str] = collections.OrderedDict()  # sha256 by name
    self.lock, self.checking = threading.Lock(), threading.BoundedSemaphore(2)

  def tidy(self):
    """Removes objects of a bucket that nobody has committed before this gateway began."""
    if isinstance(self.backend, Bucket):
      for name in self.island.storage.names(INCOMING):
        self.island.storage.delete(name)

  # -- reading

  def exists(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Tells whether there is an object that the token may read."""
    name = self.readable(caller, take(body, 'object', lambda x: requests.is_text(x, 500)))
    return {'exists': self.island.storage.exists(name)}

  def readable(self, caller: Caller, name: str) -> str:
    """Returns the name of an object. Raises Refused if the token may not read it."""
    if not authority.may_read_object(caller.scope, name):
      raise forbidden()
    return object_store.checked_name(name)

  def open(self, name: str) -> tuple[int, Iterator[files.Data]]:
    """Returns an object's size and its bytes, in parts. Raises FileNotFoundError."""
    return self.backend.size(name), self.backend.chunks(name)

  # -- writing

  def offer(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Answers the offer of an object: that it is here, or where it may be put."""
    name, _, sha256 = self._offered(caller, body)
    if self.has(name, sha256):
      return {'has': True}
    backend = self.island.storage.backend
    if not isinstance(backend, Bucket):
      return {'has': False}
    ticket = secrets.token_hex(16)
    return {'has': False, 'url': backend.sign('PUT', f'{INCOMING}/{ticket}', SIGNED_S), 'ticket': ticket}

  def commit(self, caller: Caller, body: Body) -> dict[str, Any]:
    """Checks an object that a worker has put into the bucket, and gives it its name."""
    name, size, sha256 = self._offered(caller, body)
    ticket = take(body, 'ticket', lambda x: isinstance(x, str) and len(x) == 32 and x.isalnum())
    backend, incoming = self.island.storage.backend, f'{INCOMING}/{ticket}'
    if not isinstance(backend, Bucket):
      raise malformed('this run has no bucket')
    file = self.new_file()
    try:
      self._download(incoming, size, file)
      self.accept(name, sha256, file)
    finally:
      file.unlink(missing_ok=True)
      self.island.storage.delete(incoming)
    return {}

  def _download(self, incoming: str, size: int, file: pathlib.Path):
    """Downloads an object that is not checked yet, unless it has another size."""
    try:
      if self.backend.size(incoming) != size:
        raise malformed('the object has another size than was offered')
      with open(file, 'wb') as f:
        f.writelines(self.backend.chunks(incoming))
    except FileNotFoundError:
      raise malformed('the object was not put where it was to be put') from None

  def allow(self, caller: Caller, name: str, size: int, sha256: str):
    """Raises Refused unless a worker may write an object now: as part of a task that it holds, or named by a fact."""
    expected = self.expected(name, size)
    if expected.size != size:
      raise malformed(f'the object has {size} bytes instead of {expected.size}')
    if name.rpartition('-')[2] != f'{sha256[:DIGITS]}.safetensors':
      raise malformed('the name of an object should end in the first 16 digits of its sha256')
    if not self._is_due(caller, name, sha256):
      raise Refused(409, 'lost', 'the object belongs to a task that is not owned by this worker')

  def expected(self, name: str, size: int) -> object_checks.Expected:
    """Returns what an object has to be. Raises Refused if no worker writes it."""
    try:
      return object_checks.of_name(self.island, name, size)
    except Unexpected as e:
      raise forbidden(str(e)) from e

  def writer(self, name: str) -> tuple[str, str, int]:
    """Returns the task that writes an object. Raises Refused if none does."""
    try:
      return object_checks.writer(self.island, name)
    except Unexpected as e:
      raise forbidden(str(e)) from e

  def new_file(self) -> pathlib.Path:
    """Returns a new name for an object that is not checked yet."""
    return self.aside / secrets.token_hex(16)

  def accept(self, name: str, sha256: str, file: pathlib.Path):
    """Gives a file the name of an object, if it is what the name says. Raises Refused. The file may be gone then."""
    with self.checking:
      actual = files.digests(file.parent, [file.name])[file.name]
      if actual != sha256:
        raise malformed('the object has another sha256 than its name and the request say')
      try:
        object_checks.check(file, self.expected(name, file.stat().st_size))
      except Unexpected as e:
        raise malformed(str(e)) from e
      if not self.has(name, sha256):  # another worker may have been quicker
        self._publish(name, file)
    self._note(name, sha256)
    if authority.STATE.fullmatch(name) and self.island.registry.facts('finished'):
      self.island.storage.delete(name)  # the monitor may have looked for leftovers before

  def _publish(self, name: str, file: pathlib.Path):
    """Gives a checked file its name."""
    backend = self.island.storage.backend
    if isinstance(backend, Folder):
      backend.adopt(name, file)
    else:
      self.island.storage.write_file(name, file)

  def has(self, name: str, sha256: str) -> bool:
    """Returns whether there is an object with the content that its name says; raises Refused if it has another sha256.

    An object with another content than its name says does not count.
    """
    digest = self._digest(name, again=True)  # it may have been damaged since
    if digest is None or not name.endswith(f'-{digest[:DIGITS]}.safetensors'):
      return False
    if digest != sha256:
      raise malformed('there is an object of this name with another sha256')
    return True

  def _offered(self, caller: Caller, body: Body) -> tuple[str, int, str]:
    """Returns name, size and sha256 of an object that a request offers, and that the worker may write."""
    name = take(body, 'object', lambda x: requests.is_text(x, 500))
    size, sha256 = take(body, 'size', requests.is_size), take(body, 'sha256', requests.is_sha256)
    self.allow(caller, name, int(size), sha256)
    return name, int(size), sha256

  def _is_due(self, caller: Caller, name: str, sha256: str) -> bool:
    """Returns whether a worker may write an object: its task is the worker's, or a fact of its paths names it."""
    registry = self.island.registry
    if match := authority.STATE.fullmatch(name):
      checkpoints = registry.facts('checkpoint', [match[1]], int(match[2]))
      return match[1] in caller.scope.path_keys and any(
        caller.owns(fact.meta.get('worker', '')) for fact in checkpoints
      )
    kind, key, number = self.writer(name)
    if key not in caller.scope.path_keys:
      return False
    if held_tasks.find(registry, kind, key, number, caller.owns):
      return True
    facts = self.facts_of(kind, key, number)
    return any([name, sha256] in map(list, objects) for objects in map(self.named_by, facts))

  # -- what facts name

  def facts_of(self, kind: str, key: str, number: int) -> list[Fact]:
    """Returns the facts with objects that a task has made."""
    registry = self.island.registry
    if kind == 'outer':
      return registry.facts('module', [key], number)
    if kind == 'prepare':
      return [*registry.facts('prepared'), *registry.facts('module', number=0)]
    if kind == 'reroute':
      return registry.facts('round', number=number)
    is_here = kind == 'train' and not self.island.run.settings.data.own_text  # else with the path's owner
    own = self.island.own_modules(int(key)) if is_here else []
    checkpoints = registry.facts('checkpoint' if kind == 'train' else kind, [key], number)
    return [*checkpoints, *(registry.facts('module', own, number + 1) if own else [])]

  def named_by(self, fact: Fact) -> list[tuple[str, str]]:
    """Returns (name, sha256) of the objects that a fact of a path, or of its own module, names."""
    if fact.kind != 'module':
      return list(objects_of(fact).values())
    is_own = fact.key.partition('/')[0] in self.island.own_levels
    is_here = self.island.has_own_objects(fact.number) and not self.island.run.settings.data.own_text
    return [] if is_own and not is_here else [(fact.uri, fact.sha256)]

  def check_named(self, fact: Fact):
    """Raises Refused unless all objects that a fact names are there, with these digests."""
    for name, sha256 in self.named_by(fact):
      if self._digest(name) != sha256:
        raise malformed('a fact names an object that was not put, or has another sha256')

  def is_missing(self, kind: str, key: str, number: int) -> bool:
    """Returns whether an object or file that a task made cannot be read; False of what is in an owner's store."""
    if kind == OWN_TEXT:
      return False
    facts = self.facts_of(kind, key, number)
    trees = [tree for fact in facts for tree in fact.meta.get('trees', {}).items()]
    if any(self._misses_tree(*tree) for tree in trees):
      return True
    others = [fact for fact in facts if fact.kind not in ('prepared', 'round')]
    return bool(others) and bool(withdrawals.why_unreadable(self.island, others[0], others))

  def _misses_tree(self, tree: str, sha256: str) -> bool:
    """Returns whether a file of a tree is missing or has another content."""
    try:
      index = json_text.parse(bytes(self.island.storage.read(f'{tree}.index.json', sha256)))
      return any(self._digest(f'{tree}/{name}', again=True) != digest for name, digest in index.items())
    except (object_store.Missing, object_store.Corrupt, ValueError):
      return True

  def _digest(self, name: str, again: bool = False) -> str | None:
    """Returns an object's sha256, computed once unless `again`; None if there is no object."""
    with self.lock:
      known = self.checked.get(name)
    if known and not again and self.island.storage.exists(name):
      return known
    digest = hashlib.sha256()
    try:
      for chunk in self.backend.chunks(object_store.checked_name(name)):
        digest.update(chunk)
    except FileNotFoundError:
      return None
    if name.startswith(f'{OBJECTS}/'):
      self._note(name, digest.hexdigest())
    return digest.hexdigest()

  def _note(self, name: str, sha256: str):
    """Remembers the digest of an object that was read here."""
    with self.lock:
      self.checked[name] = sha256
      while len(self.checked) > KNOWN:
        self.checked.popitem(last=False)
