"""A run whose workdir is a bucket: it works in a scratch folder of this machine, and a thread uploads its files.

    SCRATCH/run/        the workdir, as on a disk
    SCRATCH/id          the name of this scratch; the bucket's object `scratch` has that of the last one that published
    SCRATCH/uploads/    hard links to files that wait to be uploaded; the run may remove or replace the files

Files are published atomically, in the order in which they were made, and are removed from the bucket only after the
next checkpoint is uploaded. So at every moment the bucket equals the workdir at an earlier moment, and a run that
continues from it behaves like a run that was killed at that moment.
"""

import contextlib
import hashlib
import itertools
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from dipaco_jax.buckets import bucket_lock, run_objects
from dipaco_jax.buckets.upload_queue import Upload, UploadQueue
from dipaco_jax.core.errors import InputError, Unavailable
from dipaco_jax.storage import files, object_store
from dipaco_jax.storage.remedies import ISLANDS_MARK

MARK = 'scratch'  # the object that names the scratch which published last
ID = 'id'
RUN = 'run'
UPLOADS = 'uploads'
EVERYTHING = re.compile('.*')
PART_AGE_S = 300.0  # age of an unfinished stage's files before they are uploaded; short stages are made again


class Gone(Exception):
  """Error: another process no longer has its part of a tree."""


class Others(Protocol):
  """The other processes of a job, on disks of their own; see `disks_apart`."""

  def ask(self, name: str) -> Callable[[], dict[str, str]]: ...
  def pass_over(self, names: Iterable[str]): ...


