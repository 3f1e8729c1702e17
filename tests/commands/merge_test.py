"""Paths merged into one model: what is equal in all paths stays so, and what cannot be merged is named."""

import dataclasses
import json
import re
import subprocess
import sys

import hf_small
import made_run
import numpy as np
import pytest
import slow
import small
from repository import ROOT

from dipaco_jax.algorithm import modules as modules_lib
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.huggingface import config_json, model_folder
from dipaco_jax.inference import merging, trained_run
from dipaco_jax.models import transformer
from dipaco_jax.training import module_publishing

MLPS = (('mlps', 'mlp/(gate|up|down)', ('a',)), ('shared', 'embed|final_norm|attention|mlp_norm', ()))


def command(*options: str, status: int = 0) -> str:
  line = [sys.executable, '-m', 'dipaco_jax.merge', *options]
  done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=240)
  assert done.returncode == status, done.stderr
  return done.stderr if status else done.stdout


@pytest.fixture
def rows(monkeypatch):
  """Rows for the routers, in place of shards, which a run that was drawn has none of."""
  tokens = np.random.default_rng(0).integers(0, 300, (4, 96)).astype(np.int32)
  monkeypatch.setattr(merging, 'read_rows', lambda run, path, count: (tokens + path, np.ones_like(tokens)))


def drawn(tmp_path, levels=MLPS) -> trained_run.TrainedRun:
  return trained_run.TrainedRun(made_run.write(tmp_path / 'run', made_run.settings(levels)))


def mixed(run, version, paths, average=()):
  planned = merging.plan(run, paths)
  return merging.mixed_model(run, planned, average, 2), merging.to_mixture(run, version, planned, 4)


def logits(model: settings_lib.Model, params) -> np.ndarray:
  made = transformer.make_model(model, len(params['embed/tokens']))
  return hf_small.logits(made, params, np.arange(40, dtype=np.int32)[None])


def test_a_mixture_of_equal_paths_computes_what_they_do(tmp_path, rows):
  run = drawn(tmp_path)
  base = small.base(transformer.make_model(run.settings.model, 330))
  equal = [(level, at, {n: base[n] for n in run.layout.names(level)})
           for level in run.layout.levels for at in run.layout.grid.modules(level)]  # fmt: skip
  module_publishing.publish_module_files(tmp_path / 'run', 3, equal)
  model, params = mixed(run, 3, [0, 1, 2, 3])
  assert (model.num_experts, model.experts_per_token) == (2, 2)
  expected = logits(run.settings.model, base)
  np.testing.assert_allclose(logits(model, params), expected, atol=1e-4 * np.abs(expected).max())


def test_experts_are_the_modules_of_the_level_in_their_order(tmp_path, rows):
  run = drawn(tmp_path)
  model, params = mixed(run, 2, [1, 3])
  for path, expert in ((1, 0), (3, 1)):  # at a=0 and a=1
    own = made_run.parameters(run.workdir, 1 if path == 1 else 2)  # the last path points at an older version
    np.testing.assert_array_equal(params[f'block_2/mlp/expert_{expert}/up'], own['block_2/mlp/up'])
  assert {*params} == {*transformer.shapes(transformer.make_model(model, 330))}
  family, _ = config_json.write(model, 330, {})
  assert family.title == 'Mixtral'


def test_routers_choose_the_experts_of_the_text_they_are_of():
  rng = np.random.default_rng(1)
  means_ED = 3 * rng.normal(size=(3, 16))
  tokens = [mean_D + rng.normal(size=(200, 16)) for mean_D in means_ED]
  moments = [merging.Moments(x.sum(0), (x**2).sum(), float(len(x))) for x in tokens]
  router = merging.to_router(moments)
  for expert, x in enumerate(tokens):
    centred = x - means_ED.mean(0)
    assert np.mean((centred @ router).argmax(1) == expert) > 0.95
  between = merging.to_router([m + merging.NOTHING for m in moments])
  np.testing.assert_array_equal(between, router)


