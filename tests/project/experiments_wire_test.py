"""The table of thin lines: its rows differ only in the wire, and its bytes are those of the messages."""

import dataclasses
import json
import math
import sys
from typing import Any

import pytest
import repository
import tiny_run
from experiment_scripts import finish, start

from dipaco_jax.config import choices, settings, wires

sys.path.insert(0, str(repository.ROOT / 'experiments'))
import common
import config
import readme
import runs
from runs import Row


def made(method: str, changes: dict[str, Any] | None = None) -> settings.Settings:
  return runs.make('micro', Row('', '', method, changes or {}), 0).settings


@pytest.mark.parametrize('size', config.SIZES)
def test_the_wire_is_all_that_differs_in_its_rows(size):
  found = {row.name: runs.make(size, row, 0).settings for row in readme.wire.rows(size)}
  for method in ('dipaco', 'diloco'):
    mine = {name.partition('_')[2]: s for name, s in found.items() if name.startswith(method)}
    steps = {name: s.train.steps_per_dispatch for name, s in mine.items()}
    assert steps.pop('short') == 1 and len(set(steps.values())) == 1
    same = {'outer': mine['lan'].outer, 'train': mine['lan'].train, 'checkpoint': mine['lan'].checkpoint}
    assert len({dataclasses.replace(s, **same) for s in mine.values()}) == 1 < len(mine)
    assert len({dataclasses.replace(s.train, steps_per_dispatch=1) for s in mine.values()}) == 1
    of_row = {name: wires.make_wire(s.outer, s.train) for name, s in mine.items()}
    assert of_row['lan'][:3] == ('none', False, 0) and of_row['wan'][:3] == ('int8', True, 0)
    assert of_row['mixed'] == of_row['overlap']._replace(keeps=False, alpha=0.5)
    assert of_row['overlap'] == of_row['thin']._replace(compress='none') and of_row['thin'].overlap_steps > 0
    assert of_row['short']._replace(overlap_steps=of_row['thin'].overlap_steps) == of_row['thin']
    assert 0 < of_row['short'].overlap_steps <= of_row['thin'].overlap_steps
    one = mine['thin']
    layout, _ = runs.layout_and_shapes(one)
    times = choices.make_timetable(one, {level.name: 1000 for level in layout.levels})
    assert len({piece.sent for piece in times.pieces(0)} - {()}) > 1, 'levels leave one after another'


def test_bytes_of_the_wire():
  s = {name: made('fragments,8', {'outer.wire': name}) for name in ('lan', 'wan', 'thin')}
  assert runs.wire_bytes(s['lan']) == 2 * 4 and runs.wire_bytes(made('flat')) == 0
  assert runs.wire_bytes(s['wan']) == pytest.approx(2 * 8.25 / 8, rel=0.01)
  assert runs.wire_bytes(s['thin']) == pytest.approx(2 * 4.25 / 8, rel=0.01)
  assert runs.state_bytes(s['lan']) == pytest.approx(2 * 4 / 16, rel=0.01)
  assert runs.state_bytes(s['thin']) == pytest.approx((2 * 4 + 2) / 16, rel=0.01)
  assert runs.state_bytes(made('flat', {'outer.wire': 'thin'})) == runs.state_bytes(s['lan'])
  often = made('fragments,8', {'checkpoint.state_every_phases': 4})
  assert runs.state_bytes(often) == 4 * runs.state_bytes(s['lan'])
  assert runs.state_bytes(made('fragments,8', {'outer.wire': 'thin', 'checkpoint.state_every_phases': 4})) == (
    runs.state_bytes(s['thin'])
  ), 'with streaming only after closed phases'


def test_a_digest_knows_when_all_levels_exchange_and_not_when_states_are_published():
  every = {n: runs.make('micro', Row('x', 'x', 'dipaco', {'outer.closed_every': n}), 0) for n in (4, 16)}
  assert every[4].config != every[16].config == runs.make('micro', Row('x', 'x', 'dipaco'), 0).config
  for changes in ({'checkpoint.keep': 5}, {'checkpoint.state_every_phases': 4}):
    assert runs.make('micro', Row('x', 'x', 'dipaco', changes), 0).config == every[16].config


def test_differences_to_the_row_of_a_kind_with_their_interval():
  loss = {'a_lan': (1.0, 2.0, 3.0), 'a_x': (1.1, 2.2, 3.3), 'b_lan': (5.0,), 'b_x': (4.0, 1.0)}
  found = {(row, seed): {'loss': x} for row, by_seed in loss.items() for seed, x in enumerate(by_seed)}
  column = common.Column('less', 'loss', '+.2f', '*_lan', interval=True)
  numbers = common.figures(found, 'a_x', column)
  assert numbers == pytest.approx([0.1, 0.2, 0.3]) and common.figures(found, 'b_x', column) == [-1.0]
  # 0.2 +- t sd / sqrt(3), t = 2.92 of two degrees of freedom, sd = 0.1
  assert common.cell(numbers, column.form, column.interval) == '+0.20 (+0.03 to +0.37)'
  assert common.cell([-1.0], column.form, column.interval) == '-1.00'


@pytest.mark.slow
def test_a_table_of_the_wire_is_made_by_runs(tmp_path):
  tiny_run.write_config(tmp_path)
  out, err = finish(start(tmp_path, '--rows=diloco_lan,diloco_thin', '--seeds=0', script='wire.py'))
  assert '[2/2] DiLoCo 4, int4, streaming, overlap of 1 (thin), seed 0' in err
  file = tmp_path / 'results' / 'test' / 'wire.json'
  lan, thin = json.loads(file.read_text())['runs']
  assert (lan['row'], thin['row']) == ('diloco_lan', 'diloco_thin') and lan['loss'] != thin['loss']
  assert lan['loss'] == math.log(lan['perplexity']) and lan['wire_bytes'] == 8 > 4 * thin['wire_bytes']
  assert thin['sent_bytes'] == 3 * 4 * round(thin['wire_bytes'] * thin['parameters_path'])
  (line,) = [line for line in out.splitlines() if line.startswith('| DiLoCo') and '(thin)' in line]
  assert f'| {thin["loss"]:.4f} | {thin["loss"] - lan["loss"]:+.4f} |' in line
  assert file.with_suffix('.png').stat().st_size > 1000
