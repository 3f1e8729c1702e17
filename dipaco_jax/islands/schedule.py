"""The schedule of an islands run: facts, and the tasks that they make possible [3].

Islands share no mesh; they share facts in a registry, which says what both are, and objects in storage. A task is
complete when its facts are inserted:

    task                        done by           facts
    prepare                     worker            prepared; module of version 0, each a part of the base
    own_text (owner)            the owner's       own_text (owner): sizes of shards, where text stays with its owners
                                                  (owner_facts.py); training begins when all of them exist
    train (path, phase)         worker            checkpoint (path, phase): what the path sends of the levels that it
                                                  shares (messages.py), and the holder of its AdamW state; modules that
                                                  the path has alone, and its evaluation by them (own_levels.py)
    own_text of one that joins  its worker        the same, after which it is decided when its paths begin (members.py)
    outer (module, version)     outer executor    module (module, version): weights; in the metadata, the outer state
    judge (path, phase)         evaluator         judged (path, phase): the loss without and with what the path sent, in
                                                  runs with a floor (floor_facts.py)
    evaluate (path, version)    evaluator         evaluation (path, version): its loss on the shard's hold-out
    reroute (round)             worker            round: new shards of the text
    ship (path, phase)          its holder        state (path, phase): the AdamW state, for another (hand_over.py);
                                                  at times without a task (state_facts.py)
    audit (path, phase)         another worker    audited (path, phase), of some phases (audit_facts.py); if it differs,
                                                  a third worker's task confirm gives confirmed (path, phase)
    finish                      evaluator         finished: published, evaluated, reported

A checkpoint is several objects, which `path_messages.write_objects` writes and the fact's metadata name. Two more kinds
of facts, excluded (path, phase) and diverged, are those of `screening_facts`.

`schedule` runs after a fact is committed, and again in any process that finds a fact without its tasks, so that no task
is lost with the process that inserted the fact. Versions and rounds count from 0, as in the registry's rows.

A path's next phase waits for its own modules (`_with_modules`), each of which waits for the checkpoints of all paths
that share it (`outer_executor`); at the end of a round of re-sharding, for the next round (`_after_paths`, `advance`);
and where paths are sampled, for a phase in which it is drawn. There is no other barrier. `waits` explains the waiting.
"""

import collections
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dipaco_jax.config import owners
from dipaco_jax.islands import (
  audit_facts,
  audit_oversight,
  floor_facts,
  lineage,
  members,
  owner_facts,
  path_steps,
  pieces,
  withdrawals,
)
from dipaco_jax.islands.island import OWN_TEXT, Island, carried_metadata
from dipaco_jax.islands.pieces import Part
from dipaco_jax.pipeline import jobs
from dipaco_jax.registry.registry import Fact, NewTask


def checkpoint_fact(
  path: int, number: int, objects: dict[str, list[str]], about: dict[str, Any], kind: str = 'checkpoint',
  own_modules: Sequence[Fact] = (),
) -> Fact:  # fmt: skip
  """Makes the fact of a path's checkpoint or piece. Its digest covers all objects ({} for an excluded path).

  The digest also covers the path's own modules, because a path may have no others, and the steps of a timed phase.
  """
  contents = [*sorted(objects.items()), *([fact.key, fact.sha256] for fact in own_modules)]
  contents += [(path_steps.STEPS, about[path_steps.STEPS])] if path_steps.STEPS in about else []
  digest = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
  return Fact(kind, str(path), number, '', digest, about | {'objects': objects})


def schedule(island: Island, facts: Sequence[Fact]):
  """Inserts the tasks that facts make possible, once, and wakes the tasks that wait for them."""
  in_order = sorted(facts, key=lambda fact: (fact.kind, fact.number, fact.key))
  by_kind = {kind: list(group) for kind, group in itertools.groupby(in_order, lambda fact: fact.kind)}
  _after_modules(island, by_kind.get('module', []))
  if 'prepared' in by_kind:
    island.registry.add_tasks(owner_facts.tasks(island))
  _after_owners(island, by_kind)
  _after_pieces(island, [*by_kind.get('checkpoint', []), *by_kind.get('piece', [])])
  _after_judged(island, by_kind.get(floor_facts.JUDGED, []))
  for fact in by_kind.get('round', []):
    _after_round(island, fact.number)
  audit_facts.follow(island, [*by_kind.get(audit_facts.AUDITED, []), *by_kind.get(audit_facts.CONFIRMED, [])])
  island.registry.mark_scheduled(facts)


