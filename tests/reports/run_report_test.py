"""The report of synthetic runs of every shape: its figures are the artefacts', its page stands alone."""

import datetime
import json
import os
import re
import subprocess
import sys

import numpy as np
import parsed_page
import pytest
import repository
import synthetic

from dipaco_jax import report
from dipaco_jax.core import grid as grids
from dipaco_jax.core import settings
from dipaco_jax.pipeline import stage, stage_records
from dipaco_jax.reports import (
  comparison,
  figures,
  grid_plot,
  history,
  module_drift,
  palette,
  plot_style,
  plots,
  report_page,
  run_report,
)
from dipaco_jax.reports import html_page as page_lib
from dipaco_jax.storage import lock, seals
from dipaco_jax.training import metrics_log

FIELDS = (
  'perplexity perplexity_by_path perplexity_by_domain base_perplexity validation_tokens bits_per_byte train_tokens '
  'paths parameters_path parameters_total train_flops tokens_per_s model_flops_utilization step_s outer_s '
  'outer_fraction outer_bytes_per_phase synchronous_bytes_per_phase peak_memory_bytes compilations wall_s goodput '
  'modules_sha256 config_sha256 versions'
).split()

RUNS = {
  'grid': {},
  'one_path': {'axes': (), 'domains': ('stdlib',), 'phases': 3},
  'diloco': {'axes': (('a', 8),), 'phases': 1, 'domains': ()},
  'half': {'stages': 3},
  '256_paths': {'axes': (('a', 16), ('b', 16)), 'phases': 2, 'tau': 10},
}


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """Workdirs by name, made when they are asked for."""
  made = {}

  def make(name):
    if name not in made:
      made[name] = tmp_path_factory.mktemp('runs') / name
      synthetic.make(made[name], **RUNS[name])
    return made[name]

  return make


@pytest.fixture(scope='module')
def reports(runs):
  """(workdir, report, page) by name; a report is written once."""
  written = {}

  def write(name):
    if name not in written:
      written[name] = run_report.write(runs(name))
    return runs(name), written[name], (runs(name) / 'report.html').read_text()

  return write


@pytest.mark.parametrize('name', RUNS)
def test_report(reports, name):
  workdir, found, text = reports(name)
  assert seals.read_json(workdir / 'report.json') == found
  assert set(FIELDS) <= set(found)
  page = parsed_page.Page(text)
  assert not page.fetched
  drawn = sorted(p.name for p in (workdir / 'plots').iterdir())
  assert all(p.endswith('.png') for p in drawn)
  assert page.tags.count('figure') == page.tags.count('svg') == len(drawn)
  assert page.tags.count('h1') == 1 and not page.unlabelled


def test_pictures_of_a_grid(reports):
  workdir, *_ = reports('grid')
  expected = {'validation_perplexity', 'perplexity_by_domain', 'perplexity_by_path', 'early_stopping', 'losses',
              'outer_gradients', 'shard_sizes', 'kinds_by_paths', 'grid', 'time_by_stage', 'bytes_sent',
              'holdout_losses', 'learning_rate', 'gradient_norm', 'tokens_per_s', 'agreement', 'averaging_gap',
              'siblings'}  # fmt: skip
  assert {p.stem for p in (workdir / 'plots').iterdir()} == expected


def test_figures_are_those_of_the_stages(runs):
  found = run_report.build(runs('grid'))
  for name_of_stage, names in (('evaluate', run_report.EVALUATE), ('train', run_report.TRAIN)):
    result = json.loads((runs('grid') / 'stages' / f'{name_of_stage}.json').read_text())['result']
    assert {name: found[name] for name in names} == {name: result.get(name) for name in names}
  assert found['wall_s'] == synthetic.WALL_S | {'control': 1.2, 'evaluate': synthetic.WALL_S['evaluate'] - 1.2}
  config = settings.from_dict(json.loads((runs('grid') / 'config.json').read_text()))
  assert found['config_sha256'] == settings.digest(config)
  assert found['versions']['python'] == '.'.join(map(str, sys.version_info[:3]))
  assert {'jax', 'flax', 'optax', 'orbax', 'dipaco_jax'} <= set(found['versions'])


def test_what_is_not_measured_is_none(runs):
  found = run_report.build(runs('half'))
  assert found['perplexity'] is None and found['train_tokens'] is None
  assert found['paths'] == 16 and found['pretrain_steps'] == 300
  assert list(found['wall_s']) == ['tokenize', 'pretrain', 'route']


def test_page_names_the_key_figures(reports):
  words = ''.join(parsed_page.Page(reports('grid')[2]).words)
  numbers = ('10.31', 'of the paths (10.02 to 10.61)', '10% lower (9 to 11%) than one dense model', '24% lower')
  for expected in ('16 paths', *numbers, '69 times as much', 'a4xb4', 'this run', '5f5f5f'):
    assert expected in words


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


