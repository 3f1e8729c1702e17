"""A replay of a streaming run whose worker excluded a path after a module had its contribution."""

import island_fixtures
import one_process
import pytest
from one_process import Faults, changed

from dipaco_jax.islands import decisions, screening_facts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('one_device')]
one_device, machine, prepared = island_fixtures.one_device, island_fixtures.machine, island_fixtures.prepared


def test_a_path_that_was_excluded_within_a_phase_is_excluded_there_again(machine, prepared, tmp_path, monkeypatch):
  judge, judged = screening_facts.judge, []

  def judge_second(island, path, phase, squares, *args):
    judgement = judge(island, path, phase, squares, *args)
    is_one = not island.decisions and (path, phase) == (1, 0) and squares
    judged.extend([{*squares}] if is_one else [])
    return judgement | ({'excluded': 'not plausible'} if is_one and len(judged) == 2 else {})

  monkeypatch.setattr(screening_facts, 'judge', judge_second)
  s = changed(machine.settings, outer=dict(stream='on'))
  first = machine.begin(prepared, tmp_path / 'run', s)
  first.to_the_end(tmp_path / 'run', Faults(), end=one_process.TRAINED)
  made = first.island(tmp_path / 'run')
  left_out = {f.key.partition('/')[0] for f in made.registry.facts('module', number=1) if f.meta.get('left_out')}
  assert len(judged) > 1 and left_out and judged[0].isdisjoint(left_out), 'a module has its contribution'
  decided = one_process.decisions_of(made, tmp_path)
  one_process.close(made)
  second = machine.begin(prepared, tmp_path / 'again', s)
  second.decisions = decided
  second.to_the_end(tmp_path / 'again', Faults(), end=one_process.TRAINED)
  again = second.island(tmp_path / 'again')
  assert decisions.compare(decided, again.registry)['differing'] == []
  one_process.close(again)
