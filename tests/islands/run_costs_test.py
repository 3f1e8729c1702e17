"""What a run has cost: from facts to bytes by phase, goodput and the causes of lost time."""

import json
import time

import one_process
import pytest
from island_fixtures import machine, one_device, prepared  # noqa: F401
from one_process import changed

from dipaco_jax.islands import run_costs
from dipaco_jax.islands.phase_metrics import PhaseMetrics
from dipaco_jax.islands.role_costs import RoleCosts
from dipaco_jax.islands.run_costs import Spell
from dipaco_jax.processes import time_use
from dipaco_jax.registry.registry import Fact
from dipaco_jax.telemetry import metrics_log

made = one_process.made
WAIT_S = 0.02


def fact(kind: str, key: str, number: int, role: str, bytes_in: int, bytes_out: int = 0, **more) -> Fact:
  return Fact(kind, key, number, '', '', {'role': role, 'bytes_in': bytes_in, 'bytes_out': bytes_out} | more)


def test_bytes_are_those_of_the_phase_that_they_belong_to(made):
  streams = one_process.with_settings(made, outer={'stream': 'on'})
  most = streams.timetable.most_pieces
  assert most > 1
  streams.registry.put(
    [
      fact('prepared', '', 0, 'worker', 1, reading_s=1.0, writing_s=0.0),
      fact('piece', '3', most, 'worker', 10, 7),
      fact('checkpoint', '3', 1, 'worker', 100, 70),
      fact('checkpoint', '3', 0, 'worker', 1000, 0, reading_s=1.0, writing_s=2.0),
      fact('module', 'low/0', 2, 'outer', 10_000),
      fact('evaluation', '3', 1, 'evaluator', 100_000),
      Fact('module', 'low/0', 0, '', '', {}),
    ]
  )
  found = run_costs.figures(streams)
  assert found['island_bytes_by_phase'] == [
    {'worker': {'in': 1000, 'out': 0}, 'evaluator': {'in': 100_000, 'out': 0}},
    {'worker': {'in': 110, 'out': 77}, 'outer': {'in': 10_000, 'out': 0}},
  ]
  assert found['island_bytes']['worker'] == {'in': 1111, 'out': 77}
  assert found['island_mbits'] == {'worker': {'in': pytest.approx(1001 * 8 / 1e6 / 2), 'out': None}}
  parameters = sum(x.size for x in streams.shapes.values())
  assert found['diloco_bytes_per_phase'] == 8 * parameters * streams.layout.grid.num_paths


def test_goodput_is_of_the_workers_time_beside_shared_stages():
  spells = [
    Spell(100.0, {'stages': 60.0, 'start': 20.0, 'inner': 15.0, 'storage': 5.0}),  # from 0
    Spell(120.0, {'inner': 10.0, 'wait': 10.0}),
    Spell(140.0, {'inner': 20.0}),
  ]
  found = run_costs.sum_by_cause(spells)
  assert found['inner'] == 45 and time_use.goodput(found) == 45 / 80
  # Training begins at 80, and the longest spell lasts 20 s: three stretches.
  assert run_costs.goodput_over_time(spells) == [(20.0, 0.75), (40.0, 0.5), (60.0, 1.0)]


def test_a_worker_that_only_starts_lowers_goodput_meanwhile():
  busy = [Spell(10.0 * i, {'inner': 10.0}) for i in (1, 2)]
  late = [Spell(20.0, {'start': 15.0, 'inner': 5.0})]
  assert run_costs.goodput_over_time(busy + late) == [(10.0, 0.5), (20.0, 0.75)]


def test_no_spell_no_curve():
  assert run_costs.goodput_over_time([]) is None and run_costs.sum_by_cause([]) is None


def test_the_seconds_of_a_path_are_those_before_its_checkpoints(made):
  made.registry.put(
    [
      fact('prepared', '', 0, 'worker', 0, seconds={'stages': 8.0}, until=8.0),
      fact('checkpoint', '1', 0, 'worker', 0, seconds={'inner': 2.0, 'wait': 1.0}, until=11.0),
      fact('checkpoint', '1', 1, 'worker', 0, seconds={'inner': 4.0}, until=15.0),
    ]
  )
  found = run_costs.figures(made)
  assert found['seconds_by_path'] == [{}, {'inner': 6.0, 'wait': 1.0}, {}, {}]
  assert found['seconds'] == run_costs.seconds(made) == {'train': {'inner': 6.0, 'wait': 1.0, 'stages': 8.0}}


