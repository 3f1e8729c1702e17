"""Workers behind slow lines, against times computed by hand; a phase has 10 steps, of 1 s unless it says otherwise."""

import dataclasses
import itertools
import math
import sys
import time

import pytest
import repository
import slow

from dipaco_jax.algorithm import streaming
from dipaco_jax.planning import wire_needs
from dipaco_jax.planning.wire_traffic import Traffic

sys.path.insert(0, str(repository.ROOT / 'benchmarks'))

import wire_simulation as simulation
from wire_simulation import AFTER, BEHIND, WITH, Conditions

TAU, LINE = 10, 100.0  # bytes per second
ALL = {'all': ((0, 1),)}  # one level, which both paths share


def traffic(groups=ALL, message=300, version=200, outer=0, state=0, every=0, places=None, overlap=None, paths=2):
  """A run without streaming, or one with a level at each place; bytes are those of each level."""
  at = places or dict.fromkeys(groups, TAU)
  overlaps = dict.fromkeys(groups, overlap or 0)
  table = streaming.Timetable(TAU, 1, at, overlaps, 0.5, places is not None, 99, frozenset(), every)
  sizes = [dict.fromkeys(groups, size) for size in (message, version, outer)]
  return Traffic(table, paths, groups, *sizes, state, every)


def utilization(of, *step_s, line=LINE, **conditions):
  return simulation.utilization(of, Conditions(step_s or (1.0,), line, **conditions))


def test_without_overlap_a_path_waits_for_both_transfers():
  assert utilization(traffic()) == pytest.approx(10 / (10 + 3 + 2))
  assert utilization(traffic(), line=math.inf) == 1
  assert utilization(traffic(outer=70), outer_bytes_per_s=10) == pytest.approx(10 / (10 + 3 + 7 + 2))
  assert utilization(traffic({})) == 1  # paths of their own


def test_every_call_has_its_latency():
  # The object, the fact that names it, the question what is there, the object.
  assert utilization(traffic(), latency_s=0.5) == pytest.approx(10 / (15 + 4 * 0.5))
  two = traffic({'low': ((0, 1),), 'high': ((0, 1),)})
  assert utilization(two, latency_s=0.5) == pytest.approx(10 / (20 + 6 * 0.5))


def test_levels_wait_for_the_fact_of_the_piece_or_have_their_own():
  three = traffic(dict.fromkeys('abc', ((0, 1),)))
  assert utilization(three) == pytest.approx(10 / (10 + 9 + 6))
  assert utilization(three, by_level=True) == pytest.approx(10 / (10 + 9 + 2))  # a and b come down meanwhile


@pytest.mark.parametrize('place', [4, 9, 10])
@pytest.mark.parametrize('overlap', [0, 3, 5, 8])
def test_overlap_hides_so_many_steps_of_the_transfers(place, overlap):
  late = max(0, 5 - overlap)
  of = traffic(places={'all': place}, overlap=overlap)
  assert utilization(of, publications=2) == pytest.approx(10 / (10 + late))
  assert utilization(of, line=LINE / 4, publications=2) == pytest.approx(10 / (10 + 20 - overlap))


def test_levels_at_their_places_share_the_line():
  groups = {'low': ((0, 1),), 'high': ((0, 1),)}
  apart = traffic(groups, places={'low': 5, 'high': 10}, overlap=5)
  assert utilization(apart) == pytest.approx(1)
  # 6 s, 5 of them hidden; and while a path waits for `low`, `high` is on its way for a second more.
  assert utilization(apart, line=LINE / 1.2) == pytest.approx(10 / (10 + 1))
  # At one place: both are there after 6 s, and come down until 10.
  together = traffic(groups, places={'low': 10, 'high': 10}, overlap=5)
  assert utilization(together) == pytest.approx(10 / (10 + 10 - 5))


def test_a_piece_begins_while_one_is_published():
  places = {'low': 4, 'high': 6, 'ends': 10}
  of = traffic(dict.fromkeys(places, ((0, 1),)), version=0, places=places, overlap=4)
  # `low` goes up from 4 to 7, when the piece after 6 begins; `high` until 10, when that after 8 does, the last.
  assert utilization(of) == pytest.approx(10 / 12)
  assert utilization(of, publications=0) == pytest.approx(10 / (10 + 3 * 3))
  assert utilization(of, publications=2) == pytest.approx(1)


def test_a_closed_phase_hides_nothing():
  of = traffic(places={'all': 4}, overlap=5, every=4)
  assert utilization(of) == pytest.approx(40 / (40 + 5))
  ends = dataclasses.replace(of.table, closed=frozenset(range(99)))  # of rounds, which are not simulated
  assert utilization(of._replace(table=ends)) == utilization(of)


def test_all_wait_for_the_slowest():
  assert utilization(traffic(), 1.0, 2.0) == pytest.approx((10 + 20) / 2 / (20 + 5))
  # Only who shares a module: the second pair does not wait.
  of = traffic({'all': ((0, 1), (2, 3))}, paths=4)
  assert utilization(of, 1.0, 2.0, 1.0, 1.0) == pytest.approx((10 / 25 + 20 / 25 + 2 * 10 / 15) / 4)


def test_a_chain_of_modules_passes_waiting_on():
  of = traffic({'low': ((0, 1), (2,)), 'high': ((0,), (1, 2))}, message=0, version=0, paths=3)
  assert utilization(of, 1.0, 1.0, 2.0) == pytest.approx((0.5 + 0.5 + 1) / 3)


