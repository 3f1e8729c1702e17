"""The first cards of a report: the comparison with one dense model, and costs."""

import pytest

from dipaco_jax.reports import result_cards, result_tables, run_report


@pytest.fixture
def report(runs):
  return run_report.make_report(runs('grid'))


def words(card):
  return ' '.join([card.figure, card.words, *card.details])


def test_the_first_card_names_the_kinds_on_which_the_dense_model_is_ahead(report):
  first = result_cards.of_result(report)[0]
  assert first.figure == 'Paths 10.1% better, with 16 times the training FLOPs'
  assert 'The dense model is ahead on 2 of 8 kinds of text: law +4.0%' in words(first)
  assert "config.evaluate.control_budget='flops'" in words(first)


@pytest.mark.parametrize(
  ('ratio', 'interval', 'figure', 'more'),
  [
    (1.05, [1.02, 1.08], 'Paths 5.0% worse', 'interval +2.0 to +8.0%'),
    (1.01, [0.99, 1.03], 'Not significant: +1.0%', 'interval -1.0 to +3.0%'),
    (0.99, None, 'Not significant: -1.0%', 'no interval, as documents are too few'),
  ],
)
def test_a_difference_that_may_be_chance_is_not_called_none(report, ratio, interval, figure, more):
  changed = report | {'control_tokens': None, 'ratio_to_control': ratio, 'ratio_to_control_interval': interval}
  first = result_cards.of_result(changed)[0]
  assert first.figure == figure and more in words(first) and 'no difference' not in words(first)


def test_each_card_says_what_its_model_read_and_cost(report):
  _, paths, control, base = result_cards.of_result(report)
  assert 'Trained on 39.3 M tokens with 244 T FLOPs, after the base, all paths together.' in words(paths)
  assert 'Trained on 2.46 M tokens with 15.2 T FLOPs, 600 steps after the base.' in words(control)
  assert 'Trained on 1.23 M tokens with 7.62 T FLOPs, 300 steps.' in words(base)
  assert 'To serve: 2.07 M FLOPs a token' in words(paths) and 'To serve: 2.07 M FLOPs a token.' in words(control)


def test_a_control_of_the_same_cost_needs_no_advice(report):
  found = result_cards.of_result(report | {'control_budget': 'flops', 'control_tokens': report['paths_tokens']})[0]
  assert 'control_budget' not in words(found) and 'as many FLOPs as all paths' in words(found)


def test_a_run_of_an_earlier_version_has_its_cards_and_no_table(report):
  old = report | dict.fromkeys(
    name for name in report if 'by_domain' in name or 'by_path' in name or 'flops' in name or 'tokens' in name
  )
  assert len(result_cards.of_result(old)) == 4 and result_tables.by_kind(old) is result_tables.by_path(old) is None


def test_tables_have_a_row_for_each_kind_and_each_path_with_text(report):
  rows, head = result_tables.by_kind(report)
  assert head[:5] == ('kind', 'documents', 'base', 'dense', 'paths') and len(rows) == 8
  assert ('law', '50') in [row[:2] for row in rows] and '+4.0% (+1.0 to +7.0%)' in [row[5] for row in rows]
  rows, _ = result_tables.by_path(report)
  assert len(rows) == 15 and all('too few documents' in row[5] for row in rows)