def test_compare(runs, tmp_path):
  table = report.compare([runs('grid'), runs('one_path'), runs('half')], tmp_path)
  lines = {line.split('  ')[0]: line.split() for line in table.splitlines()}
  assert table.split()[:3] == ['grid', 'one_path', 'half']
  assert lines['perplexity'][1:] == ['10.310', '10.310', '-']
  assert lines['config.routing.method'][1:] == ['kmeans', 'single', 'kmeans']
  assert 'config.model.width' not in table and len({len(line) for line in table.splitlines()}) == 1
  page = parsed_page.Page((tmp_path / 'compare.html').read_text())
  assert not page.fetched and 'config.routing.method' in page.words
  assert (tmp_path / 'compare.png').read_bytes().startswith(b'\x89PNG')


def test_rerouted_perplexities_stand_side_by_side():
  found = {'learned': {'16': 9.0, '128': 9.5}}, None, {'learned': {'16': 8.0}, 'oracle': {'16': 7.0}}
  assert comparison.rerouted([{'reroute': one} for one in found]) == [
    ['re-routed, learned, W = 128', '9.500', '-', '-'],
    ['re-routed, learned, W = 16', '9.000', '-', '8.000'],
    ['re-routed, oracle, W = 16', '-', '-', '7.000'],
  ]


def test_a_great_gap_is_explained(runs, tmp_path):
  config = stage_records.read_settings(runs('grid'))
  tau = config.train.steps_per_phase
  found = history.read(runs('grid'), 16)
  apart = figures.gap(found, tau)
  assert apart == pytest.approx(0.3, abs=0.2)  # by the curves of synthetic.py, which end 0.15 to 0.45 nats apart
  rise = found._replace(holdout=plot_style.Curve(found.holdout.steps, found.holdout.values + 1))
  assert figures.gap(rise, tau) == pytest.approx(apart + 1)
  nothing = plot_style.Curve(np.zeros(0, int), np.zeros((0, 16)))
  assert figures.gap(found._replace(holdout=nothing), tau) is None
  run = run_report.read_run(runs('grid'), run_report.build(runs('grid')))
  for history_, words in ((found, ''), (rise, f'In the last phase it lies {apart + 1:.1f} nats above')):
    caption = figures._holdout(run._replace(history=history_)).caption
    assert words in caption and ('nats above' in caption) == bool(words or apart > figures.GREAT_GAP)


def test_short_names():
  assert comparison.short_names(['runs/a', 'runs/b/']) == ['a', 'b']
  assert comparison.short_names(['x/run', 'y/run']) == ['x/run', 'y/run']


# -- on light and dark, on large and small screens


def test_text_is_legible_on_light_and_dark():
  for colour in (palette.INK, palette.GREY, palette.ORANGE, *palette.COLOURS):
    assert palette.contrast(colour, palette.PAPER) > 4.5
    assert palette.contrast(palette.DARK[colour], palette.DARK[palette.PAPER]) > 4.5
  for shade in (palette.shade(name, share) for name in palette.PALE for share in np.linspace(0, 1, 51)):
    assert palette.contrast(palette.INK, shade) > 4.5
    assert palette.contrast(palette.DARK[palette.INK], palette.DARK[shade]) > 4.5
  light, dark = ({name: pair[i] for name, pair in page_lib.COLOURS.items()} for i in (0, 1))
  for theme in (light, dark):
    for ink in ('ink', 'strong', 'quiet', 'accent'):
      assert min(palette.contrast(theme[ink], theme[ground]) for ground in ('ground', 'paper', 'notice')) > 4.5


@pytest.mark.parametrize('name', RUNS)
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
    assert sizes and min(sizes) * on_400 / width > 9


@pytest.mark.parametrize(
  ('ticks', 'words'),
  [
    ([40, 42.5, 45, 47.5], ['40.0', '42.5', '45.0', '47.5']),
    ([0, 500, 1000], ['0', '500', '1,000']),
    ([0, 0.0005, 0.001], ['0.0000', '0.0005', '0.0010']),
    ([0, 250_000, 500_000], ['0', '250 K', '500 K']),
    ([1e6, 1.5e6], ['1,000 K', '1,500 K']),
    ([2e7, 2.5e7], ['20 M', '25 M']),
    ([3.0], ['3']),
    ([], []),
  ],
)
def test_ticks_neither_repeat_nor_round(ticks, words):
  assert plot_style.tick_words(ticks) == words


def test_phases_and_steps_are_whole():
  curve = plot_style.Curve(np.array([100, 101]), np.array([[3.0], [2.0]]))
  ax = plots.holdout(curve, ['path']).axes[0]
  ax.figure.canvas.draw()
  shown = [t.get_text() for t in ax.get_xticklabels()]
  assert len({*shown}) == len(shown) and all(word.isdigit() for word in shown) and {'100', '101'} <= {*shown}


