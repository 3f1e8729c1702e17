"""Islands end with the same bits: by however many workers, killed wherever; and as `main` does [3], invariant 8."""

import dataclasses
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading
import types

import jax
import numpy as np
import pytest
import small
import tiny_run
from one_process import Faults, Machine, close, outcome

from dipaco_jax import checkpoint, islands, leases, metrics, monitor, outer_executor, registry, stages, storage
from dipaco_jax import settings as settings_lib
from dipaco_jax.registry import Fact, NewTask

pytestmark = [
  pytest.mark.usefixtures('one_device'),
  pytest.mark.filterwarnings('ignore:Explicitly requested dtype:UserWarning'),
  pytest.mark.filterwarnings('ignore::ResourceWarning'),  # what is killed closes no files
]
PREPARED, TRAINED = 'after claim train 0 0', 'after claim finish  0'
ROUNDS = {
  'routing': dict(method='discriminative', router_fraction=0.2, rounds=1, phases_per_round=1),
  'train': dict(phases=2),
}
OWN_LEVELS = (('ends', 'embed|final', ()), ('low', 'block_0', ('a',)), ('own', 'block_1', ('a', 'b')))
SAMPLED = {'train': dict(phases=4, paths_per_phase=2)}


@pytest.fixture(scope='module')
def one_device():
  """Of the fake ones, and no waiting where nothing else is to be done."""
  with pytest.MonkeyPatch.context() as patch:
    devices = jax.devices()[:1]
    patch.setattr(jax, 'devices', lambda: devices)
    patch.setattr(jax, 'device_count', lambda: 1)
    for name, seconds in (('SHORTEST_WAIT_S', 0.02), ('LONGEST_WAIT_S', 0.1), ('LOOK_AROUND_S', 0.1)):
      patch.setattr(leases, name, seconds)
    patch.setattr(monitor, 'PAUSE_S', 0.05)
    yield


@pytest.fixture(scope='module')
def config(tmp_path_factory) -> settings_lib.Settings:
  """Of two phases."""
  found: dict = {}
  exec(tiny_run.write_config(tmp_path_factory.mktemp('config')).read_text(), found)
  values = found['get_config']()
  values.train.phases, values.inner.decay_steps = 2, 36
  return settings_lib.from_dict(values.to_dict())


def changed(s: settings_lib.Settings, levels=None, **sections) -> settings_lib.Settings:
  values = {name: dataclasses.replace(getattr(s, name), **fields) for name, fields in sections.items()}
  return dataclasses.replace(s, **values, levels=levels or s.levels)


@pytest.fixture(scope='module')
def machine(config) -> Machine:
  return Machine(config, {})


@pytest.fixture(scope='module')
def prepared(machine, tmp_path_factory) -> pathlib.Path:
  """A place to copy, where training is about to begin."""
  place = tmp_path_factory.mktemp('prepared')
  machine.to_the_end(place, Faults(), end=PREPARED)
  return place


@pytest.fixture(scope='module')
def undisturbed(machine, prepared, tmp_path_factory) -> tuple[pathlib.Path, list[str]]:
  """A finished run, and the points that it passed."""
  place, faults = tmp_path_factory.mktemp('undisturbed') / 'run', Faults()
  shutil.copytree(prepared, place)
  machine.to_the_end(place, faults)
  return place, faults.passed


def of(machine: Machine, s: settings_lib.Settings) -> Machine:
  """Another config's; programs are shared where they are the same."""
  return Machine(s, machine.programs if s.levels == machine.settings.levels else {})


def begin(prepared: pathlib.Path, place: pathlib.Path, machine: Machine, s: settings_lib.Settings) -> Machine:
  """A run of another config of training, whose text, base and shards are there already."""
  place.mkdir()
  for name in ('sequences', 'base', 'features', 'routing', 'shards', 'stages', islands.TOKENIZER):
    (shutil.copytree if (prepared / name).is_dir() else shutil.copy)(prepared / name, place / name)
  return of(machine, s)


# -- as `main` does

CONFIGS = {
  'plain': (None, {}),
  'sampled': (None, SAMPLED),
  'own modules': (OWN_LEVELS, {}),
  'a round of re-sharding': (None, ROUNDS),
}


