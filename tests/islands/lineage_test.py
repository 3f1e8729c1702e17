"""Where a path's state comes from; and that whoever lacks it makes the same again [3]."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import threading
import types

import excluded_path
import numpy as np
import one_process
import poison
import pytest
from island_fixtures import machine, one_device, prepared  # noqa: F401
from one_process import OWN_LEVELS, Faults, changed, with_settings

from dipaco_jax.islands import (
  inner_phase,
  lineage,
  monitor,
  path_exchange,
  path_state,
  pieces,
  schedule,
  state_facts,
  worker,
)
from dipaco_jax.islands.held_states import HeldStates, Key
from dipaco_jax.islands.island import Gone, Later
from dipaco_jax.islands.path_state import INNER
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.registry import database, registry
from dipaco_jax.registry.registry import Fact, Task
from dipaco_jax.telemetry import profiling

made = one_process.made
EVERY = 3  # phases from one publication to the next


# -- which state


@pytest.fixture(autouse=True)
def any_state_will_do(request, monkeypatch):
  """Those of a Scene are not shaped as a model's are."""
  if 'machine' not in request.fixturenames:
    monkeypatch.setattr(path_state, 'check_carried', lambda *_: None)


def test_the_phase_before_is_the_last_in_which_the_path_was_trained(made):
  of = with_settings(made, train=dict(phases=6, schedule=((0, (0, 1)), (2, (1,)), (5, (0,)))))
  assert [pieces.trained_before(of, 0, phase) for phase in range(6)] == [None, 0, 1, 1, 1, 1]
  assert pieces.trained_before(of, 2, 5) is None


@pytest.mark.parametrize(
  'every, schedule, expected',
  [
    (3, (), [2, 5]),  # nobody goes on from the last
    (1, (), [*range(8)]),
    (3, ((0, (0,)), (1, (1,)), (4, (0,))), [4, 5]),  # not in 1, 2, 3: the first phase after the third
    (2, tuple((t, (t % 2,)) for t in range(9)), [2, 4, 6]),  # drawn in even phases, none of which completes a pair
  ],
)
def test_a_state_is_published_after_every_kth_phase_or_the_next_of_the_path(every, schedule, expected, made):
  sections = dict(train=dict(phases=9, schedule=schedule), checkpoint=dict(state_every_phases=every))
  of = with_settings(made, **sections)
  trained = [phase for phase in range(9) if of.active_paths(phase)[0]]
  assert [phase for phase in trained if lineage.publishes_state(of, 0, phase)] == expected
  never = with_settings(made, **sections, inner=dict(keep_state=False))
  assert not any(lineage.publishes_state(never, 0, phase) for phase in trained)


def test_with_streaming_a_state_is_published_after_closed_phases_that_do_not_depend_on_that(made):
  outer, expected = dict(wire='thin', closed_every=3), {1: [2, 5], 2: [2, 5], 3: [2, 5], 4: [5], 7: [], 8: []}
  for every, phases in expected.items():
    of = with_settings(made, train=dict(phases=9), outer=outer, checkpoint=dict(state_every_phases=every))
    assert [phase for phase in range(9) if of.timetable.is_closed(phase)] == [2, 5, 8]
    assert [phase for phase in range(9) if lineage.publishes_state(of, 0, phase)] == phases


def test_costs_are_reported_by_path(made):
  of = with_settings(made, train=dict(phases=9), checkpoint=dict(state_every_phases=4))
  facts = [
    Fact('checkpoint', str(path), t, '', '', {}) for path, last in enumerate((3, 5, 6, 5)) for t in range(last + 1)
  ]
  of.registry.put([*facts, *(Fact('state', key, 3, '', '', {}) for key in '12')])
  of.registry.put([excluded_path.exclusion(of, 3, 5, 'w')])
  assert lineage.costs(of) == {(4, 0.0): [0], (3, 0.0): [2], (2, 0.0): [1]}
  assert not lineage.costs(with_settings(of, inner=dict(keep_state=False)))
  assert not lineage.costs(with_settings(of, train=dict(phases=6))).keys() & {(2, 0.0)}, 'the last phase is done'


