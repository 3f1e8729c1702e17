"""Checks and preparations before a run begins: workdir, config, model, devices, and stages of another run."""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp

from dipaco_jax.algorithm import grid as grid_lib, inner, modules
from dipaco_jax.config import choices, extension, settings as settings_lib
from dipaco_jax.core import errors
from dipaco_jax.core.errors import InputError, Unavailable
from dipaco_jax.data import corpus, source, tokenizer_files
from dipaco_jax.huggingface import model_folder
from dipaco_jax.models import block_check, transformer
from dipaco_jax.pipeline import rate_check, run as run_lib, stage as stage_lib, stage_records, tokenize_stage
from dipaco_jax.planning import cost_check
from dipaco_jax.processes import display, processes, stopping
from dipaco_jax.routing import own_router
from dipaco_jax.storage import files, module_store, publishing
from dipaco_jax.telemetry import metrics_log
from dipaco_jax.training import mesh

# Files that may be missing: they are not needed any more, or made again; of a tokenizer's files, some exist.
OPTIONAL = ('features', 'shards/base', *tokenizer_files.FILES)

# Of a file that cannot be read or written, or where a folder should be a file, or a file a folder.
OF_FILES = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)


@contextlib.contextmanager
def kept(workdir: pathlib.Path):
  """Makes the workdir; removes it again if the input proves wrong before the first text is tokenized.

  Raises InputError if it cannot be made or contains other files, Unavailable if it is gone or cannot be written later.
  """
  try:
    new = not (workdir.exists() and any(workdir.iterdir()))
    check_place(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / 'lock').touch()
  except OSError as e:
    if errors.disk_is_full(e):
      raise
    raise InputError(f'--workdir={workdir}: {e.strerror}; name a directory that can be made and written') from e
  try:
    yield
  except Exception as e:
    if not os.path.exists(workdir / 'lock'):  # also where its disk or file server does not answer
      raise Unavailable(f'--workdir={workdir} is gone; run the same command again when it is back') from e
    if not isinstance(e, InputError) and (cause := find_unusable_file(e, workdir)):
      fix = 'check its disk, permissions and kind, and run the same command again'
      raise Unavailable(f'{cause.filename}: {cause.strerror}; {fix}') from e
    has_text = finished_tokenizing(workdir) or any(workdir.glob('tokenize-*/sequences/*'))
    if isinstance(e, InputError) and new and not has_text:
      shutil.rmtree(workdir, ignore_errors=True)
    raise


def find_unusable_file(error: BaseException, folder: pathlib.Path) -> OSError | None:
  """Returns the cause of an error that is a file or folder in `folder` that cannot be used."""
  named = [e for e in errors.causes(error) if isinstance(e, OSError) and e.errno in OF_FILES and e.filename]
  paths = [pathlib.Path(os.fsdecode(e.filename)).absolute() for e in named]
  return next((e for e, path in zip(named, paths, strict=True) if path.is_relative_to(folder.absolute())), None)


def check_place(workdir: pathlib.Path):
  """Raises InputError if the directory contains files that are not of a run; lost+found and the like are ignored."""
  names = {file.name for file in workdir.iterdir() if file.name[0] != '.'} if workdir.exists() else set()
  if not names & {'lock', 'config.json'} and (others := names - {'lost+found'}):
    raise InputError(
      f'--workdir={workdir} contains other files ({min(others)}) but no run: name a directory of its own'
    )


def finished_tokenizing(workdir: pathlib.Path) -> bool:
  """Returns whether the text of a run is tokenized."""
  return stage_records.record_file(workdir, 'tokenize').exists()


def check_text(workdir: pathlib.Path, settings: settings_lib.Settings):
  """Checks the text, unless it is tokenized already. Raises InputError if it cannot be read or is too short."""
  if not finished_tokenizing(workdir):
    with display.doing('looking at the text'):
      corpus.check_readable(source.settings_of(settings), lambda: corpus.plan_held_back(settings).fraction)
      tokenize_stage.check_input(settings)


def check_model(settings: settings_lib.Settings):
  """Checks levels' patterns against the parameters and batches against the devices; raises InputError."""
  kernel, platform = settings.model.attention, jax.default_backend()
  if (owner := {'splash': 'tpu', 'flash': 'gpu', 'cudnn': 'gpu'}.get(kernel, platform)) != platform:
    raise InputError(f"config.model.attention='{kernel}' is for a {owner.upper()}: use 'auto'")
  if settings.model.experts == 'megablox' and platform != 'tpu':
    raise InputError("config.model.experts='megablox' is for a TPU: use 'auto'")
  model = transformer.make_model(settings.model, settings.tokenizer.vocab_size)
  shapes = transformer.shapes(model)
  if settings.model.block:
    block_check.check(model)
  layout = modules.make_layout(settings.grid, settings.levels, shapes)
  inner.check_frozen(settings.inner.frozen, shapes)
  _check_optimizers(settings, shapes)
  if extension.is_reference(settings.routing.method):
    own_router.rehearse(settings)
  rate_check.check_rates(settings)
  microbatch = settings.train.microbatch
  for stage, grid in (('train', layout.grid), ('pretrain', grid_lib.Grid())):
    sizes = settings.batch_sizes(stage)
    rows = sizes[f'{stage}.batch_size'] // mesh.place(grid, settings.mesh, sizes, jax.devices()).data
    if (used := inner.rows_at_once(rows, microbatch)) < min(microbatch, rows):
      message = 'config.train.microbatch=%d does not divide the %d rows of %s on a device: %d at a time are used'
      logging.warning(message, microbatch, rows, f'{stage}.batch_size', used)


