"""Canaries: they stand in one owner's text as often as stated, and exposure is the paper's."""

import json
import math
import sys
import types

import jax
import numpy as np
import optax
import pytest
import repository
import tiny_run
from experiment_scripts import finish, start

sys.path.insert(0, str(repository.ROOT / 'experiments'))
import canaries
import config
import owners
import runs
import source_losses

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import tokenizer_files
from dipaco_jax.inference import trained_run
from dipaco_jax.models import loss, transformer

DOCUMENTS = [
  {'text': f'{kind} is number {number} of some texts', 'domain': kind} for number in range(5) for kind in ('a', 'b')
]


def test_canaries_stand_in_one_owners_text_as_often_as_stated_and_nothing_else_changes():
  planted = {0: ['\nnone\n'], 1: ['\none\n'], 3: ['\nthree\n'], 12: ['\ntwelve\n', '\ndozen\n']}
  made = canaries.insert(DOCUMENTS, 'a', planted)
  assert [x for x in made if x['domain'] == 'b'] == [x for x in DOCUMENTS if x['domain'] == 'b']
  text_of_a = [x['text'] for x in made if x['domain'] == 'a']
  for times, sentences in planted.items():
    assert [''.join(text_of_a).count(sentence) for sentence in sentences] == [times] * len(sentences)
  assert [text.count('\nthree\n') for text in text_of_a].count(1) == 3  # in documents of their own
  for sentence in (sentence for sentences in planted.values() for sentence in sentences):
    text_of_a = [text.replace(sentence, ' ') for text in text_of_a]
  assert [text.split() for text in text_of_a] == [x['text'].split() for x in DOCUMENTS if x['domain'] == 'a']
  assert canaries.insert(DOCUMENTS, 'a', planted) == made
  with pytest.raises(InputError, match="--data: none of its first 10 documents is of the domain 'c'"):
    canaries.insert(DOCUMENTS, 'c', planted)


def test_references_are_none_of_the_canaries():
  for size, by_times in canaries.CANARIES.items():
    drawn = canaries.draw_sentences(size)
    planted = [sentence for sentences in drawn.canaries.values() for sentence in sentences]
    assert {times: len(sentences) for times, sentences in drawn.canaries.items()} == by_times
    assert len({*planted, *drawn.references}) == len(planted) + canaries.REFERENCES[size]
    assert {len(sentence) for sentence in [*planted, *drawn.references]} == {len(planted[0])}


def test_exposure_is_that_of_the_rank_among_canary_and_references():
  references_N = np.arange(1.0, 4096.0)
  assert canaries.exposure(0.5, references_N) == 12
  assert canaries.exposure(1.5, references_N) == 11  # second of 4,096
  assert canaries.exposure(5000.0, references_N) == 0
  assert canaries.exposure(7.0, np.full(7, 7.0)) == 3 - math.log2(4.5)  # a model to which all are alike
  every_rank = [canaries.exposure(x, references_N) for x in np.arange(0.5, 4096)]
  assert np.mean(every_rank) == pytest.approx(canaries.NOTHING_BITS, abs=0.005)


def test_means_are_over_canaries_and_the_paths_of_other_owners():
  by_path = [{0: [1.0, 3.0], 4: [2.0]}, {0: [0.0, 1.0], 4: [12.0]}, {0: [5.0, 1.0], 4: [4.0]}]
  found = canaries.summarize(by_path, own=1)
  assert found['own'] == {'0': 0.5, '4': 12.0} and found['other'] == {'0': 2.5, '4': 3.0}
  assert found['canaries'] == {'own': {'0': [0.0, 1.0], '4': [12.0]}, 'other': {'0': [3.0, 2.0], '4': [3.0]}}


@pytest.mark.parametrize('size', canaries.STEPS)
def test_rows_differ_only_in_what_is_shared_and_train_on_all_text(size):
  found = [runs.make(size, row, 0).settings for row in canaries.rows(size)]
  assert len({s.levels for s in found}) == len(found)
  assert len({(s.train, s.outer, s.inner, s.data, s.model, s.tokenizer) for s in found}) == 1
  assert canaries.OWNER[size] in config.SIZES[size].owners
  assert found[0].data.holdout_fraction == 0 and found[0].train.loss_on_prefix and not found[0].train.early_stopping


@pytest.mark.slow
def test_a_model_that_has_read_a_canary_again_and_again_ranks_it_first_and_no_other():
  drawn = canaries.draw_sentences('test')
  read, unread = drawn.canaries[4][0], drawn.canaries[0][0]
  s = runs.make('test', canaries.rows('test')[0], 0).settings
  tokenizer = tokenizer_files.load(tokenizer_files.train(drawn.references * 9, s.tokenizer))
  model = transformer.make_model(s.model, tokenizer.vocab_size)
  params = transformer.init(model, jax.random.key(0))
  rows = canaries.pad(tokenizer.encode_batch([read], eos=False))
  adam = optax.adam(1e-2)

  @jax.jit
  def step(params, state):
    gradients = jax.grad(lambda params: loss.path_loss(model, 0, params, *rows)[0])(params)
    updates, state = adam.update(gradients, state)
    return optax.apply_updates(params, updates), state

  def exposures(params):
    path = types.SimpleNamespace(tokenizer=tokenizer, model=model, params=params)
    references_N = canaries.score(path, drawn.references)
    return [canaries.exposure(nats, references_N) for nats in canaries.score(path, [read, unread])]

  before = exposures(params)
  state = adam.init(params)
  for _ in range(60):
    params, state = step(params, state)
  most = math.log2(canaries.REFERENCES['test'] + 1)
  assert exposures(params)[0] == most and max(before[0], exposures(params)[1]) < most


@pytest.mark.slow
def test_the_script_measures_exposure_in_every_path(tmp_path):
  tiny_run.write_config(tmp_path)
  process = start(tmp_path, '--rows=alone', script='canaries.py')
  out, _ = finish(process)
  assert 'Not run: one shared model; upper blocks of their own; blocks of their own.' in out
  [record] = json.loads((tmp_path / 'results' / 'test' / 'canaries.json').read_text())['runs']
  assert record['exposure']['own'] != record['exposure']['other']  # two models
  of_canaries = record['exposure']['canaries']['own']
  assert {n: len(bits) for n, bits in of_canaries.items()} == {'0': 2, '1': 2, '4': 1}

  # What was trained on has the canaries, and a path's losses are those of its logits.
  [workdir] = tmp_path.glob('runs/test/owners_alone-*')
  drawn = canaries.draw_sentences('test')
  documents = [*source_losses.read_documents(str(tmp_path / 'runs' / 'test' / 'canaries.jsonl.gz'))]
  text = ''.join(document['text'] for document in documents)
  assert len(documents) == owners.DOCUMENTS['test']['little']
  assert [text.count(x) for x in drawn.canaries[4]] == [4] and not any(x in text for x in drawn.references)
  path = trained_run.load(str(workdir), 1)
  tokens = path.tokenizer.encode(drawn.references[0], eos=False)
  logits = np.asarray(path.logits(drawn.references[0]), np.float64)[:-1]
  logits -= np.log(np.exp(logits).sum(1, keepdims=True))
  expected = -logits[np.arange(len(tokens) - 1), tokens[1:]].sum()
  assert canaries.score(path, drawn.references[:3])[0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_text_that_is_no_file_of_lines_is_an_error(tmp_path):
  (tmp_path / 'text.jsonl').mkdir()
  process = start(tmp_path, f'--data={tmp_path}/none.jsonl', script='canaries.py')
  assert '--data=' in process.communicate()[1] and process.returncode == 2
