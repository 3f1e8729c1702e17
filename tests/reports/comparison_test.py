"""Several runs side by side."""

import matplotlib.figure
import parsed_page
import pytest

from dipaco_jax import report
from dipaco_jax.pipeline import stage_records
from dipaco_jax.reports import comparison, run_report


def test_runs_are_compared_in_a_table_a_page_and_a_picture(runs, tmp_path):
  table = report.compare([runs('grid'), runs('one_path'), runs('half')], tmp_path)
  lines = {line.split('  ')[0]: line.split() for line in table.splitlines()}
  assert table.split()[:3] == ['grid', 'one_path', 'half']
  assert lines['perplexity'][1:] == ['10.310', '10.310', '-']
  assert lines['config.routing.method'][1:] == ['kmeans', 'single', 'kmeans']
  assert 'config.model.width' not in table and len({len(line) for line in table.splitlines()}) == 1
  page = parsed_page.Page((tmp_path / 'compare.html').read_text())
  assert not page.fetched and 'config.routing.method' in page.words
  assert (tmp_path / 'compare.png').read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize('bases, same', [(['9.0', '9.0'], True), (['9.0', '9.1'], False), (['-', '-'], False)])
def test_bases_are_equally_good_where_both_were_evaluated(bases, same):
  page = comparison.render([['', 'a', 'b'], ['base perplexity', *bases]], matplotlib.figure.Figure())
  assert ('They start from equally good base models.' in page) == same


def test_rerouted_perplexities_stand_side_by_side():
  found = {'learned': {'16': 9.0, '128': 9.5}}, None, {'learned': {'16': 8.0}, 'oracle': {'16': 7.0}}
  assert comparison.rerouted([{'reroute': one} for one in found]) == [
    ['re-routed, learned, W = 128', '9.500', '-', '-'],
    ['re-routed, learned, W = 16', '9.000', '-', '8.000'],
    ['re-routed, oracle, W = 16', '-', '-', '7.000'],
  ]


def test_an_interval_stands_under_its_perplexity(runs):
  reports = {name: run_report.make_report(runs(name)) for name in ('grid', 'half')}
  reports['grid']['reroute'] = {'learned': {'16': 9.0}}
  configs = {name: stage_records.read_settings(runs(name)) for name in reports}
  names = [row[0] for row in comparison.table(reports, configs)]
  assert names[1:4] == ['perplexity', 'its 95% interval', 're-routed, learned, W = 16']


def test_names_are_as_long_as_they_need_to_differ():
  assert comparison.short_names(['runs/a', 'runs/b/']) == ['a', 'b']
  assert comparison.short_names(['x/run', 'y/run']) == ['x/run', 'y/run']
