"""Discriminative re-sharding: router data stays out of training, scores are the paths', a stop loses nothing."""

import dataclasses
import json
import shutil
import signal

import numpy as np
import plain_transformer
import pytest
import tiny_run

from dipaco_jax.algorithm import modules
from dipaco_jax.config import settings
from dipaco_jax.core import errors
from dipaco_jax.data import holdouts, loader, tokenizer_files
from dipaco_jax.data.sequences import Sequences
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import resharding_round, run as run_lib, stage_records
from dipaco_jax.storage import module_store

pytestmark = pytest.mark.slow  # its fixture is a whole run, or several

OPTIONS = [
  '--config.routing.method=discriminative', '--config.routing.router_fraction=0.2', '--config.routing.rounds=2',
  '--config.routing.phases_per_round=1', '--config.data.holdout_fraction=0.1',
  '--config.evaluate.reroute_every=(16,64)', '--config.evaluate.chunk_router_steps=8',
]  # fmt: skip


@pytest.fixture(scope='module')
def rerouted(tmp_path_factory):
  """A run of three rounds of shards."""
  folder = tmp_path_factory.mktemp('rounds')
  config = tiny_run.write_config(folder)
  tiny_run.run(config, folder / 'run', *OPTIONS)
  return folder / 'run'


def router_data(workdir):
  contents = Sequences(workdir / 'sequences', 'train').contents()
  return holdouts.draw_documents(contents, 0, 0.2, 'router data')


def rows_of(workdir, name, path):
  files = (workdir / 'shards' / name / str(path) / f'{kind}.array_record' for kind in ('train', 'holdout'))
  return np.concatenate([np.stack(loader.read_rows(str(file), 0, 10**6, 64), 1) for file in files])


def test_router_data_is_in_no_shard(rerouted):
  sequences, kept = Sequences(rerouted / 'sequences', 'train'), router_data(rerouted)
  assert 0.1 < kept.mean() < 0.3
  for name, paths in (('base', 3), ('0', 4), ('1', 4), ('2', 4)):
    rows = np.concatenate([rows_of(rerouted, name, path) for path in range(paths)])
    found = {tuple(tokens[ids == k]) for tokens, ids in rows for k in range(1, ids.max() + 1)}
    for i, sequence in enumerate(sequences.read(range(len(sequences)))):
      assert (tuple(sequence.tokens) in found) != kept[i]


def check_scores(workdir, number, version):
  """Some scores of a round against a direct computation."""
  s = settings.from_dict(json.loads((workdir / 'config.json').read_text()))
  sequences = Sequences(workdir / 'sequences', 'train')
  indices = np.flatnonzero(router_data(workdir))
  made = transformer.make_model(s.model, tiny_run.record(workdir, 'tokenize')['result']['vocab_size'])
  layout = modules.make_layout(s.grid, s.levels, transformer.shapes(made))
  for path in range(4):
    scores = np.load(workdir / 'routing' / f'{number}-scores' / f'{path}.npy')
    assert scores.shape == indices.shape
    params = module_store.load_path(workdir, layout, path, version)
    for i in (0, 7, len(indices) - 1):
      tokens = sequences[indices[i]].tokens.astype(int)
      nll = plain_transformer.nll(params, tokens, s.model)[s.routing.prefix_tokens - 1 :]
      assert scores[i] == pytest.approx(-nll.sum(), rel=1e-4)


def test_what_a_round_reports(rerouted):
  made = tiny_run.record(rerouted, 'train')['result']['rounds']
  assert len(made) == 2
  for found in made:
    assert 0 <= found['majority'] <= 1 and found['accuracy'] >= found['majority'] - 0.2
    assert sum(found['label_frequency_by_path']) == pytest.approx(1) and 0 <= found['moved_fraction'] <= 1
    assert found['not_finite_by_path'] == found['given_by_path'] == [0] * 4
    assert min(found['shard_rows']) > 0 and found['scored_pairs'] == 4 * found['router_sequences']
  report = json.loads((rerouted / 'report.json').read_text())
  assert report['domain_nmi'] == made[-1]['domain_nmi'] and 0 <= report['router_accuracy'] <= 1


