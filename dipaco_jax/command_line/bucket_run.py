"""A run in a bucket: what `main` and `dipaco_jax.train` do before and after its stages, and how commands read it."""

import contextlib
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator

from dipaco_jax.core import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.pipeline import stage_records
from dipaco_jax.storage import (
  bucket_lock,
  files,
  lock,
  mirror as mirror_lib,
  object_store,
  remedies,
  retry,
  run_objects,
)
from dipaco_jax.training import display

START_PATIENCE_S = 30  # for a bucket that does not answer before there is any work


def scratch_parent(scratch: str | os.PathLike | None) -> pathlib.Path:
  """Returns the folder of scratch folders: what --scratch says, or the user's cache."""
  cache = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
  return pathlib.Path(scratch or os.path.join(cache, 'dipaco_jax', 'runs')).absolute()


def folder_here(workdir: str, scratch: str | os.PathLike | None) -> pathlib.Path:
  """Returns the folder of a run's files on this machine: the workdir itself, or that in the scratch folder."""
  if '://' not in workdir:
    return pathlib.Path(workdir)
  return mirror_lib.folder_of(workdir, scratch_parent(scratch)) / mirror_lib.RUN


@contextlib.contextmanager
def opened(url: str, parent: pathlib.Path, settings: settings_lib.Settings) -> Iterator[mirror_lib.Mirror]:
  """Holds a run in a bucket, with what it needs to go on in its scratch folder; at the end all is published.

  Raises InputError where the bucket or the scratch folder cannot be used or another process is at work on the run,
  Unavailable where the bucket cannot be written later.
  """
  storage, scratch = object_store.open_storage(url), mirror_lib.folder_of(url, parent)
  try:
    files.make_private_folder(scratch, '--scratch')
  except OSError as e:
    raise InputError(f'--scratch={parent}: {e.strerror}; name a folder that can be made and written') from e
  with naming(url, scratch), contextlib.ExitStack() as stack:
    stack.enter_context(lock.hold(scratch))
    mirror = mirror_lib.Mirror(storage, scratch)
    stack.callback(mirror.close)
    with answering(storage), display.doing(f'looking at {url}'):
      names = mirror.names()
      stack.enter_context(bucket_lock.hold(storage, mirror.id, mirror.fail))
      mirror.fetch_files(names)
    with display.doing(f'fetching what is needed from {url}'):
      mirror.fetch_trees(names, _is_finished(mirror.workdir, settings), not _is_on_same_devices(mirror.workdir))
    try:
      yield mirror
    finally:
      with display.doing(f'uploading to {url}'):
        mirror.publish_all()
        mirror.wait()


@contextlib.contextmanager
def answering(storage: object_store.Storage) -> Iterator[None]:
  """Raises InputError where a bucket does not answer, before any work."""
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
def naming(url: str, scratch: pathlib.Path) -> Iterator[None]:
  """Has errors about the workdir name the bucket, which the user has named."""
  try:
    yield
  except InputError as e:
    if (words := str(e).replace(f'--workdir={scratch / mirror_lib.RUN}', f'--workdir={url}')) == str(e):
      raise
    raise InputError(words) from e


@contextlib.contextmanager
def copied(url: str, *trees: str) -> Iterator[pathlib.Path]:
  """Yields a copy of a run's files as they are now, and of its trees whose names begin with one of `trees`.

  Other trees are empty folders, and whoever holds the run holds the copy. Raises InputError where there is no run.
  """
  storage = object_store.open_storage(url, START_PATIENCE_S)
  with tempfile.TemporaryDirectory() as temp, contextlib.ExitStack() as stack:
    folder = pathlib.Path(temp, url.partition('://')[2].strip('/'))
    folder.mkdir(parents=True)
    stack.enter_context(_named(url, folder))
    with answering(storage):
      names = storage.names('')
      if remedies.ISLANDS_MARK in names:
        raise InputError(f'--workdir={url} is a run of islands: name its --registry, which knows how far it is')
      run_objects.fetch_files(storage, run_objects.matching(names, run_objects.FIRST + run_objects.LAST), folder)
      for name in run_objects.whole_trees(names):
        if name.startswith(trees):
          storage.download_tree(name, folder / name)
        else:
          (folder / name).mkdir(parents=True)
          os.utime(folder / name, (time.time(), storage.changed(f'{name}{run_objects.INDEX}')))
      if holder := bucket_lock.holder(storage):
        stack.enter_context(lock.held_as(folder, holder))
    yield folder


def upload_pages(url: str, folder: pathlib.Path):
  """Uploads what a run shows."""
  storage = object_store.open_storage(url, START_PATIENCE_S)
  with answering(storage):
    for name in run_objects.found(folder, run_objects.PAGES):
      storage.write(name, (folder / name).read_bytes())


@contextlib.contextmanager
def _named(url: str, folder: pathlib.Path) -> Iterator[None]:
  try:
    yield
  except InputError as e:
    raise InputError(str(e).replace(str(folder), url)) from e


def _is_finished(workdir: pathlib.Path, settings: settings_lib.Settings) -> bool:
  with contextlib.suppress(InputError):  # of another config, which is refused later
    return stage_records.is_done(workdir, settings, 'evaluate')
  return False


def _is_on_same_devices(workdir: pathlib.Path) -> bool:
  import jax

  return stage_records.read_environment(workdir).get('devices', jax.device_count()) == jax.device_count()
