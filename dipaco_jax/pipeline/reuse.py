"""Takes finished stages from another run: runs that are compared share a tokenizer and a base, and make them once."""

import contextlib
import os
import pathlib
import shutil

from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.pipeline import stage_records
from dipaco_jax.storage import files, publishing, seals
from dipaco_jax.training import metrics_log

# What a stage has published, by its place in a workdir.
ARTEFACTS = {
  'tokenize': ('tokenizer.model', 'sequences'),
  'pretrain': ('shards/base', 'base'),
  'route': ('features', 'routing/0', 'shards/0'),
}

OPTIONAL = ('features', 'shards/base')  # of no more use, or made again when they are asked for


def take(run: run_lib.Run, other: pathlib.Path):
  """Links the stages that `other` has finished with the same settings, up to the first that differs or is here.

  Files are linked where they are on one disk: they are never written again.

  Raises:
    InputError: there is no run in `other`.
    seals.Damaged: what would be taken is not as it was written.
  """
  theirs = stage_records.read_settings(other)
  for stage, names in ARTEFACTS.items():
    if run.record(stage):
      continue
    record = stage_records.read_stages(other).get(stage)
    same = record and record['digest'] == run_lib.digest(run.settings, stage)
    if not record or not same or (stage != 'tokenize' and theirs.decay_steps != run.settings.decay_steps):
      return
    if not all((other / name).exists() for name in names if name not in OPTIONAL):
      return
    for name in names:
      _check(other / name)
      _link(other / name, run.workdir / name)
    for row in list(metrics_log.read_rows(other)):
      if row['stage'] == stage:
        run.metrics.write(row.pop('kind'), row.pop('stage'), row.pop('updates'), **row)
    publishing.write_json(run_lib.record_file(run.workdir, stage), record)


def _check(source: pathlib.Path):
  """Records too, which are else looked at one by one: damage would be found here, and mended here in vain."""
  for file in [source] if source.is_file() else files.files(source):
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
