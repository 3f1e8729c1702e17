"""Runs in a bucket with processes that do not share a disk: the first publishes the files of all, the others follow.

The first process alone decides what is in the bucket, through its mirror, like the process of a run with one process.
All processes write a part of each checkpoint and each version of modules. When the first process uploads its part, it
requests the parts of the others, and then writes the index of the whole. So nobody sees a version before all parts are
uploaded. Each process keeps a part on its disk until the first process requests it or drops it for a newer version.

The processes exchange requests, and the names and SHA-256 of files, as short texts (`Peers`).
"""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dipaco_jax.buckets import mirror as mirror_lib, run_objects
from dipaco_jax.core.errors import Unavailable, disk_is_full
from dipaco_jax.storage import files, object_store

AGAIN = 'run the same command again when the bucket can be read and written'
Texts = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Peers:
  """Messages between processes. Each key is used once."""

  index: int  # of this process; the first is 0
  count: int
  say: Callable[[str, str], None]  # key, text
  hear: Callable[[str], str]  # key -> text; waits for it
  forget: Callable[[str], None]


class Others:
  """Requests of the first process to the others, for their parts of files that all write. One thread calls `ask`."""

  def __init__(self, peers: Peers):
    self.peers = peers
    self._numbers = itertools.count()
    self._lock = threading.Lock()
    self._unanswered: list[str] = []  # requests without a reply; a reply to a later request acknowledges them

  def ask(self, name: str) -> Callable[[], Texts]:
    """Requests the others' parts of a tree; returns a function that waits for the uploads and returns {file: sha256}.

    That function raises mirror.Gone if a process no longer has its part, OSError if one cannot upload it.
    """
    with self._lock:
      acknowledged, self._unanswered = self._unanswered, []
      key = self._order({'upload': name})

    def wait() -> Texts:
      digests: Texts = {}
      answers = [f'{key}/{k}' for k in range(1, self.peers.count)]
      replies = [json.loads(self.peers.hear(answer)) for answer in answers]
      for used in (key, *answers, *acknowledged):
        self.peers.forget(used)
      if why := next((reply['error'] for reply in replies if 'error' in reply), ''):
        raise OSError(why)
      if any('gone' in reply for reply in replies):
        raise mirror_lib.Gone(name)
      for reply in replies:
        digests |= reply['files']
      return digests

    return wait

  def pass_over(self, names: Iterable[str]):
    """Has the others drop parts that a newer version has made unnecessary."""
    if names := list(names):
      with self._lock:
        self._unanswered.append(self._order({'drop': names}))

  def close(self):
    """Tells the others that no more requests follow."""
    with self._lock:
      self._order({})

  def _order(self, order: dict[str, Any]) -> str:
    """Sends the next request under the lock, so that requests are answered in order."""
    self.peers.say(key := f'order {next(self._numbers)}', json.dumps(order))
    return key


class First:
  """The first process's side of exchanges between stages."""

  def __init__(self, mirror: mirror_lib.Mirror, peers: Peers):
    self.mirror, self.peers = mirror, peers

  def gather(self, occasion: str, patterns: Sequence[str]):
    """Fetches the files and trees that the others have made; removes temporary ones from the bucket."""
    for k in range(1, self.peers.count):
      digests: Texts = json.loads(self.peers.hear(key := f'{occasion}: made/{k}'))
      self.peers.forget(key)
      with exchanging():
        for name, sha256 in digests.items():
          self._take(name, sha256)

  def _take(self, name: str, sha256: str):
    storage, path = self.mirror.storage, self.mirror.workdir / name
    if run_objects.TREE.fullmatch(name):
      storage.download_tree(name, path, sha256)
    else:
      fetch_file(storage, name, path, sha256)
    if run_objects.lasts(name):
      self.mirror.adopt(name, sha256)
    else:
      storage.delete(name)

  def follow(self, occasion: str, with_checkpoints: bool):
    """Publishes everything between stages, has the others fetch it, and completes trees on this disk."""
    self.mirror.publish_all()
    self.mirror.publish_parts(older_than_s=-1)
    self.mirror.wait()
    if lost := {*run_objects.newest_checkpoints(self.mirror.workdir)} - self.mirror.published(True).keys():
      # The next stage needs it, and no other process has all parts of it.
      raise Unavailable(f'{min(lost)} is not in the bucket; {AGAIN}')
    self.tell(occasion, with_checkpoints)

  def tell(self, occasion: str, with_checkpoints: bool = True):
    """Tells the others which files are published, so that they have exactly these; see `follow`."""
    published, workdir = self.mirror.published(with_checkpoints), self.mirror.workdir
    for name in run_objects.followed(workdir, with_checkpoints):
      if run_objects.is_joint(name) and name not in published:  # dropped: no process will ever have more than its part
        shutil.rmtree(workdir / name)
    self.peers.say(f'{occasion}: published', json.dumps(published))
    with exchanging():
      for name in self.mirror.in_part & published.keys():
        complete(self.mirror.storage, name, workdir, published[name])
        self.mirror.in_part.discard(name)


@contextlib.contextmanager
def exchanging() -> Iterator[None]:
  """Raises Unavailable if the bucket cannot be read or written."""
  try:
    yield
  except OSError as e:
    if disk_is_full(e):
      raise
    raise Unavailable(f'{e.strerror or e}; {AGAIN}') from e


def complete(storage: object_store.Storage, name: str, workdir: Path, sha256: str):
  """Fetches a tree, even if a part or an earlier version of it is on this disk. Raises as `Storage.read`."""
  storage.verified_trees.discard((name, sha256))
  storage.download_tree(name, workdir / name, sha256)


def fetch_file(storage: object_store.Storage, name: str, file: Path, sha256: str):
  """Fetches an object as a file, atomically. Raises as `Storage.read_file`."""
  file.parent.mkdir(parents=True, exist_ok=True)
  aside = files.beside(file)
  try:
    storage.read_file(name, sha256, aside)
    os.replace(aside, file)
  finally:
    aside.unlink(missing_ok=True)
