"""The experiments' configs are what they say, and their scripts run what is missing, once."""

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import signal
import sys

import pytest
import repository
import tiny_run
from experiment_scripts import finish, start, wait_for

from dipaco_jax.core import modules, settings
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import stage
from dipaco_jax.training import performance

sys.path.insert(0, str(repository.ROOT / 'experiments'))
import common
import config
import readme
import runs
import split
from runs import Row

FOLDER = runs.HERE
PLANNED = [(size, table, row) for size in config.SIZES for table in readme.TABLES for row in table.rows(size)]


@functools.cache
def shapes(of: settings.Model, vocab_size: int):
  return transformer.shapes(transformer.make_model(of, vocab_size))


def made(size: str, method: str, **changes) -> settings.Settings:
  return runs.make(size, Row('', '', method, changes), 0).settings


def flops(s: settings.Settings) -> float:
  """Of the base and of all paths."""
  paths = math.prod(dict(s.grid).values()) * s.train.phases * s.train.steps_per_phase * s.train.batch_size
  tokens = (paths + s.pretrain.steps * s.pretrain.batch_size) * s.model.seq_len
  return tokens * performance.flops_per_token(s.model, s.tokenizer.vocab_size, s.model.seq_len)


@pytest.mark.parametrize('size', config.SIZES)
def test_every_row_is_a_valid_run_whose_levels_catch_all_parameters(size):
  for _, table, row in (planned for planned in PLANNED if planned[0] == size):
    s = runs.make(size, row, 0).settings
    layout = modules.make_layout(s.grid, s.levels, shapes(s.model, s.tokenizer.vocab_size))
    assert len(layout.owner) == len(shapes(s.model, s.tokenizer.vocab_size)), (table.name, row.name)
    assert s.decay_steps == s.pretrain.steps + s.train.phases * s.train.steps_per_phase, (table.name, row.name)


def test_rows_of_a_table_are_different_runs():
  for size in config.SIZES:
    for table in readme.TABLES:
      rows = table.rows(size)
      assert len({row.name for row in rows}) == len({row.title for row in rows}) == len(rows)
      assert len({runs.make(size, row, 0).config for row in rows}) == len(rows), table.name


@pytest.mark.parametrize('size', config.SIZES)
def test_tau_is_all_that_differs_in_its_rows(size):
  rows = [row for row in readme.tau.rows(size) if row.name.startswith('tau_')]
  found = [runs.make(size, row, 0).settings for row in rows]
  assert len({s.train.phases * s.train.steps_per_phase for s in found}) == 1 < len(found)
  tau = dataclasses.replace(found[0].train, phases=1, steps_per_phase=1)
  assert len({dataclasses.replace(s, train=tau) for s in found}) == 1


@pytest.mark.parametrize('size', config.SIZES)
def test_all_rows_of_a_table_of_equal_steps_train_as_many(size):
  for table in (readme.tau, readme.sharing, readme.wire, readme.upcycle):
    found = [runs.make(size, row, 0).settings for row in table.rows(size)]
    assert len({s.pretrain.steps + s.train.phases * s.train.steps_per_phase for s in found}) == 1, table.__name__


@pytest.mark.parametrize('size', config.SIZES)
def test_methods_share_a_base(size):
  def base(method):
    upto = [field for one in stage.up_to('pretrain') for field in one.depends]
    return settings.digest(made(size, method), *upto)

  methods = ('dense', 'diloco', 'fragments', 'flat', 'dipaco', 'own', 'ends', 'rerouted', 'discriminative')
  assert len({base(method) for method in methods}) == 1
  assert base('dense,2') != base('dense')  # its cosine is longer


@pytest.mark.parametrize('size', [size for size in config.SIZES if size not in ('test', 'smoke')])
def test_equal_flops(size):
  num_paths = math.prod(config.SIZES[size].grid)
  equal = [flops(made(size, method)) for method in ('dipaco', 'diloco', 'flat', f'dense,{num_paths}')]
  assert len(set(equal)) == 1
  assert flops(made(size, 'larger')) == pytest.approx(equal[0], rel=0.02)  # it has whole phases of the same tau


