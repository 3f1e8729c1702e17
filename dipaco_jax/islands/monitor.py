"""The monitor: schedules tasks that killed processes left unscheduled, collects garbage, and reports stuck tasks [3].

Objects of a version or phase are deleted when all open tasks are at least GENERATIONS newer; the others suffice to
compute any object of the newest versions again. Some are kept for longer: versions of modules that early stopping
points to, the last published state of each path, however long ago the path was drawn, and the weights with which the
path was trained since then, for a replay (lineage.py). When the run is finished, only the modules of the last version
and those that early stopping chose are left.

While the run trains, the monitor writes its page, from facts, to the place of `report.html`. A path has one point for
each phase. Because paths proceed at different speeds, an incomplete phase shows the paths that have completed it.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dipaco_jax.islands import (
  audit_facts,
  audit_oversight,
  evaluator,
  final_files,
  lineage,
  live_metrics,
  members,
  module_weights,
  outer_executor,
  path_steps,
  pieces,
  role_loop,
  run_history,
  schedule,
  screening_facts,
  worker,
)
from dipaco_jax.islands.guard import objects_of
from dipaco_jax.islands.island import DIFFERENCES, OBJECTS, OUTER, OWN_TEXT, STATES, Island
from dipaco_jax.islands.pieces import PIECE
from dipaco_jax.islands.state_facts import STATE
from dipaco_jax.processes import display, stopping
from dipaco_jax.registry import registry_backup
from dipaco_jax.registry.registry import SILENT_S, STOPPED, TASK_NAMES, Fact
from dipaco_jax.reports import live_report, run_report, timeline_plot
from dipaco_jax.storage import retry
from dipaco_jax.telemetry import sinks

PAUSE_S = 2.0  # between looks
PATHS = 'paths'  # of contributions, in storage
GENERATIONS = 2  # of objects that are kept below the open tasks, as above
ROLES = {'worker': worker.KINDS, 'outer': outer_executor.KINDS, 'evaluator': evaluator.KINDS}
LOOK_S = 5.0  # between looks of sinks for rows, which ask the database
TOLD = 3  # tasks that came back with an error
BACKUP_S, LONGEST_BACKUP_S = 10.0, 600.0  # between backups of the registry, where a phase takes less, or more
PAGE_S = 60.0  # between pages of the run so far


def watch(island: Island, is_alone: bool = False):
  """Watches until the run is finished; raises Diverged if it has diverged.

  `is_alone`: whether one process has all roles, so that none can be missing.
  """
  overseer = audit_oversight.Overseer(island)
  final_files.write_grown_config(island)  # for the page: rows have the paths of all owners
  collector = Collector(island, overseer)
  page = LivePage(island)
  backups = Backups(island)
  about = {'task': '', 'stuck': ''}
  s, shown = island.run.settings, -1
  # One process trains the control, and paths are trained by many: how long it takes is not known.
  progress = display.Progress('train', s.train.phases, 'phases of all paths', later=None if s.evaluate.control else 0.0)
  # Signs of life come from a thread, as collecting may take minutes.
  beating = retry.every(PAUSE_S, 'a sign of life', lambda: island.registry.beat(island.name, 'monitor', dict(about)))
  metric_sinks = sinks.make(s, island.storage.url.rstrip('/').rpartition('/')[2])
  fed = sinks.fed(metric_sinks, lambda: live_metrics.follow(island), sinks.in_storage(island.storage), LOOK_S)
  display.STDERR.note(TASK_NAMES)
  with contextlib.closing(progress), beating, fed:
    while not schedule.is_finished(island):
      screening_facts.heed(island)
      members.heed(island)
      if closed := overseer.look():
        schedule.schedule(island, closed)
      schedule.advance(island)
      reached = frontier(island)
      backups.write_if_due(reached)
      collector.collect(backups.reached - GENERATIONS)
      if reached > shown and island.registry.facts('prepared'):
        shown = reached
        progress.update(reached)
      if (why := stuck(island, {} if is_alone else ROLES)) and why != about['stuck']:
        logging.warning('%s', why)
      about['stuck'] = why
      page.write_if_due()
      time.sleep(PAUSE_S)
    backups.write(s.train.phases)
    collector.collect(s.train.phases)
    collector.finish()


@contextlib.contextmanager
def saying_stopped(island: Island) -> Iterator[None]:
  """Notes for people, after the block or at a signal, that the monitor ends."""

  def say(number: int = 0) -> bool:
    if number:
      stopping.call_later(role_loop.GIVE_BACK_S, os._exit, 128 + number)
    island.registry.beat(island.name, 'monitor', {'task': '', STOPPED: True})
    return False

  with stopping.listening() as signals, signals.answered(say):
    yield
  say()


def frontier(island: Island) -> int:
  """Returns the lowest phase that a task works on, or will once all facts have had their consequences."""
  # of tasks, and of facts
  before = {'train': 0, PIECE: 0, 'judge': 0, 'outer': 1, 'evaluate': 1, 'checkpoint': 0, 'module': 0}
  before[members.BEGAN] = 0  # number 0: until the tasks of its paths are there, all is kept
  lowest = island.registry.lowest_open()
  if PIECE in lowest:
    lowest[PIECE] = pieces.phase_of(island, PIECE, lowest[PIECE])
  return min((lowest[kind] - back for kind, back in before.items() if kind in lowest), default=0)


def stuck(island: Island, roles: Mapping[str, Sequence[str]] = ROLES) -> str:
  """Describes tasks that came back with an error, and required `roles` that are silent; '' if there are none.

  Preemptions and lost leases count as claims, too, and an error may say only what a task waits for.
  """
  failed_tasks = [t for state in ('ready', 'running') for t in island.registry.tasks(state, limit=TOLD, failed=True)]
  failing = [f'{t["kind"]} {t["key"]} {t["number"]}, claimed {t["attempts"]} times: {t["error"]}' for t in failed_tasks]
  at_work = (r for r in island.registry.roles() if not r['about'].get(STOPPED))
  alive = {r['role'] for r in at_work if r['silent_s'] < SILENT_S}
  ready = island.registry.ready_kinds()
  needed = {role for role, kinds in roles.items() if not ready.isdisjoint(kinds)}
  waiting = island.registry.tasks('ready', OWN_TEXT, TOLD) if OWN_TEXT in ready else []
  return '; '.join(
    [
      *failing[:TOLD],
      *(f'no process has the role {role}: start one' for role in sorted(needed - alive)),
      *(f'no worker reads the text of {t["key"]}: start one on its machines' for t in waiting),
    ]
  )


class Collector:
  """Deletes objects that nobody will read again, version by version."""

  def __init__(self, island: Island, audits: audit_oversight.Overseer | None = None):
    self.island = island
    self.audits = audits or audit_oversight.Overseer(island)
    self.next = 0  # the first version that was not collected yet
    # Collected versions with objects that were kept, by kind of object.
    self.left: dict[str, list[int]] = {'modules': [], DIFFERENCES: [], OUTER: [], PATHS: []}
    self.replayed_from = [0] * island.layout.grid.num_paths  # the first phase that a replay of a path would repeat
    self.beginnings = [{0} for _ in self.replayed_from]  # phases from which a replay of a path may begin
    self.audited: dict[int, tuple[int, int]] = {}  # the lowest and highest phase of open audits, by path
    self.pointers = run_history.Pointers(island)
    self.modules_left = members.modules_left(island)  # of owners that left: nobody will read them again

  def collect(self, end: int):
    """Collects versions below `end`, and the phases that made them."""
    while self.next < end:
      version, self.next = self.next, self.next + 1
      self.audited = self.audits.needed_since()
      if version:
        self.pointers.add(version)
      self._mark_new_beginnings(version)
      self._note_states(version + 1)
      newer = list(self._newer())
      kept = [*self._base(), *self._chosen(), *self._for_replays(), *newer]
      weights = module_weights.objects(self.island.registry, kept)
      states = {fact.meta[OUTER][0] for fact in newer if OUTER in fact.meta}  # from which later ones are made
      for kind, keep in (('modules', weights), (DIFFERENCES, weights), (OUTER, states)):
        self.left[kind] = [v for v in [*self.left[kind], version] if self._forget(f'{OBJECTS}/{kind}/{v}', keep)]
      if version:
        phases = [*self.left[PATHS], version - 1]
        self.left[PATHS] = [t for t in phases if self._forget(f'{OBJECTS}/{PATHS}/{t}', self._for_audits(t))]

  def finish(self):
    """Collects the rest: the last phase, and objects made again, or by a process that did not know of the end."""
    self.pointers.add(self.next)
    self._forget(OBJECTS, module_weights.objects(self.island.registry, [*self._chosen(), *self._newer()]))
    self.island.storage.tidy('')

  def _forget(self, prefix: str, keep: set[str]) -> bool:
    """Deletes the objects in a folder but `keep`; returns whether any is left."""
    self.island.storage.tidy(prefix)
    names = self.island.storage.names(prefix)
    for name in {*names} - keep:
      self.island.storage.delete(name)
    return not keep.isdisjoint(names)

  def _mark_new_beginnings(self, phase: int):
    """Notes the first phase to replay for a path that starts with fresh state after this phase."""
    keeps = lineage.has_state(self.island)
    closed, exclusions = self.island.timetable.is_closed(phase), self.island.registry.facts('excluded', number=phase)
    excluded = {fact.key for fact in exclusions if closed or 'executor' not in fact.meta}  # lineage.previous
    excluded = set() if self.island.own_levels else excluded  # who keeps its own modules
    for fact in self.island.registry.facts('checkpoint', number=phase):
      if not keeps or fact.key in excluded:
        self.beginnings[int(fact.key)].add(phase + 1)
        self._move_beginning(int(fact.key))

  def _note_states(self, end: int):
    """Notes the states that were published since for phases below `end`, and deletes those before them."""
    for key, phase in self.island.registry.newest(STATE, end).items():
      self.beginnings[int(key)].add(phase + 1)
      if int(key) in self.audited:  # an audit may begin from an earlier one
        earlier = self.island.registry.facts(STATE, [key], at_most=max(0, self.audited[int(key)][0] - 1))
        self.beginnings[int(key)] |= {fact.number + 1 for fact in earlier}
      self._move_beginning(int(key))

  def _move_beginning(self, path: int):
    """Moves the first phase that a replay of a path would repeat to the last one that open audits allow."""
    most, _ = self.audited.get(path, (self.island.run.settings.train.phases, 0))
    first = max((begin for begin in self.beginnings[path] if begin <= most), default=0)
    if first > self.replayed_from[path]:
      self.replayed_from[path] = first
      self.beginnings[path] = {begin for begin in self.beginnings[path] if begin >= first}
      if lineage.has_state(self.island):
        self._forget_states_before(path, first - 1)

  def _for_audits(self, phase: int) -> set[str]:
    """Returns the objects of a phase's contributions with which open audits will compare theirs."""
    paths = [str(path) for path, (_, last) in self.audited.items() if self.replayed_from[path] <= phase <= last]
    facts = [fact for path in paths for fact in audit_facts.published(self.island, path, phase)]
    return {name for fact in facts for name, _ in objects_of(fact).values()}

  def _forget_states_before(self, path: int, phase: int):
    """Deletes the states of a path that were published for earlier phases."""
    folder = f'{OBJECTS}/{STATES}/{path}'
    for name in self.island.storage.names(folder):
      number = name.removeprefix(f'{folder}/').partition('-')[0]
      if number.isdecimal() and int(number) < phase:  # else it is none of ours, as what file managers leave in folders
        self.island.storage.delete(name)

  def _chosen(self) -> list[Fact]:
    """Returns the facts of the modules that early stopping points at."""
    best = self.pointers.version
    facts = (fact for version in {*best} - {0} for fact in self.island.registry.facts('module', number=version))
    here = (fact for fact in facts if fact.key not in self.modules_left)
    return [fact for fact in here if self.island.is_chosen(fact, best)]

  def _for_replays(self) -> list[Fact]:
    """Returns the facts of collected modules that a path would need to repeat the phases since its published state."""
    island, kept = self.island, list[Fact]()
    for version in range(min(self.replayed_from), self.next):
      active = island.active_paths(version)
      paths = (path for path, first in enumerate(self.replayed_from) if first <= version and active[path])
      here = (path for path in paths if path not in island.members.until)
      needed = {module for path in here for module in island.modules_of(path).values()}
      kept += [fact for fact in island.registry.facts('module', number=version) if fact.key in needed]
    return kept

  def _newer(self) -> Iterator[Fact]:
    """Yields the facts of the modules that are not collected yet."""
    number = self.next
    while newer := self.island.registry.facts('module', number=number):
      yield from (fact for fact in newer if fact.key not in self.modules_left)
      number += 1

  def _base(self) -> list[Fact]:
    """Returns the facts of version 0, of which owners that join begin with copies; none if nobody can join."""
    return self.island.registry.facts('module', number=0) if self.island.run.settings.data.own_text else []


