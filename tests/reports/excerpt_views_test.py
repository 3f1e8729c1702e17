"""Texts by the paths that read them: on a run's page, and in a terminal."""

import contextlib
import re

import made_run
import numpy as np
import parsed_page
import plain_transformer
import pytest
import synthetic
from excerpts_of_four import FOUND, FOUR

from dipaco_jax.config import settings
from dipaco_jax.data.sequences import Sequences
from dipaco_jax.inference import trained_run
from dipaco_jax.pipeline import excerpt_choice, run as run_lib, stage_records
from dipaco_jax.reports import excerpt_views, palette, report_page, run_data, run_report
from dipaco_jax.routing import chunk_losses
from dipaco_jax.storage import publishing, seals


def test_a_run_shows_its_validation_text(undisturbed):
  found = chunk_losses.Excerpts.from_dict(seals.read_json(undisturbed / chunk_losses.FILE))
  run = trained_run.TrainedRun(str(undisturbed))
  all_of_them = Sequences(undisturbed / 'sequences', 'validation')
  texts = [run.tokenizer.decode(x.tokens) for x in all_of_them.read(range(len(all_of_them)))]
  routed = np.load(undisturbed / 'routing/0/validation.npy')
  base = {name: np.asarray(x) for name, x in run.router.base.items()}
  assert (found.every, found.prefix_tokens, found.by) == (32, 32, 'router')
  assert len(found.documents) == excerpt_choice.DOCUMENTS
  for document in found.documents:
    n = texts.index(''.join(chunk.text for chunk in document.chunks))
    tokens = all_of_them[n].tokens.astype(int)
    assert document.path == routed[n] == document.chunks[0].path
    for name, params in (('nats', run.path(document.path).params), ('base', base)):
      params = {key: np.asarray(x) for key, x in params.items()}
      expected = plain_transformer.nll(params, tokens, run.settings.model)[31:]
      assert getattr(document, name) == pytest.approx(expected.mean(), rel=1e-4) and document.counted == len(expected)
  assert {document.name for document in found.documents} == {'vowels', 'consonants'}
  assert len({document.path for document in found.documents}) == len(set(routed))
  text = (undisturbed / 'report.html').read_text()
  assert text.count('<div class="text">') == excerpt_choice.DOCUMENTS


@pytest.mark.parametrize('levels', [(('all', '.*', ()),), made_run.LEVELS], ids=['one', 'many'])
def test_nothing_is_shown_where_all_paths_are_one_model(levels, tmp_path):
  s = settings.from_dict(made_run.settings().to_dict() | {'levels': levels})
  publishing.write_json(
    stage_records.record_file(tmp_path, 'tokenize'), {'result': {'vocab_size': 330, 'domains': ['']}}
  )
  alone = run_lib.unattended(tmp_path, s, 1)
  alone.metrics.close()
  looks_for_text = pytest.raises(ValueError, match=r'meta\.json, made by the stage tokenize, is missing')
  with looks_for_text if levels is made_run.LEVELS else contextlib.nullcontext():
    excerpt_choice.write(alone)


def test_the_stages_own_choice_of_chunks():
  assert excerpt_choice.chunk_tokens(settings.Settings()) == 32
  assert excerpt_choice.chunk_tokens(settings.from_dict({'evaluate': {'reroute_every': (64, 16)}})) == 16


def test_older_runs_have_no_panel(tmp_path):
  synthetic.make(tmp_path, (('a', 2), ('b', 2)), phases=2)
  run = run_data.read_run(tmp_path, run_report.make_report(tmp_path))
  without = report_page.render(run, {})
  synthetic.write_json(tmp_path / chunk_losses.FILE, FOUND.to_dict())
  text = report_page.render(run, {})
  assert '<div class="text">' not in without and 'Who reads what' not in without
  assert text.index('Who reads what') < text.index('<div class="text">')
  parsed_page.Page(text)


class Spans(parsed_page.Page):
  """Attributes and text of each span inside a text."""

  def __init__(self, text):
    self.spans, self.inside = [], False
    super().__init__(text)

  def handle_starttag(self, tag, attrs):
    super().handle_starttag(tag, attrs)
    if tag == 'span':
      self.spans.append((dict(attrs), []))

  def handle_data(self, data):
    super().handle_data(data)
    if self.spans and self.open and self.open[-1] == 'span':
      self.spans[-1][1].append(data)