def test_a_table_is_never_cut_off():
  few, many = page_lib.table([('a', 'b')]), page_lib.table([('a', 'b', 'c', 'd')], ('', 'x', 'y', 'z'))
  assert 'class="pairs"' in few and 'scroll' not in few  # its rows become blocks on a small screen
  assert many.startswith('<div class="scroll" role="region" tabindex="0"')


def test_a_picture_that_is_alone_has_its_caption_beside_it(reports):
  for name in RUNS:
    for row in reports(name)[2].split('<div class="row">')[1:]:
      count = row.split('</figure></div>')[0].count('<figure')
      assert count == 2 or 'class="alone"' in row or 'class="wide"' in row


def test_early_stopping_that_stops_nothing_is_a_sentence(tmp_path):
  synthetic.make(tmp_path, (('a', 2), ('b', 2)), phases=3)
  synthetic.write_json(tmp_path / 'paths' / 'best.json', {'version': [3] * 4})
  found = figures.make(run_report.read_run(tmp_path, run_report.build(tmp_path)))
  assert 'early_stopping' not in found and 'All paths were best after the last phase' in found['holdout_losses'].caption
  synthetic.write_json(tmp_path / 'paths' / 'best.json', {'version': [3, 1, 3, 3]})
  found = figures.make(run_report.read_run(tmp_path, run_report.build(tmp_path)))
  assert found['early_stopping'].caption == '1 of 4 paths is taken from before the last phase.'


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


# -- of a run that trains


def test_a_run_that_trains_has_a_page_that_says_so(tmp_path):
  synthetic.make(tmp_path, stages=3)
  text = run_report.page_so_far(tmp_path)
  words = ' '.join(''.join(parsed_page.Page(text).words).split())
  assert 'This run is not finished, and no process works on it: phase 6 of 12 is done. Written at 20' in words
  with lock.hold(tmp_path):
    words = ''.join(parsed_page.Page(run_report.page_so_far(tmp_path)).words)
  assert 'This run is still training: phase 6 of 12 is done. Written at 20' in words
  assert 'id="perplexity_by_path"' in text and 'id="losses"' in text and '6 of 12phases are done' in words
  assert not (tmp_path / 'report.json').exists()  # which says that a run is finished


# -- what it is made from


def test_history_has_paths_that_take_turns(tmp_path):
  with metrics_log.Metrics(tmp_path) as writer:
    for updates, (step, path, loss) in enumerate([(10, 0, 3.0), (20, 0, 2.0), (10, 1, 4.0), (20, 1, None)]):
      writer.write('step', 'train', updates, step=step, paths=[path], loss=[loss])
  found = history.read(tmp_path, 3)
  assert found.training.steps.tolist() == [10, 20]
  np.testing.assert_array_equal(found.training.values, [[3, 4, np.nan], [2, np.nan, np.nan]])


def test_long_curves_are_means_of_stretches(tmp_path):
  steps = 4 * history.POINTS
  with metrics_log.Metrics(tmp_path) as writer:
    for step in range(1, steps + 1):
      writer.write('step', 'train', step, step=step, paths=[0], loss=[float(step)])
  curve = history.read(tmp_path, 1).training
  assert curve.steps.tolist() == list(range(4, steps + 1, 4))
  np.testing.assert_allclose(curve.values[:, 0], curve.steps - 1.5)


def test_drift_against_numpy(runs):
  workdir = runs('grid')
  config = stage_records.read_settings(workdir)
  grid = grids.Grid(config.grid)
  levels = grids.make_levels(grid, config.levels)
  from safetensors.numpy import load_file

  base = load_file(workdir / 'base' / 'params.safetensors')
  for slab, found in module_drift.measure(workdir, 12, grid, levels):
    files = [
      workdir / 'modules' / '12' / slab.level.name / f'{"-".join(map(str, m))}.safetensors'
      for m in grid.modules(slab.level)
    ]
    modules = np.stack([np.concatenate([load_file(f)[n].ravel() for n in slab.names]) for f in files]).astype(float)
    start = np.concatenate([base[n].ravel() for n in slab.names]).astype(float)
    norm = np.linalg.norm(start)
    np.testing.assert_allclose(found.from_base, np.linalg.norm(modules - start, axis=1) / norm, rtol=1e-9)
    expected = np.linalg.norm(modules - modules.mean(0), axis=1) / norm
    np.testing.assert_allclose(found.from_siblings, expected, rtol=1e-9)


