"""Places of levels, against a walk through all steps of a run."""

import math

import pytest

from dipaco_jax.algorithm import streaming
from dipaco_jax.config import choices, settings, wires
from dipaco_jax.core.errors import InputError


def timetable(sizes, phases=6, tau=20, rounds=None, **outer):
  sections: dict = {'train': dict(phases=phases, steps_per_phase=tau, steps_per_dispatch=2), 'outer': outer}
  sections['outer'] = dict(closed_every=4) | outer
  if rounds:
    sections['routing'] = dict(method='discriminative', router_fraction=0.1, rounds=1, phases_per_round=rounds)
  return choices.make_timetable(settings.from_dict(sections), sizes)


def walk(table, phases):
  """Yields (phase, step, event, level) in the order of time, by the definition of a place."""
  events = []
  for phase in range(phases):
    closed = (phase + 1) % 4 == 0 or phase + 1 in (phases, 3)
    for level, place in table.places.items():
      leaves = phase * table.tau + (table.tau if closed else place)
      events.append((leaves, 0, 'sent', level, phase + 1))
      events.append(
        (leaves + (0 if closed else table.overlaps[level]), 1, 'new' if closed else 'mixed', level, phase + 1)
      )
  return sorted(events)


SIZES = {'ends': 10, 'low': 10, 'high': 20, 'own': 0}


@pytest.mark.parametrize('wire', [dict(wire='thin'), dict(wire='wan'), dict(wire='thin', overlap_steps=16)])
def test_pieces_are_the_walk(wire):
  table, phases = timetable(SIZES, rounds=3, **wire), 6
  found, versions = [], {}
  for phase in range(phases):
    pieces = table.pieces(phase)
    assert [p.begin for p in pieces] == [0, *(p.end for p in pieces[:-1])] and pieces[-1].end == table.tau
    for piece in pieces:
      if piece.begin == 0 and table.begins_whole(phase):
        versions = dict.fromkeys(SIZES, phase)
        found += [(phase * 20, 1, 'new', level, phase) for level in SIZES if phase]
      for level in piece.mixed:
        versions[level] += 1
        found.append((phase * 20 + piece.begin, 1, 'mixed', level, versions[level]))
      assert {level: table.version(level, phase, piece.begin) for level in SIZES} == versions
      found += [(phase * 20 + piece.end, 0, 'sent', level, phase + 1) for level in piece.sent]
  end = [(phases * 20, 1, 'new', level, phases) for level in SIZES]
  assert sorted(found + end) == walk(table, phases)


def test_when_levels_exchange_does_not_depend_on_when_states_are_published():
  tables = [
    choices.make_timetable(settings.from_dict({'outer': {'wire': 'thin'}, 'checkpoint': checkpoint}), SIZES)
    for checkpoint in (dict(state_every_phases=4), dict(state_every_phases=16), dict(every_steps=7, keep=3))
  ]
  assert tables[0] == tables[1] == tables[2]
  assert [phase for phase in range(40) if tables[0].is_closed(phase)] == [15, 31]


def test_what_is_taken_over_is_its_equation():
  own, left, new = 3.0, 2.0, 10.0
  assert streaming.taken(0.25, own, None, new) == 0.25 * own + 0.75 * new
  assert streaming.taken(0.25, own, left, new) == own + 0.75 * (new - left)
  assert streaming.taken(0.0, own, None, new) == new and streaming.taken(0.0, own, left, new) == own + new - left


def test_steps_since_the_last_place():
  table, last = timetable(SIZES, wire='thin'), dict.fromkeys(SIZES, 0)
  for time, _, event, level, version in walk(table, 2):
    if event == 'sent' and version <= 1:
      assert table.steps_since(level, version - 1) == time - last[level]
  assert table.steps_since('low', 1) == 20 and table.steps_since('low', 3) == 20 + 20 - table.places['low']
  assert sum(table.steps_since('low', phase) for phase in range(6)) == 6 * 20


def test_places_spread_the_bytes():
  places = streaming.spread({'a': 1, 'b': 3, 'own': 0, 'c': 4}, 80, 1)
  assert places == {'a': 40, 'b': 50, 'own': 80, 'c': 80}
  in_order = [places[level] for level in 'abc']
  gaps = [after - before for before, after in zip(in_order, [*in_order[1:], in_order[0] + 80], strict=True)]
  assert gaps == [10, 30, 40]  # in which a's, b's and c's bytes travel


def test_without_streaming_a_phase_is_one_piece():
  table = timetable(SIZES)
  assert all(table.pieces(t) == ((0, 20, (), tuple(SIZES)),) and table.begins_whole(t) for t in range(6))


@pytest.mark.parametrize('wire, expected', [
  (dict(), ('none', False, 0, False, 0.5)),
  (dict(wire='wan'), ('int8', True, 0, False, 0.5)),
  (dict(wire='thin'), ('int4', True, 4, True, 0.0)),
  (dict(wire='thin', compress='int8', overlap_steps=2, mix=0.25), ('int8', True, 2, True, 0.25)),
  (dict(stream='on', overlap='keep'), ('none', True, 0, True, 0.0)),
  (dict(wire='thin', stream='off', overlap='mix'), ('int4', False, 0, False, 0.5)),
])  # fmt: skip
def test_wire_and_what_overrides_it(wire, expected):
  s = settings.from_dict({'outer': wire, 'train': dict(steps_per_phase=20, steps_per_dispatch=2)})
  assert wires.make_wire(s.outer, s.train) == expected


@pytest.mark.parametrize('tau, steps', [(10, 8), (1, 8), (150, 8), (7, 8)])
def test_thin_fits_every_phase(tau, steps):
  s = settings.from_dict({'outer': dict(wire='thin'), 'train': dict(steps_per_phase=tau, steps_per_dispatch=steps)})
  d, unit = wires.make_wire(s.outer, s.train).overlap_steps, choices.make_timetable(s, SIZES).unit
  assert 0 <= d < tau and d % unit == 0 and math.gcd(tau, unit) == unit


@pytest.mark.parametrize('sections, field', [
  ({'outer': dict(stream='on', overlap_steps=20)}, 'outer.overlap_steps'),
  ({'outer': dict(overlap_steps=2)}, "outer.stream='on'"),
  ({'outer': dict(mix=-0.5)}, 'outer.mix=-0.5 should be 0 or more'),
  ({'outer': dict(wire='wan', lost=0.1)}, 'outer.lost'),
  ({'outer': dict(wire='wan', floor=0.1)}, "outer.stream='off'"),
  ({'outer': dict(overlap_steps=-2)}, '-1 or more'),
])  # fmt: skip
def test_rejected(sections, field):
  with pytest.raises(InputError, match=field):
    settings.from_dict({'grid': {'a': 2}, 'train': dict(steps_per_phase=20)} | sections)
