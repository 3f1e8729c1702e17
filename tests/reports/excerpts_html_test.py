"""What a run shows of its validation text, on its page and in a terminal; the command `inspect`."""

import contextlib
import os
import re
import subprocess
import sys

import made_run
import numpy as np
import parsed_page
import plain_transformer
import pytest
import synthetic
import tiny_run
from repository import ROOT

from dipaco_jax.core import settings
from dipaco_jax.core.grid import Grid
from dipaco_jax.data.sequences import Sequences
from dipaco_jax.inference import excerpts, trained_run
from dipaco_jax.pipeline import excerpt_choice, stage_records
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.reports import excerpts_html, excerpts_text, figures, html_page, palette, report_page, run_report
from dipaco_jax.routing import chunk_losses
from dipaco_jax.storage import publishing, seals

FOUR = Grid({'a': 2, 'b': 2})
FOUND = chunk_losses.Excerpts(4, 4, 'router', [
  chunk_losses.Excerpt('code <b>', 1, 3, 2.5, 2.25, 3.0, [
    chunk_losses.Chunk(0, 'if a < b:\n', 1, 2.0, 2.5, 0),
    chunk_losses.Chunk(4, '<script>alert("x")</script>\x1b[31m', 3, 2.25, 3.0, 4),
    chunk_losses.Chunk(8, ' & so on', 3, 3.5, 3.0, 3),
  ])
])  # fmt: skip


# -- in a run


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


# -- on a page


def test_older_runs_have_no_panel(tmp_path):
  synthetic.make(tmp_path, (('a', 2), ('b', 2)), phases=2)
  run = run_report.read_run(tmp_path, run_report.build(tmp_path))
  without = report_page.make(run, {})
  synthetic.write_json(tmp_path / chunk_losses.FILE, FOUND.to_dict())
  text = report_page.make(run, {})
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
  panel = Spans(excerpts_html.make(FOUND, FOUR))
  assert 'script' not in panel.tags and panel.tags.count('b') == 2 and 'code <b>' in panel.words
  keys, parts = panel.spans[:4], panel.spans[4:]
  assert [''.join(words) for _, words in parts] == ['if a < b:\n', '<script>alert("x")</script>␛[31m', ' & so on']
  assert [''.join(words) for _, words in keys] == figures.labels(FOUR) == ['0', '1', '2', '3']  # one name everywhere
  assert [attrs['title'] for attrs, _ in keys][3] == 'path 3: a 1, b 1'
  colours = [excerpts_html.colour(FOUR, path).style for path in range(4)]
  assert [attrs['style'] for attrs, _ in keys] == colours and len(set(colours)) == 4
  assert [attrs['style'] for attrs, _ in parts] == [colours[1], colours[3], colours[3]]
  assert [attrs['class'] for attrs, _ in parts] == ['prefix', '', 'worse']
  assert parts[0][0]['title'].split('\n')[-1] == 'not counted'
  assert parts[1][0]['title'].split('\n') == [
    'path 3: a 1, b 1',
    '2.250 nats a token',
    'base 3.000',
    'difference -0.750',
  ]
  assert panel.tags.count('sup') == 2  # the last chunk has the same path as the one before it
  words = '3.000 nats a token under the base, 2.500 under path 1, 2.250 with paths chosen anew.'
  assert words in panel.words


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
  for shown in (excerpts_html.make(found, FOUR), excerpts_text.make(found, FOUR, False)):
    assert words in shown and ('chosen anew.' in shown) == bool(by)


def test_losses_that_are_no_numbers():
  (document,) = FOUND.documents
  nothing = document._replace(nats=None, rerouted=None, chunks=[document.chunks[1]._replace(nats=None)])
  panel = Spans(excerpts_html.make(FOUND._replace(documents=[nothing]), FOUR))
  assert '3.000 nats a token under the base, - under path 1, - with paths chosen anew.' in panel.words
  assert '- ' in excerpts_text.make(FOUND._replace(documents=[nothing]), FOUR, False)


@pytest.mark.parametrize(
  'axes', [{}, {'a': 1}, {'a': 2, 'b': 2}, {'a': 4, 'b': 4}, {'w': 16}, {'a': 2, 'b': 2, 'c': 4}, {'a': 16, 'b': 16}]
)
def test_every_path_has_a_colour_that_ink_is_legible_on(axes):
  grid = Grid(axes)
  colours = [excerpts_html.colour(grid, path) for path in range(grid.num_paths)]
  inks = html_page.COLOURS['strong']
  for i, of_screen in enumerate(zip(*colours, strict=True)):  # light, and dark
    assert len(set(of_screen)) == grid.num_paths
    assert min(palette.contrast(inks[i], c) for c in of_screen) > 4.5


