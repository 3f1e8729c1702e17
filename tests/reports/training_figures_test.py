"""The pictures of training say what their curves mean."""

import numpy as np
import pytest

from dipaco_jax.pipeline import stage_records
from dipaco_jax.reports import history, plot_style, run_data, run_report, training_figures


def test_a_great_gap_is_explained(runs, tmp_path):
  config = stage_records.read_settings(runs('grid'))
  tau = config.train.steps_per_phase
  found = history.read_history(runs('grid'), 16)
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