@pytest.mark.parametrize('name', CONFIGS)
def test_agrees_with_main(name, machine, config, prepared, tmp_path):
  levels, sections = CONFIGS[name]
  s = changed(config, levels, **sections)
  if 'routing' in sections:  # its text is cut otherwise
    (tmp_path / 'islands').mkdir()
    alone = of(machine, s)
  else:
    alone = begin(prepared, tmp_path / 'islands', machine, s)
  alone.to_the_end(tmp_path / 'islands', Faults(), end=TRAINED)
  run = of_main(alone, tmp_path)
  facts = registry.Registry(f'sqlite:///{tmp_path}/islands/registry.db')
  check_losses(facts, run)
  # As for placements: a rounding of a parameter and of its direction, a sum over targets, for each step. Sums of outer
  # gradients differ by less: one rounding for each path.
  steps, targets = s.train.phases * s.train.steps_per_phase, s.train.batch_size * s.model.seq_len
  tolerance = 1.33 * 8**0.5 * steps * small.EPS * (2 + s.inner.learning_rate * targets)
  for fact in facts.facts('module', number=s.train.phases):
    level, _, at = fact.key.partition('/')
    file = run.workdir / 'modules' / str(s.train.phases) / level / f'{at}.safetensors'
    expected = islands.safetensors.numpy.load_file(file)
    found, _ = islands.split(islands.safetensors.numpy.load_file(tmp_path / 'islands' / fact.uri))
    small.assert_close(found, expected, tolerance)
  facts.close()


def of_main(machine: Machine, folder: pathlib.Path):
  """The same config as one program, from the same text."""
  place, made = folder / 'main', machine.islands(folder / 'islands')
  close(made)
  place.mkdir()
  for name in ('sequences', 'base', 'features', 'stages', islands.TOKENIZER, 'routing/0', 'shards/0'):
    source = made.run.workdir / name
    (shutil.copytree if source.is_dir() else shutil.copy)(source, place / name)
  run = dataclasses.replace(made.run, workdir=place, metrics=metrics.Metrics(place))
  run.__dict__.update(machine.programs)
  stages.run_all(run, 'train')
  run.metrics.close()
  return run


def check_losses(facts: registry.Registry, run):
  """Of the first phase, which begins from the base: equal to the bit. And all that are there."""
  expected = {
    (path, row['phase'], row['step']): loss
    for row in metrics.read_rows(run.workdir) if row['kind'] == 'step' and row['stage'] == 'train'
    for path, loss in zip(row['paths'], row['loss'], strict=True)
  }  # fmt: skip
  s = run.settings
  found = {
    (int(fact.key), fact.number, s.pretrain.steps + fact.number * s.train.steps_per_phase + after): loss
    for fact in facts.facts('checkpoint') for after, loss, *_ in fact.meta['rows']
  }  # fmt: skip
  assert found.keys() == expected.keys()
  for at, loss in found.items():
    assert loss == expected[at] if at[1] == 0 else abs(loss - expected[at]) < 1e-4, at


ALONE = """
import pathlib, sys, one_process
from dipaco_jax import settings
found = {}
exec(pathlib.Path(sys.argv[1]).read_text(), found)
place = pathlib.Path(sys.argv[2])
one_process.Machine(settings.from_dict(found['get_config']().to_dict()), {}).to_the_end(place, one_process.Faults())
"""


def test_three_workers_as_one_process(tmp_path):
  """Processes of one fake device each, unlike this one: eight share a pool of threads, and round otherwise."""
  file = tiny_run.write_config(tmp_path)
  file.write_text(file.read_text().replace('phases=4', 'phases=2'))
  tests = pathlib.Path(__file__).parent
  flags = '--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0'
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags, 'PYTHONPATH': f'{tests}:{tests.parent}'}
  alone, three = tmp_path / 'alone', tmp_path / 'three'
  local = str(tests.parent / 'launch' / 'local.py')
  for command in (
    [sys.executable, '-c', ALONE, str(file), str(alone)],
    [sys.executable, local, f'--config={file}', f'--workdir={three}', '--workers=3'],
  ):
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=tiny_run.PATIENCE_S)
    assert done.returncode == 0, done.stderr
  expected, found = outcome(alone), outcome(three)
  assert found == expected and len(found) == 1 + 8 + 5 * 3 + 8 + 1
  assert tiny_run.modules_sha256(three) == tiny_run.modules_sha256(alone)
  reports = [json.loads((place / 'report.json').read_text()) for place in (alone, three)]
  assert reports[0]['perplexity'] == reports[1]['perplexity']
  assert f'perplexity {reports[1]["perplexity"]:.2f}' in done.stdout


# -- killed


def draw_points(undisturbed, everything: bool) -> list[list[str]]:
  """Points by run, in which each of them is hit once: some, or all of them."""
  points = sorted({point for point in undisturbed[1] if 'nothing' not in point and 'release' not in point})
  random.Random(8).shuffle(points)
  if everything:
    return [points[i::8] for i in range(8)]
  return [points[:20]]


