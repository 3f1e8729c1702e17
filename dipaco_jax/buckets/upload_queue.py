"""The queue of uploads, in the order of creation, without uploads that newer ones have made unnecessary.

Otherwise a bucket that is slower than training would fill the disk, or would never get a checkpoint.
"""

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


class Upload(NamedTuple):
  """Files and trees that are published together, and files that are then removed from the bucket."""

  links: Path  # the folder that they are in
  names: list[str]
  gone: Sequence[str] = ()
  checkpoints: str = ''  # the folder of the checkpoint that this is, of a stage
  pointers: str = ''  # the file that is published after the version of modules that this is, and names versions

  @property
  def version(self) -> int:
    return int(self.names[0].rpartition('/')[2])


class UploadQueue:
  """A thread that repeatedly calls `put`, which raises nothing, with all waiting uploads."""

  def __init__(self, put: Callable[[Upload], None]):
    self.waiting: list[Upload] = []
    self._put = put
    self._changed = threading.Condition()
    self._is_busy = False
    self._is_closed = False
    self._thread = threading.Thread(target=self._work, name='uploads', daemon=True)
    self._thread.start()

  def add(self, upload: Upload) -> list[Upload]:
    """Adds an upload to the queue; returns those that it has made unnecessary."""
    with self._changed:
      before = [*self.waiting, upload]
      self.waiting = without_useless(before)
      self._changed.notify_all()
      waiting_links = {upload.links for upload in self.waiting}
    dropped = [upload for upload in before if upload.links not in waiting_links]
    for one in dropped:
      shutil.rmtree(one.links, ignore_errors=True)
    return dropped

  def wait(self):
    """Waits until the queue is empty."""
    with self._changed:
      self._changed.wait_for(lambda: not self.waiting and not self._is_busy)

  def close(self):
    """Ends the thread after its current upload; waiting uploads are dropped."""
    with self._changed:
      self.waiting, self._is_closed = [], True
      self._changed.notify_all()
    self._thread.join()

  def _work(self):
    while True:
      with self._changed:
        self._is_busy = False
        self._changed.notify_all()
        self._changed.wait_for(lambda: self.waiting or self._is_closed)
        if self._is_closed:
          return
        # Taken together: a checkpoint among them gets its turn, however many newer ones come meanwhile.
        batch = self.waiting
        self.waiting = []
        self._is_busy = True
      for upload in batch:
        if not self._is_closed:
          self._put(upload)


def without_useless(uploads: Sequence[Upload]) -> list[Upload]:
  """Drops checkpoints before the last of their stage, and versions of modules that no pointers name any more.

  Those pointers count and are kept that a checkpoint was saved with, and the last ones. A version that they do not name
  is not named by later ones either.
  """
  last = {upload.checkpoints: i for i, upload in enumerate(uploads) if upload.checkpoints}
  kept = [upload for i, upload in enumerate(uploads) if last.get(upload.checkpoints, i) == i]
  for pointers in {upload.pointers for upload in kept} - {''}:
    kept = _without_useless_versions(kept, pointers)
  return kept


def _without_useless_versions(uploads: Sequence[Upload], pointers: str) -> list[Upload]:
  versions = [i for i, upload in enumerate(uploads) if upload.pointers == pointers]
  ends = [i for i, upload in enumerate(uploads) if upload.checkpoints] + [len(uploads)]
  pointing = {max(before) for end in ends if (before := [i for i in versions if i < end])}
  needed = {uploads[i].version for i in pointing}
  for i in pointing:
    needed |= {*json.loads((uploads[i].links / pointers).read_text())['version']}
  kept = []
  for i, upload in enumerate(uploads):
    if i not in versions or i in pointing:
      kept.append(upload)
    elif upload.version in needed:
      kept.append(upload._replace(names=upload.names[:1]))  # its pointers may name dropped versions
  return kept
