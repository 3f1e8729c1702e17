"""What a worker reads and writes: a path's state within a phase, and its checkpoint after it."""

import numpy as np
import one_process
import pytest
import tiny_run
from one_process import with_settings

from dipaco_jax.islands import worker
from dipaco_jax.islands.path_state import INNER, PathState
from dipaco_jax.islands.registry import Task

made = one_process.made
TASK = Task(0, 'train', '3', 1, 1, 'all', 0, None)


class Lease:
  """Keeps what is kept."""

  progress = None

  def keep(self, progress):
    self.progress = progress


def state(made, x: float = 1.0) -> PathState:
  params = {name: np.full(shape.shape, x, np.float32) for name, shape in made.shapes.items()}
  return PathState(params, {f"['{INNER}'].count": np.array(4)})


def test_the_next_owner_goes_on_from_what_was_kept(made):
  lease, kept = Lease(), state(made)
  worker.keep(made, lease, TASK, 4, kept)
  step, found = worker.resume(made, lease.progress, kept.params)
  assert step == 4 and found.inner.keys() == kept.inner.keys()
  assert all((found.params[name] == x).all() for name, x in kept.params.items())


def test_nothing_is_kept_that_nobody_could_go_on_from(made):
  lease, kept = Lease(), state(made)
  kept.params['final_norm/scale'][3] = np.nan
  worker.keep(made, lease, TASK, 4, kept)
  assert lease.progress is None and worker.resume(made, None, kept.params) is None


@pytest.mark.parametrize('damage', [tiny_run.flip_a_bit, lambda file: file.unlink()])
def test_without_what_was_kept_the_phase_is_trained_from_its_start(damage, made, caplog):
  lease, kept = Lease(), state(made)
  worker.keep(made, lease, TASK, 4, kept)
  damage(made.run.workdir / lease.progress['name'])
  assert worker.resume(made, lease.progress, kept.params) is None
  assert 'the phase is trained from its start' in caplog.text


@pytest.mark.parametrize('keep_state', [True, False])
def test_a_checkpoint_has_an_object_for_each_level_and_the_inner_state(keep_state, made):
  of = with_settings(made, inner=dict(keep_state=keep_state))
  objects = worker.write_objects(of, 3, 1, state(made))
  assert objects.keys() == {'ends', 'low', 'high'} | ({INNER} if keep_state else set())
  for level in made.layout.levels:
    assert made.read_object(*objects[level.name]).keys() == set(made.layout.names(level))
  assert all(name.startswith('objects/paths/1/3-') for name, _ in objects.values())


def test_the_phase_before_is_the_last_in_which_the_path_was_trained(made):
  of = with_settings(made, train=dict(phases=6, schedule=((0, (0, 1)), (2, (1,)), (5, (0,)))))
  assert [worker.trained_before(of, 0, phase) for phase in range(6)] == [None, 0, 1, 1, 1, 1]
  assert worker.trained_before(of, 2, 5) is None