def test_killed_at_every_point(machine, prepared, undisturbed, tmp_path, request):
  expected, chosen = outcome(undisturbed[0]), draw_points(undisturbed, request.config.getoption('--all_crash_points'))
  hit = []
  for i, points in enumerate(chosen):
    place, faults = tmp_path / str(i), Faults(points)
    shutil.copytree(prepared, place)
    machine.to_the_end(place, faults)
    assert outcome(place) == expected
    assert tiny_run.modules_sha256(place) == tiny_run.modules_sha256(undisturbed[0])
    check_clean(machine, place)
    hit += faults.hit
    shutil.rmtree(place)
  print(f'killed at {len(hit)} of {sum(map(len, chosen))} points')
  assert len(hit) > 0.8 * sum(map(len, chosen))  # heartbeats come when they come


def check_clean(machine: Machine, place: pathlib.Path):
  """Nothing is open, and after the monitor has looked nothing is left that nobody needs, nor half of anything."""
  made = machine.islands(place)
  monitor.watch(made)
  assert {state for states in made.registry.counts().values() for state in states} == {'done'}
  assert not [fact for fact in made.registry.unscheduled() if fact.kind != 'finished']  # from which nothing follows
  kept = {f.uri for f in made.registry.facts('module') if f.number in {machine.settings.train.phases, *best(place)}}
  assert set(made.storage.names(islands.OBJECTS)) == kept
  close(made)
  assert not [f for f in place.rglob('*') if storage.ASIDE.fullmatch(f.name) and islands.OBJECTS in f.parts]


def best(place: pathlib.Path) -> list[int]:
  return checkpoint.best_versions(place)


def test_each_task_on_another_machine(machine, prepared, undisturbed, tmp_path):
  shutil.copytree(prepared, tmp_path / 'run')
  points = sorted(p for p in set(undisturbed[1]) if p.startswith('after mark_scheduled 1 from') and 'finished' not in p)
  points = random.Random(9).sample(points, 12)
  faults = Faults(points)
  machine.to_the_end(tmp_path / 'run', faults, far=tmp_path / 'far')
  assert len(faults.hit) > 0.8 * len(points) and outcome(tmp_path / 'run') == outcome(undisturbed[0])


# -- what is gone, and what goes


@pytest.mark.parametrize(
  'damage, moment', [(pathlib.Path.unlink, 'after claim train 3 1'), (tiny_run.flip_a_bit, TRAINED)]
)
def test_what_is_gone_is_made_again(damage, moment, machine, prepared, undisturbed, tmp_path):
  place = tmp_path / 'run'
  shutil.copytree(prepared, place)
  machine.to_the_end(place, Faults(), end=moment)
  objects, newest = place / islands.OBJECTS, '2' if moment == TRAINED else '1'
  gone = [*(objects / 'modules' / newest / 'low').iterdir(), *(objects / 'paths' / '0').glob('[01]-*')]
  for file in gone:
    damage(file)
  machine.to_the_end(place, Faults())
  assert outcome(place) == outcome(undisturbed[0])
  assert all(file.exists() for file in gone[:2])


def test_what_made_an_object():
  assert islands.maker('objects/paths/7/12-low-0123456789abcdef.safetensors') == ('train', '12', 7)
  assert islands.maker('objects/paths/7/12-step4-0123456789abcdef.safetensors') == ('train', '12', 7)
  assert islands.maker('objects/modules/3/low/0-11-0123456789abcdef.safetensors') == ('outer', 'low/0-11', 3)
  assert islands.maker('objects/modules/3/all/shared-0123456789abcdef.safetensors') == ('outer', 'all/shared', 3)
  for name in ('objects/modules/0/low-0123456789abcdef.safetensors', 'shards/0', 'routing/0', 'base', 'stages'):
    assert islands.maker(name) == ('prepare', '', 0)
  assert islands.maker('shards/2') == islands.maker('routing/2') == ('reroute', '', 2)


def test_the_monitor_removes_nothing_that_is_needed(machine, config, prepared, tmp_path):
  rate = 7.0  # too high: an early version is the best
  s = changed(config, train=dict(phases=10, paths_per_phase=1, steps_per_phase=2), outer=dict(learning_rate=rate))
  alone = begin(prepared, tmp_path / 'run', machine, s)
  watcher = alone.islands(tmp_path / 'run')
  removed, delete = [], watcher.storage.delete
  watcher.storage.delete = lambda name: (removed.append(name), delete(name))
  thread = threading.Thread(target=monitor.watch, args=(watcher,))
  thread.start()
  faults = Faults()
  alone.to_the_end(tmp_path / 'run', faults)
  thread.join()
  close(watcher)
  phases = {int(name.split('/')[2]) for name in removed}
  assert phases == set(range(10)) and not [point for point in faults.passed if 'missing' in point]
  assert min(best(tmp_path / 'run')) < 5
  check_clean(alone, tmp_path / 'run')