def test_what_enters_the_mlps_is_measured(tmp_path):
  run = drawn(tmp_path)
  path = run.path(0, 2)
  tokens, segments = np.arange(20, dtype=np.int32)[None], np.repeat([[1, 0]], 10, 1).astype(np.int32)
  whole = merging.mlp_inputs(path.model, path.params, tokens, segments)
  scanned = dataclasses.replace(path.model, config=dataclasses.replace(path.model.config, layers='scanned'))
  found = merging.mlp_inputs(scanned, path.params, tokens, segments)
  assert sorted(found) == [0, 1, 2] and found[1][2] == 10
  np.testing.assert_allclose(found[2][0], whole[2][0], rtol=1e-5)
  assert found[0][1] > 0


ANCHORED = (
  ('own', 'mlp/(expert_1|router)', ('a',)),
  ('shared', 'embed|final_norm|attention|mlp_norm|mlp/expert_0', ()),
)
PAIR = {'num_experts': 2, 'experts_per_token': 2, 'normalize_gates': True}


def test_paths_that_are_mixtures_keep_their_own_experts_beside_the_one_they_share(tmp_path):
  run = trained_run.TrainedRun(made_run.write(tmp_path / 'run', made_run.settings(ANCHORED, model=PAIR)))
  model, params = mixed(run, 2, [0, 1, 2, 3])
  assert (model.num_experts, model.experts_per_token) == (3, 2)
  assert {*params} == {*transformer.shapes(transformer.make_model(model, 330))}
  for path, expert in ((0, 1), (2, 2)):  # at a=0 and a=1
    own = made_run.parameters(run.workdir, path)
    for block in range(3):
      for theirs, number in ((0, 0), (1, expert)):
        names = f'block_{block}/mlp/expert_{number}/up', f'block_{block}/mlp/expert_{theirs}/up'
        np.testing.assert_array_equal(params[names[0]], own[names[1]])
      mine, merged = own[f'block_{block}/mlp/router'], params[f'block_{block}/mlp/router']
      np.testing.assert_allclose(merged[:, expert] - merged[:, 0], mine[:, 1] - mine[:, 0], atol=1e-6)
    # With these two experts alone, the merged model is the path.
    two = {name.replace(f'expert_{expert}/', 'expert_1/'): x for name, x in params.items()
           if not re.search(f'expert_{3 - expert}/', name)}  # fmt: skip
    two |= {name: x[:, [0, expert]] for name, x in two.items() if name.endswith('router')}
    expected = logits(run.settings.model, own)
    np.testing.assert_allclose(logits(run.settings.model, two), expected, atol=1e-4 * np.abs(expected).max())


def test_paths_that_are_mixtures_without_a_common_expert_cannot_be_mixed(tmp_path):
  levels = (('own', 'mlp/(expert|router)', ('a',)), MLPS[1])
  run = trained_run.TrainedRun(made_run.write(tmp_path / 'run', made_run.settings(levels, model=PAIR)))
  with pytest.raises(InputError, match='these paths are mixtures that, in block 0, have no expert in common'):
    merging.mixed_model(run, merging.plan(run, [0, 1, 2, 3]), (), 0)


def test_the_mean_is_that_of_paths(tmp_path):
  """Two of the three share a module of each level."""
  run = drawn(tmp_path, made_run.LEVELS)
  planned = merging.plan(run, [0, 1, 2])
  mean = merging.mean(planned, merging.read_modules(run, 2, planned))
  own = [made_run.parameters(run.workdir, path) for path in (0, 1, 2)]
  for name, x in mean.items():
    np.testing.assert_allclose(x, sum(params[name] for params in own) / 3, atol=1e-6)


