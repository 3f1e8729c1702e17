"""Islands end with the same bits, wherever they are killed, cut off or out of space, and whatever gets lost [3]."""

import contextlib
import pathlib
import random
import re
import shutil
import threading

import island_fixtures
import line
import one_process
import pytest
import tiny_run
from backends import NAMES, Backend, small_disk
from one_process import OWN_LEVELS, Faults, Machine, changed, close

from dipaco_jax.islands import all_roles, island, module_weights, monitor, path_steps, pieces, shared_stages, worker
from dipaco_jax.islands.guard import Later
from dipaco_jax.processes import stopping
from dipaco_jax.registry import database, registry, registry_backup
from dipaco_jax.storage import files, module_store, object_store

pytestmark = [
  pytest.mark.usefixtures('one_device'),
  pytest.mark.filterwarnings('ignore::ResourceWarning'),  # what is killed closes no files
]
OF_FOLDERS = r' replace (objects/|\S*index\.json)'  # points that folders alone pass
GRACE_S = 5.0  # longer than it takes to begin again after a kill
ROUNDS = {'routing': dict(method='discriminative', rounds=1, phases_per_round=1)}


one_device, machine, prepared = island_fixtures.one_device, island_fixtures.machine, island_fixtures.prepared


def finish(machine: Machine, prepared: pathlib.Path, place: pathlib.Path, faults: Faults, **options) -> dict:
  """A run from there, to its outcome."""
  machine.backend.copy(prepared, place)
  machine.to_the_end(place, faults, **options)
  return machine.backend.outcome(place)


@pytest.fixture(scope='module')
def undisturbed(machine, prepared, tmp_path_factory) -> tuple[dict, list[str]]:
  """What a run comes to, in SQLite and a folder, and the points that it passes."""
  faults = Faults()
  return finish(machine, prepared, tmp_path_factory.mktemp('undisturbed') / 'run', faults), faults.passed


# -- killed


def draw_points(passed: list[str], everything: bool) -> list[list[str]]:
  """Points by run, in which each of them is hit once: some, or all of them."""
  points = sorted({point for point in passed if 'nothing' not in point and 'release' not in point})
  random.Random(8).shuffle(points)
  if everything:
    return [points[i::8] for i in range(8)]
  return [sorted({*points[:5], 'before replace stages/evaluate.json'})]


@pytest.mark.on('postgresql,s3')  # --islands_on=all: on others
def test_a_run_killed_at_any_point_ends_with_the_same_bits(machine, backend, prepared, undisturbed, tmp_path, request):
  kill_at_points(machine, backend, prepared, undisturbed, tmp_path, request)


@pytest.mark.slow
@pytest.mark.on('postgresql,s3')
def test_a_run_over_a_thin_line_killed_at_any_point_ends_with_the_same_bits(
  machine, backend, prepared, tmp_path, request
):  # fmt: skip
  """With pieces, compressed messages and versions, and a level that each path has alone."""
  sections = {'train': dict(phases=3), 'checkpoint': dict(state_every_phases=2)}
  settings = changed(machine.settings, OWN_LEVELS, outer=dict(wire='thin', whole_every=2, closed_every=2), **sections)
  thin = machine.begin(prepared, tmp_path / 'prepared', settings)
  thin.to_the_end(tmp_path / 'prepared', Faults(), end=one_process.PREPARED)
  faults = Faults()
  outcome = finish(thin, tmp_path / 'prepared', tmp_path / 'alone', faults)
  assert any('objects/states/' in point for point in faults.passed)
  kill_at_points(thin, backend, tmp_path / 'prepared', (outcome, faults.passed), tmp_path, request)


