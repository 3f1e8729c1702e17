"""upcycle_gpu.py: its rows are the runs that they say, its text is apart, its intervals are of sources, it resumes."""

import gzip
import json
import math
import os
import pathlib
import signal
import sys
import time
from types import SimpleNamespace

import jax
import model_folders
import numpy as np
import pytest
import repository
import tiny_run
from experiment_scripts import finish, start, wait_for

from dipaco_jax.algorithm import modules

sys.path.insert(0, str(repository.ROOT / 'experiments'))
import runs
import source_losses
import upcycle_gpu
import upcycle_text
from deadline import Deadline

EMBEDDING = 1000  # numbers, in a model whose blocks have one


def settings_by_row(size: str):
  return {row.name: runs.make(size, row, 0).settings for row in upcycle_gpu.rows(size)}


def test_levels_share_what_the_rows_say():
  rows = {row.name: row for row in upcycle_gpu.rows('gpu')}
  assert list(rows)[:7] == ['long', 'third', 'batch', 'flat', 'diloco', 'shared', 'dense']
  stored = {'long': (1, 30), 'third': (1, 2 * 10 + 2 * 10 + 4 * 10), 'batch': (1, 30), 'flat': (4, 4 * 30)}
  stored |= {'diloco': (1, 30), 'shared': (1, 2 * 15 + 2 * 15), 'dense': (1, 30)}
  sizes = {'embed/tokens': EMBEDDING, **{f'block_{n}/mlp/up': 1 for n in range(30)}}
  shapes = {name: jax.ShapeDtypeStruct((size,), np.float32) for name, size in sizes.items()}
  for name, (embeddings, blocks) in stored.items():
    s = runs.make('gpu', rows[name], 0).settings
    layout = modules.make_layout(s.grid, s.levels, shapes)
    assert len(layout.owner) == len(shapes)
    assert layout.num_parameters(shapes) == embeddings * EMBEDDING + blocks, name


@pytest.mark.parametrize('size', upcycle_gpu.SIZES)
def test_rows_train_as_many_tokens_from_one_base(size):
  def tokens(s):
    return s.num_paths * s.train.phases * s.train.steps_per_phase * s.train.batch_size * s.model.seq_len

  found = settings_by_row(size)
  dense = found.pop('dense')
  assert {tokens(s) for s in found.values()} == {4 * tokens(dense)}
  assert {(s.pretrain.steps, s.pretrain.init, s.inner.learning_rate) for s in found.values()} == {
    (0, upcycle_gpu.MODEL, dense.inner.learning_rate)
  }
  assert all(s.train.batch_size % (s.train.microbatch or 1) == 0 for s in found.values())
  high = {name: s.train.learning_rate / s.inner.learning_rate for name, s in found.items() if name.endswith('_high')}
  assert len(high) == 6 and {round(x, 6) for x in high.values()} == {upcycle_gpu.HIGH}


def test_a_tenth_of_the_tokens_is_trained_on_a_cpu():
  gpu, cpu = (settings_by_row(size)['third'].train for size in ('gpu', 'cpu'))
  steps = [t.phases * t.steps_per_phase * t.batch_size for t in (gpu, cpu)]
  assert steps[0] == 10 * steps[1] and gpu.phases == cpu.phases


def test_changes_are_bootstrapped_over_sources():
  rng = np.random.default_rng(0)
  kind = np.array(['law'] * 20 + ['wiki'] * 5)
  tokens, base = rng.integers(100, 200, 25).astype(float), rng.uniform(300, 400, 25).round(3)
  shift = np.where(kind == 'law', -0.5, 0.1) * tokens
  losses = source_losses.Losses('x', kind, tokens, {'paths': (base + shift).round(3), 'base': base})
  again = source_losses.unpack(source_losses.pack(losses))
  assert again.names == 'x' and (again.tokens == tokens).all()
  rounded = source_losses.UNIT / 2 * tokens.max()
  assert all(again.nats[name] == pytest.approx(losses.nats[name], abs=rounded) for name in source_losses.MODELS)
  change, interval = source_losses.change(again, again.nats['base'], ['law'])
  assert interval and interval[0] <= change <= interval[1]
  assert change == pytest.approx(math.exp(-0.5) - 1, abs=1e-3) == pytest.approx(interval[1], abs=1e-3)
  assert source_losses.change(again, again.nats['base'], ['wiki'])[1] is None  # five sources
  assert upcycle_gpu.forgetting(again, ['law']) == pytest.approx(0.1, abs=1e-3)
  assert source_losses.mean([losses, losses]).nats['base'].tolist() == base.tolist()


