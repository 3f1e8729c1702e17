"""An islands run's history from its facts: early stopping, rows of metrics.jsonl, figures for the report."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.algorithm import averaging_gap, outer
from dipaco_jax.islands import audit_history, members, path_steps, pieces, run_costs, screening_facts
from dipaco_jax.islands.island import Island
from dipaco_jax.pipeline import epochs, jobs, resharding_round, run as run_lib, stages
from dipaco_jax.registry.registry import Fact
from dipaco_jax.storage import publishing
from dipaco_jax.training import evaluation, job as job_lib, train_state as state_lib

# The report's phase, counted from 1, of a task with number 0.
FIRST_PHASE = {pieces.TRAIN: 1, pieces.PIECE: 1, 'outer': 0, 'evaluate': 0}
TIMELINE_TASKS = 20_000  # of each kind; a picture shows no more


class Phase(NamedTuple):
  """A phase of all paths."""

  checkpoints: Sequence[Fact]
  modules: Sequence[Fact]  # of the version after it
  excluded: Sequence[Fact]  # paths that took no part
  losses: list[float | None]  # on the hold-outs after it, by path
  best_version: list[int]  # by path, after it


class History(NamedTuple):
  """All phases, and what early stopping chose [2.7]."""

  phases: list[Phase]
  best_version: list[int]
  best_loss: list[float | None]
  wall_s: float


class Pointers:
  """The version that early stopping points each path at, as versions come one after another [2.7]."""

  def __init__(self, island: Island):
    self.island, paths = island, island.layout.grid.num_paths
    self.version = [0] * paths
    self.loss: list[float | None] = [None] * paths

  def add(self, version: int) -> list[float | None]:
    """Moves the pointers by the next version's evaluations; returns its losses, by path."""
    if version > 1 and self.island.round_of(version - 1) != self.island.round_of(version - 2):
      self.loss = [None] * len(self.loss)  # a new round has other hold-outs
    losses, targets = holdout_losses(self.island, version)
    of_models = evaluation.by_model(self.island.layout.models(), losses, targets)
    before = list(zip(self.version, self.loss, strict=True))
    evaluation.update_best(version, of_models, self.version, self.loss)
    for path in self._others(version):
      self.version[path], self.loss[path] = before[path]
    return losses

  def _others(self, version: int) -> list[int]:
    """Returns the paths without an evaluation of a version: they were late, or their owners left, or joined later."""
    if not self.island.members.num_facts and not late_at(self.island, version):
      return []
    measured = {int(fact.key) for fact in self.island.registry.facts('evaluation', number=version)}
    return [path for path in range(len(self.version)) if path not in measured]


def read(island: Island) -> History:
  """Reads the history of a run all of whose phases are done."""
  pointers = Pointers(island)
  phases = [read_phase(island, pointers, phase) for phase in range(island.run.settings.train.phases)]
  metas = [fact.meta for phase in phases for fact in (*phase.checkpoints, *phase.modules) if 'ended' in fact.meta]
  times = [meta[which] for meta in metas for which in ('started', 'ended')]
  return History(phases, pointers.version, pointers.loss, max(times) - min(times))


def read_pointers(island: Island) -> Pointers:
  """Returns where early stopping points at the end of a run."""
  pointers = Pointers(island)
  for version in range(1, island.run.settings.train.phases + 1):
    pointers.add(version)
  return pointers


def is_complete(island: Island, phase: int) -> bool:
  """Returns whether all modules of the version after a phase exist and are evaluated."""
  registry, s = island.registry, island.run.settings
  if phase == s.train.phases or not has_modules(island, phase + 1):
    return False
  paths = evaluated_paths(island, phase + 1) - len(late_at(island, phase + 1))
  return not s.train.early_stopping or len(registry.facts('evaluation', number=phase + 1)) >= paths


def has_modules(island: Island, version: int) -> bool:
  """Returns whether all modules of a version exist."""
  there = {fact.key for fact in island.registry.facts('module', number=version)}
  return there.issuperset(island.modules_of_version(version))


def late_at(island: Island, version: int) -> set[int]:
  """Returns the paths whose workers should have evaluated a version, at the beginning of a phase, but were late."""
  if island.has_own_objects(version):
    return set()
  return screening_facts.late_paths(island.registry.facts('excluded', number=version))


def evaluated_paths(island: Island, version: int) -> int:
  """Returns how many paths are evaluated at a version: those that trained before it and are not gone after it."""
  if not island.members.num_facts:
    return island.layout.grid.num_paths
  is_last = version == island.run.settings.train.phases
  stays = [path not in island.members.until if is_last else a for path, a in enumerate(island.active_paths(version))]
  return int((island.active_paths(version - 1) & np.array(stays)).sum())


