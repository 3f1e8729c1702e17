"""What a page is made from while its run trains."""

import parsed_page
import synthetic

from dipaco_jax.reports import run_report
from dipaco_jax.storage import lock


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