def test_a_path_whose_blocks_are_computed_again_is_measured(tmp_path, rows):
  s = made_run.settings(MLPS)
  s = dataclasses.replace(s, model=dataclasses.replace(s.model, remat='full'))
  run = trained_run.TrainedRun(made_run.write(tmp_path / 'run', s))
  plain = drawn(tmp_path / 'plain')
  found, expected = (merging.measure(one, 2, 0, 4) for one in (run, plain))
  np.testing.assert_allclose(found[2].sum_D, expected[2].sum_D, rtol=1e-5)


UNEQUAL = (*made_run.LEVELS[:1], ('low', 'block_0', ('a', 'b')), made_run.LEVELS[2])
SPLIT = (('gates', 'mlp/gate', ('a',)), ('others', 'mlp/(up|down)', ('b',)), MLPS[1])


@pytest.mark.parametrize('levels, average, words', [
  (made_run.LEVELS, (), 'the level low has 2 modules, and block_0/attention/k is not part of an MLP.*--average=low'),
  (made_run.LEVELS, ('lo',), '--average=lo: there is no such level; there are'),
  (UNEQUAL, ('low', 'high'), 'block 0 has 4, block 1 has 2, block 2 has 2: use --to=dense'),
  (SPLIT, (), 'the MLP of block 0 is in the levels gates and others'),
  (small.ONE_LEVEL, (), 'these paths share their MLPs'),
])  # fmt: skip
def test_what_cannot_be_mixed_is_named(levels, average, words, tmp_path):
  run = drawn(tmp_path, levels)
  with pytest.raises(InputError, match=words):
    merging.mixed_model(run, merging.plan(run, [0, 1, 2, 3]), average, 2)


def test_a_run_becomes_a_mixture_that_a_run_starts_from(undisturbed, tmp_path):
  out = tmp_path / 'merged'
  said = command(f'--workdir={undisturbed}', '--to=moe', '--average=low,high', f'--out={out}')
  assert f'{out}: a mixture of 2 experts of 4 paths at version ' in said and "--config.inner.frozen='^(?!" in said
  theirs = json.loads((out / 'config.json').read_text())
  assert theirs['num_local_experts'] == 2 and theirs['dipaco_jax']['merged'] == 'moe'
  read = dataclasses.replace(settings_lib.Model(), **config_json.read_config(theirs))
  params, _ = model_folder.load_params(str(out), transformer.make_model(read, theirs['vocab_size']))
  routers = [params[f'block_{n}/mlp/router'] for n in range(2)]
  assert all(np.isfinite(x).all() and np.abs(x).max() > 0 for x in routers)
  modules_lib.make_layout({'a': 1}, (('routers', 'mlp/router', ()), ('others', '^(?!.*mlp/router)', ())), params)


WRONG = [
  ((), 'name a run with --workdir=DIR'),
  (('--workdir=DIR', '--out=OUT'), 'say what the paths become: --to=moe'),
  (('--workdir=DIR', '--out=OUT', '--to=dense', '--average=low'), '--average is for --to=moe'),
  (('--workdir=DIR', '--out=OUT', '--to=dense', '--rows=3'), '--rows is for --to=moe'),
  (('--workdir=DIR', '--out=OUT', '--to=moe', '--paths=1'), 'merging takes two paths or more'),
  (('--workdir=DIR', '--out=OUT', '--to=dense', '--paths=1,0,1'), '--paths=1,0,1 names a path twice'),
  (('--workdir=DIR', '--out=OUT', '--to=moe', '--paths=7,1'), '--paths=7: the paths are 0 to 3'),
  (('--workdir=DIR', '--out=OUT', '--to=moe', '--average=low,high', '--experts_per_token=3'), 'should be 2 to 2'),
]


@pytest.mark.parametrize('options, words', slow.all_but(WRONG, WRONG[1]))
def test_wrong_options(options, words, undisturbed, tmp_path):
  places = [option.replace('=DIR', f'={undisturbed}').replace('=OUT', f'={tmp_path}/out') for option in options]
  said = command(*places, status=2)
  assert words in said and said.startswith('dipaco_jax: ') and said.count('\n') == 1
  assert not (tmp_path / 'out').exists()
