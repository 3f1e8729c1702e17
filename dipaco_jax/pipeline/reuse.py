"""Takes finished stages from another run: runs that are compared share a tokenizer and a base, and make them once."""

import contextlib
import os
import pathlib
import shutil

from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.pipeline import stage, stage_records
from dipaco_jax.storage import files, publishing, seals
from dipaco_jax.training import metrics_log

OPTIONAL = ('features', 'shards/base')  # may be gone: no longer needed, or made again when they are


def take(run: run_lib.Run, other: pathlib.Path):
  """Takes the stages that `other` has finished with the same settings, up to the first that differs or is here.

  Files are linked where they are on one disk: they are never written again. Raises InputError where there is no run in
  `other`, seals.Damaged where what would be taken is not as it was written.
  """
  theirs = stage_records.read_settings(other)
  for one in stage.STAGES:
    if not one.artefacts:
      return
    if run.record(one.name):
      continue
    record = stage_records.read_record(other, one.name)
    # After `tokenize`, the base's learning rate follows the whole run's cosine.
    same_rate = one.name == 'tokenize' or theirs.decay_steps == run.settings.decay_steps
    if not record or record['digest'] != stage.digest(run.settings, one.name) or not same_rate:
      return
    if not all((other / path).exists() for path in one.artefacts if path not in OPTIONAL):
      return
    for path in one.artefacts:
      _check(other / path)
      _link(other / path, run.workdir / path)
    for row in list(metrics_log.read_rows(other)):
      if row['stage'] == one.name:
        run.metrics.write(row.pop('kind'), row.pop('stage'), row.pop('updates'), **row)
    publishing.write_json(stage_records.record_file(run.workdir, one.name), record)


def _check(source: pathlib.Path):
  """Checks a file, or all files of a directory, JSON records included: damage copied here could not be mended here."""
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