class Mirror:
  """Fetches the files that a run needs to resume, and publishes its results without blocking the caller."""

  def __init__(self, storage: object_store.Storage, scratch: Path, others: Others | None = None):
    """If `others` have parts of checkpoints and modules, no scratch folder is complete, and the bucket counts."""
    self.storage = storage
    self.scratch = scratch
    self.workdir = scratch / RUN
    if not (name := scratch / ID).exists():
      files.write_file(name, secrets.token_hex(8))
    self.id = name.read_text()
    self._others, self._mark = others, secrets.token_hex(8) if others else self.id
    self._published: dict[str, str] = {}  # contents of the bucket; for trees, the sha256 of their indices
    self._left: list[str] = []  # checkpoints in the bucket that were not fetched
    self._states: dict[str, tuple[int, ...]] = {}  # of files, as they were when they were published
    self._begun = set[str]()  # trees that wait to be uploaded, or are
    self.in_part = set[str]()  # those that have parts of other processes, which are not on this disk
    self._numbers = itertools.count()
    self.queue = UploadQueue(self._put)
    self._marked = False
    self._failed: Exception | None = None
    shutil.rmtree(scratch / UPLOADS, ignore_errors=True)  # of a process that was killed

  # -- from the bucket

  def names(self) -> list[str]:
    """Lists the objects of the run. Raises InputError if the bucket does not answer, or holds other things."""
    names = self.storage.names('')
    if ISLANDS_MARK in names:
      raise InputError(f'--workdir={self.storage.url} is a run of islands: add its --role, or name another place')
    if names and not {MARK, bucket_lock.NAME} & {*names}:
      raise InputError(
        f'--workdir={self.storage.url} holds other things ({names[0]}) than a run that was made there: name a place of '
        'its own; a run that was copied to it can only be resumed from a disk'
      )
    return names

  def fetch_files(self, names: Sequence[str]):
    """Fetches the files of a run, but trees. What another scratch has published since replaces all that is here."""
    self._trusts_scratch = MARK in names and bytes(self.storage.fetch(MARK)).decode() == self._mark
    if not self._trusts_scratch:
      if self._others:  # before any deletion: a process without others would trust the remaining files
        self._mark_bucket()
      run_objects.remove_others(self.workdir, run_objects.whole_trees(names))
    lasting = run_objects.matching(names, run_objects.LASTING)
    self._published |= dict.fromkeys(lasting, '')
    missing = [name for name in lasting if not (self.workdir / name).exists()]
    run_objects.fetch_files(self.storage, missing, self.workdir)
    self._states |= {name: files.state(self.workdir / name) for name in missing}

  def fetch_trees(self, names: Sequence[str], is_finished: bool, all_checkpoints: bool):
    """Fetches the trees that are needed to continue: of checkpoints the newest, unless all are asked for."""
    others: list[str] = []
    for name in run_objects.half_trees(names):  # of a process that was killed
      self.storage.delete_tree(name)
    for name in run_objects.whole_trees(names):
      is_needed = name == 'base' or 'modules/' in name or not (is_finished or run_objects.is_checkpoint(name))
      if is_needed or (self.workdir / name).exists():
        self._fetch_tree(name)
      else:
        others.append(name)
    for newest_first in () if is_finished else run_objects.by_age(others):
      self._fetch_checkpoints(newest_first, all_checkpoints)

  def _fetch_checkpoints(self, newest_first: list[str], all_of_them: bool):
    while newest_first:
      name = newest_first.pop(0)
      try:
        self._fetch_tree(name)
      except (object_store.Missing, object_store.Corrupt):
        if not newest_first:
          raise
      else:
        if not all_of_them:
          break
    self._left += newest_first

  def _fetch_tree(self, name: str):
    index = bytes(self.storage.fetch(f'{name}{run_objects.INDEX}'))
    self._published[name] = sha256 = hashlib.sha256(index).hexdigest()
    if not (self._trusts_scratch and (self.workdir / name).exists()):
      self.storage.download_tree(name, self.workdir / name, sha256)

  # -- to the bucket

  def publish_version(self, modules: Path, pointers: Path):
    """Publishes a version of modules and the pointers that may name it, after everything published earlier."""
    self.check()
    name = str(pointers.relative_to(self.workdir))
    self._upload(tree := str(modules.relative_to(self.workdir)), [tree, name], pointers=name)

  def publish_checkpoint(self, path: Path):
    """Publishes a checkpoint after the metrics so far, in place of an earlier one that still waits.

    Then removes from the bucket files that no longer existed when it was written, such as older checkpoints.
    """
    name = str(path.relative_to(self.workdir))
    folder, _, number = name.rpartition('/')
    seals = run_objects.list_files(self.workdir, [f'{folder}.sha256/{number}/*.json'])
    files_before = [*run_objects.GROWING, *self._changed(run_objects.PAGES), *seals]
    older = [left for left in self._left if left.startswith(f'{folder}/')]
    self._upload(name, [*files_before, name], self._gone() + older, checkpoints=folder)

  def publish_all(self):
    """Publishes all permanent files that are not yet in the bucket; called between stages, when nothing is written."""
    self.check()
    if not (self.workdir / 'config.json').exists():  # rejected before any text was tokenized
      if not any(list(self._published.values())) and not self._begun:
        self._upload('', [], self._gone(EVERYTHING))
      return
    first = self._changed(run_objects.FIRST)
    trains = any(name.startswith(('checkpoints/train/', 'modules/')) for name in [*self._published, *self._begun])
    if 'config.json' in first and not trains:  # maybe another one, after a refusal: what is gone was of the one before
      self._upload('', [], self._gone(EVERYTHING))
    trees = [n for n in run_objects.trees(self.workdir) if n not in self._published and n not in self._begun]
    last, gone = self._changed(run_objects.LAST + run_objects.PAGES), self._gone()
    self._upload('', first)
    for name in trees:
      self._upload(name, [name])
    for name in () if self._others else run_objects.newest_checkpoints(self.workdir):
      if name not in self._published and name not in self._begun:
        self.publish_checkpoint(self.workdir / name)
    self._upload('', last, gone)

  def publish_parts(self, older_than_s: float = PART_AGE_S):
    """Publishes intermediate results of unfinished stages if worthwhile; called by a thread from time to time."""
    with contextlib.suppress(OSError):  # the stage ends at this moment
      trees = run_objects.trees(self.workdir, run_objects.PARTS)
      for name in trees + run_objects.list_files(self.workdir, run_objects.PART_FILES):
        is_old = time.time() - (self.workdir / name).stat().st_mtime > older_than_s
        if is_old and name not in self._published and name not in self._begun and name not in self._states:
          self._upload(name, [name])

  def published(self, with_checkpoints: bool) -> dict[str, str]:
    """Returns the shared files and trees of a job in the bucket: {file: ''} and {tree: sha256 of its index}."""
    names = run_objects.followed(self.workdir, with_checkpoints)
    return {name: self._published[name] for name in names if name in self._published}

  def adopt(self, name: str, sha256: str):
    """Takes over a file or tree that another process has published, and this one has fetched."""
    is_tree = (self.workdir / name).is_dir()
    self._published[name] = sha256 if is_tree else ''
    if not is_tree:
      self._states[name] = files.state(self.workdir / name)

  def check(self):
    """Raises the error of a failed upload, after which nothing is published."""
    if self._failed:
      raise self._failed

  def fail(self, error: Exception):
    """Stops publishing, for example because another process has taken over the run."""
    self._failed = self._failed or error

  def wait(self):
    """Waits until everything is published; raises the error of a failed upload."""
    self.queue.wait()
    self.check()

  def close(self):
    self.queue.close()

  def _gone(self, expected: re.Pattern = run_objects.REMOVED) -> list[str]:
    """Lists published and queued files that are no longer in the workdir.

    Files that the run never removes itself do not count: somebody else has removed them, and the bucket keeps them.
    """
    names = {*list(self._published), *list(self._begun), *list(self._states)}
    return [name for name in sorted(names) if expected.fullmatch(name) and not (self.workdir / name).exists()]

  def _changed(self, patterns: Sequence[str]) -> list[str]:
    """Lists the files that match globs and have changed since they were last published."""
    names = run_objects.list_files(self.workdir, patterns)
    return [name for name in names if self._states.get(name) != files.state(self.workdir / name)]

  def _upload(self, needed: str, names: Sequence[str], gone: Sequence[str] = (), **about: str):
    """Links files and trees aside, and has them uploaded; then those that are gone are removed from the bucket.

    Those that go meanwhile are left out, and all where the one that is `needed` does.
    """
    links = self.scratch / UPLOADS / str(next(self._numbers))
    try:
      linked = [name for name in names if files.link(self.workdir / name, links / name)]
    except OSError:
      shutil.rmtree(links, ignore_errors=True)
      self._pass_over([needed])
      raise
    if needed and needed not in linked:
      shutil.rmtree(links, ignore_errors=True)
      self._pass_over([needed])
      return
    for name in linked:
      if (links / name).is_dir():
        self._begun.add(name)
        if self._others and run_objects.is_joint(name):
          self.in_part.add(name)
      else:
        self._states[name] = files.state(links / name)
    for dropped in self.queue.add(Upload(links, linked, gone, **about)):
      for name in {*dropped.names} - {*linked}:
        self._states.pop(name, None)  # it was not published after all
      self._pass_over(dropped.names)

  def _pass_over(self, names: Sequence[str]):
    if self._others:
      self._others.pass_over(name for name in names if run_objects.is_joint(name))

  def _put(self, upload: Upload):
    links, names, gone, *_ = upload
    try:
      if not self._failed and not self._marked:
        self._mark_bucket()
      for name in names:
        if not self._failed:
          (self._put_tree if (links / name).is_dir() else self._put_file)(name, links / name)
      for name in gone:
        if not self._failed:
          self._remove(name)
    except Gone:  # a newer checkpoint will come, after which files that no longer exist are removed
      pass
    except Exception as e:  # obstore raises many kinds
      why = getattr(e, 'strerror', None) or e
      left = '' if self._others else f': what it lacks is in {self.scratch}'  # which the next start trusts
      self.fail(Unavailable(f'{why}; run the same command again when the bucket can be written{left}'))
    finally:
      shutil.rmtree(links, ignore_errors=True)

  def _mark_bucket(self):
    self.storage.write(MARK, self._mark.encode())
    self._marked = True

  def _put_file(self, name: str, file: Path):
    self.storage.write(name, file.read_bytes())  # not as a file, which may grow meanwhile
    self._published[name] = ''

  def _put_tree(self, name: str, folder: Path):
    if before := self._published.get(name):
      if object_store.tree_matches(folder, before):
        self._pass_over([name])
        return
      self.storage.delete(f'{name}{run_objects.INDEX}')  # or it would be that of other files
    others = self._others.ask(name) if self._others and run_objects.is_joint(name) else dict
    try:
      self._published[name] = self.storage.upload_tree(folder, name, others)
    except Gone:
      self.storage.delete_tree(name)
      raise

  def _remove(self, name: str):
    if name in self._left:
      self._left.remove(name)
      self.storage.delete_tree(name)
    elif (index := self._published.pop(name, None)) is not None:
      self.storage.delete_tree(name) if index else self.storage.delete(name)
    if not (self.workdir / name).exists():  # or it has been made again
      self._states.pop(name, None)
      self._begun.discard(name)
