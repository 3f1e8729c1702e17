"""What `status` says of the lines of a run's workers."""

import one_process
import pytest

from dipaco_jax.islands import lineage, wire_status
from dipaco_jax.planning import wire_needs
from dipaco_jax.registry import registry
from dipaco_jax.registry.registry import Fact

made = one_process.made


def trained(made, phase: int, step_s: float, path: int = 0):
  made.registry.put([Fact('checkpoint', str(path), phase, '', '', {'timed_s': 10 * step_s, 'timed_steps': 10})])


def test_the_line_is_that_of_the_measured_steps_and_the_workers_that_are_there(made):
  assert wire_status.lines(made) == []
  trained(made, 0, 0.5)
  assert wire_status.lines(made) == []  # nobody works
  about = {'bytes_in': 10**6, 'reading_s': 2.0, 'bytes_out': 0, 'writing_s': 0.0}
  made.registry.beat('one', 'worker', about)
  made.registry.beat('two', 'worker', {})  # a backup, at a copy of a task
  made.registry.beat('outer', 'outer', about | {'bytes_in': 10**9})
  [line] = wire_status.lines(made)
  needed = wire_needs.line_bytes_per_s(wire_needs.make_traffic(made.run.settings), 0.5, 2) * 8 / 1e6
  assert f'inner steps: about {needed:.3g} Mbit/s each way (2 paths each, 0.5 s a step' in line
  assert line.endswith('so far theirs did 4 Mbit/s reading')


def test_steps_are_those_of_the_newest_phases(made):
  of = one_process.with_settings(made, train=dict(phases=9))
  for phase, step_s in enumerate((9.0, 9.0, 9.0, 1.0, 2.0)):
    trained(of, phase, step_s)
  assert wire_status.measured_step_s(of, 4) == pytest.approx(1.5)


def test_what_a_phase_takes_has_all_its_pieces(made, monkeypatch):
  streams = one_process.with_settings(made, outer=dict(stream='on'))
  most = streams.timetable.most_pieces
  assert most > 2 and lineage.phase_s(streams) == 0
  seconds = {'train': [4.0, 5.0, 90.0], 'piece': [1.0, 2.0]}
  monkeypatch.setattr(registry.Registry, 'durations', lambda self, kind, limit: seconds[kind])
  assert lineage.phase_s(streams) == 5 + 1.5 * (most - 1) and lineage.phase_s(made) == 5
