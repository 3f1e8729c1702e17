"""Reuse of stages of another run, so that compared runs share a tokenizer, a base and shards.

A stage is taken where its settings are the same, apart from where inputs lie, and its inputs have the same content.
"""

import contextlib
import logging
import os
import pathlib
import shutil
from typing import Any

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.data import tokenizer_files
from dipaco_jax.pipeline import inputs, run as run_lib, stage as stage_lib, stage_records
from dipaco_jax.storage import files, publishing, seals
from dipaco_jax.telemetry import metrics_log

# Files that may be missing: they are not needed any more, or made again; of a tokenizer's files, some exist.
OPTIONAL = ('features', 'shards/base', *tokenizer_files.FILES)


def take_stages(run: run_lib.Run, other: pathlib.Path):
  """Reuses the stages that `other` has finished with the same settings and inputs, up to the first that differs.

  Files are linked where they are on one disk: they are never written again. Raises InputError if there is no run in
  `other`, seals.Damaged if what would be taken is not as it was written.
  """
  theirs = stage_records.read_settings(other)
  for one in stage_lib.STAGES:
    if not one.artefacts:
      return
    record = stage_records.read_record(other, one.name)
    if why := _find_difference(run, theirs, record, one) or _find_missing(run, other, one):
      logging.warning('--reuse=%s: stages from %s on are not reused: %s', other, one.name, why)
      return
    if not run.record(one.name) and record:
      _take(run, other, one, record)


def _find_difference(
  run: run_lib.Run, theirs: settings_lib.Settings, record: dict[str, Any] | None, one: stage_lib.Stage
) -> str:
  """Returns how a stage of another run differs from that of this run, '' if they are the same."""
  if not record:
    return 'that run has not finished it'
  if record['digest'] != stage_lib.digest(theirs, one.name):
    return 'it was made by another version of this program'
  ours, others = inputs.without_places(run.settings), inputs.without_places(theirs)
  if stage_lib.digest(ours, one.name) != stage_lib.digest(others, one.name):
    changes = settings_lib.differences(others, ours)
    depends = tuple(field for stage in stage_lib.up_to(one.name) for field in stage.depends)
    return settings_lib.in_words({name: x for name, x in changes.items() if name.startswith((*depends, 'extensions'))})
  if one.name != 'tokenize' and not stage_lib.same_base(others, ours):
    return 'its learning rate has another schedule, or other text was held out'
  return _find_other_input(run, record, one.name)


def _find_other_input(run: run_lib.Run, record: dict[str, Any], name: str) -> str:
  """Returns which input of a stage has another content, '' if none has."""
  own = run.record(name)
  now = own['inputs'] if own else inputs.compute_digests(run.workdir, run.settings, name)
  other = sorted(field for field in now | record['inputs'] if now.get(field) != record['inputs'].get(field))
  return f'config.{other[0]} has other contents' if other else ''


def _find_missing(run: run_lib.Run, other: pathlib.Path, one: stage_lib.Stage) -> str:
  """Returns a missing part of a stage of another run; '' if none is missing, or if this run has its own stage."""
  needed = [path for path in one.artefacts if path not in OPTIONAL]
  if one.name == 'tokenize':
    needed += tokenizer_files.names(run.settings.tokenizer, lambda name: (other / name).exists())
  missing = [path for path in needed if not (other / path).exists()]
  return f'{other / missing[0]} no longer exists' if missing and not run.record(one.name) else ''


def _take(run: run_lib.Run, other: pathlib.Path, one: stage_lib.Stage, record: dict[str, Any]):
  for path in one.artefacts:
    _check(other / path)
    _link(other / path, run.workdir / path)
  if rows := [row for row in metrics_log.read_rows(other) if row['stage'] == one.name]:
    run.metrics.rewind(one.name, -1)  # rows of an earlier start
  for row in rows:
    run.metrics.write(row.pop('kind'), row.pop('stage'), row.pop('updates'), **row)
  inputs.note_as_read(run.workdir, run.settings, one.name)
  own = record | {'digest': stage_lib.digest(run.settings, one.name)}  # with the places of this run's inputs
  publishing.write_json(stage_records.record_file(run.workdir, one.name), own)


def _check(source: pathlib.Path):
  """Checks a file, or all files of a directory, JSON records included: copied damage could not be repaired here."""
  for file in [source] if source.is_file() else files.complete_files(source):
    (seals.read_json if file.suffix == '.json' else seals.check)(file)


def _link(source: pathlib.Path, target: pathlib.Path):
  if source.is_file():
    publishing.write_sealed(target, source.read_bytes())
  elif source.is_dir():
    with publishing.publish_directory(target, sealed=False) as aside:
      shutil.copytree(source, aside, copy_function=_link_file, dirs_exist_ok=True)


def _link_file(source: str, target: str):
  with contextlib.suppress(OSError):  # another disk
    os.link(source, target)
    return
  shutil.copy2(source, target)