def test_path_specific_ends_leave_a_block_of_each_level():
  # Blocks 0, 5, 6 and 11 of 12 are the paper's [4].
  assert config.own_blocks(12) == [0, 5, 6, 11]
  assert config.own_blocks(8) == [0, 3, 4, 7]
  assert config.own_blocks(4) == [0, 3]
  assert config.own_blocks(2) == []


def test_a_digest_knows_the_config_and_the_bytes_of_the_text(tmp_path):
  one, two = (tmp_path / name for name in ('one.txt', 'two.txt'))
  one.write_text('text')
  two.write_text('text')
  row = Row('x', 'x', 'dipaco')
  base = runs.make('micro', row, 0, str(one))
  assert base.settings.data.train == (str(one),) and base.settings.data.source == 'files'
  assert runs.make('micro', row, 0, str(two)).key == base.key
  assert runs.make('micro', row, 0, str(one), str(two)).text != base.text
  assert runs.make('micro', row, 1, str(one)).config != base.config
  assert runs.make('micro', row._replace(changes={'outer.reweigh': False}), 0, str(one)).config != base.config
  two.write_text('texts')
  assert runs.make('micro', row, 0, str(two)).text != base.text


def test_a_row_starts_from_the_base_as_it_is_stated_now(monkeypatch):
  def start():
    row = next(row for row in readme.methods.rows('micro') if row.name == 'diloco_own')
    return row.changes['pretrain.init'], runs.make('micro', row, 0).config

  place, digest = start()
  shares = readme.methods.SHARES['micro']
  monkeypatch.setitem(readme.methods.SHARES, 'micro', shares | {'diloco': shares['diloco'] / 2})
  other, other_digest = start()
  assert other != place and other_digest != digest  # though the row itself is the same


def test_validation_text_is_cut_into_pieces_that_begin_with_a_word():
  text = ' '.join(f'word{n}' for n in range(300))
  line = json.dumps({'text': text, 'domain': 'books'}).encode()
  found = [json.loads(piece) for piece in split.pieces(line)]
  assert len(found) > 3 and {piece['domain'] for piece in found} == {'books'}
  assert all(len(piece['text']) == split.PIECE and piece['text'].startswith('word') for piece in found)
  places = [text.index(piece['text']) for piece in found]
  assert all(split.PIECE <= b - a < split.PIECE + len('word000 ') for a, b in itertools.pairwise(places))
  short = json.dumps({'text': 'short'}).encode()
  assert list(split.pieces(short)) == [short]


# -- tables


ROWS = [Row(name, name.title(), method) for name, method in {'dense': 'dense', 'grid': 'dipaco', 'bad': 'ends'}.items()]
ROWS.append(Row('none', 'None', 'flat'))
COLUMNS = (
  common.Column('p', 'perplexity'),
  common.Column('less', 'perplexity', '+.1f', 'dense'),
  common.Column('n', 'a.b', '.2g'),
)
TABLE = common.Table('t', 'A table', lambda size: ROWS, COLUMNS, lambda table, rows, results: None)


def results() -> common.Results:
  found = {'dense': (10.0, 12.0), 'grid': (9.0, 10.0, 5.0), 'bad': (None,)}
  return {
    (row, seed): {'perplexity': perplexity, 'a': {'b': 1234} if seed == 1 else None}
    for row, by_seed in found.items()
    for seed, perplexity in enumerate(by_seed)
  }


def test_markdown():
  lines = common.to_markdown(TABLE, 'micro', results()).splitlines()
  assert lines[2] == '| Dense | 2 | 11.00 ± 1.41 | +0.0 ± 0.0 | 1.2e+03 (of 1) |'
  # Differences are by seed: -1 and -2; seed 2 has no dense run to compare with.
  assert lines[3] == '| Grid | 3 | 8.00 ± 2.65 | -1.5 ± 0.7 (of 2) | 1.2e+03 (of 1) |'
  assert lines[4] == '| Bad | 1 | diverged |  |  |'
  assert lines[5:] == ['', 'Not run: None.']
  assert common.lowest(TABLE, 'micro', results()) == 'grid'