# -- the end, and rounds, come in their time


def test_no_end_before_its_time(machine, prepared, tmp_path):
  """A process that was stopped inside `advance` while others made a round goes on with what it had read."""

  class Stopped(registry.Registry):
    def is_idle(self):
      self.put([Fact('round', '', 1, '', '', {})])
      return True

  shutil.copytree(prepared, tmp_path / 'run')
  s = changed(machine.settings, **ROUNDS)
  made = Machine(machine.settings, machine.programs).islands(tmp_path / 'run')
  made.registry.mark_scheduled(made.registry.unscheduled())
  stopped = Stopped(f'sqlite:///{tmp_path}/run/registry.db')
  run = dataclasses.replace(made.run, settings=s)
  islands.advance(dataclasses.replace(made, run=run, registry=stopped))
  assert 'finish' not in stopped.counts() and stopped.counts()['reroute'] == {'ready': 1}
  stopped.close()
  close(made)


@pytest.mark.parametrize('after', [0, 1])
def test_idle_is_asked_of_one_moment(after, tmp_path):
  """A task is completed before or after the first statement, and its fact scheduled before the next."""
  db = registry.Registry(f'sqlite:///{tmp_path}/registry.db')
  db.add_tasks([NewTask('train', '0', 0)])
  task, fact, asked = db.claim('a', ['train']), Fact('checkpoint', '0', 0, '', '', {}), []
  rows = db._db.rows

  def slowly(*args):
    asked.append(args)
    if len(asked) == 1 + after:
      db.complete(task, [fact])
    found = rows(*args)
    if len(asked) == 1 + after:
      db.add_tasks([NewTask('outer', 'x', 1)])
      db.mark_scheduled([fact])
    return found

  db._db.rows = slowly
  assert not db.is_idle()
  db.close()


# -- what is on one machine


def test_what_is_summed_outlives_a_contribution_that_is_gone(machine, undisturbed, tmp_path):
  place = tmp_path / 'run'
  shutil.copytree(undisturbed[0], place)
  made, executor = machine.islands(place), outer_executor.Executor(tmp_path / 'scratch')
  lease = types.SimpleNamespace(about={}, check=lambda: None)
  [file] = (place / islands.OBJECTS / 'paths' / '1').glob('3-high-*')
  data = file.read_bytes()
  file.unlink()
  task = registry.Task(0, 'outer', 'high/1', 2, 1, '', 0, None)
  with pytest.raises(islands.Gone, match='3-high'):
    executor.perform(made, task, lease)
  assert executor.partials['high/1', 2].squares.keys() == {'1'}
  file.write_bytes(data)
  [found] = executor.perform(made, task, lease)()
  [expected] = made.registry.facts('module', ['high/1'], 2)
  assert found.sha256 == expected.sha256 and not executor.partials
  close(made)


@pytest.mark.parametrize('damage', [tiny_run.flip_a_bit, lambda f: os.truncate(f, 40), lambda f: os.truncate(f, 0)])
def test_a_damaged_sum_is_summed_anew(damage, tmp_path):
  file, old = tmp_path / 'x.sum', {'w': np.ones(100, np.float32)}
  kept = outer_executor.Partial(file, old, {})
  kept.add('3', 0.5, {'w': np.zeros(100, np.float32)})
  kept.save()
  found = outer_executor.Partial(file, old, {})
  assert found.squares == {'3': 25.0} and (found.sum.mean()['w'] == 1).all()
  damage(file)
  assert outer_executor.Partial(file, old, {}).squares == {}


def test_a_workdir_that_another_process_holds_is_waited_for(machine, tmp_path):
  made = machine.islands(tmp_path)
  with checkpoint.hold(tmp_path), pytest.raises(islands.Busy, match='in use by process'), made.hold():
    pass
  with made.hold(), pytest.raises(ValueError, match='its own'):
    raise ValueError('its own')
  close(made)


def test_another_config_is_refused(machine, config, tmp_path):
  close(machine.islands(tmp_path))
  other = Machine(changed(config, train=dict(phases=3)), machine.programs)
  with pytest.raises(ValueError, match=r'config.train.phases was 2, is 3\): use another database'):
    other.islands(tmp_path)
  with pytest.raises(ValueError, match=r'config.train.phases was 2, is 3\): use another --workdir'):
    other.islands(tmp_path, url=f'sqlite:///{tmp_path}/new.db')
