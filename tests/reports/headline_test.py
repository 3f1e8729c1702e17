"""The words that a report leads with claim what its intervals bear out, and nothing else."""

import pytest

from dipaco_jax.pipeline import stage_records
from dipaco_jax.reports import headline

REPORT = {
  'paths': 4, 'steps': 96, 'perplexity': 17.25, 'perplexity_interval': [16.8, 17.71],
  'ratio_to_base': 0.73, 'ratio_to_base_interval': [0.717, 0.744],
  'ratio_to_control': 0.89, 'ratio_to_control_interval': [0.877, 0.902],
}  # fmt: skip


def test_the_fair_comparison_comes_first():
  assert headline.lead(REPORT) == (
    'On unseen text 4 paths, each as small as the base model, reach a perplexity of 17.25: 11% lower (10 to 12%) than '
    'the dense control (as many steps); 27% lower (26 to 28%) than the base that they started from. In brackets: 95% '
    'intervals over the validation documents.'
  )


OF_COST = {
  'control_budget': 'steps', 'control_tokens': 1000, 'paths_tokens': 4000,
  'ratio_to_control': 1.0, 'ratio_to_control_interval': [0.98, 1.02],
  'ratio_to_control_by_domain': {'law': 0.9, 'news': 1.041, 'code': 1.002, 'none': None},
  'ratio_to_control_interval_by_domain': {'law': [0.85, 0.95], 'news': [1.01, 1.07], 'code': [0.99, 1.03]},
}  # fmt: skip


def test_a_loss_does_not_look_like_a_draw():
  found = headline.lead(REPORT | OF_COST)
  assert 'no difference' not in found
  assert 'the difference from the dense control (as many steps) is not significant (interval -2.0 to +2.0%)' in found
  assert 'The dense control read 25% of the tokens that all paths read together, with 25% of their FLOPs.' in found
  assert 'The dense control is better on 2 of 3 kinds of text: news, code.' in found
  assert headline.results(REPORT | OF_COST)[-1] == (
    'the dense control is better on 2 of 3 kinds of text: news +4.1% (+1.0 to +7.0%), code +0.2%, not significant '
    '(-1.0 to +3.0%)'
  )


def test_a_control_of_the_same_cost_is_called_so():
  found = headline.lead(REPORT | OF_COST | {'control_budget': 'flops', 'control_tokens': 4000, 'control_steps': 384})
  assert 'the dense control (as many FLOPs as all paths together)' in found
  words = 'The dense control read as many tokens as all paths together, with as many FLOPs'
  assert f'{words}, but in 4 times as many sequential steps (384 instead of 96).' in found


def test_where_the_paths_are_ahead_everywhere_nothing_is_named():
  assert headline.dense_ahead(REPORT | {'ratio_to_control_by_domain': {'a': 0.9, 'b': None}}) == ''
  assert headline.dense_ahead(REPORT) == headline.budget(REPORT) == ''
  many = {f'kind {i}': 1.1 for i in range(9)}
  assert headline.dense_ahead({'ratio_to_control_by_domain': many}).endswith('+10.0%, too few documents, 3 more')


def test_without_a_control_it_says_what_it_does_not_compare():
  found = headline.lead(REPORT | {'ratio_to_control': None, 'ratio_to_control_interval': None})
  assert (
    '27% lower (26 to 28%) than the base that they started from, which was trained for 96 steps fewer, and they were '
    'not compared with the dense control (as many steps).'
  ) in found
  alone = headline.lead(REPORT | {'paths': 1, 'ratio_to_control': None, 'ratio_to_control_interval': None})
  assert alone.startswith('On unseen text one path, trained on from the base, reaches') and 'not compared' not in alone