@pytest.mark.slow
@pytest.mark.on('postgresql,s3')
def test_a_run_of_timed_phases_killed_at_any_point_ends_with_the_same_bits(
  machine, backend, prepared, tmp_path, request, monkeypatch
):  # fmt: skip
  """Each path takes other numbers of steps in each phase, whoever trains it; one is late in the first."""
  training = threading.local()  # path and phase
  train_first = worker.Worker.train_first

  def noting(does, i, lease, beginning):
    training.at = int(lease.task.key), beginning.parts[0].phase
    return train_first(does, i, lease, beginning)

  def is_over(clock) -> bool:
    path, phase = training.at
    return clock.dispatches > (path + phase) % 3

  perform = worker.Worker.perform

  def performed(does, i, task, lease):
    if (task.kind, task.key, task.number) == ('train', '1', 0):
      raise Later('slow')
    return perform(does, i, task, lease)

  monkeypatch.setattr(worker.Worker, 'perform', performed)
  monkeypatch.setattr(worker.Worker, 'train_first', noting)
  monkeypatch.setattr(path_steps.Clock, 'is_over', is_over)
  sections = dict(checkpoint=dict(every_steps=100))  # none within a phase
  s = changed(machine.settings, train=dict(phase_s=1e6), outer=dict(quorum=0.75, grace_s=GRACE_S), **sections)
  timed = machine.begin(prepared, tmp_path / 'prepared', s)
  timed.to_the_end(tmp_path / 'prepared', Faults(), end=one_process.PREPARED)
  faults = Faults()
  outcome = finish(timed, tmp_path / 'prepared', tmp_path / 'alone', faults)
  made = timed.island(tmp_path / 'alone')
  assert {path_steps.of_fact(made, fact).taken for fact in made.registry.facts('checkpoint')} == {0, 2, 4, 6}
  assert [fact[1:3] for fact in made.registry.facts('excluded') if pieces.LATE in fact.meta] == [('1', 0)]
  close(made)
  kill_at_points(timed, backend, tmp_path / 'prepared', (outcome, faults.passed), tmp_path, request)


def kill_at_points(machine, backend, prepared, undisturbed, tmp_path, request):
  expected, passed = undisturbed
  machine, faults = machine.other(backend=backend), Faults()
  everything = request.config.getoption('--all_crash_points')
  if backend.name != NAMES[0] and everything:
    assert finish(machine, prepared, tmp_path / 'undisturbed', faults) == expected
    passed = faults.passed
  elif backend.name != NAMES[0]:
    passed = [point for point in passed if not re.search(OF_FOLDERS, point)]
  chosen, hit = draw_points(passed, everything), []
  for i, points in enumerate(chosen):
    place, faults = tmp_path / str(i), Faults(points)
    assert finish(machine, prepared, place, faults) == expected
    check_clean(machine, place)
    hit += faults.hit
    shutil.rmtree(place)
  drawn = {point for points in chosen for point in points}
  print(f'{backend.name}: killed at {len(hit)} of {len(drawn)} points; not at {sorted(drawn.difference(hit))}')
  sure = {point for point in drawn if ' heartbeat ' not in point}  # a heartbeat comes when its time has come
  assert len(sure.intersection(hit)) > 0.8 * len(sure)


def check_clean(machine: Machine, place: pathlib.Path):
  """Nothing is open, and after the monitor has looked nothing is left that nobody needs, nor half of anything."""
  made = machine.island(place)
  with all_roles.watched(made):
    pass  # the run is finished
  assert {state for states in made.registry.counts().values() for state in states} == {'done'}
  assert not [fact for fact in made.registry.unscheduled() if fact.kind != 'finished']  # from which nothing follows
  best = module_store.best_versions(place)
  last = {machine.settings.train.phases, *best}
  facts = [f for f in made.registry.facts('module') if f.number in last and made.is_chosen(f, best)]
  assert set(made.storage.names(island.OBJECTS)) == module_weights.objects(made.registry, facts)
  assert made.storage.exists('evaluation/excerpts.json')
  close(made)
  assert not [f for f in place.rglob('*') if files.ASIDE.fullmatch(f.name) and 'checkpoints' not in f.parts]


@pytest.mark.slow
@pytest.mark.on('postgresql,s3')
def test_tasks_each_on_another_machine_make_the_same_bits(machine, backend, prepared, undisturbed, tmp_path):
  expected, passed = undisturbed
  points = sorted(p for p in set(passed) if p.startswith('after mark_scheduled 1 from') and 'finished' not in p)
  faults = Faults(random.Random(9).sample(points, 12))
  found = finish(machine.other(backend=backend), prepared, tmp_path / 'run', faults, far=tmp_path / 'far')
  assert len(faults.hit) > 0.8 * 12 and found == expected


# -- what is gone, and what goes


