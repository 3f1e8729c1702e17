"""A worker: states of a path within a phase, checkpoints after it, and measurements."""

import types

import jax.numpy as jnp
import numpy as np
import one_process
import pytest
from one_process import with_settings
from stopped_clock import Clock

from dipaco_jax.islands import island, messages, path_messages, path_state, phase_metrics, schedule, state_facts, worker
from dipaco_jax.islands.held_states import HeldStates
from dipaco_jax.islands.path_state import INNER, PathState
from dipaco_jax.islands.phase_metrics import PhaseMetrics
from dipaco_jax.islands.pieces import Part
from dipaco_jax.registry.registry import Task
from dipaco_jax.training import job as job_lib

made = one_process.made
MODEL = types.SimpleNamespace(config=types.SimpleNamespace(seq_len=10))
JOB = types.SimpleNamespace(
  name='train',
  schedule=job_lib.Schedule(phases=4, steps_per_phase=8, steps_per_dispatch=2, first_step=92),
  data=types.SimpleNamespace(batch_size=3),
  programs=types.SimpleNamespace(model=MODEL),
)


def state(made, x: float = 1.0) -> PathState:
  params = {name: np.full(shape.shape, x, np.float32) for name, shape in made.shapes.items()}
  return PathState(params, {f"['{INNER}'].count": np.array(4)})


def sent(made, of: PathState, phase: int) -> dict:
  """What a path sends of all levels after a phase."""
  levels = made.layout.levels
  new = {level: {name: of.params[name] for name in made.layout.names(level)} for level in levels}
  return {level.name: messages.send('none', params, params, {}) for level, params in new.items()}


def write(made, of: PathState, phase: int) -> dict:
  return path_messages.write_objects(made, 3, Part(phase, 0), sent(made, of, phase))


def test_a_checkpoint_has_an_object_for_each_level(made):
  objects = write(made, state(made), 2)
  assert objects.keys() == {'ends', 'low', 'high'}
  for level in made.layout.levels:
    assert made.read_object(*objects[level.name]).keys() == set(made.layout.names(level))
  assert all(name.startswith('objects/paths/2/3-') for name, _ in objects.values())


def test_only_parameters_of_shared_levels_leave_the_machine(made):
  of = with_settings(made, levels=one_process.OWN_LEVELS)
  assert of.own_levels == {'own'}
  before, params = {*of.storage.names(island.OBJECTS)}, state(of).params
  objects = write(of, state(of), 2)
  assert objects.keys() == {'ends', 'low'}
  assert {*of.storage.names(island.OBJECTS)} - before == {name for name, _ in objects.values()}
  for level in (level for level in of.layout.levels if level.name in objects):
    np.testing.assert_equal(of.read_object(*objects[level.name]), {n: params[n] for n in of.layout.names(level)})


@pytest.mark.parametrize(
  'keep_state, every, phase, excluded, expected',
  [
    (True, 2, 1, False, 1),
    (True, 2, 2, False, 0),
    (True, 1, 2, False, 1),
    (False, 1, 2, False, 0),
    (True, 2, 1, True, 0),
  ],
)
def test_a_state_is_put_aside_for_publication_after_every_kth_phase(
  keep_state, every, phase, excluded, expected, made, monkeypatch
):  # fmt: skip
  monkeypatch.setattr(path_state, 'check_carried', lambda *_: None)  # it is not shaped as a model's
  sections = dict(train=dict(phases=9), checkpoint=dict(state_every_phases=every))
  of, does = with_settings(made, inner=dict(keep_state=keep_state), **sections), worker.Worker(HeldStates())
  fact, kept = schedule.checkpoint_fact(3, phase, {}, {}), state(made)._replace(excluded=excluded)
  does.hold(of, fact, kept)
  assert len(does.held.aside()) == expected
  state_facts.publish_aside(of, does.held, does.line)
  assert len(does.held.aside()) == expected and not of.registry.facts('state'), 'its checkpoint is no fact yet'
  of.registry.put([fact])
  state_facts.publish_aside(of, does.held, does.line)
  assert not does.held.aside() and len(of.registry.facts('state')) == expected
  if expected:
    np.testing.assert_equal(state_facts.read(of, fact), kept.carried())


def test_a_replay_that_differs_is_held_and_told_with_both_machines(made, caplog):
  old = schedule.checkpoint_fact(3, 2, write(made, state(made), 2), {'worker': 'worker-7'})
  made.registry.put([old])
  does, replayed = worker.Worker(HeldStates()), state(made)
  assert not does.hold_replayed(made, 3, Part(2, 0), sent(made, replayed, 2), [], replayed)[0] and not caplog.messages
  replayed.params['final_norm/scale'][3] += 1
  assert does.hold_replayed(made, 3, Part(2, 0), sent(made, replayed, 2), [], replayed)[0]
  assert 'phase 3, trained again: all computed other values of ends of path 3 than worker-7' in caplog.text
  assert does.held.get(3, 2, old.sha256) == replayed.inner


@pytest.fixture
def clock(monkeypatch) -> Clock:
  found = Clock()
  monkeypatch.setattr(phase_metrics, 'time', found)
  return found


@pytest.fixture
def metrics(clock) -> PhaseMetrics:
  lease = types.SimpleNamespace(about={'task': 'train 7 1'}, task=Task(0, 'train', '7', 1, 1, 'w', 0))
  return PhaseMetrics(lease, JOB, 1)


def dispatched(loss: list[float], skipped=0) -> dict:
  """Metrics of two steps."""
  found = {'loss': loss, 'grad_norm': [1.0, 3.0], 'learning_rate': [0.1, 0.2], 'skipped': [0, skipped]}
  return {name: jnp.asarray(x, jnp.float32) for name, x in found.items()}


def test_rows_come_one_dispatch_late(metrics):
  metrics.dispatched(2, dispatched([4.0, 2.0]))
  assert not metrics.rows and 'step' not in metrics.lease.about
  metrics.dispatched(4, dispatched([1.0, 1.0]))
  assert metrics.rows == [[2, 3.0, 2.0, pytest.approx(0.2), 2, 0]]
  assert metrics.lease.about == {'task': 'train 7 1', 'step': 2, 'of': 8, 'loss': 3.0}
  assert [row[0] for row in metrics.close()['rows']] == [2, 4]


def test_the_rate_leaves_out_the_first_dispatch_which_may_compile(metrics, clock):
  for after in (2, 4, 6):
    clock.now += 100.0 if after == 4 else 1.0
    metrics.dispatched(after, dispatched([1.0, 1.0]))
  assert metrics.lease.about['tokens_per_s'] == 2 * 3 * 10 / 1.0
  found = metrics.close()
  assert (found['timed_steps'], found['timed_s']) == (4, 1.0)


def test_the_first_of_the_steps_that_are_not_finite_is_reported(metrics, caplog):
  for after, loss in ((2, [1.0, np.nan]), (4, [np.nan, np.nan]), (6, [1.0, 1.0]), (8, [np.inf, 1.0])):
    metrics.dispatched(after, dispatched(loss, skipped=1))
  metrics.close()
  assert [words.split(':')[0] for words in caplog.messages] == ['train, step 102', 'train, step 107']
  assert metrics.rows[1][1] is None and metrics.rows[1][4:] == [0, 1], 'JSON has no NaN'
