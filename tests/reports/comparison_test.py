"""Several runs side by side."""

import shutil

import matplotlib.figure
import parsed_page
import pytest

from dipaco_jax import report
from dipaco_jax.pipeline import stage_records
from dipaco_jax.reports import comparison, plot_style, run_report


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
  found = [comparison.caption('perplexity', [None if base == '-' else float(base) for base in bases])]
  assert ('They start from equally good base models.' in found[0]) == same


def test_a_page_shows_its_warning_and_its_pairs_escaped():
  rows = [['', 'a', 'b'], ['bits per byte', '1.0', '2.0']]
  pair = [['kind', 'documents in both', 'a', 'b', 'b against a'], ['<script>', '9', '1.0', '2.0', '+100.0%']]
  picture = plot_style.Picture(matplotlib.figure.Figure(), '')
  page = parsed_page.Page(comparison.render(rows, [picture], 'They differ & <so>.', [pair]))
  words = ''.join(page.words)
  assert 'They differ & <so>.' in words and '<script>' in words and 'script' not in page.tags


@pytest.mark.parametrize(
  ('differences', 'words'),
  [
    (['tokenizer'], 'do not have the same tokenizer: their perplexities are left out'),
    (['tokenizer', 'training text', 'validation set'], 'the same tokenizer, training text and validation set'),
    (['training text'], 'A difference may be due to the text that they were trained on.'),
  ],
)
def test_a_warning_names_what_differs(differences, words):
  assert words in comparison.warning(differences)


def test_runs_that_differ_are_compared_in_bits_per_byte_only(runs, tmp_path, caplog):
  other = tmp_path / 'other'
  shutil.copytree(runs('grid'), other)
  (other / 'tokenizer.model').write_bytes(b'another')
  table = report.compare([runs('grid'), other], tmp_path)
  assert 'These runs do not have the same tokenizer' in caplog.text
  assert 'perplexity' not in table and 'change from the control' not in table
  assert table.splitlines()[1].split() == ['bits', 'per', 'byte', '1.2140', '1.2140']
  assert 'do not have the same tokenizer' in (tmp_path / 'compare.html').read_text()


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
