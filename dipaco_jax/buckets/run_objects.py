"""Permanent files of a run, and trees that are published whole; objects have the names that these have in a workdir.

All else in a workdir is made again where it is missing: features, token losses, compiled programs.
"""

import concurrent.futures
import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from dipaco_jax.storage import files, object_store

INDEX = '.index.json'  # of a tree, see object_store
_MADE = r'sequences|base|shards/(?:base|\d+)|routing/\d+|modules/\d+|checkpoints/\w+/\d+'
_PART = r'tokenize-\w+/sequences/\d+|shards/(?:base|\d+)-parts/\d+'
TREE = re.compile(rf'((?:control/)?(?:{_MADE}|{_PART}))(/.*|\.index\.json)?')  # and its contents
# Globs in the order of publication: config.json comes before files that depend on it, and records of stages come after
# their files.
FIRST = (
  'config.json', 'command.txt', 'environment.json', 'inputs.json', 'chat_template.jinja*', 'generation_config.json*',
  'tokenizer*',
)  # fmt: skip
TREES = 'sequences', 'shards/*', 'base', 'routing/*', 'modules/*', 'control/modules/*'
REFITTED = 'evaluation/router.safetensors*', 'evaluation/routes.npy*'
LAST = (
  'metrics.jsonl', 'checkpoints/*.sha256/*/*.json', 'control/checkpoints/*.sha256/*/*.json', 'paths/best.json',
  'control/paths/best.json', 'evaluation/excerpts.json*', 'evaluation/documents.safetensors*',
  'evaluation/samples.json', 'evaluation/chooser.safetensors*', *REFITTED, 'sinks/*', 'refused.txt', 'stages/*',
)  # fmt: skip
MODULES = 'modules/*', 'control/modules/*'  # trees too, among TREES
PARTS = 'tokenize-*/sequences/*', 'shards/*-parts/*'  # trees, of stages that are not finished
PART_FILES = (  # their files, each with its seal
  'tokenize-*/sample-*', 'tokenize-*/validation-*', 'routing/*-parts/*', 'routing/*-scores/*'
)  # fmt: skip
REMOVED = re.compile(  # removed by the run itself
  r'(?:control/)?(?:modules|checkpoints)/.*|tokenize-.*|(?:shards|routing)/[^/]*-(?:parts|scores)/.*|stages/.*|refused.txt'
)
# Files that the processes of a job read between stages.
READ = *FIRST, 'stages/*.json', 'paths/best.json', 'control/paths/best.json', *REFITTED, *PART_FILES
SET_ASIDE = re.compile(r'(?:control/)?checkpoints/\w+-\d+-\w+-\d+/')  # checkpoints that may be moved back
LASTING = FIRST + LAST + PART_FILES
GROWING = 'metrics.jsonl', 'stages/seconds.json', 'evaluation/samples.json'  # that go up with checkpoints, too
PAGES = 'events/*/*', 'plots/*', 'report.json', 'report.html'  # to look at: no run reads them
CHECKPOINTS = 'checkpoints/*/*', 'control/checkpoints/*/*'  # trees, too; the newest one of each stage is enough


def list_files(workdir: Path, patterns: Sequence[str]) -> list[str]:
  """Lists the files of a workdir that match globs, in their order."""
  paths = (path for pattern in patterns for path in sorted(workdir.glob(pattern)))
  return [str(p.relative_to(workdir)) for p in paths if files.written_as(p) == p and p.is_file()]


def trees(workdir: Path, patterns: Sequence[str] = TREES) -> list[str]:
  """Lists the trees of a workdir that match globs, in their order."""
  names = (str(path.relative_to(workdir)) for pattern in patterns for path in sorted(workdir.glob(pattern)))
  return [name for name in names if TREE.fullmatch(name) and (workdir / name).is_dir()]


def newest_checkpoints(workdir: Path) -> list[str]:
  """Lists the newest checkpoint of each stage in a workdir."""
  names = (str(path.relative_to(workdir)) for pattern in CHECKPOINTS for path in workdir.glob(pattern))
  return [newest_first[0] for newest_first in by_age(name for name in names if TREE.fullmatch(name))]


def whole_trees(names: Iterable[str]) -> list[str]:
  """Lists the trees that are whole, of the names of all objects of a run."""
  return [name.removesuffix(INDEX) for name in names if name.endswith(INDEX) and TREE.fullmatch(name)]


def half_trees(names: Collection[str]) -> list[str]:
  """Lists the trees that have files but no index."""
  begun_trees = {match[1] for name in names if (match := TREE.fullmatch(name))}
  return sorted(begun_trees - {*whole_trees(names)})


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
  """Lists the names of objects that match globs and are not part of a tree."""
  parts = ('[^/]*'.join(map(re.escape, pattern.split('*'))) for pattern in patterns)
  matches = re.compile('|'.join(parts)).fullmatch
  return [name for name in names if matches(name) and not TREE.fullmatch(name)]


def lasts(name: str) -> bool:
  """Returns whether a file or tree is kept in the bucket."""
  return bool(TREE.fullmatch(name) or matching([name], LASTING))


def is_part(name: str) -> bool:
  """Returns whether a file is an intermediate result of an unfinished stage."""
  return bool(matching([name], PART_FILES))


def is_joint(name: str) -> bool:
  """Returns whether a name is of a tree that all processes of a job write together."""
  return bool(TREE.fullmatch(name) and name.removeprefix('control/').startswith(('modules/', 'checkpoints/')))


def index_name(process: int) -> str:
  """Returns the name of the index of the modules that a process has written, in their version's folder."""
  return f'index-{process}.json'


def followed(workdir: Path, with_checkpoints: bool = True) -> list[str]:
  """Lists the files and trees of a workdir that the processes of a job have alike."""
  patterns = TREES + PARTS + (CHECKPOINTS if with_checkpoints else ())
  return trees(workdir, patterns) + list_files(workdir, READ)


def remove_others(workdir: Path, kept: Collection[str]):
  """Removes everything from a workdir except these trees. Checkpoints are removed, as they may be incomplete."""
  kept = {name for name in kept if not is_checkpoint(name)}
  for path in sorted(workdir.rglob('*'), reverse=True):  # what is in a folder before it
    name = str(path.relative_to(workdir))
    tree = TREE.fullmatch(name)
    if SET_ASIDE.match(name) or (tree and tree[1] in kept):
      continue
    if not path.is_dir():
      path.unlink()
    elif not any(path.iterdir()):
      path.rmdir()


def is_checkpoint(tree: str) -> bool:
  return 'checkpoints/' in tree


def by_age(checkpoints: Iterable[str]) -> Iterator[list[str]]:
  """Yields the checkpoints of each stage, newest first."""
  folders: dict[str, list[str]] = {}
  for name in checkpoints:
    folders.setdefault(name.rpartition('/')[0], []).append(name)
  for names in folders.values():
    yield sorted(names, key=lambda name: int(name.rpartition('/')[2]), reverse=True)


def fetch_files(storage: object_store.Storage, names: Sequence[str], workdir: Path):
  """Fetches objects into a workdir, without those that are deleted meanwhile."""

  def fetch(name: str):
    with contextlib.suppress(object_store.Missing):
      files.write_file(workdir / object_store.checked_name(name), storage.fetch(name))

  with concurrent.futures.ThreadPoolExecutor(object_store.TRANSFERS) as pool:
    list(pool.map(fetch, names))