def test_a_run_that_was_evaluated_before_there_were_intervals_speaks_of_none():
  none = dict.fromkeys(('ratio_to_base', 'ratio_to_base_interval', 'ratio_to_control', 'ratio_to_control_interval'))
  assert headline.lead(REPORT | none | {'paths': 1, 'base_perplexity': 23.6}) == (
    'On unseen text one path, trained on from the base, reaches a perplexity of 17.25; the base, at 23.60, was trained '
    'for 96 steps fewer.'
  )


def test_epochs_are_tokens_seen_of_tokens_there():
  report = {
    'pretrain_epochs': 1.5,
    'pretrain_text_tokens': 2000,
    'epochs_by_path': [0.5, 2.0],
    'shard_tokens': [800, 400],
  }
  assert headline.epochs(report) == 'base 1.50 (3,000 of 2,000 tokens), paths 0.50 to 2.00 (1,200 of 1,200 tokens)'
  one = {'pretrain_epochs': None, 'epochs_by_path': [0.5], 'shard_tokens': [800]}
  assert headline.epochs(one) == 'path 0.50 (400 of 800 tokens)'
  assert headline.epochs({}) == ''


def test_time_is_that_of_the_account_with_what_restarts_lost():
  report = {
    'wall_s': {'train': 80.0, 'control': 40.0},
    'seconds': {'train': {'inner': 80.0, 'lost': 20.0}, 'control': {'inner': 40.0, 'lost': 100.0}},
  }
  assert headline.stage_seconds(report) == {'train': 100.0, 'control': 140.0}
  assert headline.wall_time(report) == (
    '4 min, of which 2 min were lost to restarts: train 1 min 40 s, control 2 min 20 s'
  )
  assert headline.stage_seconds(report | {'island_bytes': 1}) == report['wall_s']  # there, it adds up all workers'
  assert headline.stage_seconds(report | {'seconds': {'train': {'inner': 80.0}}}) == report['wall_s']


def test_wall_time_has_units():
  assert (
    headline.wall_time({'wall_s': {'tokenize': 4.4, 'train': 80.3}}) == '1 min 25 s: tokenize 4 s, train 1 min 20 s'
  )


@pytest.mark.parametrize(
  ('ratio', 'interval', 'words'),
  [
    (0.9, [0.85, 0.95], '10% lower (5 to 15%) than it'),
    (1.1, [1.04, 1.16], '10% higher (4 to 16%) than it'),
    (0.98, [0.95, 1.01], 'the difference from it is not significant (interval -5.0 to +1.0%)'),
    (1.0, [1.0, 1.0], 'the difference from it is not significant (interval +0.0 to +0.0%)'),
    (0.994, [0.991, 0.997], '0.6% lower (0.3 to 0.9%) than it'),
    (0.9, [0.898, 0.902], '10.0% lower (9.8 to 10.2%) than it'),
    (0.7, None, '30.0% lower than it (too few documents for an interval)'),
    (1.02, None, '2.0% higher than it (too few documents for an interval)'),
  ],
)
def test_change(ratio, interval, words):
  assert headline.change(ratio, interval, 'it') == words


def test_validation_text_that_is_too_little_is_named():
  assert (
    stage_records.too_little([1000, 5000], 1000)
    == stage_records.too_little([], 1000)
    == stage_records.too_little([0], 0)
    == ''
  )
  assert stage_records.too_little([455, 9918, 7391, 0], 1000) == (
    'validation text is short of config.data.min_validation_tokens=1,000 tokens for 2 of 4 paths (path 0 has 455, path '
    '3 has 0): their results may be noise; give more text, or fewer paths'
  )
  assert '(path 0 has 1, path 1 has 1, path 2 has 1, path 3 has 1, 60 more paths have fewer too)' in (
    stage_records.too_little([1] * 64, 10)
  )


@pytest.mark.parametrize('how', headline.HELD_BACK)
def test_the_page_says_what_was_held_back(how):
  words = headline.held_back({'held_back': how, 'validation_fraction': 0.0471})
  assert 'alidation' in words and ('4.7%' in words or how == 'given')
  assert headline.held_back({}) == ''