def test_a_path_has_the_colour_of_its_line():
  for path in range(4):
    found, line = excerpts_html.colour(FOUR, path), palette.COLOURS[path]
    assert found.light == palette.mix('#ffffff', line, 0.3)


# -- in a terminal


def test_plain_text_and_colours():
  plain = excerpts_text.make(FOUND, FOUR, False)
  assert '[path 1]if a < b:\n[path 3]<script>alert("x")</script>␛[31m & so on' in plain and '\x1b' not in plain
  assert re.search(r'^ +4 +3 +2\.250 +3\.000 +-0\.750$', plain, re.MULTILINE)
  assert re.search(r'^ +0 +1 +2\.000 +2\.500 +-0\.500  not counted$', plain, re.MULTILINE)
  coloured = excerpts_text.make(FOUND, FOUR, True)
  blue = ';'.join(str(c) for c in bytes.fromhex(excerpts_html.colour(FOUR, 1).light[1:]))
  assert f'48;2;{blue}m¹if a < b:\x1b[0m\n' in coloured  # the line's rest is not coloured
  assert '³<script>' in coloured and '³ & so on' not in coloured
  assert re.sub(r'\x1b\[[\d;]*m', '', coloured).count('\x1b') == 0


def test_texts_together():
  (one,) = FOUND.documents
  two = one._replace(counted=1, nats=0.5, rerouted=4.25, base=1.0)
  short = one._replace(counted=0, nats=None, rerouted=None, base=None)
  told = excerpts_text.make(FOUND._replace(documents=[one, two, short]), FOUR, False)
  words = 'All 4 tokens: 2.500 nats a token under the base, 2.000 routed once, 2.750 with paths chosen anew.'
  assert told.endswith(words) and 'All ' not in excerpts_text.make(FOUND, FOUR, False)
  diverged = excerpts_text.make(FOUND._replace(documents=[one, two._replace(nats=None)]), FOUR, False)
  assert '2.500 nats a token under the base, - routed once' in diverged


# -- the command


def run(*options: str, given: bytes = b'', status: int = 0) -> tuple[str, str]:
  env = os.environ | {'XLA_FLAGS': '--xla_backend_optimization_level=0', 'PYTHONPATH': str(ROOT)}
  command = [sys.executable, '-m', 'dipaco_jax.inspect', *options]
  done = subprocess.run(command, env=env, input=given, capture_output=True, timeout=tiny_run.PATIENCE_S)
  assert done.returncode == status, done.stderr.decode()
  return done.stdout.decode(), done.stderr.decode()


def test_the_command(undisturbed, tmp_path):
  words = 'aeiou yoye eaei bcd. ' * 8 + '<script>\n'
  out, err = run(
    f'--workdir={undisturbed}', '--file=-', '--every=16', f'--html={tmp_path / "x.html"}', given=words.encode()
  )
  found = excerpts.of_text(trained_run.TrainedRun(str(undisturbed)), words, 16, None, None)
  assert out == excerpts_text.make(found, FOUR, False) + '\n' and not err
  spans = Spans((tmp_path / 'x.html').read_text())
  assert not spans.fetched and 'script' not in spans.tags and spans.tags.count('h1') == 1
  assert out.count('[path ') == spans.tags.count('sup')


@pytest.mark.parametrize(
  'options, words',
  [
    (['--text=x'], '--workdir=DIR'),
    (['--workdir=x'], 'give a text: --text=WORDS or --file=FILE'),
    (['--workdir=x', '--text=x', '--file=x'], 'give a text: --text=WORDS or --file=FILE'),
    (['--workdir=x', '--file=/nowhere'], '--file=/nowhere: No such file'),
    (['--workdir=x', f'--file={sys.executable}'], 'is not UTF-8'),
    (['--workdir=x', '--text=x', '--every=0'], '--every=0 should be a whole number, 1 or more'),
    (['--workdir=x', '--text=x', '--html=/proc'], '--html=/proc cannot be written: name a file'),
    (['--workdir=/nowhere', '--text=x'], '--workdir=/nowhere: there is no run'),
  ],
)
def test_wrong_input(options, words):
  out, err = run(*options, status=2)
  assert words in err and err.count('\n') == 1 and not out


def test_the_stages_own_choice_of_chunks():
  assert excerpt_choice.every(settings.Settings()) == 32
  assert excerpt_choice.every(settings.from_dict({'evaluate': {'reroute_every': (64, 16)}})) == 16


def test_nobody_loses_pythons_inspect():
  """Not even who runs a file in the package's folder, which Python then searches first."""
  done = subprocess.run(
    [sys.executable, '-c', 'import inspect; print(inspect.signature(print))'],
    cwd=ROOT / 'dipaco_jax',
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 0, done.stderr
