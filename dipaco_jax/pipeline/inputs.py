"""What a run reads from outside its workdir: text, a tokenizer, a pretrained model. It is compared by content.

A stage records the digests of its inputs when it begins. A run that is resumed or reuses stages of another compares
these digests: files of the same name may differ, and files in another place may be equal.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Iterator

from dipaco_jax.config import fields, settings as settings_lib
from dipaco_jax.core.errors import InputError, Unavailable
from dipaco_jax.data import content, source_files, tokenizer_files
from dipaco_jax.huggingface import weight_files
from dipaco_jax.pipeline import input_records, run as run_lib, stage as stage_lib, stage_records
from dipaco_jax.processes import display, processes
from dipaco_jax.storage import remote_files

TOKENIZER, MODEL = 'tokenizer.model_file', 'pretrain.init'
READERS = ('tokenize', 'pretrain')  # stages that read anything from outside
AWAY = (OSError, InputError, Unavailable)


def find_inputs(s: settings_lib.Settings, stage: str) -> dict[str, content.Content]:
  """Returns {field: content} of the inputs of a stage. Raises InputError if they do not exist."""
  if stage == 'pretrain' and s.pretrain.init:
    names = ('config.json', *weight_files.find(s.pretrain.init))
    return {MODEL: _content_of(s.pretrain.init, names)}
  if stage != 'tokenize':
    return {}
  contents = content.of_text(s.data)
  if s.tokenizer.model_file:
    folder, name = os.path.split(s.tokenizer.model_file)
    beside = [other for other in tokenizer_files.BESIDE if remote_files.can_open(f'{folder or "."}/{other}')]
    of_tokenizer = _content_of(folder or '.', (name, *beside))
    renamed = tuple(file._replace(name='' if file.name == name else file.name) for file in of_tokenizer.files)
    contents[TOKENIZER] = content.Content(renamed)
  return contents


def _content_of(folder: str, names: tuple[str, ...]) -> content.Content:
  return content.Content(tuple(content.File(name, f'{folder}/{name}') for name in names))


def compute_digests(workdir: pathlib.Path, s: settings_lib.Settings, stage: str) -> dict[str, str]:
  """Returns {field: digest} of the present inputs of a stage, and keeps digests of files for the next time."""
  known = input_records.read_inputs(workdir)
  described = _describe(s, stage, digests := content.Digests(known.files))
  if digests.known != known.files:
    input_records.write_inputs(workdir, known._replace(files=digests.known))
  return {field: about['digest'] for field, about in described.items()}


def _describe(s: settings_lib.Settings, stage: str, digests: content.Digests) -> dict[str, dict]:
  """Returns {field: {'digest', 'files': {path: digest}}} of the present inputs of a stage."""
  with display.doing('comparing text and models with their records', tells=False):
    contents = find_inputs(s, stage)
    return {
      field: {'digest': digests.of_content(of), 'files': digests.of_files(file.path for file in of.files)}
      for field, of in contents.items()
    }


def note_inputs(run: run_lib.Run, stage: str) -> None:
  """Records the inputs of a stage before it reads them; removes an unfinished tokenization of other inputs."""
  has_changed = processes.is_first() and _note(run.workdir, run.settings, stage)
  if processes.any_process(has_changed, f'other inputs of {stage}') and run.disk.is_ours:
    stage_records.remove_leftovers(run.workdir, [stage_lib.find(stage)])
  run.disk.follow(f'inputs of {stage}')


def _note(workdir: pathlib.Path, s: settings_lib.Settings, stage: str) -> bool:
  """Records the inputs of a stage; returns whether results of other inputs exist."""
  known = input_records.read_inputs(workdir)
  described = _describe(s, stage, digests := content.Digests(known.files))
  before, now = known.digests(stage), {field: about['digest'] for field, about in described.items()}
  if before and before != now:
    [changed, *_] = sorted(field for field in before | now if before.get(field) != now.get(field))
    logging.warning('config.%s: it has changed since stage %s began, which is started again', changed, stage)
  input_records.write_inputs(workdir, input_records.Inputs(digests.known, known.stages | {stage: described}))
  return bool(before) and before != now


def note_as_read(workdir: pathlib.Path, s: settings_lib.Settings, stage: str) -> None:
  """Records that a stage of this run was made from the inputs that the config names now."""
  _note(workdir, s, stage)


def check_unchanged(run: run_lib.Run, stage: str) -> None:
  """Raises InputError if files have changed since the stage began, while they were read."""
  noted = input_records.read_inputs(run.workdir).stages.get(stage, {})
  if any(about['files'] for about in noted.values()):
    now = compute_digests(run.workdir, run.settings, stage)
    if any(now.get(field) != about['digest'] for field, about in noted.items() if about['files']):
      raise InputError('config.data: files were added, removed or changed while they were read: run the command again')


def check_inputs(workdir: pathlib.Path, s: settings_lib.Settings, keeps: bool = True) -> None:
  """Raises InputError, with the fix, if inputs of a finished stage have changed. Inputs that are gone are ignored.

  `keeps`: whether digests of files are kept for the next time, which requires that no other process is running in the
  workdir.
  """
  known = input_records.read_inputs(workdir)
  digests = content.Digests(known.files)
  for stage in READERS:
    if known.stages.get(stage) and _is_used(workdir, stage):
      for field, about in known.stages[stage].items():
        for path, change in _find_changed(s, field, about['files'], digests):
          fix = f'restore the files that were read, or use another --workdir than {workdir}'
          raise InputError(f'config.{field}: {path} {change} stage {stage} of this run read the files: {fix}')
  if keeps and digests.known != known.files:
    input_records.write_inputs(workdir, known._replace(files=digests.known))


def _is_used(workdir: pathlib.Path, stage: str) -> bool:
  """Returns whether a stage is finished or has trained; an unfinished tokenization starts again by itself."""
  begun = stage == 'pretrain' and any((workdir / name).exists() for name in ('base', 'checkpoints/pretrain'))
  return begun or stage_records.record_file(workdir, stage).exists()


def _find_changed(
  s: settings_lib.Settings, field: str, before: dict[str, str], digests: content.Digests
) -> Iterator[tuple[str, str]]:
  """Yields (path, description) of files of a field that differ from those `before`, {path: digest}."""
  if not before:
    return
  present: list[str] = []
  if field in ('data.train', 'data.validation'):
    present = source_files.list_present(getattr(s.data, field.removeprefix('data.')))
  now: dict[str, str] = {}
  with contextlib.suppress(*AWAY):
    now = digests.of_files([*before, *present])
  num_read = collections.Counter(before.values())
  num_present = collections.Counter(now[path] for path in {*present} if path in now)
  for path, digest in now.items():
    if path in before and digest != before[path]:
      yield path, 'has changed since'
    elif path not in before and num_present[digest] > num_read[digest]:  # a file that has moved is present once
      yield path, 'was added after'


# -- another run


def without_places(s: settings_lib.Settings) -> settings_lib.Settings:
  """Returns settings in which no field says where an input lies."""

  def globs(entries: tuple[str | fields.Source, ...]) -> tuple[str | fields.Source, ...]:
    mixed = fields.sources(entries)
    return tuple(one._replace(globs=()) for one in mixed) if mixed else ('',) if entries else ()

  data = dataclasses.replace(s.data, train=globs(s.data.train), validation=globs(s.data.validation), data_dir='')
  tokenizer = dataclasses.replace(s.tokenizer, model_file='given' if s.tokenizer.model_file else '')
  pretrain = dataclasses.replace(s.pretrain, init='given' if s.pretrain.init else '')
  return dataclasses.replace(s, data=data, tokenizer=tokenizer, pretrain=pretrain)