def _after_owners(island: Island, by_kind: Mapping[str, Sequence[Fact]]):
  """Adds the tasks of paths that can begin, as the text of an owner is read, and wakes what waits for one who left."""
  everyone = range(island.layout.grid.num_paths)
  if not by_kind.keys().isdisjoint((OWN_TEXT, members.LEFT)):
    _after_paths(island, _with_modules(island, everyone, 0), 0, 0)
  for fact in by_kind.get(OWN_TEXT, []):
    if fact.key in island.members.joined:
      members.begin(island, fact.key)
  for fact in by_kind.get(members.BEGAN, []):
    if fact.key in island.members.since:
      paths = owners.paths_of(island.layout.grid, fact.key)
      _after_paths(island, _with_modules(island, paths, fact.meta['since']), fact.meta['since'], 0)
  for path, phases in island.members.until.items() if members.LEFT in by_kind else ():
    island.registry.wake('outer', sorted(island.shared_modules(path).values()), phases + 1)


def _after_modules(island: Island, facts: Iterable[Fact]):
  """Adds the tasks of paths whose modules are all there, and carries modules that no path trains over."""
  s, carried = island.run.settings, []
  waited_for = filter(functools.partial(_makes_possible, island), facts)
  for version, version_facts in itertools.groupby(waited_for, lambda fact: fact.number):
    group = list(version_facts)
    paths = sorted({path for fact in group for path in island.paths_through(fact.key)})
    rounds = len(island.registry.facts('round')) if s.rounds else 0
    _after_paths(island, _with_modules(island, paths, version), version, rounds)
    _before_readers(island, group, version)
    if version < s.train.phases and not s.data.own_text:  # where a module ends with its owners
      active = island.active_paths(version)
      carried += [
        fact._replace(number=version + 1, meta=carried_metadata(fact))
        for fact in group
        if not active[island.paths_through(fact.key)].any()
      ]
  if carried:
    withdrawals.put(island, carried)


def _makes_possible(island: Island, module: Fact) -> bool:
  """Returns whether tasks may wait for a module: not for those that stay with their path, unless that begins whole."""
  is_own, version = module.key.partition('/')[0] in island.own_levels, module.number
  return not is_own or island.has_own_objects(version) or island.timetable.begins_whole(version)


def _with_modules(island: Island, paths: Sequence[int], version: int) -> list[int]:
  """Returns the paths whose modules of a version are all there."""
  return [path for path, missing in _missing_modules(island, paths, version).items() if not missing]


def _missing_modules(island: Island, paths: Sequence[int], version: int) -> dict[int, list[str]]:
  """Returns the modules of each path that are not there in a version."""
  needed = {path: list(island.modules_of(path).values()) for path in paths}
  available = {f.key for f in island.registry.facts('module', sorted({m for n in needed.values() for m in n}), version)}
  return {path: [module for module in modules if module not in available] for path, modules in needed.items()}


def _after_paths(island: Island, paths: Sequence[int], version: int, rounds: int):
  """Adds the tasks of paths that are at a version, to evaluate and train them; `rounds` have made their shards."""
  s = island.run.settings
  end = jobs.round_end(s, rounds)
  if version == 0 and owner_facts.missing(island):
    return
  if 0 < version <= end and s.train.early_stopping and island.has_own_objects(version):  # else see own_levels.py
    trained = island.active_paths(version - 1) if s.data.own_text else np.ones(island.layout.grid.num_paths, bool)
    island.registry.add_tasks(NewTask('evaluate', str(path), version) for path in paths if trained[path])
  if version < end:
    drawn = [path for path in paths if island.active_paths(version)[path]]
    if island.timetable.begins_whole(version):
      _add_tasks(island, drawn, Part(version, 0))


def _add_tasks(island: Island, paths: Sequence[int], part: Part):
  island.registry.add_tasks(pieces.tasks(island, paths, part, lineage.holders(island, paths, part)))


def _before_readers(island: Island, modules: Sequence[Fact], version: int):
  """Adds the tasks of paths that take new modules over within a phase, or between two, and have all that they need."""
  waiting = collections.defaultdict[Part, set[int]](set)
  for fact in modules:
    level = island.parse_module(fact.key)[0].name
    for part in pieces.readers(island, level, version):
      if not pieces.begins_whole(island, part):
        waiting[part].update(island.paths_through(fact.key))
  for part, paths in waiting.items():
    _add_tasks(island, pieces.ready(island, sorted(paths), part), part)


def _after_round(island: Island, number: int):
  """Adds the tasks of paths at the version that the round has waited for, or a later one that nobody has to train."""
  s, paths = island.run.settings, range(island.layout.grid.num_paths)
  for version in range(jobs.round_end(s, number - 1), jobs.round_end(s, number) + 1):
    _after_paths(island, _with_modules(island, paths, version), version, number)


