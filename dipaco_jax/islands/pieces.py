"""Pieces of a path's phases as tasks and facts, and what each waits for [algorithm/streaming.py].

Without streaming a phase is one piece: task `train (path, phase)`, fact `checkpoint (path, phase)`. With it, that is
the last piece of a phase. The earlier ones are `piece (path, n)`, task and fact, n = phase * most + nth, where `most`
is the largest number of pieces of a phase.

Before its first piece of a phase that begins with the modules, a path needs all of its modules in that version; before
another piece, the modules that it takes over there, and the piece before. A path that was excluded in an open phase
begins the next one with all modules too.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dipaco_jax.algorithm import streaming
from dipaco_jax.islands.island import Island
from dipaco_jax.registry.registry import Fact, NewTask, Task

PIECE = 'piece'
TRAIN = 'train'
CHECKPOINT = 'checkpoint'
LATE = 'late'  # in the metadata of facts of a path that took no part because it was late (quorum.py)
KNOWN = 10_000  # exclusions that a process remembers


class Part(NamedTuple):
  """A piece of a phase."""

  phase: int
  nth: int


def of_phase(island: Island, phase: int) -> tuple[streaming.Piece, ...]:
  """Returns the pieces of a phase."""
  return island.timetable.pieces(phase)


def piece(island: Island, part: Part) -> streaming.Piece:
  return of_phase(island, part.phase)[part.nth]


def is_last(island: Island, part: Part) -> bool:
  """Returns whether a phase ends with this piece."""
  return part.nth + 1 == len(of_phase(island, part.phase))


def begins_whole(island: Island, part: Part) -> bool:
  """Returns whether paths begin a piece with the modules, and nothing of their own parameters."""
  return part.nth == 0 and island.timetable.begins_whole(part.phase)


def task_name(island: Island, part: Part) -> tuple[str, int]:
  """Returns kind and number of the tasks of a piece."""
  if is_last(island, part):
    return TRAIN, part.phase
  return PIECE, part.phase * island.timetable.most_pieces + part.nth


def fact_name(island: Island, part: Part) -> tuple[str, int]:
  """Returns kind and number of the facts of a piece."""
  kind, number = task_name(island, part)
  return CHECKPOINT if kind == TRAIN else kind, number


def part_of(island: Island, task_or_fact: Task | Fact) -> Part:
  """Returns the piece of a task or a fact."""
  if task_or_fact.kind == PIECE:
    return Part(*divmod(task_or_fact.number, island.timetable.most_pieces))
  return Part(task_or_fact.number, len(of_phase(island, task_or_fact.number)) - 1)


def phase_of(island: Island, kind: str, number: int) -> int:
  """Returns the phase of a task or a fact of training, from its kind and number."""
  return number // island.timetable.most_pieces if kind == PIECE else number


def trained_before(island: Island, path: int, phase: int) -> int | None:
  """Returns the last phase before this one in which the path was trained, or None."""
  return next((t for t in reversed(range(phase)) if island.active_paths(t)[path]), None)


def earlier_facts(island: Island, phase: int, paths: Sequence[str]) -> list[Fact]:
  """Returns the facts of all pieces of a phase but the last, of these paths."""
  parts = (Part(phase, nth) for nth in range(len(of_phase(island, phase)) - 1))
  return [fact for part in parts for fact in island.registry.facts(PIECE, paths, fact_name(island, part)[1])]


def before(island: Island, part: Part) -> Part | None:
  """Returns the piece before, None for the first of the run."""
  if part.nth:
    return part._replace(nth=part.nth - 1)
  return Part(part.phase - 1, len(of_phase(island, part.phase - 1)) - 1) if part.phase else None


def after(island: Island, part: Part) -> Part | None:
  """Returns the piece after, None for the last of the run."""
  if not is_last(island, part):
    return part._replace(nth=part.nth + 1)
  return Part(part.phase + 1, 0) if part.phase + 1 < island.run.settings.train.phases else None


def sender(island: Island, level: str, version: int) -> Part:
  """Returns the piece after which a level's outer gradients leave for a version of its modules."""
  parts = of_phase(island, version - 1)
  return Part(version - 1, next(i for i, each in enumerate(parts) if level in each.sent))


