"""Samples on the page: each model by its name, escaped."""

import parsed_page
import synthetic

from dipaco_jax.reports import run_report, sample_views
from dipaco_jax.storage import publishing

REPORT = {'paths': 4}
PROMPT = {'domain': 'law', 'prompt': 'The <court>', 'original': ' of law'}
FOUND = {
  'temperature': 0.7, 'prompts': [PROMPT], 'paths': [3],
  'texts': {'base': ['b<script>'], 'control': ['c'], 'paths': ['p']},
  'while_training': [{'phase': 1, 'paths': [2], 'texts': ['early']}],
}  # fmt: skip


def test_models_stand_side_by_side():
  found = sample_views.page_content(FOUND, REPORT)
  assert found['texts'][0]['rows'] == [
    ('original', ' of law'),
    ('base', 'b<script>'),
    ('dense control', 'c'),
    ('path 3', 'p'),
  ]
  assert found['texts'][0]['earlier'] == [('phase 1, path 2', 'early')] and found['when'] == ''


def test_while_training_the_newest_paths_are_shown():
  found = sample_views.page_content(FOUND | {'texts': {'base': ['b']}}, REPORT)
  assert found['texts'][0]['rows'] == [('original', ' of law'), ('base', 'b'), ('path 2', 'early')]
  assert found['when'] == 'after phase 1' and found['texts'][0]['earlier'] == []


def test_a_run_without_samples_shows_none():
  nothing = FOUND | {'texts': {}, 'while_training': []}
  assert sample_views.page_content(None, REPORT) is sample_views.page_content(nothing, REPORT) is None


def test_they_are_escaped_on_the_page(tmp_path):
  synthetic.make(tmp_path, axes=(), phases=2)
  publishing.write_json(tmp_path / 'evaluation' / 'samples.json', FOUND)
  run_report.write(tmp_path)
  page = parsed_page.Page((tmp_path / 'report.html').read_text())
  words = ''.join(page.words)
  assert 'b<script>' in words and 'The <court>' in words and 'script' not in page.tags