def test_rerouting_is_reported(rerouted):
  report = json.loads((rerouted / 'report.json').read_text())
  once = pytest.approx(report['perplexity'], rel=1e-5)
  # Sequences have at most 64 tokens: a chunk of 64 is the sequence, which its route from the prefix scores.
  assert report['reroute']['oracle']['64'] == report['reroute']['learned']['64'] == once
  assert report['reroute']['hindsight']['16'] < report['reroute']['hindsight']['64'] < report['perplexity']


def test_the_report_shows_text_by_the_choosers_paths(rerouted):
  found = json.loads((rerouted / 'evaluation' / 'excerpts.json').read_text())
  assert (found['every'], found['by']) == (16, 'chooser')
  (chosen_NL,) = (np.load(file) for file in (rerouted / 'evaluation').glob('chosen-*.npy'))
  nll = [np.load(rerouted / 'evaluation' / 'validation' / f'nll-{path}.npy') for path in range(4)]
  decode = tokenizer_files.open_file(rerouted / 'tokenizer.model').decode
  texts = [decode(x.tokens) for x in Sequences(rerouted / 'sequences', 'validation')]
  for document in found['documents']:
    n = texts.index(''.join(chunk['text'] for chunk in document['chunks']))
    expected = [np.load(rerouted / 'routing' / '2' / 'validation.npy')[n], *chosen_NL[n, 15::16]]
    assert [chunk['path'] for chunk in document['chunks']] == expected[: len(document['chunks'])]
    chunk = document['chunks'][2]
    assert chunk['nats'] == pytest.approx(nll[chunk['path']][n, 31:47].mean(), rel=1e-6)


def test_the_chooser_that_is_kept_is_the_one_that_was_evaluated_last(rerouted, tmp_path):
  workdir, config = tmp_path / 'run', rerouted.parent / 'config.py'
  shutil.copytree(rerouted, workdir)
  first = (workdir / 'evaluation' / 'chooser.safetensors').read_bytes()
  for steps in (4, 8):
    tiny_run.run(config, workdir, *OPTIONS[:-1], f'--config.evaluate.chunk_router_steps={steps}')
    assert ((workdir / 'evaluation' / 'chooser.safetensors').read_bytes() == first) == (steps == 8)
    assert len(list((workdir / 'evaluation').glob('chosen-*.npy'))) == 1


def test_early_stopping_begins_again_with_new_shards(rerouted):
  rows = [json.loads(line) for line in (rerouted / 'metrics.jsonl').read_text().splitlines()]
  phases = [row for row in rows if row['kind'] == 'phase' and row['stage'] == 'train']
  # The first phase of a round is the best so far of its own hold-outs, whatever earlier rounds had.
  assert [phases[n]['best_version_by_path'] for n in (0, 1, 2)] == [[1] * 4, [2] * 4, [3] * 4]


def score(workdir, path, scores):
  """Other scores of a path, without a seal."""
  file = workdir / 'routing' / '1-scores' / f'{path}.npy'
  np.save(file, scores)
  file.with_name(f'{file.name}.sha256').unlink(missing_ok=True)