def test_questions_have_one_right_answer_among_others_of_the_kind():
  def document(kind, i):
    source = {'source': f'{kind}{i // 2}'} if kind == 'books' else {}
    return json.dumps({'text': ' '.join(f'{kind}{i}w{n}' for n in range(80)), 'domain': kind} | source)

  asked = readme.downstream.questions([document(kind, i) for kind in ('books', 'code') for i in range(6)])
  assert len(asked['next']) == len(asked['word']) == 12
  for question in [*asked['next'], *asked['word']]:
    assert len(set(question['answers'])) == 4
    of = question['question'].split('w')[0]  # the document's own words begin like that
    right = [answer for answer in question['answers'] if answer.split()[0].split('w')[0] == of]
    assert [question['answers'][question['right']]] == right
    assert all(answer.split()[0].startswith(question['kind']) for answer in question['answers'])
    numbers = [int(answer.split()[0].split('w')[0][len(question['kind']) :]) // 2 for answer in question['answers']]
    own = int(of[len(question['kind']) :]) // 2
    assert question['kind'] == 'code' or numbers.count(own) == 1  # the others are of other sources


def test_results_of_another_config_are_left_out(tmp_path):
  digest = runs.make('micro', ROWS[0], 0).config
  records = [{'row': 'dense', 'seed': seed, 'config': digest, 'text': ''} for seed in (0, 1)]
  records.append({'row': 'gone', 'seed': 0, 'config': digest, 'text': ''})
  common.publish(tmp_path / 'micro' / 't.json', json.dumps({'runs': records}))
  assert list(common.read(TABLE, 'micro', tmp_path)) == [('dense', 0)]  # that of seed 1 is of seed 0's config


def test_results_of_another_text_are_kept(tmp_path):
  options = '--rows=dense', '--seeds=0'
  row = next(row for row in readme.methods.TABLE.rows('test') if row.name == 'dense')
  record = {'row': 'dense', 'seed': 0, 'config': runs.make('test', row, 0).config, 'text': 'another'}
  file = tmp_path / 'results' / 'test' / 'methods.json'
  common.publish(file, json.dumps({'runs': [record]}))
  process = start(tmp_path, *options)
  assert 'is of another text' in process.communicate()[1] and process.returncode == 2
  assert json.loads(file.read_text())['runs'] == [record]


def test_pages_hold_the_results_as_they_are():
  assert [table for tables in readme.PAGES.values() for table in tables] == readme.TABLES
  for name, tables in readme.PAGES.items():
    words = (FOLDER / name).read_text()
    assert readme.render(words, common.RESULTS, tables) == words


def test_claims_stand_between_their_markers(tmp_path):
  row = next(row for row in readme.methods.rows('micro') if row.name == 'dense')
  record = {'row': 'dense', 'seed': 0, 'config': runs.make('micro', row, 0).config, 'text': 'x', 'perplexity': 47.0}
  record |= {'environment': {'devices': 1, 'device': 'cpu', 'cpus': 2}, 'wall_s': {'train': 1.0}}
  common.publish(tmp_path / 'micro' / 'methods.json', json.dumps({'runs': [record]}))
  tables = ''.join(f'<!-- {table.name} -->\n<!-- end of {table.name} -->\n' for table in readme.TABLES)
  words = 'is <!-- figure methods dense -->1<!-- / -->,\n<!-- figure methods dense perplexity .1f -->2<!-- / -->.\n'
  made = readme.render(words + tables, tmp_path, readme.TABLES)
  assert re.sub('<!--.*?-->', '', made).startswith('is 47.00,\n47.0.\n')
  with pytest.raises(ValueError, match='no table'):
    readme.render(words.replace('methods', 'others') + tables, tmp_path, readme.TABLES)


def test_every_command_of_the_page_is_there():
  scripts = {
    word for word in (FOLDER / 'README.md').read_text().replace('`', ' ').split() if word.startswith('experiments/')
  }
  assert {'experiments/methods.py', 'experiments/readme.py', 'experiments/split.py'} <= scripts
  assert not [name for name in scripts if ':' not in name and not (FOLDER.parent / name).is_file()]
  assert {f'{table.name}.py' for table in readme.TABLES} <= {file.name for file in FOLDER.iterdir()}


def test_the_learning_rate_is_the_tuned_one():
  for size in config.SIZES:
    if found := common.read(readme.tune.TABLE, size, common.RESULTS):
      for stated, prefix in (
        (made(size, 'dense').inner.learning_rate, ''),
        (made(size, 'larger').inner.learning_rate, 'larger_'),
        (readme.muon.RATE[size], 'muon_'),
      ):
        rates = {n: r['perplexity_final'] for (n, _), r in found.items() if re.fullmatch(prefix + r'[\d.]+', n)}
        best = min(rates, key=lambda name: rates[name])
        assert float(best.removeprefix(prefix)) == stated


def test_paths_have_the_rates_and_outer_steps_that_were_best():
  for size, config_of_size in config.SIZES.items():
    found = common.read(readme.tune.TABLE, size, common.RESULTS)
    peak = config_of_size.config['inner']['learning_rate']
    for name in readme.tune.METHODS:
      tried = {}
      for (row, _), r in found.items():
        if of := re.fullmatch(rf'(long|averaged|nesterov)_{name}_([\d.]+)', row):
          nesterov = of[1] == 'nesterov' or (of[1], name) == ('long', 'diloco')
          tried[float(of[2]), nesterov] = r['perplexity_final']
      if len(tried) > 1:
        rate = peak * readme.methods.SHARES.get(size, {}).get(name, 1)
        stated = pytest.approx(rate), name in readme.methods.NESTEROV.get(size, ())
        assert min(tried, key=lambda of: tried[of]) == stated, (size, name)


def test_rates_and_outer_steps_of_other_tables_are_the_best_too():
  for size, config_of_size in config.SIZES.items():
    peak, tried = config_of_size.config['inner']['learning_rate'], {}
    for (row, _), r in common.read(readme.tune.TABLE, size, common.RESULTS).items():
      if of := re.fullmatch(r'(paths|pretrained)_(nesterov_)?([a-z]+)_([\d.]+)', row):
        tried.setdefault((of[1], of[3]), {})[float(of[4]), bool(of[2])] = r['perplexity_final']
    for (table, kind), of_kind in tried.items():
      module = getattr(readme, table)
      rate = pytest.approx(peak * module.SHARES.get(size, {}).get(kind, 1))
      nesterov = kind in module.NESTEROV.get(size, ())
      assert len(of_kind) < 3 or min(of_kind, key=lambda at: of_kind[at]) == (rate, nesterov), (table, kind)


# -- scripts


@pytest.mark.slow
def test_a_script_goes_on_where_it_was_killed_and_runs_nothing_twice(tmp_path):
  tiny_run.write_config(tmp_path)
  options = '--rows=dense,kmeans', '--seeds=0'
  killed = start(tmp_path, *options)
  wait_for(killed, tmp_path, 'runs/test/dense-*/stages/pretrain.json')
  os.killpg(killed.pid, signal.SIGKILL)
  killed.communicate()
  (base,) = tmp_path.glob('runs/test/dense-*/stages/pretrain.json')
  made_at = base.stat().st_mtime_ns

  out, err = finish(start(tmp_path, *options))
  assert '[1/2] dense, seed 0' in err and '[2/2] DiPaCo, k-means, seed 0; about' in err
  assert base.stat().st_mtime_ns == made_at  # it went on
  (other,) = tmp_path.glob('runs/test/dipaco-*/stages/pretrain.json')
  assert json.loads(other.read_text()) == json.loads(base.read_text())  # taken from there
  assert '| DiPaCo, k-means | 1 |' in out and 'Not run: DiLoCo, 4 workers, tau = 4;' in out

  file = tmp_path / 'results' / 'test' / 'methods.json'
  written = file.read_bytes()
  records = {record['row']: record for record in json.loads(written)['runs']}
  assert set(records) == {'dense', 'kmeans'} and str(tmp_path) not in written.decode()
  assert records['kmeans']['base_perplexity'] == records['dense']['base_perplexity'] > 1
  assert records['kmeans']['sent_bytes'] > records['dense']['sent_bytes'] == 0
  assert file.with_suffix('.png').stat().st_size > 1000

  os.rename(tmp_path / 'runs', tmp_path / 'gone')
  again, err = finish(start(tmp_path, *options))
  assert out.endswith(again) and '| DiPaCo, k-means | 1 |' in again and not err
  assert file.read_bytes() == written and not (tmp_path / 'runs').exists()


@pytest.mark.slow
def test_two_processes_share_the_rows(tmp_path):
  tiny_run.write_config(tmp_path)
  both = [start(tmp_path, '--rows=dense,kmeans', '--seeds=0') for _ in range(2)]
  told = [finish(process)[1] for process in both]
  begun = re.findall(r'\[\d/2\] (.*), seed', ''.join(told))
  assert sorted(begun) == ['DiPaCo, k-means', 'dense']
  assert 'another process trains it' in ''.join(told)
  records = json.loads((tmp_path / 'results' / 'test' / 'methods.json').read_text())['runs']
  assert [record['row'] for record in records] == ['dense', 'kmeans']


@pytest.mark.slow
def test_two_processes_make_the_bases_of_two_seeds_beside_each_other(tmp_path):
  tiny_run.write_config(tmp_path)
  both = [start(tmp_path, '--rows=diloco_own', '--seeds=0,1') for _ in range(2)]
  for process in both:
    finish(process)
  bases = list(tmp_path.glob('runs/test/diloco-*-[01].json'))
  assert sorted(file.stem[-1] for file in bases) == ['0', '1']
  records = json.loads((tmp_path / 'results' / 'test' / 'methods.json').read_text())['runs']
  assert [(record['row'], record['seed']) for record in records] == [('diloco_own', 0), ('diloco_own', 1)]
  assert all(
    record['before'] == json.loads(file.read_text()) for record, file in zip(records, sorted(bases), strict=True)
  )


@pytest.mark.parametrize('table', readme.TABLES, ids=lambda table: table.name)
def test_every_table_can_be_drawn_and_written(table, tmp_path):
  """Of made-up figures, one seed at first: a picture that fails would end the script after its first run."""
  rows = table.rows('test')
  number = 5.0
  for most in (1, len(rows)):
    results = {}
    for i, row in enumerate(rows[:most]):
      one = runs.make('test', row, 0)
      record = {
        'row': row.name, 'seed': 0, 'config': one.config, 'text': 'x', 'perplexity': number + i,
        'perplexity_final': 9.0,
        'bits_per_byte': 2.0 + i, 'steps_per_phase': one.settings.train.steps_per_phase, 'parameters_path': 10 + i,
        'perplexity_by_step': [[8, 9.0], [16, 8.0]], 'train_tokens': 200, 'pretrain_tokens': 100, 'pretrain_steps': 8,
        'steps': 8, 'paths': 4, 'train_flops': 1e9, 'cosine': {'low': [0.1]}, 'averaging_gap': [0.1, 0.2],
        'validation_loss': 2.0, 'loss': 2.0 + i / 10,
        'environment': {'devices': 1, 'device': 'cpu', 'cpus': 2}, 'wall_s': {'train': 1.0},
        'routers': {'first': {'value': -0.1, 'accuracy': 0.5}}, 'downstream': {'next': 0.3},
      }  # fmt: skip
      results[row.name, 0] = record
    common.write(table, 'test', tmp_path, results)
    assert (tmp_path / 'test' / f'{table.name}.png').stat().st_size > 1000
    assert common.read(table, 'test', tmp_path).keys() == results.keys()
    lines = common.to_markdown(table, 'test', results).partition('\n\n')[0].splitlines()
    assert len(lines) == most + 2 or (table.lines and len({line.count('|') for line in lines}) == 1)