def test_facts_tile_the_time_of_their_process_and_keep_what_was_not_told(made):
  time_use.end()
  costs = RoleCosts(made, 'worker')
  made.storage.write('a', b'12345')
  (lost,) = costs.note([Fact('checkpoint', '0', 0, '', '', {})])  # never settled: it did not get into the registry
  made.storage.fetch('a')
  first, other = costs.note([Fact('checkpoint', '0', 0, '', '', {'x': 1}), Fact('checkpoint', '1', 0, '', '', {})])
  costs.settle()
  (second,) = costs.note([Fact('checkpoint', '2', 0, '', '', {})])
  time_use.end()
  assert (lost.meta['bytes_in'], lost.meta['bytes_out'], other.meta) == (0, 5, {})
  assert (first.meta['bytes_in'], first.meta['bytes_out'], first.meta['x'], first.meta['role']) == (5, 5, 1, 'worker')
  assert first.meta['writing_s'] > 0 < first.meta['reading_s'] and second.meta['bytes_in'] == 0
  spells = run_costs.read_spells([first, second])
  assert spells[1].begin == pytest.approx(spells[0].end, abs=0.01)


@pytest.mark.slow
def test_a_streaming_run_tells_its_time_its_pieces_and_its_steps(machine, prepared, tmp_path, one_device, monkeypatch):  # noqa: F811
  time_use.end()
  streams = machine.begin(prepared, tmp_path / 'run', changed(machine.settings, outer=dict(stream='on')))
  began = time.time()
  dispatched = PhaseMetrics.dispatched

  def slowly(*args):
    time.sleep(WAIT_S)  # as for a device
    dispatched(*args)

  monkeypatch.setattr(PhaseMetrics, 'dispatched', slowly)
  streams.live(tmp_path / 'run')
  of = streams.island(tmp_path / 'run')
  tau, paths = machine.settings.train.steps_per_phase, of.layout.grid.num_paths
  assert of.timetable.most_pieces > 1

  facts = [fact for kind in run_costs.KINDS for fact in of.registry.facts(kind)]  # of one process, in all roles
  spells = [Spell(fact.meta['until'], fact.meta['seconds']) for fact in facts if 'seconds' in fact.meta]
  told = sum(sum(spell.seconds.values()) for spell in spells)
  ended = max(spell.end for spell in spells)
  assert told == pytest.approx(ended - min(spell.begin for spell in spells), abs=0.05) and told < ended - began
  found = run_costs.sum_by_cause(spells)
  assert min(found['inner'], found['database'], found['storage'], found['other'], found['stages']) > 0
  busy_s = sum(fact.meta['busy_s'] for fact in of.registry.facts('checkpoint'))  # of all pieces
  dispatches = paths * machine.settings.train.phases * tau // machine.settings.train.steps_per_dispatch
  assert WAIT_S * dispatches <= found['inner'] <= busy_s

  rows = [row for row in metrics_log.read_rows(tmp_path / 'run') if row['stage'] == 'train' and row['kind'] == 'step']
  for row in rows:
    after = row['step'] - machine.settings.pretrain.steps - tau * row['phase']
    begin, end = next(piece[:2] for piece in of.timetable.pieces(row['phase']) if piece.end >= after)
    [path] = row['paths']
    assert row['updates'] == paths * (tau * row['phase'] + begin) + path * (end - begin) + after - begin

  timeline = json.loads((tmp_path / 'run' / 'timeline.json').read_text())['tasks']
  trained = [phase for _, kind, phase, *_ in timeline if kind == 'train']
  assert sorted(trained) == sorted(
    fact.number // of.timetable.most_pieces + 1 if fact.kind == 'piece' else fact.number + 1
    for kind in ('checkpoint', 'piece')
    for fact in of.registry.facts(kind)
  )
  one_process.close(of)
