"""What a token allows: a table of kinds and names, and nothing else. Pure.

    kind of fact                                        may be read
    config, prepared, round, diverged, finished         always
    module                                              if one of the token's paths goes through it
    checkpoint, piece, state, evaluation, excluded      of the token's paths
    all others, `withdrawn` included                    never: no worker reads them, and they quote other paths' facts

    object or file                                      may be read
    base/..., stages/..., their indices                 always
    shards/N/meta.json, shards/N.index.json             always: sizes by path
    shards/N/PATH/...                                   of the token's paths
    objects/modules/, differences/                      if one of the token's paths goes through the module
    objects/paths/, objects/states/                     of the token's paths
    all others (sequences, routing, outer states)       never

Tasks: `train` and `piece` of the token's paths, and `ship`. Tasks that read all text, `prepare` and `reroute`, are left
to workers with direct access.
"""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

ALWAYS = ('config', 'prepared', 'round', 'diverged', 'finished')
OF_PATHS = ('checkpoint', 'piece', 'state', 'evaluation', 'excluded')
TASKS = ('train', 'piece', 'ship')
OPEN_TREES = re.compile(r'(?:base|stages)(?:\.index\.json|(?:/[\w.-]+)+)|shards/\d{1,9}(?:\.index\.json|/meta\.json)')
SHARD = re.compile(r'shards/\d{1,9}/(\d{1,9})/[\w.-]+')
MODULE = re.compile(r'objects/(?:modules|differences)/(\d{1,9})/(.+)-[0-9a-f]{16}\.safetensors')
OF_PATH = re.compile(r'objects/paths/(\d{1,9})/(\d{1,9})(?:\.(\d{1,9}))?-(.+)-[0-9a-f]{16}\.safetensors')
STATE = re.compile(r'objects/states/(\d{1,9})/(\d{1,9})-(\d{1,9})-[0-9a-f]{16}\.safetensors')


class Scope(NamedTuple):
  """The paths and modules of a token."""

  paths: frozenset[int]
  modules: frozenset[str]  # through which one of these paths goes
  levels: frozenset[str]  # all: an object of version 0 is that of a level

  @property
  def path_keys(self) -> frozenset[str]:
    """The keys of facts and tasks of these paths."""
    return frozenset(map(str, self.paths))


def readable_keys(scope: Scope, kind: str, keys: Sequence[str] | None) -> Collection[str] | None:
  """Returns the keys of facts that may be read: of those asked for, or of all if None. None means any.

  Raises KeyError if no fact of the kind may be read.
  """
  if kind in ALWAYS:
    return keys
  allowed = {**dict.fromkeys(OF_PATHS, scope.path_keys), 'module': scope.modules}[kind]
  return sorted(allowed if keys is None else allowed & {*keys})


def may_read_object(scope: Scope, name: str) -> bool:
  """Returns whether an object or a file of a tree may be read."""
  if '..' in name.split('/') or not name.isascii():
    return False
  if OPEN_TREES.fullmatch(name):
    return True
  if match := SHARD.fullmatch(name):
    return int(match[1]) in scope.paths
  if match := MODULE.fullmatch(name):
    return match[2] in (scope.levels if int(match[1]) == 0 else scope.modules)
  if match := OF_PATH.fullmatch(name):
    return int(match[2]) in scope.paths and match[4] in scope.levels
  if match := STATE.fullmatch(name):
    return int(match[1]) in scope.paths
  return False


def claimable(kinds: Sequence[str]) -> list[str]:
  """Returns those kinds of tasks that a token may claim."""
  return [kind for kind in kinds if kind in TASKS]
