"""What a worker holds on its machine: slots, and states of paths in memory and on disk."""

import os
import pathlib

import numpy as np
import pytest
import tiny_run

from dipaco_jax.islands import held_states
from dipaco_jax.islands.held_states import HeldStates, Key

D = 'd' * 64


def state(x: float) -> dict[str, np.ndarray]:
  return {"['inner'].mu": np.full(100, x, np.float32), "['inner'].count": np.array(4)}


def is_state(found, x: float) -> bool:
  return found is not None and found.keys() == state(x).keys() and bool((found["['inner'].mu"] == x).all())


@pytest.fixture
def held(tmp_path):
  with held_states.slot(tmp_path) as found:
    yield found


def again(held: HeldStates) -> HeldStates:
  """As the next process finds it."""
  return HeldStates(held.folder, held.holder)


# -- slots


def test_a_process_takes_the_first_free_slot_and_its_id_stays(tmp_path):
  with held_states.slot(tmp_path) as first:
    with held_states.slot(tmp_path) as second:
      assert (first.folder, second.folder) == (tmp_path / 'held' / '0', tmp_path / 'held' / '1')
      assert first.holder != second.holder and second.memory_bytes < first.memory_bytes
    with held_states.slot(tmp_path) as third:
      assert third.holder == second.holder
  with held_states.slot(tmp_path) as fourth:
    assert fourth.holder == first.holder


@pytest.mark.parametrize('damage', [tiny_run.flip_a_bit, lambda f: os.truncate(f, 3), pathlib.Path.unlink])
def test_a_slot_whose_id_is_lost_is_another_holder(damage, tmp_path):
  with held_states.slot(tmp_path) as before:
    pass
  damage(before.folder / 'holder')
  with held_states.slot(tmp_path) as found:
    assert len(found.holder) == 16 and found.holder != before.holder


def test_slots_that_nobody_holds_are_removed_at_the_end(tmp_path):
  with held_states.slot(tmp_path) as first:
    with held_states.slot(tmp_path):
      pass
    held_states.remove_free(tmp_path)
    assert [folder.name for folder in (tmp_path / 'held').iterdir()] == ['0']
    first.put(Key(0, 0, D), state(1))
  held_states.remove_free(tmp_path)
  assert not (tmp_path / 'held').exists()


# -- states


def test_a_state_is_found_in_memory_and_by_the_next_process(held):
  held.put(Key(3, 7, D), state(1))
  for one in (held, again(held)):
    assert is_state(one.get(3, 7, D), 1)
    assert one.get(3, 6, D) is one.get(2, 7, D) is one.get(3, 7, 'e' * 64) is None


def test_the_state_before_stays_until_the_newer_one_is_asked_for(held):
  """A process may be killed before the fact that names the newer one is there."""
  held.put(Key(3, 6, D), state(1))
  held.put_within(Key(3, 7, D, 4), state(1.5))
  held.put(Key(3, 7, D), state(2))
  held.put(Key(4, 6, D), state(3))
  assert is_state(again(held).get(3, 6, D), 1) and again(held).get_within(3, 7, D)
  assert is_state(held.get(3, 7, D), 2)
  for one in (held, again(held)):
    assert one.get(3, 6, D) is None and not one.has_within(3, 7) and is_state(one.get(4, 6, D), 3)


def test_a_state_that_is_made_again_displaces_no_newer_one(held):
  held.put(Key(3, 9, D), state(9))
  held.put(Key(3, 4, D), state(4))
  assert is_state(held.get(3, 4, D), 4) and is_state(held.get(3, 9, D), 9)


@pytest.mark.parametrize('damage', [tiny_run.flip_a_bit, lambda f: os.truncate(f, 200), lambda f: os.truncate(f, 0)])
def test_a_damaged_file_counts_as_absent(damage, held):
  held.put(Key(3, 7, D), state(1))
  held.put_within(Key(3, 8, D, 4), state(2))
  for file in held.folder.glob('*.state'):
    damage(file)
  found = again(held)
  assert found.get(3, 7, D) is None and found.get_within(3, 8, D) is None and found.has_within(3, 8)


def test_what_a_killed_process_left_half_written_goes(tmp_path):
  with held_states.slot(tmp_path) as held:
    (held.folder / '.3-7-dddd.state.17').write_bytes(b'half')
  with held_states.slot(tmp_path) as held:
    assert not [file for file in held.folder.iterdir() if file.name[0] == '.']


def test_within_a_phase_the_last_step_counts_and_what_it_began_from(held):
  held.put_within(Key(3, 7, D, 4), state(1))
  held.put_within(Key(3, 7, D, 12), state(2))
  assert len(held.names()) == 1, 'the earlier one is gone'
  step, found = again(held).get_within(3, 7, D)
  assert step == 12 and is_state(found, 2)
  assert held.get_within(3, 7, 'e' * 64) is None and held.get_within(3, 8, D) is None


def test_memory_is_bounded_and_the_rest_is_on_disk(held):
  held.memory_bytes = 2 * sum(x.nbytes for x in state(0).values())
  for path in range(4):
    held.put(Key(path, 0, D), state(path))
  assert [key.path for key in held.memory] == [2, 3]
  assert all(is_state(held.get(path, 0, D), path) for path in range(4))


def test_a_disk_that_fails_stops_nobody(held, monkeypatch, caplog):
  def fail(*args):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(held_states.files, 'write_file', fail)
  held.put(Key(3, 7, D), state(1))
  held.put_within(Key(3, 8, D, 4), state(1))
  assert is_state(held.get(3, 7, D), 1) and 'path 3: its state is not on disk' in caplog.text
  assert again(held).get(3, 7, D) is None
