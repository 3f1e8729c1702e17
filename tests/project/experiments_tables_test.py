"""Tables, pages and pictures of the experiments hold the results as they are; rates are the best of those tried."""

import contextlib
import json
import pathlib
import re
import sys
import threading

import numpy as np
import pytest
import repository
from experiment_scripts import start

from dipaco_jax.config import settings
from dipaco_jax.data import equality
from dipaco_jax.pipeline import document_losses
from dipaco_jax.storage import publishing, tensors

sys.path.insert(0, str(repository.ROOT / 'experiments'))
import again
import common
import config
import readme
import runs
import source_losses
from runs import Row

FOLDER = runs.HERE


def made(size: str, method: str) -> settings.Settings:
  return runs.make(size, Row('', '', method), 0).settings


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


def test_writing_keeps_what_another_process_has_written(tmp_path):
  row = Row('dense', 'Dense', 'dense')
  table = common.Table('t', 'A table', lambda size: [row], COLUMNS, None)
  of_seed = {
    seed: {'row': 'dense', 'seed': seed, 'config': runs.make('test', row, seed).config, 'perplexity': 9.0}
    for seed in (0, 1)
  }
  for seed, record in of_seed.items():
    common.write(table, 'test', tmp_path, {('dense', seed): record})
  assert json.loads((tmp_path / 'test' / 't.json').read_text())['runs'] == list(of_seed.values())
  assert [file.name for file in (tmp_path / 'test').iterdir()] == ['t.json']


def made_losses(count: int, seed: int = 0) -> source_losses.Losses:
  """Of as many sources of two kinds, 4 nats a token with the base, 3.3 with paths."""
  rng = np.random.default_rng(seed)
  tokens, base = rng.integers(60, 2000, count).astype(float), rng.normal(4.0, 0.35, count)
  kind = np.where(np.arange(count) % 2, 'law_de', 'wiki_en')
  paths = base - 0.7 + rng.normal(0, 0.12, count)
  return source_losses.Losses('x', kind, tokens, {'paths': paths * tokens, 'base': base * tokens})


def test_losses_of_1500_sources_add_6_kb_to_a_record_and_keep_its_perplexity():
  losses = made_losses(1500)
  packed = source_losses.pack(losses)
  assert len(packed['nats']) < 6000
  by_kind = [source_losses.perplexity(of, ['law_de']) for of in (losses, source_losses.unpack(packed))]
  assert by_kind[1] == pytest.approx(by_kind[0], rel=1e-4)


def test_a_file_of_results_has_the_sources_of_a_text_once(tmp_path):
  table = common.Table('t', 'A table', lambda size: ROWS[:2], COLUMNS, None)
  packed = [source_losses.pack(made_losses(30, seed)) for seed in (0, 0, 1)]
  of = {'dense': (packed[0], packed[2]), 'grid': (packed[1], None)}  # the third is of another tokenizer
  results = {
    (row.name, seed): {'row': row.name, 'seed': seed, 'config': runs.make('test', row, seed).config, 'text': 'x'}
    | ({'by_source': losses} if (losses := of[row.name][seed]) else {})
    for row in ROWS[:2] for seed in (0, 1)
  }  # fmt: skip
  common.write(table, 'test', tmp_path, dict(results))
  file = tmp_path / 'test' / 't.json'
  assert file.read_text().count(json.dumps(packed[0]['sources'])) == 1 and len(packed[0]['sources']) > 100
  assert len(json.loads(file.read_text())['sources']) == 2
  assert common.read(table, 'test', tmp_path) == results
  assert {r['row'] for r in common.read_all('test', tmp_path).values() if 'by_source' in r} == {'dense', 'grid'}


def write_run(workdir: pathlib.Path, texts: list[str]):
  """A finished run's losses of its validation documents, 10 tokens each: 30 nats with paths, 40 with the base."""
  count = len(texts)
  arrays = {f'nats/{name}': np.full(count, nats) for name, nats in (('paths', 30.0), ('base', 40.0))}
  arrays |= {name: np.full(count, 10) for name in ('tokens', 'bytes', 'domain', 'path', 'text', 'beginning')}
  arrays['content'] = np.array([equality.digest(text) for text in texts], np.uint64)
  (workdir / 'evaluation').mkdir(parents=True)
  publishing.write_sealed(workdir / document_losses.FILE, tensors.to_bytes(arrays))
  (workdir / 'report.json').write_text(json.dumps({'modules_sha256': 'm'}))