def read_phase(island: Island, pointers: Pointers, phase: int) -> Phase:
  """Reads the next phase, which has all its facts."""
  losses, facts = pointers.add(phase + 1), island.registry.facts
  checkpoints = [fact for fact in facts('checkpoint', number=phase) if pieces.LATE not in fact.meta]
  modules = facts('module', number=phase + 1)
  excluded = facts('excluded', number=phase)
  return Phase(checkpoints, modules, excluded, losses, list(pointers.version))


def holdout_losses(island: Island, version: int) -> tuple[list[float | None], list[float]]:
  """Returns the losses of a version by path, or None, and the number of targets in each mean."""
  losses: list[float | None] = [None] * island.layout.grid.num_paths
  targets = [0.0] * len(losses)
  for fact in island.registry.facts('evaluation', number=version):
    loss, targets[int(fact.key)] = fact.meta['loss'], fact.meta['targets']
    losses[int(fact.key)] = float(loss) if loss is not None else None
  return losses, targets


def write_rows(island: Island, run: run_lib.Run, history: History):
  """Writes what training leaves in the workdir: its rows, as SPMD writes them, and the timeline of tasks."""
  publishing.write_json(run.workdir / 'timeline.json', timeline(island, replays(trained(island, history))))
  run.metrics.rewind('train', -1)
  for phase, phase_history in enumerate(history.phases):
    for row in rows_of_phase(island, phase, phase_history):
      run.metrics.write(**row)


def rows_of_phase(island: Island, phase: int, phase_history: Phase) -> list[dict[str, Any]]:
  """Makes the rows of a phase's steps, by rising `updates`, and of its end."""
  s, rows = island.run.settings, list[dict[str, Any]]()
  for fact in phase_history.checkpoints:
    seconds = max(fact.meta['timed_s'], 1e-9)
    rate = fact.meta['timed_steps'] * s.train.batch_size * s.model.seq_len / seconds or None
    for after, loss, norm, learning_rate, _, skipped in fact.meta['rows']:
      values = {
        'phase': phase, 'step': path_steps.of_fact(island, fact).first + after, 'paths': [int(fact.key)],
        'paths_in_phase': len(phase_history.checkpoints), 'loss': [loss], 'grad_norm': [norm],
        'learning_rate': learning_rate, 'tokens_per_s': rate, **({'skipped': [skipped]} if skipped else {}),
      }  # fmt: skip
      rows.append({'kind': 'step', 'updates': updates(island, int(fact.key), phase, after), **values})
  rows.sort(key=lambda row: row['updates'])
  first, after = updates(island, 0, phase + 1, 0), path_steps.after(island, phase, phase_history.checkpoints)
  rows.append({'kind': 'phase', 'updates': first, **phase_row(island, after, phase, phase_history)})
  return [{'stage': 'train'} | row for row in rows]


def phase_row(island: Island, after: int, phase: int, phase_history: Phase) -> dict[str, Any]:
  """Makes the row of a phase; `after` is the step at its end, see `path_steps.after`."""
  means: list[float | None] = [None] * island.layout.grid.num_paths
  before, skipped = [None] * len(means), [0] * len(means)
  for fact in phase_history.checkpoints:
    rows, path = fact.meta['rows'], int(fact.key)  # steps, loss, norm, learning rate, finite steps, skipped
    before[path] = fact.meta['holdout_loss']
    skipped[path] = sum(count for *_, count in rows)
    if steps := sum(finite for *_, finite, _ in rows):
      means[path] = math.fsum(loss * finite for _, loss, *_, finite, _ in rows if finite) / steps
  norms, cosines = {}, {}
  for level in island.layout.levels:
    split = [(fact.key.partition('/'), fact.meta) for fact in phase_history.modules if 'norm' in fact.meta]
    mine = {module: meta for (name, _, module), meta in split if name == level.name}
    norms[level.name] = {module: meta['norm'] for module, meta in mine.items()}
    if several := [m for m in mine.values() if m['paths'] > 1]:
      each = [outer.cosine(m['paths'], m['square_of_sum'], m['sum_of_squares'], np) for m in several]
      cosines[level.name] = math.fsum(each) / len(each)
  excluded = {f.key: f'{f.meta["why"]}; trained by {f.meta["worker"]}' for f in phase_history.excluded}
  failed: dict[str, Any] = members.changes_of_phase(island, phase)
  failed |= {'excluded': excluded} if excluded else {}
  failed |= {'skipped_by_path': skipped} if any(skipped) else {}
  return {
    'phase': phase + 1, 'step': after, 'inner_s': busy_seconds(phase_history.checkpoints),
    'outer_s': busy_seconds(phase_history.modules), 'loss_by_path': means, 'holdout_loss_by_path': phase_history.losses,
    'holdout_loss_before_by_path': before,
    'averaging_gap': averaging_gap.mean_gap(averaging_gap.gaps(before, phase_history.losses)),
    'best_version_by_path': phase_history.best_version, 'outer_gradient_norm': norms, 'cosine': cosines, **failed,
  }  # fmt: skip