class Backups:
  """Writes backups of the registry when the run has reached another phase, or from time to time."""

  def __init__(self, island: Island):
    self.island = island
    self.reached = -1  # the frontier that the newest backup knows; earlier ones are needed by no rebuilt registry
    self.next = 0.0
    self.latest = 0.0
    self.failed = False

  def write_if_due(self, reached: int):
    """Writes a backup if it is due, in a small share of the time."""
    now = time.monotonic()
    if now >= (self.next if reached > self.reached else self.latest):
      self.write(reached)

  def write(self, reached: int):
    """Writes a backup. Never raises: a run does not end for its backup, and a full disk has to be cleaned up."""
    started = time.monotonic()
    try:
      registry_backup.write(self.island.registry, self.island.storage)
      self.failed = False
    except Exception as e:
      if not self.failed:  # once, as the cause may last for weeks
        logging.warning('the registry was not backed up (%s)', retry.first_line(e) or repr(e))
      self.failed = True
    self.reached, ended = reached, time.monotonic()
    self.next = ended + max(BACKUP_S, (ended - started) / live_report.SHARE)
    self.latest = max(self.next, ended + LONGEST_BACKUP_S)


class LivePage:
  """Writes the page of a run whose text is prepared, from time to time."""

  def __init__(self, island: Island, every_s: float = PAGE_S):
    self.island, self.every_s = island, every_s
    self.pointers = run_history.Pointers(island)
    self.rows: list[dict[str, Any]] = []  # of complete phases
    self.replays: dict[tuple[str, str, int], float] = {}  # seconds, by the task that they came before
    self.phases = 0  # that are complete
    self.next, self.failed = time.monotonic() + every_s, False

  def write_if_due(self) -> None:
    """Writes the page if it is due. Never raises: a run does not end for its page."""
    if (started := time.monotonic()) < self.next:
      return
    try:
      self.write()
      self.failed = False
    except Exception as e:
      if not self.failed:  # once, as the cause may last for weeks
        logging.warning('the report of the run so far was not written (%s)', str(e) or repr(e))
      self.failed = True
    self.next = time.monotonic() + max(self.every_s, (time.monotonic() - started) / live_report.SHARE)

  def write(self) -> None:
    """Writes the page, unless no path is done with a phase yet, or the evaluator makes the report of the run."""
    registry, rows = self.island.registry, self.make_rows()
    if not rows or 'finish' in registry.counts():
      return
    self.island.fetch_trees()
    tasks = [timeline_plot.Task(*task) for task in run_history.timeline(self.island, self.replays)['tasks']]
    text = run_report.page_so_far(self.island.run.workdir, rows, tasks)
    if 'finish' not in registry.counts():
      self.island.storage.write(live_report.PAGE, text.encode())

  def make_rows(self) -> list[dict[str, Any]]:
    """Makes rows in the format of metrics.jsonl. Complete phases are read only once."""
    while run_history.is_complete(self.island, self.phases):
      phase_history = run_history.read_phase(self.island, self.pointers, self.phases)
      after = path_steps.after(self.island, self.phases, phase_history.checkpoints)
      row = run_history.phase_row(self.island, after, self.phases, phase_history)
      # all of a phase at once, and last: what failed before is tried again from the phase's first row
      self.rows += [*self.steps(phase_history.checkpoints), {'kind': 'phase', 'stage': 'train'} | row]
      self.phases += 1
    rows, phase = list(self.rows), self.phases
    while facts := self.island.registry.facts('checkpoint', number=phase):
      rows += self.steps(facts)
      phase += 1
    return rows

  def steps(self, facts: Sequence[Fact]) -> Iterator[dict[str, Any]]:
    """Yields a row of steps for each path's checkpoint of a phase; notes replays."""
    earlier = pieces.earlier_facts(self.island, facts[0].number, [fact.key for fact in facts]) if facts else []
    self.replays |= run_history.replays([*facts, *earlier])
    s = self.island.run.settings
    for fact in facts:
      if not fact.meta['rows']:  # of a path that was late
        continue
      _, losses, norms, rates, *_ = np.array(fact.meta['rows'], float).T
      tokens, seconds = fact.meta['timed_steps'] * s.train.batch_size * s.model.seq_len, fact.meta['timed_s']
      step = path_steps.of_fact(self.island, fact).end
      of_path = {'paths': [int(fact.key)], 'loss': [float(losses.mean())], 'grad_norm': [float(norms.mean())]}
      rate = {'learning_rate': float(rates[-1]), 'tokens_per_s': tokens / seconds if seconds else None}
      yield {'kind': 'step', 'stage': 'train', 'step': step} | of_path | rate
