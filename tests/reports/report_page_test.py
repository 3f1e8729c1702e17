"""The page of synthetic runs of every shape: it stands alone, is escaped, and shows what there is."""

import dataclasses
import datetime
import json
import re

import parsed_page
import pytest
import slow
import synthetic

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.pipeline import stage
from dipaco_jax.reports import report_page, run_data, run_report
from dipaco_jax.storage import seals


@pytest.fixture(scope='module')
def reports(runs):
  """(workdir, report, page) by name; a report is written once."""
  written = {}

  def write(name):
    if name not in written:
      written[name] = run_report.write(runs(name))
    return runs(name), written[name], (runs(name) / 'report.html').read_text()

  return write


@pytest.mark.parametrize('name', slow.all_but(synthetic.RUNS, 'grid'))
def test_a_page_stands_alone_and_has_every_picture(reports, name):
  workdir, found, text = reports(name)
  assert seals.read_json(workdir / 'report.json') == found
  page = parsed_page.Page(text)
  assert not page.fetched
  drawn = sorted(p.name for p in (workdir / 'plots').iterdir())
  assert all(p.endswith('.png') for p in drawn)
  assert page.tags.count('figure') == page.tags.count('svg') == len(drawn)
  assert page.tags.count('h1') == 1 and not page.unlabelled
  assert 'http-equiv="refresh"' not in text


def test_a_grid_has_its_pictures(reports):
  workdir, *_ = reports('grid')
  expected = {'validation_perplexity', 'validation_perplexity_by_step', 'perplexity_by_domain', 'perplexity_by_path',
              'early_stopping', 'losses',
              'outer_gradients', 'shard_sizes', 'kinds_by_paths', 'grid', 'time_by_stage', 'bytes_sent',
              'holdout_losses', 'learning_rate', 'gradient_norm', 'tokens_per_s', 'agreement', 'averaging_gap',
              'siblings', 'time_by_cause'}  # fmt: skip
  assert {p.stem for p in (workdir / 'plots').iterdir()} == expected


def test_a_page_of_owners_names_them(reports):
  workdir, found, text = reports('grid')
  assert 'Validation perplexity by kind of text' in text and '<td>path 0</td>' in text
  run = run_data.read_run(workdir, found)
  s = dataclasses.replace(run.settings, routing=dataclasses.replace(run.settings.routing, method='owner'))
  grid = Grid(owner=('clinic', 'court', 'press', 'school'), topic=4)
  page = report_page.render(run._replace(settings=s, grid=grid), {})
  assert 'Validation perplexity by owner' in page and '<th>owner</th>' in page
  assert '<td>clinic,0</td>' in page and '<td>path 0</td>' not in page


def test_page_names_the_key_figures(reports):
  words = ''.join(parsed_page.Page(reports('grid')[2]).words)
  numbers = ('10.31', 'of the paths (10.02 to 10.61)', '10% lower (9 to 11%) than the dense control', '24% lower')
  numbers += 'perplexity 10.1% lower', 'The dense control is better on 2 of 8 kinds of text: law +4.0% (+1.0 to +7.0%)'
  numbers += 'read 6.25% of the tokens', 'FLOPs a token', '600 steps after the base'
  for expected in ('16 paths', *numbers, '69 times as many bytes', 'a4xb4', 'data-parallel', '5f5f5f'):
    assert expected in words


def test_bytes_are_in_gigabytes():
  assert report_page._number('peak_memory_bytes', 12_345_678_901) == '12.3 GB'
  assert report_page._number('outer_bytes_per_phase', 5_300) == '5.3 kB'


@pytest.mark.slow
def test_texts_are_escaped(tmp_path):
  synthetic.make(tmp_path / 'a<b>&', axes=(), domains=('x<script>', 'y&amp;'), phases=2)
  (tmp_path / 'a<b>&' / 'command.txt').write_text('python -m dipaco_jax.main --config.data.train=<&>')
  run_report.write(tmp_path / 'a<b>&')
  page = parsed_page.Page((tmp_path / 'a<b>&' / 'report.html').read_text())
  assert 'script' not in page.tags and 'x<script>' in ''.join(page.words)
  assert '--config.data.train=<&>' in ''.join(page.words)


def test_svgs_of_a_page_do_not_share_names(reports):
  names = [part.split('"')[0] for part in reports('grid')[2].split(' id="')[1:]]
  assert names and len(set(names)) == len(names)


@pytest.mark.parametrize('name', slow.all_but(synthetic.RUNS, 'grid'))
def test_pictures_have_the_pages_colours_and_text_that_a_telephone_shows_large_enough(reports, name):
  text = reports(name)[2]
  style, body = text.split('</style>', 1)
  svgs = [part.split('</svg>')[0] for part in body.split('<svg')[1:]]
  for svg in svgs:
    written = re.sub(r'base64,[^"]*', '', svg)
    assert not set(re.findall('#[0-9a-f]{6}', written)) - {'#000000'}
    assert f'{re.findall("--c[0-9a-f]{6}", written)[0]}:' in style
    width = float(re.search(r'viewBox="0 0 ([0-9.]+)', svg)[1])
    on_400 = 760 if width > 6 * 72 else 400 - 24 - 24 - 2  # pixels: a wide one is scrolled
    sizes = [float(size) for size in re.findall(r'font-size: ([0-9.]+)px', svg)]
    assert sizes and min(sizes) * on_400 / width >= 10


@pytest.mark.parametrize('name', slow.all_but(synthetic.RUNS, 'grid'))
def test_a_picture_that_is_alone_has_its_caption_beside_it(reports, name):
  for row in reports(name)[2].split('<div class="row">')[1:]:
    count = row.split('</figure></div>')[0].count('<figure')
    assert count == 2 or 'class="alone"' in row or 'class="wide"' in row


def test_the_header_says_when_on_what_and_in_what_precision(tmp_path):
  synthetic.make(tmp_path, axes=(), phases=2)
  for number, name in enumerate(stage.NAMES):
    file = tmp_path / 'stages' / f'{name}.json'
    about = {'ended': 1_700_000_000 + 60 * number, 'wall_s': 30.0}
    result = {'device': 'TPU v5 lite', 'num_devices': 4, 'dtype': 'bfloat16'} if name == 'train' else {}
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | about | {'result': record['result'] | result}))
  found = run_report.write(tmp_path)
  assert (found['device'], found['num_devices'], found['dtype']) == ('TPU v5 lite', 4, 'bfloat16')
  times = [datetime.datetime.fromisoformat(found[name]).timestamp() for name in ('began', 'ended')]
  assert times == [1_700_000_000 - 30, 1_700_000_000 + 240]
  words = ''.join(parsed_page.Page((tmp_path / 'report.html').read_text()).words)
  assert '4 × TPU v5 lite · bfloat16 · dipaco_jax' in words and '2023-11-1' in words  # noqa: RUF001
