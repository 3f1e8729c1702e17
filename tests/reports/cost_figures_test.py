"""The pictures of costs: time by stage, bytes against those of synchronous training."""

import pytest

from dipaco_jax.reports import cost_figures, run_data, run_report


@pytest.fixture(scope='module')
def run(runs):
  return run_data.read_run(runs('grid'), run_report.make_report(runs('grid')))


def words(picture) -> list[str]:
  return [text.get_text() for text in picture.figure.axes[0].texts]


def test_bytes_are_those_of_all_phases_beside_synchronous_ones(run):
  train = run.results['train'] | {'phases': 3, 'outer_bytes_per_phase': 10**6, 'synchronous_bytes_per_phase': 10**8}
  picture = cost_figures.bytes_sent(run._replace(results=run.results | {'train': train}))
  assert words(picture) == ['300 MB', '3 MB'] and 'would have sent 100 times as much' in picture.caption


def test_one_path_sends_nothing_and_has_no_picture(run):
  train = run.results['train'] | {'outer_bytes_per_phase': 0}
  assert cost_figures.bytes_sent(run._replace(results=run.results | {'train': train})) is None


def test_time_is_the_sum_of_the_stages(run):
  seconds = {'tokenize': 60.0, 'train': 3600.0}
  picture = cost_figures.time_by_stage(run._replace(report=run.report | {'wall_s': seconds}))
  assert picture.caption.startswith('1:01:00 in all. Exchange between paths')
  assert words(picture) == ['1:00:00', '1:00']
