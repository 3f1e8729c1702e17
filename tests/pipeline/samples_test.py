"""Samples: the same prompts for the whole run, continued by every model, and by the paths while they train."""

import dataclasses
import functools
import json
import shutil

import numpy as np
import pytest

from dipaco_jax.pipeline import run as run_lib, samples, stage_records
from dipaco_jax.storage import module_store, publishing, seals

COUNT = 6  # of tiny_run.SAMPLES


@pytest.fixture
def run(undisturbed):
  made = run_lib.unattended(undisturbed, stage_records.read_settings(undisturbed), 1)
  assert made.settings.evaluate.samples == COUNT
  yield made
  made.metrics.close()


def test_every_model_continues_the_same_prompts(undisturbed, run):
  found = samples.read(undisturbed)
  chosen = samples.choose(run)
  assert chosen == samples.choose(run) and len(found['prompts']) == len(chosen) == COUNT
  assert [x['domain'] for x in found['prompts']].count('vowels') == COUNT // 2
  assert {*found['texts']} == {'base', 'control', 'paths'}
  assert all(len(texts) == COUNT and all(texts) for texts in found['texts'].values())
  assert found['paths'] == run.last_routes()[chosen].tolist()
  assert [entry['phase'] for entry in found['while_training']] == [1, 2, 4]
  prefix = run.settings.routing.prefix_tokens
  tokens = run.sequences('validation').read(chosen[:1])[0].tokens[:prefix]
  assert found['prompts'][0]['prompt'].strip() == run.tokenizer.decode(tokens).strip()


@pytest.mark.slow
def test_a_sample_is_the_same_again(undisturbed, run):
  sampler = samples.Sampler(run)
  assert sampler.texts(samples._on_device(run.base())) == samples.read(undisturbed)['texts']['base']


def test_a_path_gives_the_same_text_after_training_as_while_training(undisturbed, run):
  last = samples.read(undisturbed)['while_training'][-1]
  assert last['phase'] == run.settings.train.phases
  load = functools.partial(module_store.load_path, run.workdir, run.layout, version=last['phase'])
  texts = samples.Sampler(run).texts_by_path(last['paths'], lambda path: samples._on_device(load(path)))
  assert texts == last['texts']


def test_the_order_of_prompts_changes_no_text(run):
  sampler = samples.Sampler(run)
  params = samples._on_device(run.base())
  texts = sampler.texts(params)
  sampler.prompts, sampler.seeds = sampler.prompts[::-1], sampler.seeds[::-1]
  assert sampler.texts(params) == texts[::-1]
  assert sampler.seeds == [samples.sampling_seed(run.settings.seed, prompt) for prompt in sampler.prompts]


def test_random_numbers_are_those_of_a_prompt_and_a_seed():
  assert samples.sampling_seed(0, [1, 2]) == samples.sampling_seed(0, np.array([1, 2], np.int32))
  others = [
    samples.sampling_seed(seed, prompt) for seed, prompt in ((0, [1, 2]), (1, [1, 2]), (0, [2, 1]), (0, [0, 1, 2]))
  ]
  assert len({*others}) == 4 and all(0 <= seed < 2**32 for seed in others)


def test_texts_drawn_with_other_random_numbers_are_not_kept(undisturbed, run, tmp_path):
  (tmp_path / 'evaluation').mkdir()
  known = samples.read(undisturbed)
  publishing.write_json(tmp_path / samples.FILE, known)
  elsewhere, sampler = dataclasses.replace(run, workdir=tmp_path), samples.Sampler(run)
  assert samples._begun(elsewhere, sampler)['while_training']
  publishing.write_json(tmp_path / samples.FILE, {name: x for name, x in known.items() if name != 'seeds'})
  assert samples._begun(elsewhere, sampler) == sampler.to_dict()


def test_a_likely_token_is_continued_as_the_model_says(run):
  params = module_store.load_path(run.workdir, run.layout, 0)
  sampler = samples.Sampler(run)
  tokens, seeds = np.stack(sampler.prompts)[:2], np.array(sampler.seeds[:2], np.uint32)
  both = np.asarray(samples.continue_texts(run.model, params, tokens, seeds, 8))
  assert both.shape == (2, 8)
  alone = np.asarray(samples.continue_texts(run.model, params, tokens[:1], seeds[:1], 8))
  assert (alone[0] == both[0]).all()  # whatever else is in the batch


def test_a_later_attempt_replaces_its_phase_and_those_after_it(undisturbed, run, tmp_path, monkeypatch):
  for name in ('sequences', 'stages', 'base', 'routing', 'evaluation'):
    shutil.copytree(undisturbed / name, tmp_path / name)
  for name in ('config.json', 'tokenizer.model'):
    shutil.copy(undisturbed / name, tmp_path / name)
  again = run_lib.unattended(tmp_path, run.settings, 1)
  sample = samples.while_training(again, again.programs, 0)
  params = again.base()
  shape = (1,) * len(again.layout.grid.shape)
  in_flight = {n: np.broadcast_to(x, (*shape, *x.shape)) for n, x in params.items()}
  sample(3, lambda turn: pytest.fail('phase 3 is not sampled'))
  sample(2, lambda turn: in_flight)
  found = samples.read(tmp_path)
  assert [entry['phase'] for entry in found['while_training']] == [1, 2]
  assert found['while_training'][-1]['texts'] == found['texts']['base']  # every path was the base
  again.metrics.close()


def test_a_sample_that_fails_is_a_warning(run, caplog):
  sample = samples.while_training(run, run.programs, 0)

  def fail(turn):
    raise MemoryError('no room')

  before = (run.workdir / samples.FILE).read_bytes()
  sample(1, fail)
  sample(2, fail)
  assert caplog.text.count('no samples are made while training: no room') == 1
  assert (run.workdir / samples.FILE).read_bytes() == before


def test_a_damaged_file_is_named_by_the_report_and_made_again_by_training(tmp_path, run):
  assert samples.read(tmp_path) is None
  (tmp_path / 'evaluation').mkdir()
  (tmp_path / samples.FILE).write_text(json.dumps({'prompts': []}))
  with pytest.raises(seals.Damaged, match=r'samples\.json'):
    samples.read(tmp_path)
  sampler = samples.Sampler(run)
  assert samples._begun(dataclasses.replace(run, workdir=tmp_path), sampler) == sampler.to_dict()


def test_samples_become_rarer():
  assert [phase for phase in range(1, 40) if samples.is_due(phase)] == [1, 2, 4, 8, 16, 32]


def test_a_run_may_have_no_samples(run):
  none = dataclasses.replace(run.settings.evaluate, samples=0)
  assert samples.choose(dataclasses.replace(run, settings=dataclasses.replace(run.settings, evaluate=none))) == []
