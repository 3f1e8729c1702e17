"""A path's state: what goes to the devices, or into an object, comes back as it was."""

import jax
import numpy as np
import pytest
import small

from dipaco_jax.islands import path_state
from dipaco_jax.islands.path_state import PathState


@pytest.fixture(scope='module')
def job():
  return small.make_job(small.make_programs(small.settings({'a': 2}, small.ONE_LEVEL)))


def drawn(job, has_inner: bool) -> PathState:
  """A path's state of random numbers."""
  rng = np.random.default_rng(0)
  draw = lambda x: rng.normal(size=x.shape).astype(x.dtype)  # noqa: E731
  return PathState(*({name: draw(x) for name, x in part.items()} for part in path_state.zeros(job, has_inner)[:2]))


@pytest.mark.parametrize('has_inner', [False, True])
def test_an_object_has_all_of_it(has_inner, job):
  state = drawn(job, has_inner)
  arrays = state.to_arrays()
  assert len(arrays) == len(state.params) + len(state.inner) and bool(state.inner) == has_inner
  assert any(name.startswith("['params']['") for name in arrays), 'the names of objects that runs have written'
  found = path_state.from_arrays(dict(reversed(arrays.items())), state.params)
  jax.tree.map(np.testing.assert_array_equal, found, state)


def test_the_devices_give_back_what_they_were_given(job):
  state = drawn(job, has_inner=True)
  found = path_state.to_host(job.programs, *path_state.to_devices(job, 0, state, fresh=False))
  assert found.params.keys() == state.params.keys() and found.inner.keys() == state.inner.keys()
  jax.tree.map(np.testing.assert_array_equal, found, state)


def test_a_path_without_inner_state_gets_the_base_models_or_a_fresh_one(job):
  state = drawn(job, has_inner=True)
  _, in_flight = path_state.to_devices(job, 0, state, fresh=False)
  base_state = jax.tree.map(lambda x: x[(0,) * job.programs.specs.num_axes], jax.device_get(in_flight))
  with_base, lacking = small.make_job(job.programs, base_state=base_state), PathState(state.params, {})
  found = path_state.to_host(job.programs, *path_state.to_devices(with_base, 0, lacking, fresh=False))
  jax.tree.map(np.testing.assert_array_equal, found.inner, state.inner)
  fresh = path_state.to_host(job.programs, *path_state.to_devices(with_base, 0, lacking, fresh=True))
  assert fresh.inner.keys() == state.inner.keys() and not any(x.any() for x in fresh.inner.values())
