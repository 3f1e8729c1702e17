"""A copy of a run in a bucket, for commands that read many of its files."""

import contextlib
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator

from dipaco_jax.buckets import bucket_lock, run_objects
from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import lock, object_store, remedies, retry

START_PATIENCE_S = 30  # for a bucket that does not answer before there is any work


@contextlib.contextmanager
def answering(storage: object_store.Storage) -> Iterator[None]:
  """Raises InputError if a bucket does not answer, before any work."""
  patience_s, storage.patience_s = storage.patience_s, START_PATIENCE_S
  try:
    yield
  except OSError as e:
    why = retry.first_line(e).partition(f'{storage.url}/: ')[2] or retry.first_line(e)
    fix = 'check the name of the bucket, the network and your credentials'
    raise InputError(f'--workdir={storage.url}: {why}; {fix}') from e
  finally:
    storage.patience_s = patience_s


@contextlib.contextmanager
def copied(url: str, *trees: str) -> Iterator[pathlib.Path]:
  """Yields a copy of a run's files as they are now, and of its trees whose names begin with one of `trees`.

  Other trees are empty folders. The holder of the run also holds the copy. Raises InputError if there is no run.
  """
  storage = object_store.open_storage(url, START_PATIENCE_S)
  with tempfile.TemporaryDirectory() as temp, contextlib.ExitStack() as stack:
    folder = pathlib.Path(temp, url.partition('://')[2].strip('/'))
    folder.mkdir(parents=True)
    stack.enter_context(_named(url, folder))
    with answering(storage):
      names = storage.names('')
      if remedies.ISLANDS_MARK in names:
        raise InputError(f'--workdir={url} is a run of islands: name its --registry, which records its progress')
      run_objects.fetch_files(storage, run_objects.matching(names, run_objects.FIRST + run_objects.LAST), folder)
      for name in run_objects.whole_trees(names):
        with contextlib.suppress(object_store.Missing, FileNotFoundError):  # it goes at this moment
          if name.startswith(trees):
            storage.download_tree(name, folder / name)
          else:
            written = storage.changed(f'{name}{run_objects.INDEX}')
            (folder / name).mkdir(parents=True)
            os.utime(folder / name, (time.time(), written))
      if holder := bucket_lock.holder(storage):
        stack.enter_context(lock.held_as(folder, holder))
    yield folder


def upload_pages(url: str, folder: pathlib.Path):
  """Uploads the pages of a run."""
  storage = object_store.open_storage(url, START_PATIENCE_S)
  with answering(storage):
    for name in run_objects.list_files(folder, run_objects.PAGES):
      storage.write(name, (folder / name).read_bytes())


@contextlib.contextmanager
def _named(url: str, folder: pathlib.Path) -> Iterator[None]:
  try:
    yield
  except InputError as e:
    raise InputError(str(e).replace(str(folder), url)) from e
