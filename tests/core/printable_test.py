"""Text from outside is text: whatever a domain, a worker or a level is called, every door it goes through is whole."""

import json
import logging
import re
import xml.dom.minidom

import made_run
import numpy as np
import pytest
import synthetic

from dipaco_jax import report
from dipaco_jax.algorithm import grid as grids
from dipaco_jax.command_line import command
from dipaco_jax.config import settings
from dipaco_jax.core import printable
from dipaco_jax.data import corpus, sentencepiece_tokenizer
from dipaco_jax.islands import status_table
from dipaco_jax.registry import registry
from dipaco_jax.reports import curve_plots, grid_plot, module_drift, plot_style, run_report, timeline_plot
from dipaco_jax.telemetry import metrics_log

HOSTILE = (
  r'$\frac$', r'$x^2$ \$', 'a' * 400, '<b onclick="x">&amp;', '\x1b[2J\x1b]0;title\x07', 'nul\0nul', 'one\ntwo\r\n3',
  'half \ud800', '\u202egnihton', 'עברית', 'عربي', '漢字', '👩\u200d👩\u200d👧', '_hidden', '%s %d {} \\N{x}', "';DROP",
)  # fmt: skip
OBEYED = re.compile('[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]')


@pytest.mark.parametrize(
  'given, shown',
  [
    ('plain name', 'plain name'),
    (' two  blanks ', ' two  blanks '),
    ('one\ntwo\r\nthree\t', 'one two three'),
    ('\x1b[31mred', '\u241b[31mred'),
    ('half \ud800', 'half \ufffd'),
    ('\u202egnihton', '\ufffdgnihton'),
    ('👩\u200d👩\u200d👧 é עברית 漢字', '👩\u200d👩\u200d👧 é עברית 漢字'),
    ('x' * 200, 'x' * 200),
    ('x' * 201, 'x' * 199 + '…'),
  ],
)
def test_a_name_is_one_line_that_only_shows_itself(given, shown):
  assert printable.name(given) == shown == printable.name(shown)


def test_texts_keep_their_lines():
  assert printable.text('a\n\tb\x1b\0\r\u2028') == 'a\n\tb\u241b\u2400\u240d\ufffd'


def test_domains_are_plain_where_they_enter(tmp_path):
  lines = [json.dumps({'text': f'text {i}', 'domain': domain}) for i, domain in enumerate([*HOSTILE, {'a': '\ud800'}])]
  (tmp_path / 'x.jsonl').write_text('\n'.join(lines))
  data = settings.Data(source='files', train=(str(tmp_path / 'x.jsonl'),), validation_fraction=0.4)
  found = [d.domain for split in ('train', 'validation') for d in corpus.documents(data, split)]
  assert len(found) == len(lines) and not any(OBEYED.search(domain) or '\n' in domain for domain in found)
  assert {r'$\frac$', '漢字', '_hidden'} <= {*found}
  with metrics_log.Metrics(tmp_path / 'run') as writer:
    writer.write('evaluation', 'evaluate', 1, perplexity_by_domain=dict.fromkeys(found, 2.0))


SMALL = {'axes': (('a', 2), ('b', 2)), 'phases': 2, 'pretrain_steps': 20, 'tau': 5}


@pytest.fixture(scope='module')
def hostile(tmp_path_factory):
  """A run of such domains, with a picture that cannot be drawn."""
  workdir = tmp_path_factory.mktemp('hostile') / r'run $\frac$ <b>'
  synthetic.make(workdir, domains=tuple(map(printable.name, HOSTILE)), **SMALL)
  file = workdir / 'stages' / 'route.json'
  record = json.loads(file.read_text())
  record['result']['shard_tokens'] = ['many'] * 4
  file.write_text(json.dumps(record))
  return workdir


@pytest.mark.slow
def test_a_report_of_any_names_and_without_what_cannot_be_drawn(hostile, caplog):
  found = run_report.write(hostile)
  drawn = {file.stem for file in (hostile / 'plots').iterdir()}
  assert {'perplexity_by_domain', 'kinds_by_paths', 'grid'} <= drawn and 'shard_sizes' not in drawn
  assert caplog.text.count('is left out') == 1 and 'the picture shard_sizes is left out' in caplog.text
  page = (hostile / 'report.html').read_text()
  assert page.count('<svg') == len(drawn) and not OBEYED.search(page)
  assert r'$\frac$' in page and '<b onclick' not in page
  for svg in re.findall('<svg.*?</svg>', page, re.DOTALL):
    xml.dom.minidom.parseString(svg)
  assert set(found['perplexity_by_domain']) == set(map(printable.name, HOSTILE))


def test_a_comparison_with_any_names_obeys_nothing(hostile, tmp_path):
  other = tmp_path / ('\x1b[2J' + 'x' * 200)
  synthetic.make(other, **SMALL)
  table = report.compare([hostile, other], tmp_path / 'out')
  assert not OBEYED.search(table) and not OBEYED.search((tmp_path / 'out' / 'compare.html').read_text())


def test_pictures_with_any_names_are_well_formed():
  tasks = [timeline_plot.Task(name, 'train', 1, 0.0, 1.0) for name in HOSTILE]
  grid = grids.Grid({'a' * 60: 2, 'b' * 60: 2})
  storey = module_drift.Storey(grids.Level('x' * 60, '', ('a' * 60,)), 'part')
  curve = plot_style.Curve(np.array([1.0, 2.0]), np.array([3.0, 2.0]))
  for figure in (
    timeline_plot.draw(timeline_plot.rows(tasks)),
    curve_plots.perplexity_curves(dict.fromkeys(HOSTILE, curve), {}),
    grid_plot.draw(grid, [storey], [np.array([1.0, 2.0])], 'title', 'blue'),
  ):
    assert plot_style.to_png(figure).startswith(b'\x89PNG')
    assert xml.dom.minidom.parseString(plot_style.to_svg(figure, 'name')).documentElement.tagName == 'svg'


def test_what_is_logged_and_said_at_the_end_obeys_nothing(monkeypatch, capsys):
  monkeypatch.setattr(logging.root, 'handlers', [])
  monkeypatch.setattr(logging.root, 'level', logging.WARNING)
  command.quiet()
  for name in HOSTILE:
    logging.warning('%s has failed', name)
    with pytest.raises(SystemExit):
      command.fail(name)
  said = capsys.readouterr().err
  assert not OBEYED.search(said) and said.count('dipaco_jax: ') == 2 * len(HOSTILE)


def test_the_table_of_islands_obeys_nothing(tmp_path):
  tasks = registry.Registry(f'sqlite:///{tmp_path}/registry.db')
  for name in HOSTILE:
    name = name.replace('\0', '').encode('utf-8', 'replace').decode()
    tasks.beat(name, 'monitor', {'task': HOSTILE[3], 'stuck': '\x1b[2J'})
  lines = status_table.lines(tasks)
  assert len(lines) == 3 + 2 * len(HOSTILE) and not any(OBEYED.search(line) or '\n' in line for line in lines)


def test_a_prompt_with_half_a_character_is_rejected():
  with pytest.raises(ValueError, match='half a character'):
    sentencepiece_tokenizer.SentencePieceTokenizer(made_run.tokenizer_bytes()).encode('fox \udcff')