def check_costs(workdir: pathlib.Path, settings: settings_lib.Settings):
  """Logs the estimated memory and time of a run, unless it is done; raises InputError if it cannot fit."""
  if stage_records.record_file(workdir, stage_lib.NAMES[-1]).exists():
    return
  record = stage_records.read_record(workdir, 'tokenize')
  size = record['result']['vocab_size'] if record else model_folder.vocab_size(settings)
  _check_costs(settings, size, is_whole_run=True)


def check_worker_costs(settings: settings_lib.Settings):
  """Logs the estimated memory of a worker, which trains one path at a time; raises InputError if it cannot fit."""
  try:
    size = model_folder.vocab_size(settings)
  except InputError:  # another process has the tokenizer
    return
  _check_costs(settings.dense(), size, is_whole_run=False)


def _check_costs(settings: settings_lib.Settings, vocab_size: int, is_whole_run: bool):
  sized = dataclasses.replace(settings.tokenizer, vocab_size=vocab_size)
  with display.doing('estimating memory and time', tells=False):
    cost_check.check(dataclasses.replace(settings, tokenizer=sized), stopping.say, is_whole_run=is_whole_run)


def _check_optimizers(s: settings_lib.Settings, shapes: dict[str, jax.ShapeDtypeStruct]):
  """Raises InputError if a user-defined optimizer or schedule returns unexpected results."""
  named = extension.references(s)
  for name, make in {
    'inner.optimizer': lambda: choices.make_transformation(s.inner),
    'outer.optimizer': lambda: choices.make_outer_optimizer(s.outer),
  }.items():
    if name in named:
      with extension.blaming(name, named[name]):
        optimizer = make()
        updates, _ = jax.eval_shape(
          lambda params, optimizer=optimizer: optimizer.update(params, optimizer.init(params), params), shapes
        )
      if jax.tree.map(_shape, updates) != jax.tree.map(_shape, shapes):
        raise InputError(f'config.{name}={named[name]!r}: its updates should have the shapes of the parameters')
  if (name := 'inner.schedule') in named:
    with extension.blaming(name, named[name]):
      schedule = choices.make_inner_of_run(s).learning_rate
      rate = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    if _shape(rate) != ((), jnp.float32):
      raise InputError(f'config.{name}={named[name]!r} should return a rate for a step, float32 []')


def _shape(x: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], jnp.dtype]:
  return x.shape, x.dtype


def settle_config(workdir: pathlib.Path, settings: settings_lib.Settings, command: str):
  """Writes config.json and the command or call; rejects another config than the run began with, naming the fields."""
  file = workdir / 'config.json'
  if file.exists():
    old = stage_records.read_settings(workdir)
    stage_records.check_changes(workdir, old, settings)
    trained = max(module_store.versions(workdir), default=0)
    if settings.train.phases < trained:
      raise InputError(
        f'config.train.phases={settings.train.phases}: {trained} phases are trained already; set that or more'
      )
    _check_end(workdir, old, settings)
    if old.train.phases != settings.train.phases and not settings.inner.decay_steps:
      more = 'more phases stretch the cosine, so the learning rate steps up'
      fewer = 'fewer phases shorten the cosine, so the learning rate steps down'
      message = '%s; --config.inner.decay_steps states its length from the start'
      logging.warning(message, more if old.train.phases < settings.train.phases else fewer)
  publishing.write_json(file, settings_lib.recorded(settings))
  (workdir / stage_records.REFUSED).unlink(missing_ok=True)
  files.write_file(workdir / stage_records.COMMAND, os.fsencode(f'{command}\n'))


def _check_end(workdir: pathlib.Path, old: settings_lib.Settings, new: settings_lib.Settings):
  """Raises InputError if the new number of phases would change whether a phase that has begun is closed."""
  before, now = (choices.make_timetable(s, {}) for s in (old, new))
  steps = (row for row in metrics_log.read_rows(workdir) if (row['stage'], row['kind']) == ('train', 'step'))
  begun = max((row['phase'] + 2 for row in steps), default=0)  # also the next phase: rows come late
  if any(before.is_closed(phase) != now.is_closed(phase) for phase in range(min(begun, old.train.phases))):
    raise InputError(
      f'config.train.phases={new.train.phases}: a run with streaming has to end as it was begun, '
      f'after {old.train.phases}; set that, or use another --workdir'
    )


def note_environment(run: run_lib.Run):
  """Records the environment on which the modules' digest depends, and warns if it differs in a resumed run."""
  now = {'device': jax.devices()[0].device_kind, 'devices': jax.device_count(), 'processes': jax.process_count()}
  now |= {'cpus': len(os.sched_getaffinity(0)), 'jax': jax.__version__}
  file = run.workdir / 'environment.json'
  if not (then := stage_records.read_environment(run.workdir)) and file.exists():
    logging.warning('%s is damaged: it is unknown whether this run began on the same devices', file)
  then = then or now
  changed = [f'{name} {then.get(name)} -> {value}' for name, value in now.items() if then.get(name) != value]
  if changed:
    logging.warning(
      'this run began elsewhere (%s): it continues, but results will differ in the last bits', ', '.join(changed)
    )
  if processes.is_first():
    files.write_file(file, json.dumps(now, indent=1) + '\n')
