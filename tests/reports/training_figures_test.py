"""The pictures of training and of its cost say what their curves and bars mean."""

import numpy as np
import pytest

from dipaco_jax.pipeline import stage_records
from dipaco_jax.reports import history, plot_style, run_data, run_report, training_figures
from dipaco_jax.telemetry import metrics_log


def test_a_great_gap_is_explained(runs, tmp_path):
  config = stage_records.read_settings(runs('grid'))
  tau = config.train.steps_per_phase
  found = history.make_curves(metrics_log.read_rows(runs('grid')), 16)
  apart = training_figures.overfitting(found, tau)
  assert apart == pytest.approx(0.3, abs=0.2)  # by the curves of synthetic.py, which end 0.15 to 0.45 nats apart
  rise = found._replace(holdout=plot_style.Curve(found.holdout.steps, found.holdout.values + 1))
  assert training_figures.overfitting(rise, tau) == pytest.approx(apart + 1)
  nothing = plot_style.Curve(np.zeros(0, int), np.zeros((0, 16)))
  assert training_figures.overfitting(found._replace(holdout=nothing), tau) is None
  run = run_data.read_run(runs('grid'), run_report.make_report(runs('grid')))
  for history_, words in ((found, ''), (rise, f'In the last phase it lies {apart + 1:.1f} nats above')):
    caption = training_figures.holdout(run._replace(history=history_)).caption
    assert words in caption and ('nats above' in caption) == bool(words or apart > training_figures.EXPLAINED_GAP)


@pytest.fixture(scope='module')
def run(runs):
  return run_data.read_run(runs('grid'), run_report.make_report(runs('grid')))


def words(picture) -> list[str]:
  return [text.get_text() for text in picture.figure.axes[0].texts]


def test_bytes_are_those_of_all_phases_beside_data_parallel_ones(run):
  train = run.results['train'] | {'phases': 3, 'outer_bytes_per_phase': 10**6, 'synchronous_bytes_per_phase': 10**8}
  picture = training_figures.bytes_sent(run._replace(results=run.results | {'train': train}))
  assert words(picture) == ['300 MB', '3 MB'] and 'would send 100 times as many bytes' in picture.caption
  assert 'one device, so nothing was sent' in picture.caption
  several = run._replace(results=run.results | {'train': train}, report=run.report | {'num_devices': 4})
  assert training_figures.bytes_sent(several).caption.startswith('Paths exchanged parameters once in ')


def test_one_path_sends_nothing_and_has_no_picture(run):
  train = run.results['train'] | {'outer_bytes_per_phase': 0}
  assert training_figures.bytes_sent(run._replace(results=run.results | {'train': train})) is None


def test_the_time_of_training_is_reported_by_cause_without_text_and_shards(run):
  found = {
    'inner': 300.0,
    'wait': 60.0,
    'storage': 30.0,
    'database': 0.0,
    'start': 10.0,
    'stages': 1000.0,
    'other': 100.0,
  }
  picture = training_figures.time_by_cause(run._replace(report=run.report | {'seconds': {'train': found}}))
  assert words(picture) == ['1 min 40 s, 20.0%', '1 min, 12.0%', '30 s, 6.0%', '10 s, 2.0%', '5 min, 60.0%']
  names = [label.get_text() for label in picture.figure.axes[0].get_yticklabels()]
  assert names == ['other work', 'waiting for others', 'storage', 'start', 'inner steps']
  assert picture.caption == '8 min 20 s of training; goodput, the share of steps, is 60%.'
  for nothing in (None, {'tokenize': found}, {'train': {'stages': 1.0}}):
    assert training_figures.time_by_cause(run._replace(report=run.report | {'seconds': nothing})) is None


def test_time_is_the_sum_of_the_stages(run):
  seconds = {'tokenize': 60.0, 'train': 3600.0}
  picture = training_figures.time_by_stage(run._replace(report=run.report | {'wall_s': seconds, 'seconds': None}))
  assert picture.caption.startswith('1 h 1 min in all. The exchange between paths')
  assert words(picture) == ['1 h', '1 min']


def test_what_restarts_lost_is_part_of_the_time(run):
  found = {'tokenize': {'stages': 60.0}, 'train': {'inner': 3000.0, 'lost': 600.0}}
  report = run.report | {'wall_s': {'tokenize': 60.0, 'train': 3000.0}, 'seconds': found}
  picture = training_figures.time_by_stage(run._replace(report=report))
  assert picture.caption.startswith(
    '1 h 1 min in all, of which 10 min were lost to restarts (hatched: lost to restarts).'
  )
  assert words(picture) == ['1 h', '1 min']