def flip_a_bit(place: object_store.Storage, name: str):
  data = bytearray(place.fetch(name))
  data[len(data) // 2] ^= 1
  place.backend.put(name, bytes(data))


GONE = (object_store.Storage.delete, 'after claim train 3 1', 1), (flip_a_bit, one_process.TRAINED, 2)


@pytest.mark.on('postgresql,folder')
@pytest.mark.slow
@pytest.mark.parametrize('damage, moment, newest', GONE)
def test_what_is_gone_is_made_again(damage, moment, newest, machine, backend, prepared, undisturbed, tmp_path):
  """And who asks for it is killed before and after he has said so."""
  place, machine = tmp_path / 'run', machine.other(backend=backend)
  finish(machine, prepared, place, Faults(), end=moment)
  objects = object_store.open_storage(backend.storage(place))
  prefixes = [f'{island.OBJECTS}/{name}' for name in (f'modules/{newest}/low/', 'paths/0/0-', 'paths/0/1-')]
  gone = [name for name in objects.names(island.OBJECTS) if name.startswith(tuple(prefixes))]
  for name in gone:
    damage(objects, name)
  faults = Faults(f'{when} reopen outer low/{i} {newest}' for when in ('before', 'after') for i in (0, 1))
  machine.to_the_end(place, faults)
  assert len(faults.hit) >= 2 and backend.outcome(place) == undisturbed[0]
  assert all(objects.exists(name) for name in gone[:2])


@pytest.mark.slow
@pytest.mark.on('sqlite,folder')
@pytest.mark.parametrize('lost', ['after claim train 3 1', one_process.TRAINED])
def test_a_registry_that_is_rebuilt_from_an_older_backup_makes_the_same_bits(
  lost, machine, backend, prepared, undisturbed, tmp_path
):  # fmt: skip
  """What was made since the backup is there already, by the same names."""
  place, machine = tmp_path / 'run', machine.other(backend=backend)
  finish(machine, prepared, place, Faults(), end='after claim outer low/0 1')
  made = machine.island(place)
  registry_backup.write(made.registry, made.storage)
  close(made)
  machine.to_the_end(place, Faults(), end=lost)
  (place / 'registry.db').unlink()
  registry_backup.rebuild(backend.registry(place), object_store.open_storage(backend.storage(place)))
  machine.to_the_end(place, Faults())
  assert backend.outcome(place) == undisturbed[0]


@pytest.mark.slow
@pytest.mark.on('postgresql,s3')
def test_trees_that_are_damaged_are_made_again(machine, backend, prepared, undisturbed, tmp_path):
  """By a machine that has nothing of its own."""
  place, machine = tmp_path / 'run', machine.other(backend=backend)
  finish(machine, prepared, place, Faults(), end='after claim train 3 1')
  objects = object_store.open_storage(backend.storage(place))
  flip_a_bit(objects, objects.names('shards/0')[-1])
  objects.delete(objects.names('base')[0])
  faults = Faults(['after claim prepare  0'])
  machine.to_the_end(place, faults, far=tmp_path / 'far')
  assert faults.hit and backend.outcome(place) == undisturbed[0]


SPOILED = (
  ('base/inner.safetensors', tiny_run.flip_a_bit, False),
  ('base/params.safetensors', pathlib.Path.unlink, True),
  ('shards/0/1/train.array_record', tiny_run.flip_a_bit, True),
  ('shards/0', shutil.rmtree, False),
)


@pytest.mark.slow
@pytest.mark.parametrize('name, damage, far', SPOILED)
def test_a_tree_that_is_spoiled_is_made_again(name, damage, far, machine, prepared, undisturbed, tmp_path):
  """Of a folder in which all work; or of a place from which it comes to another machine."""
  place, elsewhere = tmp_path / 'run', tmp_path / 'far' if far else None
  machine.backend.copy(prepared, place)
  damage(place / name)
  machine.to_the_end(place, Faults(), far=elsewhere, end='after complete train 1 0')
  found = machine.backend.outcome(place)
  assert found.items() <= undisturbed[0].items() and 'checkpoint 1 0' in found


def test_what_another_machine_makes_otherwise_changes_nothing(machine, prepared, tmp_path):
  place = tmp_path / 'run'
  machine.backend.copy(prepared, place)
  made = machine.island(place)
  [fact] = made.registry.facts('prepared')
  about = {'tokenizer': fact.meta['tokenizer']}
  assert made.publish_trees('prepared', 0, shared_stages.TREES, about)[:5] == fact[:5]
  index = (place / 'base.index.json').read_bytes()
  tiny_run.flip_a_bit(place / 'base' / 'inner.safetensors')
  with pytest.raises(ValueError, match='the results of this machine differ from those in use'):
    made.publish_trees('prepared', 0, shared_stages.TREES, about)
  assert (place / 'base.index.json').read_bytes() == index
  close(made)


@pytest.mark.slow
@pytest.mark.on('sqlite,folder')
def test_the_monitor_removes_nothing_that_is_needed(machine, backend, prepared, tmp_path):
  rate = 7.0  # too high: an early version is the best
  sections = dict(train=dict(phases=10, paths_per_phase=1, steps_per_phase=2), outer=dict(learning_rate=rate))
  place = tmp_path / 'run'
  alone = machine.other(backend=backend).begin(prepared, place, changed(machine.settings, **sections))
  watcher = alone.island(place)
  removed, delete = [], watcher.storage.delete
  watcher.storage.delete = lambda name: (removed.append(name), delete(name))
  thread = threading.Thread(target=monitor.watch, args=(watcher,))
  thread.start()
  faults = Faults()
  alone.to_the_end(place, faults)
  thread.join()
  close(watcher)
  objects = [name.split('/') for name in removed if name.startswith(island.OBJECTS)]  # and no backup of the registry
  phases = {int(parts[2]) for parts in objects if parts[1] != island.OUTER}
  assert phases == set(range(10)) and not [point for point in faults.passed if 'missing' in point]
  assert min(module_store.best_versions(place)) < 5
  check_clean(alone, place)


# -- cut off, and out of space


@pytest.mark.slow
@pytest.mark.parametrize('lost, attempts', [('request', 2), ('answer', 1)])
@pytest.mark.parametrize('backend', ['postgresql,folder'], indirect=True)
def test_a_partition_amid_a_commit(lost, attempts, machine, backend, prepared, undisturbed, tmp_path, monkeypatch):
  """One waits for what the database says of its commit while another does all the rest; then it hears of that."""
  monkeypatch.setattr(stopping, '_listening', stopping.Signals(''))  # to signals, which is for the main thread
  monkeypatch.setattr(database, 'IDLE_S', 1)
  place, beyond = tmp_path / 'run', Backend(backend.name, backend.server)
  backend.copy(prepared, place)
  with line.Line(backend.server.socket) as wire:
    beyond.urls[place] = backend.server.by_port(backend.registry(place), wire.port)
    faults = Faults(['before complete train 2 0'], lambda: wire.trap(b'INSERT INTO dipaco_facts.*COMMIT', lost))
    alone = machine.other(backend=beyond)
    thread = threading.Thread(target=alone.to_the_end, args=(place, faults, tmp_path / 'far'))
    thread.start()
    assert wire.cut.wait(60)
    machine.other(backend=backend).live(place)
    assert thread.is_alive()
    wire.heal()
    thread.join(60)
  assert not thread.is_alive() and backend.outcome(place) == undisturbed[0]
  check_clean(machine.other(backend=backend), place)
  facts = registry.Registry(backend.registry(place))
  assert {(task['key'], task['number']): task['attempts'] for task in facts.tasks(kind='train')}['2', 0] == attempts
  facts.close()


@pytest.mark.slow
@pytest.mark.parametrize(
  'point, words',
  [
    ('before write objects/paths/0/2-low', 'No space left on device'),
    ('before complete train 2 0', 'disk is full'),
  ],
)
def test_a_full_disk_is_waited_for(point, words, machine, prepared, undisturbed, tmp_path, caplog):
  """It has room again a second later."""
  with small_disk(tmp_path / 'disk', 64 << 20) as disk:
    faults = Faults([next(p for p in undisturbed[1] if p.startswith(point))], lambda: fill(disk / 'filler'))
    assert finish(machine, prepared, disk / 'run', faults) == undisturbed[0]
    check_clean(machine, disk / 'run')
  assert faults.hit and words in caplog.text


def fill(file: pathlib.Path):
  """Its disk, for a second."""
  with contextlib.suppress(OSError), open(file, 'wb', buffering=0) as f:
    while True:
      f.write(bytes(1 << 12))
  threading.Timer(1, file.unlink).start()


# -- the end, and rounds, come in their time