def test_a_state_comes_before_the_fact_after_it_or_behind_all():
  states = {state: traffic(state=1400, every=2) for state in (WITH, AFTER, BEHIND)}
  found = {state: utilization(of, state=state) for state, of in states.items()}
  assert found[WITH] == pytest.approx(20 / (2 * 15 + 14))
  # The next message is made 12 s after the state begins to go: 2 down, 10 of steps.
  assert found[AFTER] == pytest.approx(20 / (2 * 15 + 2))
  assert found[BEHIND] == pytest.approx(20 / (2 * 15))


def test_states_that_are_behind_do_not_pile_up():
  full = utilization(traffic(state=10_000, every=2), state=BEHIND)
  assert full == pytest.approx(20 / (2 * 3 + 100), rel=0.02)  # nothing but objects on the line
  assert utilization(traffic({}, state=10_000, every=2), state=BEHIND) == pytest.approx(20 / 100, rel=0.02)


@pytest.mark.parametrize('line', [LINE, LINE / 2, LINE / 4])
def test_a_worker_of_two_paths_trains_one_while_the_other_waits(line):
  of = traffic({'all': ((0, 2), (1, 3))}, paths=4)
  assert utilization(of, line=line) == pytest.approx(10 / (10 + 5 * LINE / line))
  both = utilization(of, line=line, paths_per_worker=2)
  assert both == pytest.approx(min(1, 20 / (10 + 5 * LINE / line)))


def test_the_path_that_has_been_ready_longest_is_first():
  of = traffic({'all': ((0, 3), (1, 4), (2, 5))}, paths=6)
  assert utilization(of, paths_per_worker=3) == pytest.approx(1)  # no path is left behind, and none is ahead


def streamed():
  """Eight paths on a grid of 2x4 that stream three levels with overlap, and publish states."""
  low = tuple(tuple(range(4 * i, 4 * i + 4)) for i in range(2))
  high = tuple((i, i + 4) for i in range(4))
  groups = {'ends': (tuple(range(8)),), 'low': low, 'high': high}
  return traffic(groups, state=900, every=4, places={'ends': 3, 'low': 6, 'high': 10}, overlap=2, paths=8)


@pytest.mark.parametrize('state', simulation.STATES)
@pytest.mark.parametrize('by_level', slow.but([False, True], False))
def test_a_faster_line_is_never_worse(state, by_level):
  of = streamed()
  found = [utilization(of, line=10 * 1.3**i, state=state, by_level=by_level, latency_s=0.01) for i in range(30)]
  assert all(a <= b + 1e-9 for a, b in itertools.pairwise(found))
  assert 0 < found[0] < 0.1 and 0.9 < found[-1] < 1


def test_lines_are_the_slowest_that_do():
  targets = 0.9, 0.5, 0.99
  found = simulation.find_lines(streamed(), Conditions((1.0,)), targets)
  for target in targets:
    assert utilization(streamed(), line=found[target]) >= target
    assert utilization(streamed(), line=found[target] / 1.01) < target
  assert simulation.find_lines(traffic(), Conditions((1.0,)), [0.5]) == {0.5: pytest.approx(50, rel=0.01)}


@pytest.mark.parametrize('overlap', [0, 2, 3])
@pytest.mark.parametrize('places', [None, {'ends': 3, 'low': 6, 'high': 10}, {'ends': 6, 'low': 6, 'high': 10}])
def test_the_formula_finds_the_same_line_for_one_path_per_worker(places, overlap):
  of = traffic(dict.fromkeys(('ends', 'low', 'high'), ((0, 1),)), state=90, every=4, places=places, overlap=overlap)
  of = of._replace(message={'ends': 700, 'low': 300, 'high': 400})
  expected = simulation.find_lines(of, Conditions((0.5,), publications=2), [wire_needs.TARGET])[wire_needs.TARGET]
  assert wire_needs.line_bytes_per_s(of, 0.5) == pytest.approx(expected, rel=0.01)


def test_no_line_makes_up_for_latency_or_a_straggler():
  assert simulation.find_lines(traffic(), Conditions((1.0,), latency_s=1.0), [0.95])[0.95] == math.inf
  assert simulation.find_lines(traffic(), Conditions((1.0, 2.0)), [0.8])[0.8] == math.inf
  half = simulation.find_lines(traffic(), Conditions((1.0, 2.0)), [0.5])[0.5]
  assert (10 + 20) / 2 / (20 + 500 / half) == pytest.approx(0.5, rel=0.01)


def test_pieces_are_those_of_the_timetable():
  steps = simulation.make_steps(streamed(), 4)
  assert sum(step.steps for step in steps[:-1]) == 4 * TAU and [s.phase for s in steps if s.is_first] == [0, 1, 2, 3, 4]
  assert steps[-1].is_first and [s.phase for s in steps if s.has_state] == [3]
  sent = [(level, step.phase + 1) for step in steps[:-1] for level in step.sent]
  needed = [pair for step in steps[1:] for pair in step.needed]
  assert sorted(sent) == sorted(needed) and len(set(needed)) == len(needed) == 4 * 3  # each once, before phase 4


def test_a_simulation_takes_a_moment():
  began = time.process_time()
  groups = {f'level_{i}': (tuple(range(8)),) for i in range(9)}
  places = {level: i + 1 for i, level in enumerate(groups)}
  simulation.find_lines(traffic(groups, places=places, overlap=2, every=16, paths=8), Conditions((1.0,)), [0.5, 0.9])
  assert time.process_time() - began < 10  # 0.4 s on a machine of 2024