def readers(island: Island, level: str, version: int) -> list[Part]:
  """Returns the pieces that wait for a version of a level's modules."""
  times, phases = island.timetable, island.run.settings.train.phases
  if times.begins_whole(version):
    return [Part(version, 0)] if version < phases else []
  parts = [Part(version, 0)] if version < phases else []  # of paths that were excluded
  for phase in (version - 1, version):
    for index, each in enumerate(of_phase(island, phase) if phase < phases else ()):
      if level in each.mixed and times.version(level, phase, each.begin) == version:
        parts.append(Part(phase, index))
  return parts


def needed(island: Island, path: int, part: Part, is_excluded: bool) -> dict[str, int]:
  """Returns the modules that a path waits for before a piece, other than its own, and their versions."""
  modules = island.shared_modules(path)
  if begins_whole(island, part) or (part.nth == 0 and is_excluded):
    return dict.fromkeys(modules.values(), part.phase)
  next_piece, version = piece(island, part), island.timetable.version
  return {
    module: version(level, part.phase, next_piece.begin)
    for level, module in modules.items()
    if level in next_piece.mixed
  }


def ready(island: Island, paths: Iterable[int], part: Part, trained: bool = True) -> list[int]:
  """Returns the paths for which everything before a piece is complete; `trained`: including the previous piece.

  A piece that begins whole does not wait for the previous piece, because the modules contain its result.
  """
  paths = list(paths)
  if not begins_whole(island, part) and trained and (last := before(island, part)):
    kind, number = fact_name(island, last)
    trained_paths = {fact.key for fact in island.registry.facts(kind, list(map(str, paths)), number)}
    paths = [path for path in paths if str(path) in trained_paths]
  excluded = excluded_before(island, paths, part)
  waits = {path: needed(island, path, part, path in excluded) for path in paths}
  keys: dict[int, set[str]] = {}
  for modules in waits.values():
    for module, version in modules.items():
      keys.setdefault(version, set()).add(module)
  available = {
    (fact.key, version)
    for version, modules in keys.items()
    for fact in island.registry.facts('module', sorted(modules), version)
  }
  return [path for path, modules in waits.items() if modules.items() <= available]


def excluded_before(island: Island, paths: Sequence[int], part: Part) -> set[int]:
  """Returns which paths their workers have excluded in the phase before, where that makes a difference to a piece.

  Of paths that have trained that phase: the answer holds until a fact is withdrawn, and is not asked for again.
  """
  if part.nth or part.phase == 0 or begins_whole(island, part):
    return set()
  phase, known = part.phase - 1, island.exclusions
  withdrawn = island.registry.withdrawn  # results from before a withdrawal are no longer valid
  excluded_by_path = {path: known.get((path, phase, withdrawn)) for path in paths}
  if unknown := [path for path, is_excluded in excluded_by_path.items() if is_excluded is None]:
    if len(known) > KNOWN:
      known.clear()
    facts = island.registry.facts('excluded', list(map(str, unknown)), phase)
    by_worker = {int(fact.key) for fact in facts if 'executor' not in fact.meta}
    for path in unknown:
      excluded_by_path[path] = known[path, phase, withdrawn] = path in by_worker
  return {path for path, is_excluded in excluded_by_path.items() if is_excluded}


def tasks(island: Island, paths: Iterable[int], part: Part, holders: dict[int, str]) -> Iterator[NewTask]:
  """Yields the tasks of paths for a piece."""
  kind, number = task_name(island, part)
  return (NewTask(kind, str(path), number, holder=holders.get(path, '')) for path in paths)