def busy_seconds(facts: Sequence[Fact]) -> float:
  """Returns the seconds of work on all facts together."""
  seconds = (f.meta.get('busy_s', f.meta['ended'] - f.meta['started']) for f in facts if 'ended' in f.meta)
  return math.fsum(seconds)


def updates(island: Island, path: int, phase: int, after: int) -> int:
  """Returns `Job.updates` after a number of steps of a path's phase, as if paths took turns on one device."""
  num_paths, times = island.layout.grid.num_paths, island.timetable
  piece = next(i for i, piece in enumerate(times.pieces(phase)) if after <= piece.end)
  return job_lib.count_updates(times, num_paths, num_paths, job_lib.Point(phase, path, after, piece))


def trained(island: Island, history: History) -> list[Fact]:
  """Returns the facts of all tasks of training: checkpoints, and the earlier pieces of their phases."""
  checkpoints = [fact for phase in history.phases for fact in phase.checkpoints]
  return checkpoints + (island.registry.facts(pieces.PIECE) if island.timetable.most_pieces > 1 else [])


def replays(facts: Iterable[Fact]) -> dict[tuple[str, str, int], float]:
  """Returns the seconds for which workers repeated earlier phases before a task of training, by the task's name."""
  kinds = {pieces.CHECKPOINT: pieces.TRAIN}
  named = ((kinds.get(fact.kind, fact.kind), fact.key, fact.number, fact.meta) for fact in facts)
  return {(kind, key, number): meta['replay']['seconds'] for kind, key, number, meta in named if 'replay' in meta}


def timeline(island: Island, replayed: Mapping[tuple[str, str, int], float]) -> dict[str, Any]:
  """Returns the tasks that are done, each [owner, kind, phase, start, end], in seconds since the first began.

  A task with a replay gives two entries: one of the kind 'replay', and its own. Pieces of a phase count as training.

  Times are those of the database, because the clocks of machines differ, and a phase might seem to precede its inputs.
  """
  tasks = []
  for kind, first in FIRST_PHASE.items():
    for task in island.registry.tasks('done', kind, TIMELINE_TASKS):
      owner = task['owner']
      number = task['number']
      begun = task['claimed']
      ended = task['ended']
      phase = pieces.phase_of(island, kind, number) + first
      if begun is None:  # nobody began it before its owner left
        continue
      if seconds := replayed.get((kind, task['key'], number)):
        before, begun = begun, min(begun + seconds, ended)
        tasks.append((owner, 'replay', phase, before, begun))
      tasks.append((owner, pieces.TRAIN if kind == pieces.PIECE else kind, phase, begun, ended))
  begin = min((task[3] for task in tasks), default=0.0)
  owners = {'owners': members.lines(island)} if island.members.num_facts else {}
  return owners | {'tasks': [[*named, round(start - begin, 3), round(end - begin, 3)] for *named, start, end in tasks]}


def figures(island: Island, run: run_lib.Run, history: History) -> dict[str, Any]:
  """Returns the figures of the training stage for the report; tokens/s are summed over all workers."""
  s, job = run.settings, jobs.paths_job(run, run.settings.rounds)
  trained_facts = trained(island, history)
  checkpoints = [fact for fact in trained_facts if fact.kind == pieces.CHECKPOINT]
  steps = path_steps.by_path(island, checkpoints)
  tokens = sum(steps) * s.train.batch_size * s.model.seq_len
  outer_s = math.fsum(busy_seconds(phase.modules) for phase in history.phases)
  inner_s, workers = busy_seconds(checkpoints), {fact.meta['worker'] for fact in checkpoints}
  timed = sum(fact.meta['timed_steps'] for fact in checkpoints)
  record = state_lib.Record(
    tokens=tokens, inner_s=history.wall_s, timed_steps=timed, timed_tokens=tokens, outer_s=outer_s
  )
  return stages.figures(run, job, record) | {
    **_of_taken(island, steps),
    'phases': s.train.phases,
    'step_s': math.fsum(fact.meta['timed_s'] for fact in checkpoints) / max(1, timed),
    'outer_fraction': outer_s / (outer_s + inner_s),
    'workers': len(workers),
    'replay_s': math.fsum(replays(trained_facts).values()),
    **run_costs.figures(island),
    **audit_history.figures(island),
    'rounds': [resharding_round.figures(run, number + 1) for number in range(s.rounds)],
  }


def _of_taken(island: Island, steps: Sequence[int]) -> dict[str, Any]:
  """Returns the figures that depend on the steps of paths, where they took other numbers than the config says."""
  if path_steps.are_planned(island):
    return {}
  s, programs = island.run.settings, island.run.programs
  steps_P = np.array(steps)
  path_parameters = sum(x.size for x in programs.shapes.values())
  return {
    'steps': round(float(steps_P.mean())),
    'steps_by_path': steps_P.tolist(),
    'epochs_by_path': epochs.of_steps(island.run, steps_P),
    'synchronous_bytes_per_phase': round(2 * 4 * path_parameters * float(steps_P.sum()) / s.train.phases),
  }
