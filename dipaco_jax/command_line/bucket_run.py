"""A run in a bucket: what `main` and `dipaco_jax.train` do before and after its stages."""

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Iterator

import jax

from dipaco_jax.buckets import bucket_lock, disks, disks_apart, mirror as mirror_lib, other_disk
from dipaco_jax.command_line.bucket_copy import answering
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import Diverged, InputError, Unavailable, disk_is_full
from dipaco_jax.pipeline import stage_records
from dipaco_jax.processes import display, processes
from dipaco_jax.storage import files, lock, object_store, retry
from dipaco_jax.training import training_loop

PARTS_EVERY_S = 60.0
START = 'the run in the bucket'  # the occasion


def scratch_parent(scratch: str | os.PathLike | None) -> pathlib.Path:
  """Returns the folder of scratch folders: what --scratch says, or the user's cache."""
  return pathlib.Path(scratch or files.user_cache() / 'runs').absolute()


def folder_here(workdir: str, scratch: str | os.PathLike | None) -> pathlib.Path:
  """Returns the folder of a run's files on this machine: the workdir itself, or that in the scratch folder."""
  if '://' not in workdir:
    return pathlib.Path(workdir)
  return _scratch_of(workdir, scratch_parent(scratch)) / mirror_lib.RUN


def _scratch_of(url: str, parent: pathlib.Path) -> pathlib.Path:
  """Returns the scratch folder of a run in a bucket."""
  return parent / f'dipaco_jax-{hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]}'


@contextlib.contextmanager
def opened(url: str, parent: pathlib.Path, settings: settings_lib.Settings) -> Iterator[disks.Disk]:
  """Holds a run in a bucket, with the files to continue it in its scratch folder, and publishes all files at the end.

  Each process of a job has its own scratch folder, and the first process holds the run.

  Raises InputError if the bucket or the scratch folder cannot be used or another process is running on the run,
  Unavailable if the bucket cannot be written later.
  """
  storage, scratch = object_store.open_storage(url), _scratch_of(url, parent)
  try:
    files.make_private_folder(scratch, '--scratch')
  except OSError as e:
    raise InputError(f'--scratch={parent}: {e.strerror}; name a folder that can be made and written') from e
  with naming(url, scratch), contextlib.ExitStack() as stack:
    try:
      stack.enter_context(lock.hold(scratch))
    except InputError as e:
      if jax.process_count() == 1:
        raise
      raise InputError(f'--scratch={parent}: {e}; processes of one machine need a --scratch each') from e
    disk = _first_disk(url, storage, scratch, settings) if processes.is_first() else _other_disk(storage, scratch)
    yield stack.enter_context(disk)


@contextlib.contextmanager
def _first_disk(
  url: str, storage: object_store.Storage, scratch: pathlib.Path, settings: settings_lib.Settings
) -> Iterator[disks.Disk]:
  """Holds the run, as its only process or the first of several."""
  with contextlib.ExitStack() as stack:
    others = disks_apart.Others(disks.peers()) if jax.process_count() > 1 else None
    mirror = mirror_lib.Mirror(storage, scratch, others)
    stack.callback(mirror.close)
    with answering(storage), display.doing(f'looking at {url}'):
      mirror.names()  # before anything is written
      impatient = object_store.open_storage(url, bucket_lock.BEAT_S)  # or a bucket that is gone would hold up the end
      stack.enter_context(bucket_lock.hold(impatient, mirror.id, mirror.fail))
      mirror.fetch_files(names := mirror.names())
    with fetching(), display.doing(f'fetching what is needed from {url}'):
      mirror.fetch_trees(names, _is_finished(mirror.workdir, settings), not _is_on_same_devices(mirror.workdir))
    first = disks_apart.First(mirror, disks.peers()) if others else None
    if first:
      first.tell(START)
      processes.barrier(START)  # nothing is removed from the bucket while others fetch it
    try:
      with retry.every(PARTS_EVERY_S, 'uploading', mirror.publish_parts):
        yield disks.Disk(mirror, first)
    except Exception as e:
      processes.end_if_another_is_gone(e)
      raise
    finally:
      with display.doing(f'uploading to {url}'):
        mirror.publish_all()
        mirror.wait()
      if others:
        others.close()


@contextlib.contextmanager
def _other_disk(storage: object_store.Storage, scratch: pathlib.Path) -> Iterator[disks.Disk]:
  """Follows the first process, and ends after it."""
  other, patience_s = other_disk.Other(storage, scratch, disks.peers()), None
  try:
    other.begin(START)
    processes.barrier(START)
    with retry.every(PARTS_EVERY_S, 'uploading', other.publish_parts):
      yield disks.Disk(other, other)
  except training_loop.Stopped:  # as all have: the first asks for parts until it has all
    raise
  except BaseException as e:
    processes.end_if_another_is_gone(e)
    patience_s = other_disk.LEAVE_S if isinstance(e, (Diverged, InputError)) else 0  # of others only this one may know
    raise
  finally:
    other.wait(patience_s)
    other.close()


@contextlib.contextmanager
def fetching() -> Iterator[None]:
  """Raises InputError if something of the run is damaged in the bucket, Unavailable if that cannot be read."""
  try:
    yield
  except (object_store.Missing, object_store.Corrupt) as e:
    fix = 'remove its folder and the record of its stage there, and run the same command to make it again'
    raise InputError(f'{e}; {fix}') from e
  except OSError as e:
    if disk_is_full(e):
      raise
    raise Unavailable(f'{e.strerror or e}; run the same command again when the bucket can be read') from e


@contextlib.contextmanager
def naming(url: str, scratch: pathlib.Path) -> Iterator[None]:
  """Has errors about the workdir name the bucket, which the user has named."""
  try:
    yield
  except InputError as e:
    message = str(e)
    for folder in (scratch / mirror_lib.RUN, scratch):
      message = message.replace(f'--workdir={folder}', f'--workdir={url}')
    if message == str(e):
      raise
    raise InputError(message) from e


def _is_finished(workdir: pathlib.Path, settings: settings_lib.Settings) -> bool:
  with contextlib.suppress(InputError):  # of another config, which is rejected later
    return stage_records.is_done(workdir, settings, 'evaluate')
  return False


def _is_on_same_devices(workdir: pathlib.Path) -> bool:
  return stage_records.read_environment(workdir).get('devices', jax.device_count()) == jax.device_count()
