"""States that are published beside other work: what becomes of one that comes too late [3]."""

import numpy as np
import one_process
import pytest

from dipaco_jax.islands import state_facts
from dipaco_jax.islands.held_states import HeldStates, Key
from dipaco_jax.islands.state_facts import STATE, Line
from dipaco_jax.registry.registry import Fact

made = one_process.made
STATES = 'objects/states'


@pytest.fixture
def checkpoint(made) -> Fact:
  fact = Fact('checkpoint', '3', 2, '', 'c' * 64, {'objects': {}})
  made.registry.put([fact])
  return fact


def test_nothing_is_left_that_is_written_after_the_end_of_the_run(made, checkpoint, monkeypatch):
  """Whoever finishes the run has tidied up by then."""
  monkeypatch.setattr(state_facts, 'SMALLEST_PART', 4)

  def finish():
    if written := made.storage.names(STATES):
      assert len(written) == 1
      made.registry.put([Fact('finished', '', 0, '', '', {})])
      made.storage.delete(written[0])  # as the monitor does

  state_facts.publish(made, checkpoint, {name: np.ones(1, 'f') for name in 'abc'}, finish)
  assert not made.storage.names(STATES) and not made.registry.facts(STATE)


def test_of_a_path_the_newest_state_alone_waits_for_the_line(made, checkpoint, tmp_path):
  """Or a line too slow for all of them would let them grow without end."""
  held = HeldStates(tmp_path / 'held')
  for phase, path in ((2, 3), (5, 3), (2, 1)):
    held.set_aside(Key(path, phase, 'c' * 64), {'x': np.full(1, phase, 'f')})
  assert [(key.path, key.phase) for key in held.aside()] == [(1, 2), (3, 5)]
  assert [(key.path, key.phase) for key in HeldStates(tmp_path / 'held').aside()] == [(1, 2), (3, 5)]


def test_a_state_that_another_overtakes_on_its_way_is_published(made, checkpoint, tmp_path, monkeypatch):
  held, line = HeldStates(tmp_path / 'held'), Line()
  held.set_aside(Key(3, 2, checkpoint.sha256), {'x': np.ones(1, 'f')})
  monkeypatch.setattr(line, 'wait_behind', lambda: held.set_aside(Key(3, 5, 'd' * 64), {'x': np.ones(1, 'f')}))
  state_facts.publish_aside(made, held, line)
  assert [fact.number for fact in made.registry.facts(STATE)] == [2]
  assert [key.phase for key in held.aside()] == [5]


@pytest.mark.parametrize(('num_bytes', 'count', 'size'), [(8, 1, 2**18), (2**22, 17, 2**18), (2**25, 64, 2**19)])
def test_parts_of_a_state_are_small_beside_messages(num_bytes, count, size):
  state = {'x': np.arange(num_bytes, dtype=np.uint8)}
  parts = [part[state_facts.BYTES] for part in state_facts.in_parts(state)]
  assert len(parts) == count and all(part.nbytes <= size + 2 for part in parts)
  np.testing.assert_array_equal(state_facts.whole([{state_facts.BYTES: part} for part in parts])['x'], state['x'])