def test_results_get_losses_by_source_from_their_workdirs(tmp_path):
  documents = [{'text': f'text {i}', 'source': f'book {i // 2}', 'domain': 'books'} for i in range(6)]
  validation = tmp_path / 'validation.jsonl'
  validation.write_text('\n'.join(map(json.dumps, documents)))
  one = runs.make('test', ROWS[0], 0, str(tmp_path / 'train.jsonl'), str(validation))
  write_run(runs.workdir(one, tmp_path), [document['text'] for document in documents])

  def fill(**record) -> dict | None:
    record = {'modules_sha256': 'm'} | record
    results = {('dense', 0): record}
    assert common.fill_losses(tmp_path, [one], results) == (results['dense', 0] != record)
    return results['dense', 0].get('by_source')

  losses = source_losses.unpack(fill())
  assert losses.kind.tolist() == ['books'] * 3 and losses.tokens.tolist() == [20] * 3
  assert losses.nats['paths'] == pytest.approx(60) and losses.nats['base'] == pytest.approx(80)
  assert fill(by_source='there') == 'there'
  assert fill(modules_sha256='another') is None  # a workdir that was made again elsewhere
  workdir = runs.workdir(one, tmp_path)
  (tmp_path / 'plain.txt').write_text('text 0')
  assert source_losses.pack_run(workdir, [str(tmp_path / 'plain.txt')]) is None
  (workdir / document_losses.FILE).unlink()
  assert fill() is None


def test_one_process_at_a_time_claims_a_run(tmp_path):
  claims = (common.claim(tmp_path, name) for name in ('run', 'run', 'other'))
  with contextlib.ExitStack() as held:
    assert [held.enter_context(claim) for claim in claims] == [True, False, True]


def test_a_claim_that_waits_gets_the_run_from_its_holder(tmp_path):
  with contextlib.ExitStack() as holder:
    assert holder.enter_context(common.claim(tmp_path, 'run'))
    threading.Timer(0.1, holder.close).start()
    with common.claim(tmp_path, 'run', wait=True) as claimed:
      assert claimed


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


def test_runs_made_again_are_compared_as_they_are_printed(tmp_path, capsys):
  def publish(name: str, *perplexities: float):
    digests = [runs.make('micro', ROWS[0], seed).config for seed in range(len(perplexities))]
    records = [
      {'row': 'dense', 'seed': seed, 'config': digests[seed], 'text': '', 'perplexity': x, 'wall_s': {'train': x}}
      for seed, x in enumerate(perplexities)
    ]
    common.publish(tmp_path / name / 'micro' / 't.json', json.dumps({'runs': records}))

  publish('pages', 10.0, 12.0)
  publish('again', 10.001, 12.01, 11.0)
  found = again.compare(TABLE, 'micro', tmp_path / 'again', tmp_path / 'pages')
  assert found == {'t: dense, seed 0': True, 't: dense, seed 1': False, 't: dense, seed 2': False}
  assert '| Dense | 1 | 12.00 |' in capsys.readouterr().out


@pytest.mark.slow
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


def test_every_command_of_the_pages_is_there():
  scripts = {
    word for word in (FOLDER / 'TABLES.md').read_text().replace('`', ' ').split() if word.startswith('experiments/')
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


def test_rates_of_baselines_are_the_best_too():
  for size, config_of_size in config.SIZES.items():
    found = common.read(readme.tune.TABLE, size, common.RESULTS)
    for name in (row.name for row in readme.baselines.alone(size, {})):
      tried = {row: r['perplexity_final'] for (row, _), r in found.items() if row.startswith(f'baselines_{name}_')}
      rate = config_of_size.config['inner']['learning_rate'] * readme.baselines.SHARES.get(size, {}).get(name, 1)
      assert len(tried) < 3 or min(tried, key=lambda row: tried[row]).endswith(f'_{rate:g}'), (size, name)


@pytest.mark.slow
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
        'variant': one.variant, 'changes': dict(row.changes), 'parameters_total': 10 + i // 2,
        'perplexity_final': 9.0,
        'bits_per_byte': 2.0 + i, 'steps_per_phase': one.settings.train.steps_per_phase, 'parameters_path': 10 + i,
        'perplexity_by_step': [[8, 9.0], [16, 8.0]], 'train_tokens': 200, 'pretrain_tokens': 100, 'pretrain_steps': 8,
        'steps': 8, 'paths': 4, 'train_flops': 1e9, 'text_tokens': 1000, 'cosine': {'low': [0.1]},
        'averaging_gap': [0.1, 0.2], 'validation_loss': 2.0, 'loss': 2.0 + i / 10, 'holdout_loss': 2.1,
        'environment': {'devices': 1, 'device': 'cpu', 'cpus': 2}, 'wall_s': {'train': 1.0},
        'routers': {'first': {'value': -0.1, 'accuracy': 0.5}}, 'downstream': {'next': 0.3},
      }  # fmt: skip
      results[row.name, 0] = record
    common.write(table, 'test', tmp_path, results)
    picture = tmp_path / 'test' / f'{table.name}.png'
    assert picture.stat().st_size > 1000 if table.picture else not picture.exists()
    assert common.read(table, 'test', tmp_path).keys() == results.keys()
    lines = common.to_markdown(table, 'test', results).partition('\n\n')[0].splitlines()
    assert len(lines) == most + 2 or (table.lines and len({line.count('|') for line in lines}) == 1)