class Scene:
  """Path 3 after some phases, of which one is published, and excluded from others."""

  def __init__(self, made, published=(), excluded=()):
    self.made = with_settings(made, train=dict(phases=9), checkpoint=dict(state_every_phases=EVERY))
    facts = [Fact('module', key, v, f'm{v}', f'{v}' * 64, {}) for key in made.all_modules() for v in range(9)]
    for t in range(8):
      facts.append(Fact('checkpoint', '3', t, '', digest(t), {'objects': {}}))
      if t in published:
        state_facts.publish(made, facts[-1], state(t))
    made.registry.put([*facts, *(excluded_path.exclusion(made, 3, t, 'w') for t in excluded)])

  def find(self, held: HeldStates, phase: int = 8) -> lineage.NewestState:
    return lineage.find(self.made, held, Task(0, 'train', '3', phase, 1, 'all', 0))


def state(x: float):
  return {f"['{INNER}'].mu": np.full(4, x, 'f')}


def digest(phase: int) -> str:
  return f'{phase}c' * 32


def value(found: lineage.NewestState) -> float:
  return float(found.carried[f"['{INNER}'].mu"][0])


def told(found):
  return found.phases, found.carried, found.fresh


def test_it_is_held_or_published_or_begins_again_or_with_the_base(made):
  scene, held = Scene(made, published=(2, 5)), HeldStates()
  found = scene.find(held)
  assert found.phases == (6, 7, 8) and value(found) == 5 and not found.fresh and not found.within
  held.put(Key(3, 6, digest(6)), state(6.5))
  found = scene.find(held)
  assert found.phases == (7, 8) and value(found) == 6.5
  assert told(scene.find(HeldStates(), phase=2)) == ((0, 1, 2), {}, False)
  scene.made.registry.put([excluded_path.exclusion(made, 3, 6, 'w')])
  found = scene.find(held)
  assert told(found) == ((7, 8), {}, True), 'what is held is of a phase from which the path was excluded'


def test_a_state_that_another_fact_names_is_not_taken(made):
  scene, held = Scene(made), HeldStates()
  held.put(Key(3, 7, 'f' * 64), state(1))
  assert scene.find(held).phases == tuple(range(9))
  [checkpoint] = made.registry.facts('checkpoint', ['3'], 5)
  state_facts.publish(made, checkpoint._replace(sha256='f' * 64), state(5))
  assert made.registry.facts('state', ['3'], 5) and scene.find(held).phases == tuple(range(9))


def test_without_kept_states_a_phase_begins_as_the_first_does(made):
  scene = Scene(made)
  scene.made = with_settings(scene.made, inner=dict(keep_state=False))
  assert told(scene.find(HeldStates())) == ((8,), {}, False)


def test_within_a_phase_it_continues_from_the_same_beginning_alone(made, tmp_path):
  scene, held = Scene(made, published=(5,)), HeldStates(tmp_path / 'held')
  held.put_within(Key(3, 7, lineage.origin(scene.made, 3, 7), 4), state(7.5))
  found = scene.find(held)
  assert found.phases == (7, 8) and found.within[0] == 4
  scene.made.registry.put([excluded_path.exclusion(made, 3, 6, 'w')])
  scene.made = dataclasses.replace(scene.made)  # a process that begins later: nothing changes for one that has begun
  assert told(scene.find(held)) == ((7, 8), {}, True) and scene.find(held).within is None


def test_states_of_paths_that_moved_on_since_they_are_held_are_forgotten(made, tmp_path):
  of = with_settings(made, train=dict(phases=9, schedule=((0, (1, 2, 3)), (4, (2, 3)), (6, (1, 2, 3)))))
  held = HeldStates(tmp_path / 'held', 'us')
  about = {1: ('us', 6), 2: ('others', 4), 3: ('others', 3)}  # by path: who trained it last, in which phase
  of.registry.put([Fact('checkpoint', str(p), t, '', '', {'holder': name}) for p, (name, t) in about.items()])
  for path in about:
    held.put(Key(path, 3, digest(3)), state(path))
  held.put_within(Key(2, 4, digest(4), 5), state(2))
  held.put_within(Key(3, 4, digest(4), 5), state(3))
  everything = {(key.path, key.phase, key.step) for key in held.names()}
  lineage.forget_moved(of, held)
  assert {(key.path, key.phase, key.step) for key in held.names()} == everything, 'they may be from a replay'
  others = {1: 'us', 2: 'others', 3: 'us'}
  of.registry.put([Fact('checkpoint', str(p), 7, '', '', {'holder': name}) for p, name in others.items()])
  lineage.forget_moved(of, held)
  assert {(key.path, key.phase, key.step) for key in held.names()} == {(1, 3, None), (3, 3, None), (3, 4, 5)}


