"""What a token allows: a table of kinds and names, and nothing else. Pure.

    kind of fact                                        may be read
    config, prepared, round, diverged, finished         always
    joined, began, left                                 always: names of owners, and numbers of phases
    module                                              if one of the token's paths goes through it
    checkpoint, piece, state, evaluation, excluded      of the token's paths
    own_text                                            of all owners, by a token of an owner: of others, the numbers of
                                                        tokens alone, from which weights follow
    all others, `withdrawn` included                    never: no worker reads them, and they quote other paths' facts

A token of an owner also reads evaluations of other paths of the same model, which decide its version together.

    object or file                                      may be read
    base/..., stages/..., their indices                 always
    shards/N/meta.json, shards/N.index.json             always: sizes by path
    shards/N/PATH/...                                   of the token's paths
    objects/modules/, differences/                      if one of the token's paths goes through the module
    objects/paths/, objects/states/                     of the token's paths
    tokenizer, validation_text.json                     by a token of an owner, whose worker reads text
    all others (sequences, routing, outer states)       never

Tasks: `train` and `piece` of the token's paths, and `ship`; of an owner, also `own_text` of that owner, `evaluate` of
its paths, and audits of what another of its workers has trained. Tasks that read all text, `prepare` and `reroute`, are
left to workers with direct access. Where text stays with its owners, a token without an owner may do nothing.
"""

import functools
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from dipaco_jax.data import tokenizer_files
from dipaco_jax.islands import validation_text
from dipaco_jax.islands.island import OWN_TEXT
from dipaco_jax.registry.registry_schema import MEMBERS

ALWAYS = ('config', 'prepared', 'round', 'diverged', 'finished', *MEMBERS)
EVALUATE, EVALUATION = 'evaluate', 'evaluation'
OF_PATHS = ('checkpoint', 'piece', 'state', EVALUATION, 'excluded')
TASKS = ('train', 'piece', 'ship')
FILES_OF_TEXT = (*tokenizer_files.FILES, validation_text.NAME)  # that an owner's worker needs to read its text
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
  owner: str = ''  # whose text the token is for, if text stays with its owners
  models: frozenset[int] = frozenset()  # paths of the same models as these paths
  is_all: bool = False  # whether these are all paths

  @property
  def path_keys(self) -> frozenset[str]:
    """The keys of facts and tasks of these paths."""
    return _keys(self.paths)


@functools.lru_cache(4096)
def _keys(paths: frozenset[int]) -> frozenset[str]:
  return frozenset(map(str, paths))


def readable_keys(scope: Scope, kind: str, keys: Sequence[str] | None) -> Collection[str] | None:
  """Returns the keys of facts that may be read: of those asked for, or of all if None. None means any.

  Raises KeyError if no fact of the kind may be read.
  """
  if kind in ALWAYS:
    return keys
  if kind == OWN_TEXT and scope.owner:
    return keys
  allowed = {**dict.fromkeys(OF_PATHS, scope.path_keys), 'module': scope.modules}[kind]
  if kind == EVALUATION:
    allowed |= {*map(str, scope.models)}
  return sorted(allowed if keys is None else allowed & {*keys})


def may_read_object(scope: Scope, name: str) -> bool:
  """Returns whether an object or a file of a tree may be read."""
  if '..' in name.split('/') or not name.isascii():
    return False
  if OPEN_TREES.fullmatch(name) or (scope.owner and name in FILES_OF_TEXT):
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


def claims(
  scope: Scope, kinds: Sequence[str], keys: Sequence[str] | None
) -> list[tuple[list[str], list[str] | None]]:  # fmt: skip
  """Returns the (kinds, keys) of tasks that a token may claim, of those asked for; all keys if None, in this order."""
  allowed: list[tuple[list[str], list[str] | None]] = []
  if scope.owner and OWN_TEXT in kinds and (keys is None or scope.owner in keys):
    allowed.append(([OWN_TEXT], [scope.owner]))
  kinds_of_paths = [kind for kind in kinds if kind in TASKS or (scope.owner and kind == EVALUATE)]
  if keys is None and scope.is_all:  # as a database finds faster
    return [*allowed, (kinds_of_paths, None)] if kinds_of_paths else allowed
  paths = scope.path_keys if keys is None else scope.path_keys & {*keys}
  return [*allowed, (kinds_of_paths, sorted(paths))] if kinds_of_paths and paths else allowed