def test_a_path_that_has_diverged_gets_no_labels_but_continues(rerouted, tmp_path, caplog):
  """The first round again, from scores that are NaN of one path and partly of another."""
  for name in ('sequences', 'stages', 'features', 'routing/0', 'shards/0', 'routing/1-scores'):
    shutil.copytree(rerouted / name, tmp_path / name)
  s = stage_records.read_settings(rerouted)
  run = run_lib.unattended(tmp_path, dataclasses.replace(s, routing=dataclasses.replace(s.routing, calibrate=False)))
  kept = [np.load(file) for file in (tmp_path / 'routing' / '1-scores' / f'{path}.npy' for path in range(4))]
  num, expected = len(kept[0]), np.stack([kept[0], kept[1], kept[3]]).argmax(0)
  score(tmp_path, 2, np.full(num, np.nan))
  one = np.flatnonzero(expected == 0)[0]
  score(tmp_path, 0, np.where(np.arange(num) == one, np.inf, kept[0]))
  expected[one] = np.stack([kept[1], kept[3]]).argmax(0)[one] + 1
  with caplog.at_level('WARNING'):
    resharding_round.reshard(run, 1, 1)
  found = resharding_round.figures(run, 1)
  counts = np.bincount(np.array([0, 1, 3])[expected], minlength=4)
  np.testing.assert_allclose(found['label_frequency_by_path'], counts / num)
  assert found['not_finite_by_path'] == [1, 0, num, 0]
  assert found['given_by_path'][2] >= found['shard_sequences'][2] > 0 and min(found['shard_rows']) > 0
  assert f'scores that are not finite give no label: path 0 on 1, 2 on {num} of {num} router' in caplog.text

  for path in range(4):
    score(tmp_path, path, np.full(num, np.nan))
  shutil.rmtree(tmp_path / 'routing' / '1')
  with pytest.raises(errors.Diverged, match='training diverged before round 1 of re-sharding'):
    resharding_round.reshard(run, 1, 1)
  run.metrics.close()


def test_the_label_of_a_document_is_the_path_with_the_highest_sum_of_its_sequences(rerouted, tmp_path):
  """The first round again, from the same scores."""
  for name in ('sequences', 'stages', 'features', 'routing/0', 'shards/0', 'routing/1-scores'):
    shutil.copytree(rerouted / name, tmp_path / name)
  s = stage_records.read_settings(rerouted)
  run = run_lib.unattended(tmp_path, dataclasses.replace(s, routing=dataclasses.replace(s.routing, by_document=True)))
  resharding_round.reshard(run, 1, 1)
  documents = run.sequences('train').columns()[0]
  scores = np.stack([np.load(tmp_path / 'routing' / '1-scores' / f'{path}.npy') for path in range(4)], 1)
  kept = documents[router_data(rerouted)]
  labels = [scores[kept == document].sum(0).argmax() for document in np.unique(kept)]
  found = resharding_round.figures(run, 1)
  np.testing.assert_allclose(found['label_frequency_by_path'], np.bincount(labels, minlength=4) / len(labels))
  assert found['router_sequences'] == len(labels) < len(kept)
  paths = run.routed('train', 1)[:, 0]
  assert all(len({*paths[documents == document]}) == 1 for document in np.unique(documents))
  run.metrics.close()


def test_killed_while_scoring_fitting_and_sharding(rerouted, tmp_path):
  config, workdir = rerouted.parent / 'config.py', tmp_path / 'run'
  scores, routing = workdir / 'routing' / '1-scores', workdir / 'routing'
  moments = (
    lambda: len(list(scores.glob('[0-9].npy'))) >= 2,
    lambda: len(list(scores.glob('[0-9].npy'))) == 4,
    lambda: (routing / '1').exists(),
    lambda: (routing / '2').exists(),
  )
  for moment in moments:
    tiny_run.stop_when(tiny_run.start(config, workdir, *OPTIONS), moment, signal.SIGKILL)
  check_scores(workdir, 2, 2)  # its version is still there
  tiny_run.run(config, workdir, *OPTIONS)
  assert tiny_run.modules_sha256(workdir) == tiny_run.modules_sha256(rerouted)
  for number in '12':
    for split in ('train', 'validation'):
      np.testing.assert_array_equal(*(np.load(w / 'routing' / number / f'{split}.npy') for w in (workdir, rerouted)))


def test_eight_devices_agree_with_one(rerouted, tmp_path):
  config, workdir = rerouted.parent / 'config.py', tmp_path / 'run'
  tiny_run.run_until('evaluate', config, workdir, *OPTIONS, devices=8)
  for path in range(4):
    ours, theirs = (np.load(w / 'routing' / '1-scores' / f'{path}.npy') for w in (workdir, rerouted))
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)  # sums of some 30 nats, after 18 steps in another order
  ours, theirs = (tiny_run.record(w, 'evaluate')['result']['perplexity'] for w in (workdir, rerouted))
  assert ours == pytest.approx(theirs, rel=0.02)  # a few labels may tip
