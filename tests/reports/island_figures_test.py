"""Figures of the costs of islands: captions explain curves and bars; figures without data are left out."""

import pytest

from dipaco_jax.reports import figures, island_figures, run_data, run_report

BYTES = [{'worker': {'in': 6_000_000, 'out': 4_000_000}, 'outer': {'in': 1_000_000, 'out': 0}}] * 3
COSTS = {
  'island_bytes_by_phase': BYTES, 'diloco_bytes_per_phase': 50_000_000, 'synchronous_bytes_per_phase': 10**9,
  'island_mbits': {'worker': {'in': 80.25, 'out': None}}, 'goodput': 0.6,
  'goodput_over_time': [[60.0, 0.5], [120.0, 0.7]],
}  # fmt: skip
DRAWN = ('goodput', 'bytes_by_phase', 'bytes_beside')


@pytest.fixture(scope='module')
def run(runs):
  return run_data.read_run(runs('grid'), run_report.make_report(runs('grid')))


def with_costs(run, **costs):
  return run._replace(report=run.report | COSTS | costs)


def texts_in(picture) -> list[str]:
  return [text.get_text() for text in picture.figure.axes[0].texts]


def test_goodput_is_a_percentage_for_each_interval(run):
  picture = island_figures.goodput(with_costs(run))
  [line] = picture.figure.axes[0].get_lines()
  assert line.get_xydata().tolist() == [[0, 50], [60, 50], [120, 70]] and '60% in all' in picture.caption


def test_bytes_are_compared_with_plain_diloco_and_data_parallel_training(run):
  picture = island_figures.bytes_beside(with_costs(run))
  assert texts_in(picture) == ['1 GB', '50 MB', '10 MB']
  assert '5.0 times as many' in picture.caption and ', 100 times as many' in picture.caption
  assert picture.caption.endswith('A worker moved 80.2 Mbit/s while reading.')
  lines = {line.get_ydata()[0] for line in island_figures.bytes_by_phase(with_costs(run)).figure.axes[0].get_lines()}
  assert {6.0, 4.0, 1.0, 0.0, 25.0} <= lines


@pytest.mark.parametrize('name', DRAWN)
def test_unknown_costs_are_not_drawn(run, name):
  draw = getattr(island_figures, name)
  assert draw(with_costs(run)) is not None
  assert draw(with_costs(run, **dict.fromkeys(COSTS))) is None
  assert draw(run) is None
  assert draw in figures.SECTIONS['Islands'].values()


def test_there_is_no_figure_without_bytes_of_workers(run):
  assert island_figures.bytes_beside(with_costs(run, island_bytes_by_phase=[{}, {}])) is None
  assert island_figures.bytes_beside(with_costs(run, island_mbits={})).caption.endswith('times as many.')