def test_slabs_follow_the_network():
  grid = grids.Grid({'a': 2, 'b': 2})
  specs = (('middle', r'block_([1-9]|10)/\w+/', ['a']), ('ends', 'embed|block_0/|block_11/|final|head', ['a', 'b']))
  levels = grids.make_levels(grid, specs)
  names = [f'block_{i}/{part}' for i in range(12) for part in ('attention/q', 'mlp/up')]
  found = module_drift.slabs(levels, [*names, 'embed/tokens', 'final_norm/scale', 'head/kernel'])
  parts = [('ends', 'embed, block 0'), ('middle', 'blocks 1-10'), ('ends', 'block 11, final norm, head')]
  assert [(slab.level.name, slab.parts) for slab in found] == parts
  assert sorted(n for slab in found for n in slab.names) == sorted(
    [*names, 'embed/tokens', 'final_norm/scale', 'head/kernel']
  )


def test_levels_that_share_blocks_are_slabs_of_their_own():
  grid = grids.Grid({'a': 2})
  levels = grids.make_levels(grid, (('norms', 'norm', []), ('rest', 'mlp|embed', ['a'])))
  found = module_drift.slabs(levels, ['embed/tokens', 'block_0/norm', 'block_0/mlp', 'block_1/norm', 'block_1/mlp'])
  assert [(slab.level.name, slab.parts) for slab in found] == [
    ('rest', 'embed'),
    ('norms', 'blocks 0-1 (part)'),
    ('rest', 'blocks 0-1 (part)'),
  ]


@pytest.mark.parametrize('axes', [(), ('a',), ('b',), ('a', 'b'), ('a', 'c')])
def test_patches_of_the_drawn_grid_are_the_modules(axes):
  grid = grids.Grid({'a': 2, 'b': 3, 'c': 4})
  level = grids.Level('x', '', axes)
  index = grid_plot.modules_of_paths(grid, level)
  assert index.shape == (2, 12)
  modules = list(grid.modules(level))
  assert [modules[i] for i in index.ravel()] == [grid.module(level, c) for c in grid.points()]


def test_labels_do_not_overlap():
  places = plot_style._spread([1.0, 1.01, 5.0, 1.02], 0.5)
  assert np.diff(np.sort(places)).min() > 0.499 and np.argsort(places).tolist() == [0, 1, 3, 2]


def test_every_picture_of_odd_data():
  nowhere = plot_style.Curve(np.zeros(0, int), np.zeros((0, 2)))
  plots.training('Loss', 'nats', plot_style.Curve(np.zeros(0, int), np.zeros(0)), nowhere, ['0', '1'])
  plots.perplexity_curves({'a': plot_style.Curve(np.zeros(0, int), np.zeros(0))}, {'a': None})
  plots.loss_matrix(np.array([[1.0, np.nan], [2.0, 1.0]]), ['0', '1'])
  kinds = plots.kinds_by_paths(np.arange(300).reshape(3, 100), [f'kind {i}' for i in range(100)], ['0', '1', '2'])
  assert [t.get_text() for t in kinds.axes[0].get_yticklabels()][-1] == '76 others'
  plot_style.to_png(plots.bars('Nothing', [('a', [(0.0, 'red')], '0')]))


@pytest.mark.parametrize(('n', 'words'), [(812, '812'), (1.049e6, '1.05 M'), (5.3e9, '5.3 B'), (None, 'not known')])
def test_count(n, words):
  assert report_page.count(n) == words


# -- the command


def command(*args):
  env = os.environ | {'PYTHONPATH': str(repository.ROOT)}
  return subprocess.run(
    [sys.executable, '-m', 'dipaco_jax.report', *args], capture_output=True, text=True, env=env, timeout=60
  )


@pytest.mark.parametrize(
  ('args', 'words'),
  [
    ([], '--workdir=DIR'),
    (['--workdir=/nowhere'], 'there is no run here'),
    (['--workdri=x'], '--workdri: there is no such option; did you mean --workdir?'),
    (['x'], "'x' is not an option"),
    (['--workdir=gs://b/x'], '--workdir=gs://b/x: a report is made in a folder'),
    (['--workdir=x', '--workdir=x'], '--workdir=x is named twice'),
    (['--workdir=x,y'], 'name each run by a --workdir of its own'),
    (['--workdir=x', '--out=y'], '--out=y is for several runs'),
  ],
)
def test_wrong_input(args, words):
  done = command(*args)
  assert done.returncode == 2 and words in done.stderr and not done.stdout
  assert len(done.stderr.strip().splitlines()) == 1


def test_a_run_without_a_complete_stage(tmp_path):
  synthetic.make(tmp_path, stages=0)
  with pytest.raises(ValueError, match='no stage of this run is complete yet'):
    run_report.build(tmp_path)


def test_command(runs):
  done = command(f'--workdir={runs("one_path")}')
  assert done.returncode == 0, done.stderr
  assert 'report.html' in done.stdout and (runs('one_path') / 'report.html').exists()


def test_help():
  done = command('--help')
  assert done.returncode == 0 and '--workdir' in done.stdout
