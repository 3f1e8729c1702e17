"""The pictures of paths say what can be seen in them."""

import pytest
import synthetic

from dipaco_jax.reports import figures, path_figures, run_data, run_report


@pytest.fixture(scope='module')
def run(runs):
  return run_data.read_run(runs('grid'), run_report.make_report(runs('grid')))


def with_route(run, **changes):
  return run._replace(results=run.results | {'route': run.results['route'] | changes})


def test_paths_that_read_mostly_one_kind_are_counted(run):
  kinds = run.results['tokenize']['domains']
  pure = [[100 * (kind == path % 2) for kind in range(len(kinds))] for path in range(16)]
  mixed = [[1] * len(kinds) for _ in range(15)] + pure[:1]
  caption = path_figures.kinds_by_paths(with_route(run, sequences_by_path_and_domain=pure)).caption
  assert '16 of 16 paths read mostly one kind.' in caption
  assert caption.endswith('between paths and kinds: 0.40.')  # 2 I / (H + H), with 16 paths and 2 kinds: 2 / (4 + 1)
  caption = path_figures.kinds_by_paths(with_route(run, sequences_by_path_and_domain=mixed)).caption
  assert '1 of 16 paths reads mostly one kind.' in caption


def test_the_largest_and_the_smallest_shard_are_named(run):
  caption = path_figures.shard_sizes(with_route(run, shard_tokens=[1_000_000, 20, 500])).caption
  assert 'the largest shard has 1 M, the smallest 20.' in caption


def test_a_run_without_the_data_has_no_picture(run):
  assert path_figures.loss_matrix(run) is None
  assert path_figures.kinds_by_paths(with_route(run, sequences_by_path_and_domain=None)) is None
  assert path_figures.distance_from_base(run._replace(drifts=[])) is None


def test_early_stopping_that_stops_nothing_is_a_sentence(tmp_path):
  synthetic.make(tmp_path, (('a', 2), ('b', 2)), phases=3)
  synthetic.write_json(tmp_path / 'paths' / 'best.json', {'version': [3] * 4})
  found = figures.draw_all(run_data.read_run(tmp_path, run_report.make_report(tmp_path)))
  assert 'early_stopping' not in found and 'All paths were best after the last phase' in found['holdout_losses'].caption
  synthetic.write_json(tmp_path / 'paths' / 'best.json', {'version': [3, 1, 3, 3]})
  found = figures.draw_all(run_data.read_run(tmp_path, run_report.make_report(tmp_path)))
  assert found['early_stopping'].caption.endswith('1 of 4 paths was best before the last phase.')


def test_paths_are_compared_with_the_dense_control_where_there_is_one(run):
  caption = path_figures.by_domain(run).caption
  first = 'Against the dense control, the perplexity of the paths is between '
  assert caption.startswith(first) and 'Against the base, the perplexity of the paths is between ' in caption
  alone = path_figures.by_domain(run._replace(report=run.report | {'control_perplexity_by_domain': None})).caption
  assert 'dense' not in alone and alone.startswith('Against the base')
  [ax] = path_figures.by_path(run).figure.axes
  assert [text.get_text() for text in ax.get_legend().get_texts()] == ['base', 'dense control', 'path']
