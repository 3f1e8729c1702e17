"""The steps that are profiled; training continues if profiling fails."""

import logging

import jax
import jax.numpy as jnp
import pytest

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.telemetry import profiling
from dipaco_jax.telemetry.profiling import Steps


@pytest.mark.parametrize('words', ['', '5', ':', '3:0', '-1:2', 'a:b', '1:2:3', '1.5:2'])
def test_what_is_no_range_of_steps_is_rejected(words):
  with pytest.raises(InputError, match='write START:STEPS'):
    profiling.parse(words)


def test_steps_are_those_of_the_run():
  s = settings.from_dict({'pretrain': {'steps': 10}, 'train': {'phases': 2, 'steps_per_phase': 5}})
  profiling.check(profiling.parse('19:1000'), s)
  profiling.check(profiling.parse(None), s)
  with pytest.raises(InputError, match='the steps of this run are 0 to 19'):
    profiling.check(profiling.parse('20:1'), s)


def train(profiler: profiling.Profiler, dispatches: list[tuple[int, int, bool]]) -> list[str]:
  """Runs dispatches of steps (first, after, whether it is the last of its turn); what was waited for."""
  said, x = [], jnp.ones(8)
  for first, after, is_last in dispatches:
    profiler.begin(first, after, lambda first=first: said.append(f'before {first}'))
    x = jax.block_until_ready(jnp.tanh(x))
    if profiler.end(after, is_last, lambda after=after: said.append(f'after {after}')):
      said.append('ended')
  profiler.close()
  return said


def test_it_covers_the_dispatches_of_one_turn(tmp_path, capsys):
  dispatches = [(step, step + 4, step == 16) for _ in range(2) for step in range(0, 20, 4)]
  assert train(profiling.Profiler(tmp_path, Steps(6, 4)), dispatches) == ['before 4', 'after 12', 'ended']
  text = (tmp_path / 'profile' / '4-11.txt').read_text()
  assert text.startswith('profile of steps 4 to 11, the dispatches of one turn that cover 6 to 9: ')
  assert text.splitlines()[0] in capsys.readouterr().err and 'tanh' in text


def test_it_ends_with_the_turn(tmp_path):
  dispatches = [(0, 4, False), (4, 8, True), (0, 4, False), (4, 8, True)]
  assert train(profiling.Profiler(tmp_path, Steps(5, 100)), dispatches) == ['before 4', 'after 8', 'ended']
  assert (tmp_path / 'profile' / '4-7.txt').exists()


def test_no_profile_waits_for_nothing_and_one_that_was_not_reached_is_reported(tmp_path, caplog):
  assert train(profiling.Profiler(tmp_path, None), [(0, 4, True)]) == [] and not caplog.records
  assert train(profiling.Profiler(tmp_path, Steps(4, 2)), [(0, 4, True)]) == []
  assert '--profile=4:2: the run has not made these steps' in caplog.text and not (tmp_path / 'profile').exists()


def test_what_cannot_be_traced_is_a_warning(tmp_path, caplog):
  caplog.set_level(logging.WARNING)
  (tmp_path / 'profile').write_text('a file in its place')
  assert train(profiling.Profiler(tmp_path, Steps(0, 4)), [(0, 4, True)])[0] == 'before 0'
  assert 'training continues without' in caplog.text
