"""The disk of a process that is not the first of its job, if processes do not share one; see `disks_apart`."""

import contextlib
import itertools
import json
import secrets
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

from dipaco_jax.buckets import disks_apart, mirror, run_objects
from dipaco_jax.core.errors import Unavailable
from dipaco_jax.storage import files, object_store

LEAVE_S = float(object_store.PATIENCE_S)  # after an error of all processes, so that the first can upload its files


class Other:
  """The side of a process that is not the first: its disk, its parts, and the thread that uploads them on request.

  It takes the place of a single process's mirror. It keeps files to be published until the first process requests them.
  """

  def __init__(self, storage: object_store.Storage, scratch: Path, peers: disks_apart.Peers):
    self.storage = storage
    self.peers = peers
    self.workdir = scratch / mirror.RUN
    self._links = scratch / mirror.UPLOADS
    shutil.rmtree(self._links, ignore_errors=True)  # of a process that was killed
    self._kept: dict[str, Path | None] = {}  # parts, by tree, that wait to be asked for; None: it is gone
    self._begun = set[str]()  # trees that have been kept
    self._passed_over = set[str]()  # before they came
    self._uploaded, self._uploading = disks_apart.Texts(), threading.Lock()  # parts of an unfinished stage
    self._known: disks_apart.Texts = {}  # trees of the bucket that are here
    self._changed, self._is_closed = threading.Condition(), False
    self._failed: Exception | None = None
    self._thread = threading.Thread(target=self._work, name='uploads', daemon=True)
    self._thread.start()

  # -- the methods of a mirror

  def publish_version(self, modules: Path, pointers: Path):
    """Keeps this process's modules of a version for the first process to ask for."""
    self.check()
    self._keep_version(modules)

  def publish_checkpoint(self, path: Path):
    """Keeps this process's part of a checkpoint for the first process to ask for."""
    self._keep(path, path.parent.with_name(f'{path.parent.name}.sha256') / path.name / f'{self.peers.index}.json')

  def publish_all(self):
    """Keeps modules that were made but not published, as a resumed run makes them again."""
    self.check()
    for name in run_objects.trees(self.workdir, run_objects.MODULES):
      if name not in self._begun and name not in self._known:
        self._keep_version(self.workdir / name)

  def publish_parts(self, older_than_s: float = mirror.PART_AGE_S):
    """Uploads parts of unfinished stages, once that is worth it; called by a thread from time to time."""
    with contextlib.suppress(OSError):  # the stage ends at this moment
      for name in self._new_files(run_objects.PARTS + run_objects.PART_FILES):
        if time.time() - (self.workdir / name).stat().st_mtime > older_than_s:
          self._upload(name)

  def check(self):
    """Raises the error of a failed upload."""
    if self._failed:
      raise self._failed

  def wait(self, seconds: float | None = None):
    """Waits until the first process ends its requests, up to a limit; raises the error of a failed upload."""
    self._thread.join(seconds)
    self.check()

  def close(self):
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()

  # -- exchanges between stages

  def gather(self, occasion: str, patterns: Sequence[str]):
    """Uploads this process's files and trees that match globs, for the first process to fetch."""
    with disks_apart.exchanging():
      digests = {name: self._upload(name) for name in self._new_files(patterns)}
    self._known |= digests
    self.peers.say(f'{occasion}: made/{self.peers.index}', json.dumps(digests))

  def follow(self, occasion: str, with_checkpoints: bool):
    """Fetches and removes files to match those that the first process has published; checkpoints only if asked for."""
    self.publish_all()
    self._fetch(json.loads(self.peers.hear(f'{occasion}: published')), with_checkpoints)

  def begin(self, occasion: str):
    """Replaces all files here by those that the first process begins with."""
    published: disks_apart.Texts = json.loads(self.peers.hear(f'{occasion}: published'))
    run_objects.remove_others(self.workdir, published)
    self._fetch(published, with_checkpoints=True)

  def _fetch(self, published: Mapping[str, str], with_checkpoints: bool):
    for name in run_objects.followed(self.workdir, with_checkpoints):
      if name not in published:
        path = self.workdir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self._known.pop(name, None)
    present = {name for name in published if (self.workdir / name).exists()}
    names = [name for name, sha256 in published.items() if not sha256]
    with disks_apart.exchanging():
      changed = [
        name for name in names if name not in present or not run_objects.is_part(name)
      ]  # which is written once
      run_objects.fetch_files(self.storage, changed, self.workdir)
      for name in published.keys() - names:
        if name not in present or self._known.get(name) != published[name]:
          disks_apart.complete(self.storage, name, self.workdir, published[name])
    self._known |= published

  def _new_files(self, patterns: Sequence[str]) -> list[str]:
    """Lists files that match globs and do not come from the first process."""
    names = run_objects.trees(self.workdir, patterns) + run_objects.list_files(self.workdir, patterns)
    return [name for name in names if name not in self._known]

  def _upload(self, name: str) -> str:
    """Uploads a file or tree of an unfinished stage, if that is not done yet; returns its sha256."""
    with self._uploading:
      if name not in self._uploaded:
        path = self.workdir / name
        upload = self.storage.upload_tree if path.is_dir() else lambda path, name: self.storage.write_file(name, path)
        self._uploaded[name] = upload(path, name)
      return self._uploaded[name]

  # -- parts of what all write together

  def _keep_version(self, modules: Path):
    self._keep(modules, modules / run_objects.index_name(self.peers.index))

  def _keep(self, tree: Path, index: Path):
    """Links this process's files of a tree aside; `index` is {file: sha256} of them."""
    name, links = str(tree.relative_to(self.workdir)), self._links / secrets.token_hex(8)
    try:
      names = json.loads(index.read_text())
      are_linked = all(files.link(tree / file, links / file) for file in names)
    except OSError:  # it no longer exists, or the disk is full: tell the first process, and continue with the next
      are_linked = False
    if not are_linked:
      shutil.rmtree(links, ignore_errors=True)
    with self._changed:
      self._begun.add(name)
      self._known.pop(name, None)  # the whole was replaced by this part
      if name in self._passed_over:
        self._passed_over.discard(name)
        shutil.rmtree(links, ignore_errors=True)
      else:
        self._let_go(name)
        self._kept[name] = links if are_linked else None
      self._changed.notify_all()

  def _let_go(self, name: str):
    if links := self._kept.pop(name, None):
      shutil.rmtree(links, ignore_errors=True)

  def _work(self):
    with futures.ThreadPoolExecutor(1) as uploads:  # apart, as something newer may be passed over meanwhile
      try:
        for number in itertools.count():
          order = json.loads(self.peers.hear(key := f'order {number}'))
          if not order or self._is_closed:
            return
          if name := order.get('upload'):
            uploads.submit(self._reply, f'{key}/{self.peers.index}', name)
          for name in order.get('drop', ()):
            self._drop(name)
      except Exception as e:  # of the connection: the first process is gone
        self._failed = self._failed or e
        self.close()

  def _drop(self, name: str):
    with self._changed:
      if name not in self._kept:
        self._passed_over.add(name)
      self._let_go(name)

  def _reply(self, key: str, name: str):
    try:
      self.peers.say(key, json.dumps(self._answer(name)))
    except Exception as e:
      self._failed = self._failed or e

  def _answer(self, name: str) -> dict[str, Any]:
    """Uploads this process's part of a tree as soon as it exists; returns the reply to the first process."""
    with self._changed:
      self._changed.wait_for(lambda: name in self._kept or self._is_closed)
      if not (links := self._kept.pop(name, None)):
        return {'gone': name}
    try:
      return {'files': self.storage.upload_files(links, name)}
    except Exception as e:  # obstore raises many kinds
      why = str(getattr(e, 'strerror', None) or e)
      self._failed = Unavailable(f'{why}; {disks_apart.AGAIN}')
      return {'error': why}
    finally:
      shutil.rmtree(links, ignore_errors=True)