def test_no_source_of_validation_text_is_trained_on(tmp_path, monkeypatch):
  def write(name: str, kinds, count: int):
    documents = [
      {'text': f'{name} {kind} {i} ' + 'word ' * 700, 'domain': kind, 'source': f'{name}/{kind}/{i // 2}'}
      for kind in kinds
      for i in range(count)
    ]
    file = tmp_path / f'{name}.jsonl.gz'
    file.write_bytes(gzip.compress('\n'.join(map(json.dumps, documents)).encode()))
    return str(file)

  kinds = ('law_de', 'code', 'wiki_en')
  flags = SimpleNamespace(data=write('train', kinds, 60), validation=write('validation', kinds, 4), out=str(tmp_path))
  flags.megabytes, flags.validation_megabytes, flags.held_fraction = 0.1, 1, 0.2
  out = tmp_path / 'out'
  flags.out = str(out)
  monkeypatch.setattr(upcycle_text.flags, 'FLAGS', flags)
  upcycle_text.main()
  train, validation = (list(source_losses.read_documents(str(out / f'{n}.jsonl.gz'))) for n in ('train', 'validation'))
  sources = [{document['source'] for document in of} for of in (train, validation)]
  assert not sources[0] & sources[1]
  assert {d['domain'] for d in train} == {'law_de', 'code'} and {d['domain'] for d in validation} == {*kinds}
  assert len(train) == 2 * 15  # 50 kB of each kind, in documents of 3.5 kB
  assert all(300 <= len(piece['text']) <= upcycle_text.PIECE for piece in validation)
  assert any(source.startswith('train') for source in sources[1])


def test_no_run_starts_that_would_not_end_in_time():
  deadline = Deadline(0)
  assert deadline.allows(1e9)
  deadline.end = time.monotonic() + 10
  assert deadline.allows(None) and deadline.allows(8) and not deadline.allows(9)


def write_inputs(folder: pathlib.Path) -> list[str]:
  """A tiny model and text of two kinds, one of which is in the validation text only."""
  tiny_run.write_config(folder)
  documents = [
    json.loads(line) | {'source': str(i)} for i, line in enumerate((folder / 'text.jsonl').read_text().splitlines())
  ]
  for document in documents:
    document['text'] = f'\u2003 {document["text"] * 3}'  # white space of Unicode, which no tokenizer changes
  train = [document for document in documents[60:] if document['domain'] == 'vowels']
  for name, of in (('text', train), ('validation', documents[:60])):
    (folder / f'{name}.jsonl').write_text(''.join(json.dumps(document) + '\n' for document in of))
  sizes = {'num_layers': 2, 'num_heads': 2, 'num_kv_heads': 1}
  model_folders.write(folder / 'model', 'smollm2', [document['text'] for document in documents], **sizes)
  return [f'--model={folder / "model"}', f'--validation={folder / "validation.jsonl"}']


@pytest.mark.slow
def test_rows_continue_where_they_were_killed_and_are_compared(tmp_path):
  options = ['--rows=long,third,flat', *write_inputs(tmp_path)]
  killed = start(tmp_path, *options, script='upcycle_gpu.py')
  wait_for(killed, tmp_path, 'runs/test/third-*/stages/route.json')
  os.killpg(killed.pid, signal.SIGKILL)
  killed.communicate()
  out, err = finish(start(tmp_path, *options, script='upcycle_gpu.py'))
  assert '[1/2] 2x2, path-specific upper third' in err  # the first row's result was there
  assert '| the model itself |' in out and '| flat, 4 paths |' in out and '% to ' in out
  file = tmp_path / 'results' / 'test' / 'upcycle_gpu.json'
  contents = json.loads(file.read_text())
  runs = source_losses.put_sources_back(contents['runs'], contents['sources'])
  records = {record['row']: record for record in runs}
  assert list(records) == ['long', 'third', 'flat'] and str(tmp_path) not in file.read_text()
  for record in records.values():
    losses = source_losses.unpack(record['by_source'])
    assert record['trained_kinds'] == ['vowels'] and {*losses.kind.tolist()} == {'vowels', 'consonants'}
    assert source_losses.perplexity(losses, ['vowels', 'consonants']) == pytest.approx(record['perplexity'], rel=1e-4)
    assert source_losses.perplexity(losses, ['vowels'], 'base') > record['perplexity_trained'] > 1
  assert not list(tmp_path.glob('runs/test/*/checkpoints'))