def _after_pieces(island: Island, facts: Iterable[Fact]):
  """Wakes the outer tasks of the modules that paths have sent to, and adds the paths' next pieces."""
  for part, group in itertools.groupby(facts, functools.partial(pieces.part_of, island)):
    part_facts = list(group)
    paths, sent = [int(fact.key) for fact in part_facts], pieces.piece(island, part).sent
    island.registry.add_tasks(floor_facts.tasks(island, part_facts))
    shared = (island.shared_modules(path) for path in paths)
    modules = sorted({module for by_level in shared for level, module in by_level.items() if level in sent})
    island.registry.add_tasks(NewTask('outer', module, part.phase + 1, 'waiting') for module in modules)
    island.registry.wake('outer', modules, part.phase + 1)
    following = pieces.after(island, part)
    if following and not pieces.begins_whole(island, following):
      _add_tasks(island, pieces.ready(island, paths, following), following)


def _after_judged(island: Island, facts: Iterable[Fact]):
  """Wakes the outer tasks of the modules whose contributions of a path were judged."""
  for fact in facts:
    island.registry.wake('outer', sorted(island.shared_modules(int(fact.key)).values()), fact.number + 1)


def go_on(island: Island, path: int, part: Part, holder: str):
  """Adds the task of the piece after one that is trained, but perhaps not published yet, unless it waits for modules.

  Training then continues during the upload. If the holder is lost before that, another worker performs both tasks.
  """
  following = pieces.after(island, part)
  if following and not pieces.begins_whole(island, following):
    paths = pieces.ready(island, [path], following, trained=False)
    island.registry.add_tasks(pieces.tasks(island, paths, following, {path: holder}))


def advance(island: Island):
  """Adds the next task that needs all paths, a round of re-sharding or the end, once no other is left."""
  registry, s = island.registry, island.run.settings
  if lost := registry.unscheduled():
    schedule(island, lost)
    return
  schedule_closed(island)
  if island.members.left:  # a process that did not know may have added some
    registry.end_tasks(members.tasks_of(island, island.members.left))
  optional = members.optional_tasks(island)
  if not registry.is_idle(optional):
    return
  rounds = len(registry.facts('round'))  # read first: another may be done by the second time that all is idle
  if not registry.facts('prepared'):
    registry.add_tasks([NewTask('prepare', '', 0)])
  elif registry.is_idle(optional):
    registry.add_tasks([NewTask('reroute', '', rounds + 1) if rounds < s.rounds else NewTask('finish', '', 0)])


def schedule_closed(island: Island):
  """Draws the audits of a run that has nothing else to do, and does what follows from those that nobody can do."""
  if not audit_facts.is_on(island) or not island.registry.sees_others:
    return
  if not (island.registry.is_idle() or audit_oversight.are_all_that_is_left(island)):
    return
  if closed := audit_oversight.settle(island):
    schedule(island, closed)


def is_finished(island: Island) -> bool:
  return bool(island.registry.facts('finished'))


def waits(island: Island) -> dict[str, list[int]]:
  """Returns, by reason, the paths that have phases left but no ready or running task."""
  registry = island.registry
  s = island.run.settings
  paths_by_reason = collections.defaultdict[str, list[int]](list)
  if not registry.facts('prepared'):
    return {'prepare': list(range(island.layout.grid.num_paths))}
  if owners_missing := owner_facts.missing(island):
    return {f'the text of {", ".join(owners_missing)}': list(range(island.layout.grid.num_paths))}
  trained, rounds = registry.newest('checkpoint'), len(registry.facts('round'))
  tasks = (
    task for kind in ('train', 'piece') for state in ('ready', 'running') for task in registry.tasks(state, kind)
  )
  busy = {task['key'] for task in tasks}
  drawn = np.array([island.active_paths(phase) for phase in range(s.train.phases)])
  for path in range(island.layout.grid.num_paths):
    begin = trained.get(str(path), -1) + 1
    phases = begin + np.flatnonzero(drawn[begin:, path])
    if str(path) in busy or not phases.size:
      continue
    why = 'a monitor, or an idle role, to add its task'
    if missing := _missing_modules(island, [path], phases[0].item())[path]:
      why = f'{", ".join(missing)} of version {phases[0]}'
    elif phases[0] >= jobs.round_end(s, rounds):
      why = f'round {rounds + 1} of re-sharding'
    paths_by_reason[why + (f', as it is not drawn before phase {phases[0]}' if phases[0] > begin else '')].append(path)
  return dict(paths_by_reason)