@pytest.mark.parametrize('begins', ['fetch', 'replay'])
@pytest.mark.parametrize('is_late', [True, False])
def test_what_a_late_state_has_made_useless_is_not_made_again(begins, is_late, made, monkeypatch):
  """The monitor deletes modules as soon as a newer state is published, maybe while a replay is at work."""
  scene, does = Scene(made, published=(2,)), worker.Worker(HeldStates())
  task = Task(0, 'train', '3', 8, 1, 'all', 0)

  def gone(*_):
    if is_late:
      [checkpoint] = scene.made.registry.facts('checkpoint', ['3'], 5)
      state_facts.publish(scene.made, checkpoint, state(5))
    raise Gone('objects/modules/4/low/0-0.safetensors', 'it is missing')

  monkeypatch.setattr(inner_phase, 'make_job', lambda *_: None)
  monkeypatch.setattr(path_exchange, 'whole', gone)
  monkeypatch.setattr(worker.Worker, 'train_first', gone)
  with pytest.raises(Later) as told:
    if begins == 'fetch':
      does.fetch(scene.made, task)
    else:
      lease = types.SimpleNamespace(task=task, about={})
      does.replay(scene.made, lease, worker.Beginning(scene.find(does.held).parts, 0, None, False))
  assert isinstance(told.value, Gone) != is_late
  assert not is_late or scene.find(does.held).phases == (6, 7, 8)


# -- to the same bits

RUNS = {
  'plain': {},
  'sampled': {'train': dict(phases=7, paths_per_phase=2)},
  'fresh': {'inner': dict(inherit_state=False)},
  'without states': {'inner': dict(keep_state=False)},
  'poisoned': {},
  'thin': {'outer': dict(wire='thin', whole_every=4, closed_every=EVERY)},
  'own modules': {'levels': OWN_LEVELS},
  'own modules, poisoned': {'levels': OWN_LEVELS},
  'own modules, thin, poisoned': {
    'levels': OWN_LEVELS,
    'outer': dict(wire='thin', whole_every=4, closed_every=EVERY),
  },
  'own modules, without states': {'levels': OWN_LEVELS, 'inner': dict(keep_state=False)},
  'int8, without states': {'outer': dict(compress='int8'), 'inner': dict(keep_state=False)},
}
POISONED = 'noise', 12 + 3 * 6 + 1  # in the fourth phase


def begin(name: str, machine, prepared, place: pathlib.Path) -> one_process.Machine:  # noqa: F811
  """A machine and a place for a run of a name."""
  sections = {'train': dict(phases=5), 'checkpoint': dict(state_every_phases=EVERY, every_steps=2)} | RUNS[name]
  settings = changed(machine.settings, **sections)
  if 'inner' in sections:  # its base is another
    return one_process.Machine(settings, {})
  alone = machine.begin(prepared, place, settings)
  if 'poisoned' in name:
    alone.programs = {kind: x for kind, x in machine.programs.items() if kind != 'programs'}
    with contextlib.closing(alone.island(place).registry):
      programs = alone.island(place).run.programs
    programs.__dict__['steps'] = poison.poisoned(programs, programs.steps, [2], *reversed(POISONED))
    alone.programs['programs'] = programs
  return alone


class Watch:
  """A monitor beside a run, until the end of the block."""

  def __init__(self, made):
    self.made, self.over = made, threading.Event()
    self.thread = threading.Thread(target=self.watch, daemon=True)

  def watch(self):
    collector = monitor.Collector(self.made)
    while not self.over.wait(0.05):
      schedule.advance(self.made)
      collector.collect(monitor.frontier(self.made) - monitor.GENERATIONS)

  def __enter__(self):
    self.thread.start()

  def __exit__(self, *_):
    self.over.set()
    self.thread.join()
    one_process.close(self.made)


def replays(place: pathlib.Path) -> list[list[int]]:
  with contextlib.closing(registry.Registry(f'sqlite:///{place}/registry.db')) as facts:
    told = [fact.meta.get('replay') for fact in facts.facts('checkpoint')]
  assert not any(each['differing'] or each['seconds'] <= 0 for each in told if each)
  return [each['phases'] for each in told if each]


