"""What a page is made from while its run trains."""

import parsed_page
import pytest
import synthetic

from dipaco_jax.reports import run_data, run_report
from dipaco_jax.storage import lock


@pytest.mark.slow
def test_a_run_that_trains_has_a_page_that_says_so(tmp_path):
  synthetic.make(tmp_path, stages=3)
  text = run_report.page_so_far(tmp_path)
  words = ' '.join(''.join(parsed_page.Page(text).words).split())
  assert 'This run is not finished, and no process works on it: phase 6 of 12 is done. Written at 20' in words
  with lock.hold(tmp_path):
    words = ''.join(parsed_page.Page(run_report.page_so_far(tmp_path)).words)
  assert 'This run is still training: phase 6 of 12 is done. Written at 20' in words
  assert 'id="perplexity_by_path"' in text and 'id="losses"' in text and '6 of 12phases are done' in words
  assert not (tmp_path / 'report.json').exists()  # which says that a run is finished


def test_large_modules_are_not_read_while_a_run_trains(runs, monkeypatch):
  half, whole = ([runs(name), run_report.make_report(runs(name))] for name in ('half', 'grid'))
  assert len(run_data.read_run(*half).drifts) == 4
  monkeypatch.setattr(run_data, 'MAX_DRIFT_BYTES', 0)
  assert run_data.read_run(*half).drifts == [] and len(run_data.read_run(*whole).drifts) == 4


def test_the_figures_so_far_are_those_of_the_newest_evaluation(runs):
  report = run_report.make_report(runs('half'))
  found = run_data.read_run(runs('half'), report)
  assert report['perplexity_by_domain'] is None
  assert found.report['perplexity_by_domain'] == found.history.last['perplexity_by_domain']
  assert found.report['perplexity'] is None  # which says that a run is finished
  assert list(found.report) == list(report)


def test_what_a_stage_has_measured_stays(runs):
  report = run_report.make_report(runs('half')) | {'base_perplexity': 12.5, 'device': 'cpu'}
  found = run_data.read_run(runs('half'), report).report
  assert (found['base_perplexity'], found['device']) == (12.5, 'cpu')
