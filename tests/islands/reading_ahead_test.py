"""Reading of modules beside the inner steps of the piece before that which takes them over."""

import contextlib
import threading
from concurrent import futures

import excluded_path
import numpy as np
import one_process
import pytest
import tiny_run
from one_process import with_settings

from dipaco_jax.islands import island, path_exchange, pieces
from dipaco_jax.islands.pieces import Part
from dipaco_jax.islands.reading_ahead import ReadingAhead
from dipaco_jax.registry.registry import Fact

made = one_process.made
DISPATCHES = 0.9, 0.7, 0.6, 0.5, 0.3, 0.2, 0.1, 0.0  # what is left after each of a piece
PATH = 3


class Scene:
  """A path that trains a piece of phase 1, after which it takes over one module."""

  def __init__(self, made: island.Island):
    self.made = with_settings(made, outer=dict(wire='thin'))
    parts = [Part(1, nth) for nth in range(len(pieces.of_phase(self.made, 1)))]
    self.part, self.next = next(
      (part, after)
      for part in parts
      if (after := pieces.after(self.made, part)) and pieces.piece(self.made, after).mixed
    )
    [(self.module, self.version)] = pieces.needed(self.made, PATH, self.next, False).items()
    self.looks = 0

  def publish(self) -> list[str]:
    """The module's version, whole; returns its object."""
    level, _ = self.made.parse_module(self.module)
    weights = {name: np.full(self.made.shapes[name].shape, 7, 'f') for name in self.made.layout.names(level)}
    written = self.made.write_object(f'modules/{self.version}/{self.module}', weights)
    self.made.registry.put([Fact('module', self.module, self.version, *written, {})])
    return written

  def train(self, part: Part, at: float | None = None) -> list[float]:
    """Looks as a piece is trained; the module is there from `at`; returns what was left whenever it was asked for."""
    ahead, asked = ReadingAhead(self.made, PATH, part), []
    for left in DISPATCHES:
      if left == at:
        self.publish()
      before = self.made.registry.asked
      ahead.look(left)
      self.made.weights.reader.submit(lambda: None).result()
      asked += [left] * (self.made.registry.asked - before)
    return asked


@pytest.fixture
def scene(made, monkeypatch):
  facts = type(made.registry).facts

  def counted(self, *args, **options):
    self.asked += 1
    return facts(self, *args, **options)

  monkeypatch.setattr(type(made.registry), 'asked', 0, raising=False)
  monkeypatch.setattr(type(made.registry), 'facts', counted)
  return Scene(made)


def test_what_is_there_before_a_piece_ends_is_not_read_after_it(scene):
  assert scene.train(scene.part, at=0.6) == [0.7, 0.5], 'then there is nothing to look for'
  before = scene.made.storage.bytes_in
  found = path_exchange.take_over(scene.made, PATH, scene.next)
  assert found and all((x == 7).all() for x in found.values()) and scene.made.storage.bytes_in == before > 0


def test_looks_are_few(scene):
  assert scene.train(scene.part) == [0.7, 0.5, 0.2]


def test_who_begins_with_the_modules_has_nothing_to_look_for(scene):
  """They are made of what the piece before leads to."""
  scene.made = with_settings(scene.made, outer=dict(wire='lan'))
  assert scene.train(Part(0, 0)) == []
  assert scene.train(Part(scene.made.run.settings.train.phases - 1, 0)) == [], 'the run ends with it'


def test_what_cannot_be_read_is_left_to_the_task(scene, caplog):
  name, _ = scene.publish()
  tiny_run.flip_a_bit(scene.made.run.workdir / name)
  assert scene.train(scene.part) == [0.7, 0.5, 0.2] and 'were not read ahead' in caplog.text
  with pytest.raises(island.Gone, match='is corrupt'):
    path_exchange.take_over(scene.made, PATH, scene.next)


def test_a_task_that_asks_for_what_is_being_read_waits_for_it(scene, monkeypatch):
  name, _ = scene.publish()
  read, begun, go = type(scene.made.storage).read, threading.Event(), threading.Event()
  names: list[str] = []

  def slow(self, *of):
    names.append(of[0])
    begun.set()
    assert go.wait(10)
    return read(self, *of)

  monkeypatch.setattr(type(scene.made.storage), 'read', slow)
  ReadingAhead(scene.made, PATH, scene.part).look(0.5)
  assert begun.wait(10)
  with futures.ThreadPoolExecutor(1) as fetcher:
    taken = fetcher.submit(path_exchange.take_over, scene.made, PATH, scene.next)
    with contextlib.suppress(futures.TimeoutError):
      taken.result(0.5)
    go.set()
    assert taken.result(10) and names == [name]


def test_who_was_excluded_before_an_open_phase_is_asked_for_once(scene):
  of, part = scene.made, Part(1, 0)
  facts = [excluded_path.exclusion(of, 3, 0, 'w'), excluded_path.exclusion(of, 1, 0, 'w', 'executor')]
  of.registry.put(facts)
  before = of.registry.asked
  assert [pieces.excluded_before(of, paths, part) for paths in ([3, 1], [1], [3])] == [{3}, set(), {3}]
  assert of.registry.asked == before + 1
  assert pieces.excluded_before(of, [2, 3], part) == {3} and of.registry.asked == before + 2
  assert not pieces.excluded_before(of, [3], Part(1, 1))
