"""The first cards of a report: the comparison with one dense model, and costs."""

import numpy as np
import pytest
import synthetic

from dipaco_jax.reports import plot_style, result_cards, result_tables, run_data, run_report


@pytest.fixture
def report(runs):
  return run_report.make_report(runs('grid'))


def text_of(card):
  return ' '.join([card.figure, card.title, *card.details])


def test_the_first_card_names_the_kinds_on_which_the_dense_model_is_ahead(report):
  first = result_cards.of_result(report)[0]
  assert first.figure == 'Better than the dense control: perplexity 10.1% lower, with 16 times the training FLOPs'
  assert 'The dense control is better on 2 of 8 kinds of text: law +4.0%' in text_of(first)
  assert 'To compare at equal training FLOPs, set --config.evaluate.control_budget=flops.' in text_of(first)


def test_the_first_card_says_what_its_interval_does_not_cover(report):
  text = text_of(result_cards.of_result(report)[0])
  assert (
    'only the choice of validation documents of 8 kinds of text: it is that of one training run with one seed' in text
  )
  without = report | {'ratio_to_control_interval': None}
  assert 'This is one training run with one seed.' in text_of(result_cards.of_result(without)[0])


@pytest.mark.parametrize(
  ('ratio', 'interval', 'figure', 'more'),
  [
    (0.95, [0.92, 0.98], 'Better than the dense control: perplexity 5.0% lower', 'interval -8.0 to -2.0%'),
    (1.05, [1.02, 1.08], 'Worse than the dense control: perplexity 5.0% higher', 'interval +2.0 to +8.0%'),
    (1.01, [0.99, 1.03], 'No significant difference from the dense control: +1.0%', 'interval -1.0 to +3.0%'),
    (0.99, None, 'No significant difference from the dense control: -1.0%', 'no interval, as documents are too few'),
  ],
)
def test_a_difference_that_may_be_chance_is_not_called_none(report, ratio, interval, figure, more):
  changed = report | {'control_tokens': None, 'ratio_to_control': ratio, 'ratio_to_control_interval': interval}
  first = result_cards.of_result(changed)[0]
  assert first.figure == figure and more in text_of(first) and 'no difference' not in text_of(first)
  assert first.kind == {'B': 'gain', 'W': 'loss', 'N': 'open'}[figure[0]]


def test_each_card_says_what_its_model_read_and_cost(report):
  _, paths, control, base = result_cards.of_result(report)
  assert 'Trained on 39.3 M tokens with 244 T FLOPs, after the base, all paths together.' in text_of(paths)
  assert 'Trained on 2.46 M tokens with 15.2 T FLOPs, 600 steps after the base.' in text_of(control)
  assert 'Trained on 1.23 M tokens with 7.62 T FLOPs, 300 steps.' in text_of(base)
  assert 'Serving takes 2.07 M FLOPs a token;' in text_of(paths)
  assert 'Serving takes 2.07 M FLOPs a token.' in text_of(control)


def test_each_verdict_says_how_to_get_the_other_one(report):
  assert 'To compare at equal training FLOPs, set --config.evaluate.control_budget=flops.' in text_of(
    result_cards.of_result(report)[0]
  )
  found = result_cards.of_result(report | {'control_budget': 'flops', 'control_tokens': report['paths_tokens']})[0]
  assert 'To compare at equal steps, set --config.evaluate.control_budget=steps.' in text_of(found)
  assert 'at equal training FLOPs' in found.figure and 'as many FLOPs as all paths' in text_of(found)


def test_a_run_of_an_earlier_version_has_its_cards_and_no_table(report):
  old = report | dict.fromkeys(
    name for name in report if 'by_domain' in name or 'by_path' in name or 'flops' in name or 'tokens' in name
  )
  assert len(result_cards.of_result(old)) == 4 and result_tables.by_kind(old) is result_tables.by_path(old, []) is None


def test_tables_have_a_row_for_each_kind_and_each_path_with_text(report):
  rows, head = result_tables.by_kind(report)
  assert head[:5] == ('kind', 'documents', 'base', 'dense control', 'paths') and len(rows) == 8
  assert ('law', '50') in [row[:2] for row in rows] and '+4.0% (+1.0 to +7.0%)' in [row[5] for row in rows]
  rows, _ = result_tables.by_path(report, [f'path {path}' for path in range(16)])
  assert len(rows) == 15 and all('too few documents' in row[5] for row in rows)


def test_rows_of_owners_have_their_names(report):
  rows, head = result_tables.by_kind(report, 'owner')
  assert head[0] == 'owner' and rows == result_tables.by_kind(report)[0]
  names = [f'owner_{path}' for path in range(16)]
  rows, head = result_tables.by_path(report, names)
  assert head[0] == 'path' and {row[0] for row in rows} < {*names}


def test_the_training_of_base_paths_and_control_stands_side_by_side(runs):
  run = run_data.read_run(runs('grid'), run_report.make_report(runs('grid')))
  rates = plot_style.Curve(np.array([1, 2]), np.array([[0.01], [0.001]]))
  run = run._replace(history=run.history._replace(control_learning_rate=rates))
  run.report.update(pretrain_epochs=0.5, epochs_by_path=[0.5, 3.5], control_epochs=1.25)
  rows, head = result_tables.of_training(run, 11, ([12, 7], 12))
  assert head == ('', 'base', 'each path', 'dense control')
  found = {name: cells for name, *cells in rows}
  assert found['sequential steps'] == ['300', '600', '600']
  assert found['times that its text was read'] == ['0.50', '0.50 to 3.50', '1.25']
  assert found['highest learning rate'][2] == '0.01' and found['last learning rate'][2] == '0.001'
  assert found['taken from phase'][1:] == ['7 to 12 of 12', '11']
  alone = run._replace(report=run.report | {'control_steps': None})
  assert result_tables.of_training(alone, None, None)[1] == ('', 'base', 'each path')
  assert result_tables.of_training(run._replace(report=run.report | {'steps': None}), None, None) is None


def test_epochs_are_known_from_the_shards_where_no_stage_noted_them(tmp_path):
  config = synthetic.make(tmp_path, (('a', 2), ('b', 2)), phases=2, tau=5, pretrain_steps=10)
  assert run_report.make_report(tmp_path)['epochs_by_path'] is None
  for name, rows in (('base', [640]), ('0', [320, 160, 80, 40])):
    synthetic.write_json(tmp_path / 'shards' / name / 'meta.json', {'shard_rows': rows, 'shard_tokens': rows})
  found = run_report.make_report(tmp_path)
  assert config.train.batch_size == 32 and found['epochs_by_path'] == [1.0, 2.0, 4.0, 8.0]
  assert (found['pretrain_epochs'], found['pretrain_text_tokens'], found['control_epochs']) == (0.5, 640, 0.5)