def test_the_panel_is_escaped_and_coloured():
  panel = Spans(excerpt_views.to_page(FOUND, FOUR, 'runs/tiny'))
  assert 'script' not in panel.tags and panel.tags.count('b') == 2 and 'code <b>' in panel.words
  keys, parts = panel.spans[:4], panel.spans[4:]
  assert [''.join(words) for _, words in parts] == ['if a < b:\n', '<script>alert("x")</script>␛[31m', ' & so on']
  assert (
    [''.join(words) for _, words in keys] == run_data.path_names(FOUR) == ['0', '1', '2', '3']
  )  # one name everywhere
  assert [attrs['title'] for attrs, _ in keys][3] == 'path 3: a 1, b 1'
  colours = [excerpt_views._style(FOUR, path) for path in range(4)]
  assert [attrs['style'] for attrs, _ in keys] == colours and len(set(colours)) == 4
  assert [attrs['style'] for attrs, _ in parts] == [colours[1], colours[3], colours[3]]
  assert [attrs['class'] for attrs, _ in parts] == ['prefix', '', 'worse']
  assert parts[0][0]['title'].split('\n')[-1] == 'not scored'
  assert parts[1][0]['title'].split('\n') == [
    'path 3: a 1, b 1',
    '2.250 nats a token',
    'base 3.000',
    'difference -0.750',
  ]
  assert panel.tags.count('sup') == 2  # the last chunk has the same path as the one before it
  words = 'Loss in nats per token: base 3.000, path 1 2.500, with the path chosen again along the text 2.250.'
  assert words in panel.words


def test_losses_can_be_read_without_pointing_at_a_stretch():
  panel = Spans(excerpt_views.to_page(FOUND, FOUR, 'runs/tiny'))
  (document,) = FOUND.documents
  assert excerpt_views._rows(document)[0] == ('0', '1', 'not scored', '-', '-')
  assert excerpt_views._rows(document)[1] == ('4', '3', '2.250', '3.000', '-0.750')
  assert 'Losses of each stretch, nats per token' in panel.words and 'point at' not in ''.join(panel.words)


@pytest.mark.parametrize(
  'by, words',
  [
    ('', 'Each text has one path.'),
    ('router', 'every 4 tokens, by the router, from the 4 tokens before.'),
    ('chooser', 'every 4 tokens, by the learned chooser, from all tokens before.'),
  ],
)
def test_it_says_what_chose(by, words):
  found = FOUND._replace(by=by)
  for shown in (excerpt_views.to_page(found, FOUR, 'runs/tiny'), excerpt_views.to_text(found, FOUR, False)):
    assert words in shown and ('chosen again along the text' in shown) == bool(by)


def test_a_loss_that_is_not_known_is_a_dash():
  (document,) = FOUND.documents
  nothing = document._replace(nats=None, rerouted=None, chunks=[document.chunks[1]._replace(nats=None)])
  panel = Spans(excerpt_views.to_page(FOUND._replace(documents=[nothing]), FOUR, 'runs/tiny'))
  assert 'Loss in nats per token: base 3.000, path 1 -, with the path chosen again along the text -.' in panel.words
  assert '- ' in excerpt_views.to_text(FOUND._replace(documents=[nothing]), FOUR, False)


def test_paths_are_marks_in_plain_text_and_colours_in_a_terminal():
  plain = excerpt_views.to_text(FOUND, FOUR, False)
  assert '[path 1]if a < b:\n[path 3]<script>alert("x")</script>␛[31m & so on' in plain and '\x1b' not in plain
  assert re.search(r'^ +4 +3 +2\.250 +3\.000 +-0\.750$', plain, re.MULTILINE)
  assert re.search(r'^ +0 +1 +2\.000 +2\.500 +-0\.500  not scored$', plain, re.MULTILINE)
  coloured = excerpt_views.to_text(FOUND, FOUR, True)
  blue = ';'.join(str(c) for c in bytes.fromhex(palette.path_colours(FOUR, 1)[0][1:]))
  assert f'48;2;{blue}m¹if a < b:\x1b[0m\n' in coloured  # the line's rest is not coloured
  assert '³<script>' in coloured and '³ & so on' not in coloured
  assert re.sub(r'\x1b\[[\d;]*m', '', coloured).count('\x1b') == 0


def test_means_are_over_the_tokens_of_all_texts():
  (one,) = FOUND.documents
  two = one._replace(counted=1, nats=0.5, rerouted=4.25, base=1.0)
  short = one._replace(counted=0, nats=None, rerouted=None, base=None)
  told = excerpt_views.to_text(FOUND._replace(documents=[one, two, short]), FOUR, False)
  words = 'Loss in nats per token, all 4 tokens: base 2.500, routed once 2.000, '
  words += 'with the path chosen again along the text 2.750.'
  assert told.endswith(words) and 'all 4 tokens' not in excerpt_views.to_text(FOUND, FOUR, False)
  diverged = excerpt_views.to_text(FOUND._replace(documents=[one, two._replace(nats=None)]), FOUR, False)
  assert 'base 2.500, routed once -' in diverged
