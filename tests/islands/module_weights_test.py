"""What is read of modules' versions: by a worker that is started again on its machine, and by an outer executor."""

import collections
import dataclasses
import shutil
import types

import numpy as np
import one_process
import pytest
import slow
from one_process import Machine

from dipaco_jax.config import settings
from dipaco_jax.islands import island, kept_arrays, messages, outer_executor, outer_weights, pieces, schedule
from dipaco_jax.islands.module_weights import ModuleWeights
from dipaco_jax.registry.registry import Fact, NewTask

PATHS, TRAINED = 8, (0, 5)
LEVELS = ('low', 'embed|final_norm|block_0', ('a',)), ('high', 'block_1', ('b',))


class Scene:
  """A place, with 8 paths through 6 modules, whose paths send noise."""

  def __init__(self, folder, wire: str):
    s = one_process.two_phases(folder).to_dict()
    s |= {'grid': {'a': 4, 'b': 2}, 'levels': LEVELS}
    s['outer'] |= {'wire': wire, 'whole_every': 2}
    s['train']['phases'] = 6
    self.folder, self.machine = folder, Machine(settings.from_dict(s), {})
    self.there, self.rng = self.machine.island(folder / 'there'), np.random.default_rng(0)
    for key in self.there.all_modules():
      names = self.there.layout.names(self.there.parse_module(key)[0])
      first = {name: self.rng.standard_normal(self.there.shapes[name].shape, np.float32) for name in names}
      self.there.registry.put([Fact('module', key, 0, *self.there.write_object(f'modules/0/{key}', first), {})])

  def process(self, name: str) -> island.Island:
    """A process that has just begun, on the machine of this name."""
    begun = self.machine.island(self.folder / 'there', self.folder / name)
    begun.storage.bytes_in = 0  # but for the run's id
    return dataclasses.replace(begun, weights=ModuleWeights(kept_arrays.begin(begun.storage, begun.run.workdir, 'r')))

  def facts(self, version: int) -> list[Fact]:
    return self.there.registry.facts('module', number=version)

  def send(self, path: int, version: int) -> int:
    """Sends a path's contributions to a version; returns their bytes."""
    of, before = self.there, self.there.storage.bytes_out
    objects = collections.defaultdict[tuple[str, int], dict](dict)
    for level, key in of.modules_of(path).items():
      old = of.read_weights(of.registry.facts('module', [key], version - 1)[0])
      new = {name: x + 1e-3 * self.rng.standard_normal(x.shape, np.float32) for name, x in old.items()}
      found = messages.send(of.kind(of.parse_module(key)[0]), old, new, {})
      name = pieces.fact_name(of, pieces.sender(of, level, version))
      objects[name][level] = of.write_object(f'paths/{version - 1}/{path}-{level}', found.arrays)
    for (kind, number), sent in objects.items():
      of.registry.put([schedule.checkpoint_fact(path, number, sent, {'worker': 'w'}, kind)])
    return of.storage.bytes_out - before


def parameters(of: island.Island, version: int) -> list[dict[str, np.ndarray]]:
  """What a worker of two paths reads: their modules."""
  return [of.path_parameters(path, version) for path in TRAINED]


def same(found, expected) -> bool:
  return all(np.array_equal(x[name], y[name]) for x, y in zip(found, expected, strict=True) for name in x | y)


def wait_for_disk(of: island.Island):
  """Until what this process keeps is on its disk; then it may be killed."""
  of.weights.kept.writer.submit(lambda: None).result()


def perform(executor: outer_executor.Executor, of: island.Island, modules, version: int):
  """What an executor does when paths have sent to these modules."""
  of.registry.add_tasks(NewTask('outer', module, version, 'waiting') for module in modules)
  of.registry.wake('outer', modules, version)
  while task := of.registry.claim(of.name, ['outer']):
    publish = executor.perform(of, task, types.SimpleNamespace(about={}, check=lambda: None))
    if publish:
      of.registry.complete(task, publish())


@pytest.fixture
def scene(request, tmp_path, monkeypatch):
  monkeypatch.setattr(outer_weights, 'path_weights', lambda island, phase: np.ones(PATHS, np.float32))
  with one_process.one_device():
    found = Scene(tmp_path, request.param)
    yield found
    one_process.close(found.there)


# -- a worker


@pytest.mark.slow
@pytest.mark.parametrize('scene', slow.but(['lan', 'thin'], 'lan'), indirect=True)
def test_a_worker_that_is_killed_and_started_again_reads_only_what_is_new(scene):
  executor, of = outer_executor.Executor(scene.folder / 'sums'), scene.there
  modules = {module for path in TRAINED for module in of.modules_of(path).values()}
  for version in (1, 2, 3):
    for path in range(PATHS):
      scene.send(path, version)
    perform(executor, of, of.all_modules(), version)
    again, elsewhere = scene.process('machine'), scene.process(f'another machine {version}')
    if version > 1:
      assert same(parameters(again, version - 1), parameters(elsewhere, version - 1)) and again.storage.bytes_in == 0
      new = [fact.uri for fact in scene.facts(version) if fact.key in modules]
      assert same(parameters(again, version), parameters(elsewhere, version))
      assert again.storage.bytes_in == sum(len(of.storage.fetch(name)) for name in new)
    parameters(again, version)
    wait_for_disk(again)


@pytest.mark.parametrize('scene', ['thin'], indirect=True)
def test_processes_of_a_machine_share_what_one_has_read(scene):
  first, second = scene.process('machine'), scene.process('machine')
  parameters(first, 0)
  wait_for_disk(first)
  assert same(parameters(second, 0), parameters(first, 0)) and second.storage.bytes_in == 0
  shutil.rmtree(second.weights.kept.folder)
  assert same(parameters(scene.process('machine'), 0), parameters(first, 0)), 'a disk that is lost'


# -- an executor


@pytest.mark.slow
@pytest.mark.parametrize('memory_bytes', slow.but([kept_arrays.MEMORY_BYTES, 0], kept_arrays.MEMORY_BYTES))
@pytest.mark.parametrize('scene', ['thin'], indirect=True)
def test_an_executor_reads_contributions_alone_and_each_once(memory_bytes, scene):
  """Paths send one after another; what memory does not hold is on disk, also for an executor that is started again."""
  for version, life in ((1, 0), (2, 0), (3, 1)):
    if version != 2:
      of, executor = scene.process('machine'), outer_executor.Executor(scene.folder / f'sums {life}')
      of.weights.kept.versions, of.weights.kept.memory_bytes = 1, memory_bytes
    sent, before = 0, of.storage.bytes_in
    for path in scene.rng.permutation(PATHS).tolist():
      sent += scene.send(path, version)
      perform(executor, of, sorted(of.modules_of(path).values()), version)
    wait_for_disk(of)
    assert (of.storage.bytes_in - before == sent) == (version > 1), 'first, the base'
    assert len(of.weights.kept.memory) == (2 * 6 if memory_bytes else 1), 'one version of each'