def test_the_page_says_how_much_of_it_was_scored():
  report = {'validation_tokens': 24_585, 'validation_documents': 65, 'text_tokens': 983_400}
  tokenized = {'validation_documents': 260}  # sequences
  words = 'A sample of it was scored: 260 sequences from 65 documents with 24,585 scored tokens, 2.5% as many as there '
  assert headline.validation_size(report, tokenized) == f'{words}are training tokens.'
  assert headline.validation_size({}, tokenized) == headline.validation_size(report, {}) == ''


def test_the_page_says_why_early_stopping_may_be_worse_than_the_last_phase():
  words = headline.early_stopping({'perplexity': 99.76, 'perplexity_final': 99.65})
  assert '(99.76) can be better or worse' in words and words.endswith('here it is slightly worse (99.65).')
  assert 'here it is better (11.00)' in headline.early_stopping({'perplexity': 10.0, 'perplexity_final': 11.0})
  assert headline.early_stopping({'perplexity': 10.0, 'perplexity_final': 10.0}) == headline.early_stopping({}) == ''


def test_the_page_says_what_the_sources_of_a_mixture_gave():
  found = {
    'law': {'documents': 30, 'tokens': 750, 'repeated': 20},
    'web': {'documents': 1200, 'tokens': 250, 'repeated': 0},
  }
  words = 'Tokens of training text: law 75.0% (30 documents, its text 3.0 times); web 25.0% (1,200 documents).'
  assert headline.sources({'by_domain': found}, {'law': 3, 'web': 1}) == words
  assert headline.sources({'by_domain': found}, {}) == headline.sources({}, {'law': 1}) == ''


REFITTED = {
  'as_trained_perplexity': 20.0, 'ratio_to_as_trained': 0.95, 'ratio_to_as_trained_interval': [0.94, 0.96],
  'router_refit': {'kept_the_last': False},
}  # fmt: skip


def test_a_router_fitted_after_training_is_compared_with_that_of_training():
  than = '5% lower (4 to 6%) than the same paths with the router of training'
  found = headline.lead(REPORT | REFITTED)
  assert than in found and found.index(than) < found.index('the base that they started from')
  alone = headline.lead(REPORT | REFITTED | {'ratio_to_control': None, 'ratio_to_control_interval': None})
  assert 'the base that they started from, which was trained for' in alone
  kept = headline.lead(REPORT | REFITTED | {'router_refit': {'kept_the_last': True}})
  assert 'router' not in kept and kept == headline.lead(REPORT)


@pytest.mark.parametrize('documents, words', [
  (1, 'There is no interval: 1 different document is too few, 8 are needed.'),
  (7, 'There is no interval: 7 different documents are too few, 8 are needed.'),
  (9, 'There is no interval: a loss is not finite.'),
])  # fmt: skip
def test_the_page_says_why_there_is_no_interval(documents, words):
  report = {'perplexity': 54.2, 'perplexity_interval': None, 'validation_documents': documents}
  assert headline.why_no_interval(report) == words
  assert headline.why_no_interval(report | {'perplexity_interval': [50, 60]}) == ''
  assert headline.why_no_interval({'perplexity': None}) == ''


def test_the_page_says_how_many_copies_of_validation_text_were_left_out():
  none = {'dropped_documents': 0, 'dropped_ends': 0}
  assert headline.text_left_out(none | {'copies_of_validation': 0}) == []
  [one] = headline.text_left_out(none | {'copies_of_validation': 1})
  [more] = headline.text_left_out(none | {'copies_of_validation': 1200})
  assert one == '1 training document has text of a validation document and is left out.'
  assert more == '1,200 training documents have text of validation documents and are left out.'
  [equal] = headline.text_left_out(none | {'copies_in_validation': 299})
  assert equal == '299 validation documents are equal to another one and not counted again.'
