"""Advice about damaged or missing files of a run: which stage made them, and what to remove to have them made again."""

import os
from pathlib import Path

ISLANDS_MARK = 'registry.id'  # in the place of an islands run: the id of the run; its registry lists the files
OWNERS_MARK = 'owner.json'  # in an owner's store: the run and the owner that it is of
POINTERS = 'paths/best.json'  # the last file of paths that are trained: the version that early stopping chose for each
STAGES = {  # the stage that makes a file, by the first part of the file's name
  'tokenizer.model': 'tokenize', 'tokenizer.json': 'tokenize', 'tokenizer_config.json': 'tokenize',
  'chat_template.jinja': 'tokenize', 'generation_config.json': 'tokenize',
  'sequences': 'tokenize', 'base': 'pretrain', 'routing': 'route', 'shards': 'route',
  'features': 'route', 'modules': 'train', 'paths': 'train', 'evaluation': 'evaluate', 'control': 'evaluate',
}  # fmt: skip


def explain(file: str | os.PathLike) -> str:
  """Returns a message with the fault of a file, the stage that made it, and what to remove."""
  workdir, name = locate(Path(file))
  state = 'is damaged' if os.path.exists(file) else 'is missing'
  if not name:
    return f'{file} {state}'
  stage = stage_of(name)
  problem = f'{file}{f", made by the stage {stage}," if stage else ""} {state}'
  if (workdir / ISLANDS_MARK).exists():
    return f'{problem}: read a copy of this run, or start it again in another place'
  doomed = files_to_remove(workdir, name)
  return (
    f'{problem}: {_advice(workdir, doomed)}it again' if doomed else f'{problem}: the command of the run makes it again'
  )


def explain_lost_checkpoints(workdir: Path) -> str:
  """Returns what to remove if no checkpoint of training can be read, but later shards were made from one."""
  problem = f'{workdir}/checkpoints/train has no checkpoint that can be read, and later shards were made from one'
  return f'{problem}: {_advice(workdir, _files_of_training(workdir))}them again'


def _advice(workdir: Path, names: list[str]) -> str:
  listed = [str(workdir / name) for name in names]
  listing = ' and '.join(filter(None, [', '.join(listed[:-1]), *listed[-1:]]))
  return f'remove {listing}, and the command of the run makes '


def locate(file: Path) -> tuple[Path, str]:
  """Returns the workdir that a file is in and its name there, '' if it is in none."""
  for folder in file.parents:
    if (folder / 'stages').is_dir() or (folder / 'config.json').is_file():
      return folder, file.relative_to(folder).as_posix()
  return Path(), ''


def stage_of(name: str) -> str:
  """Returns the stage that makes a file, '' if none does."""
  first, _, rest = name.partition('/')
  second = rest.partition('/')[0]
  if first.startswith('tokenize-'):
    return 'tokenize'  # before it is done
  if first == 'stages':
    return second.partition('.')[0]
  if first == 'shards' and second == 'base':
    return 'pretrain'
  return 'train' if first in ('routing', 'shards') and second[:1] in [*'123456789'] else STAGES.get(first, '')


def files_to_remove(workdir: Path, name: str) -> list[str]:
  """Lists the existing files to remove so that the command of the run makes a file again."""
  first, _, rest = name.partition('/')
  second = rest.partition('/')[0]
  if first == 'modules' and not _is_last_version(workdir, second):
    return _files_of_training(workdir)
  if first in ('routing', 'shards', 'modules'):
    unit = f'{first}/{second}'  # is published whole
  else:
    unit = name if first in ('stages', 'paths') else first
  return _existing(workdir, [unit, f'stages/{stage_of(name)}.json'])


def _files_of_training(workdir: Path) -> list[str]:
  """Lists the files to remove so that training starts again from the base."""
  rounds = [f'{tree}/{p.name}' for tree in ('routing', 'shards') for p in (workdir / tree).glob('[1-9]*')]
  return _existing(workdir, ['checkpoints/train', 'modules', *sorted(rounds), 'stages/train.json'])


def _existing(workdir: Path, names: list[str]) -> list[str]:
  return [name for name in dict.fromkeys(names) if (workdir / name).exists()]


def _is_last_version(workdir: Path, version: str) -> bool:
  """Returns whether a version of the modules is the last one of a run that has trained to its end."""
  versions = [int(p.name) for p in (workdir / 'modules').glob('*') if p.name.isdecimal()]
  is_done = (workdir / 'stages' / 'train.json').exists()
  return is_done and version.isdecimal() and int(version) >= max(versions, default=0)
