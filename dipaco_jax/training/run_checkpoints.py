"""Checkpoints of a training loop, by Orbax, written in the background and sealed."""

import contextlib
import json
import logging
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax

from dipaco_jax.buckets import disks
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import display, processes
from dipaco_jax.storage import files


def own_share(names: Iterable[str]) -> list[str]:
  """Returns the names that this process is to read: every n-th, for n processes."""
  return sorted(names)[jax.process_index() :: jax.process_count()]


class _Corrupt(Exception):
  """A checkpoint cannot be read, and has been moved away."""


class RunCheckpoints:
  """Orbax checkpoints of a training loop, in `directory/<updates>`: the newest `keep`, and the last at a phase's end.

  Each is sealed: once all are written, the sha256 of its files is noted in `directory.sha256/<updates>/`, and compared
  before anything is read. Every process reads its share of the files for that.
  """

  def __init__(
    self, directory: pathlib.Path, keep: int, phase_updates: int = 1,
    sealed: Callable[[pathlib.Path], object] | None = None, disk: disks.Disk = disks.SHARED,
  ):  # fmt: skip
    """`sealed` is called, by another thread, with each checkpoint that is whole on the disk, or this process's part."""
    import orbax.checkpoint as ocp  # a second or more: not for those who only read modules

    self._ocp = ocp
    self._directory = directory.absolute()
    self._keep = keep
    self._phase_updates = phase_updates
    self._sealed, self._disk = sealed, disk
    options: dict[str, Any] = {
      'preservation_policy': self, 'enable_async_checkpointing': True, 'cleanup_tmp_directories': True,
    }  # fmt: skip
    handlers: dict[str, Any] = {'item_names': ('arrays', 'meta')}
    if disk.is_apart:
      own = {'multiprocessing_options': ocp.options.MultiprocessingOptions(primary_host=None)}
      # Not OCDBT, whose manifest names the files of one disk: a file for each shard, so that parts add up to a whole.
      arrays, meta = ocp.StandardCheckpointHandler(**own, use_ocdbt=False), ocp.JsonCheckpointHandler(**own)
      # Made at once: Orbax waits for folders made in the background until those of all processes exist.
      options |= own | {'async_options': ocp.AsyncOptions(create_directories_asynchronously=False)}
      handlers = {'item_handlers': {'arrays': arrays, 'meta': meta}}
    options = ocp.CheckpointManagerOptions(**options)
    self._manager = ocp.CheckpointManager(self._directory, options=options, **handlers)
    self._seals = self._directory.with_name(f'{self._directory.name}.sha256')
    self._sealer, self._closing = futures.ThreadPoolExecutor(1), threading.Event()
    self._sealing: futures.Future | None = None  # the last one
    self.metas: dict[int, dict[str, Any]] = {}  # of what `restore` has found and left in place, by updates
    self._exchanged = ''  # the last occasion on which the processes exchanged the names of their files
    self._reads = 0  # of checkpoints, on which the processes agree one by one

  def kept(self, available: Collection[int]) -> set[int]:
    """Returns which of these checkpoints are kept, by updates."""
    ends = [updates for updates in available if updates % self._phase_updates == 0]
    return {*sorted(available)[-self._keep :], *sorted(ends)[-1:]}

  def should_preserve(self, checkpoints, *, context) -> list[bool]:
    """Returns which checkpoints Orbax keeps when it has written one: its preservation policy."""
    kept = self.kept([checkpoint.step for checkpoint in checkpoints])
    return [checkpoint.step in kept for checkpoint in checkpoints]

  def save(self, updates: int, arrays: Any, meta: Mapping[str, Any]):
    """Copies the arrays off the device, then writes in the background. Raises OSError if the last write failed."""
    args = self._ocp.args
    items = args.Composite(arrays=args.StandardSave(arrays), meta=args.JsonSave(dict(meta)))
    self._tidy_seals()  # a killed run may have left the seal of an earlier one of this name
    with display.doing('waiting for the checkpoint before'):
      self._manager.save(updates, args=items, force=True)
    self._raise_failure()
    self._sealing = self._sealer.submit(self._seal, updates)

  def _raise_failure(self):
    """Raises what sealing has met, if it was no error of the disk: other processes would wait for this one."""
    if self._sealing and self._sealing.done():
      self._sealing.result()

  def _seal(self, updates: int):
    """Waits until Orbax has renamed the checkpoint to its name, then notes its files."""
    here = self._directory / str(updates)
    while not here.exists():
      names = [path.name for path in self._directory.iterdir()]  # an existing later one was begun after this one
      if any(name.isdigit() and int(name) > updates for name in names) or self._closing.wait(0.1):
        break
    own_digests = self._digests(here)
    parts = self._agreed(updates, own_digests) if self._disk.is_apart else {jax.process_index(): own_digests}
    if not (own_digests and parts):
      return
    with contextlib.suppress(OSError):  # the disk is full: a checkpoint without a seal is accepted
      for process, digests in parts.items():
        seal = self._seals / str(updates) / f'{process}.json'
        files.write_file(seal, json.dumps(digests, indent=1) + '\n')
    if self._sealed:
      with contextlib.suppress(OSError):  # it is not published; the next one is
        self._sealed(here)

  def _digests(self, here: pathlib.Path) -> dict[str, str]:
    """Returns {name: sha256} of the files that this process answers for, or {} if they never came, or have gone."""
    with contextlib.suppress(OSError):  # it goes at this moment
      names = [str(file.relative_to(here)) for file in here.rglob('*') if file.is_file()]
      return files.digests(here, sorted(names) if self._disk.is_apart else own_share(names))
    return {}

  def _agreed(self, updates: int, digests: dict[str, str]) -> dict[int, dict[str, str]]:
    """Returns which files count as whose, by process: of one that several have, the first's, or {} if any has none."""
    occasion = f'{self._directory.name} {updates} is written'
    texts = processes.exchange(json.dumps(digests), occasion)
    if self._exchanged:
      processes.forget(self._exchanged)
    self._exchanged = occasion
    parts = dict[int, dict[str, str]]()
    seen = set[str]()
    for process, theirs in enumerate(map(json.loads, texts)):
      if not theirs:
        return {}
      parts[process] = {name: sha256 for name, sha256 in theirs.items() if name not in seen}
      seen |= theirs.keys()
    return parts

  def _tidy_seals(self):
    """Removes the seals of checkpoints that are gone."""
    for seal in self._seals.glob('*') if self._disk.is_ours else ():
      if not (self._directory / seal.name).exists():
        shutil.rmtree(seal, ignore_errors=True)

  def _check_seal(self, updates: int, item: str):
    """Raises OSError that names a file of an item which is not as it was written. What has no seal passes."""
    written: dict[str, str] = {}
    for part in (self._seals / str(updates)).glob('*.json'):
      written |= json.loads(part.read_text())
    names = own_share(name for name in written if name.startswith(f'{item}/'))
    for name, digest in files.digests(self._directory / str(updates), names).items():
      if digest != written[name]:
        raise OSError(f'{name} is damaged')

  def _read(self, updates: int, item: str, how: Any) -> Any:
    """Returns an item as it was written, see `_try`."""
    # The processes agree on the seal before all of them restore together.
    self._try(updates, self._check_seal, updates, item)
    return self._try(updates, self._manager.restore, updates, args=self._ocp.args.Composite(**{item: how}))[item]

  def restore(self, abstract) -> tuple[Any, dict[str, Any]] | None:
    """Restores (arrays, meta) of the newest checkpoint that can be read and used, None if there is none.

    A corrupt one is named in the log, moved away, and the one before it is used. Those that cannot be used here are
    moved away too, and the log says how to take them back: their updates will be made again. If there are no others,
    nothing is moved, and InputError is raised.

    `abstract`: meta -> the ShapeDtypeStructs with shardings that the arrays have; None: only devices that are laid out
    as before can use it.
    """
    self.metas = {}
    # Not those before the kept ones: a run that was killed while it removed one has left half of it.
    for updates in sorted(self.kept(self._manager.all_steps()), reverse=True):
      with contextlib.suppress(_Corrupt):
        self.metas[updates] = self._read(updates, 'meta', self._ocp.args.JsonRestore())
    restored, elsewhere = None, []
    for updates, meta in list(self.metas.items()):
      if (target := abstract(meta)) is None:
        elsewhere.append(updates)
      elif restored is None:
        with contextlib.suppress(_Corrupt):
          restored = self._read(updates, 'arrays', self._ocp.args.StandardRestore(target)), meta
    if elsewhere and restored is None:
      raise InputError(
        f'{self._directory} has no checkpoint at the end of a phase, from which a run can be resumed on other '
        'devices: start on as many devices as before'
      )
    if elsewhere:
      self._move(elsewhere, 'elsewhere')
    return restored

  def _try(self, updates: int, read: Callable, *args, **options) -> Any:
    """Returns what `read` returns; if any process cannot read, moves the checkpoint away and raises _Corrupt."""
    result, why = None, ''
    try:
      result = read(*args, **options)
    except Exception as e:  # tensorstore and Orbax raise many kinds
      if isinstance(e, MemoryError) or 'RESOURCE_EXHAUSTED' in str(e):
        raise  # the machine is full: nothing is wrong with the checkpoint
      why = str(e).split('\n')[0] or repr(e)
    self._reads += 1
    if not processes.any_process(bool(why), f'{self._directory.name} {updates} is corrupt, read {self._reads}'):
      return result
    bad = self._directory / str(updates)
    logging.warning('checkpoint %s is corrupt (%s): using the one before it', bad, why or 'for another process')
    self._move([updates], 'corrupt')
    raise _Corrupt

  def _move(self, gone: Sequence[int], why: str):
    """Moves checkpoints aside and never deletes them: this machine may be at fault, or only for a moment.

    All of them before any process looks what there is: one that goes while another process looks is an error there.
    """
    for updates in gone if self._disk.is_ours else ():
      here = self._directory / str(updates)
      away = self._directory.with_name(f'{self._directory.name}-{updates}-{why}-{time.time_ns()}')
      os.replace(here, away)
      logging.warning('checkpoint %s was moved to %s; to resume from it, move it back', here, away)
    self._tidy_seals()  # afterwards, because without its seal a corrupt checkpoint would be accepted
    processes.barrier(f'{self._directory.name} {gone} are away, read {self._reads}')
    self.metas = {updates: meta for updates, meta in self.metas.items() if updates not in gone}
    self._manager.reload()

  def set_aside(self, after: int, why: str):
    """Moves checkpoints of later updates than `after` away, once all are written; runs continue from earlier ones."""
    self.wait()
    self._move([updates for updates in self._manager.all_steps() if updates > after], why)

  def wait(self):
    """Waits until everything is written; raises what went wrong."""
    self._manager.wait_until_finished()

  def close(self):
    """Closes after the last write. Each step is done even if the one before fails: the sealer would wait for ever."""
    with contextlib.ExitStack() as steps:  # the last first
      steps.callback(self._tidy_seals)
      steps.callback(self._sealer.shutdown)
      steps.callback(self._closing.set)
      steps.enter_context(display.doing('writing the last checkpoint'))
      steps.callback(self._manager.close)