def check_bytes(made):
  """A phase sends 4 bytes a parameter, and 8 with the state; it reads 4, what paths share once for all of them."""
  facts, published = made.registry.facts('checkpoint'), made.registry.facts('state')
  one_process.close(made)
  assert len({fact.meta['holder'] for fact in facts}) == 1
  sizes = {name: math.prod(x.shape) for name, x in transformer.shapes(made.run.model).items()}
  states = len(published) / len(facts)
  sent = sum(fact.meta['bytes_out'] for fact in facts) / len(facts) / sum(sizes.values())
  assert 0 < states < 0.5
  # What is sent after a task, parameters and perhaps a state, the next task notes: of the last one nobody does.
  left = (4 + 8) / len(facts)
  assert 0.99 * (4 + 8 * states - left) <= sent < 1.1 * (4 + 8 * states)
  names = {level.name: made.layout.names(level) for level in made.layout.levels}
  once = 4 * sum(sizes[name] for module in made.all_modules() for name in names[module.partition('/')[0]])
  read = sum(fact.meta['bytes_in'] for fact in facts if fact.number)  # the first phase reads shards and base as well
  assert read < 1.1 * once * max(fact.number for fact in facts)  # none of what it still has, as it has made it itself


@contextlib.contextmanager
def counting_answers():
  """Counts, by task, the answers of the database that training waits for in the block."""
  waited: dict[str, int] = {}
  train, run = worker.Worker.train, database.Database._run
  here = threading.local()

  def counted(self, island, task, lease):
    here.task = island.words(task)
    waited[here.task] = 0
    try:
      return train(self, island, task, lease)
    finally:
      here.task = None

  def answered(self, *args):
    if task := getattr(here, 'task', None):
      waited[task] += 1
    return run(self, *args)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(worker.Worker, 'train', counted)
    patch.setattr(database.Database, '_run', answered)
    yield waited


@pytest.mark.usefixtures('one_device')
@pytest.mark.filterwarnings('ignore::ResourceWarning')
@pytest.mark.slow
@pytest.mark.parametrize('name', RUNS)
def test_whose_disk_is_lost_after_every_task_makes_the_same_bits(name, machine, prepared, tmp_path):  # noqa: F811
  """A monitor collects beside it, and nothing that it has deleted is missed. What is compared with was traced."""
  alone = begin(name, machine, prepared, tmp_path / 'one')
  steps = profiling.Steps(alone.settings.pretrain.steps + 3, 2)
  with counting_answers() as waited, pytest.MonkeyPatch.context() as patch:
    profiler = profiling.Profiler(tmp_path, steps)
    patch.setattr(run_lib, 'unattended', functools.partial(run_lib.unattended, profiler=profiler))
    alone.to_the_end(tmp_path / 'one', Faults(), end=one_process.TRAINED)
  assert not replays(tmp_path / 'one')
  [table] = (tmp_path / 'profile').glob('*.txt')
  assert table.read_text().startswith('profile of steps ')
  if name == 'thin':  # far from the database, each of them would take as long as some inner steps
    assert len(waited) > 40 and sum(waited.values()) < 10, waited
  if name == 'plain':
    check_bytes(alone.island(tmp_path / 'one'))
  place = tmp_path / 'run'
  other = begin(name, machine, prepared, place)
  other.programs = alone.programs
  ends = [f'after complete train {path} {phase}' for path in range(4) for phase in range(7)]
  faults = Faults([*ends, *(f'after complete piece {path} {n}' for path in range(4) for n in range(0, 24, 5))])
  with Watch(other.island(place)):
    other.to_the_end(place, faults, far=tmp_path / 'far', end=one_process.TRAINED)
  assert len(faults.hit) > 12 and not [point for point in faults.passed if 'missing' in point]
  assert other.backend.outcome(place) == alone.backend.outcome(tmp_path / 'one')
  # With streaming, the pieces of the task's own phase too.
  # A disk is lost before the state of the last task is published; a state that was published late ends a replay sooner.
  most = {'without states': 0, 'sampled': EVERY - 1}.get(name, EVERY)
  assert min(most, 1) <= max(map(len, replays(place)), default=0) <= most
