"""A router fitted after training: it is chosen by what paths lose, and all that routes afterwards routes by it."""

import dataclasses
import json
import math
import shutil

import jax
import numpy as np
import pytest
import tiny_run

from dipaco_jax.config import settings
from dipaco_jax.data import holdouts
from dipaco_jax.data.sequences import Sequences
from dipaco_jax.inference import trained_run
from dipaco_jax.pipeline import features, router_refit, run as run_lib
from dipaco_jax.routing import own_router, router
from dipaco_jax.storage import tensors

DATA = '--config.routing.router_fraction=0.2'
REFIT = '--config.evaluate.refit_router=True'


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """The folder of a config, and of a finished run with router data."""
  folder = tmp_path_factory.mktemp('refit')
  tiny_run.run(tiny_run.write_config(folder), folder / 'before', DATA)
  return folder


@pytest.fixture(scope='module')
def refitted(finished):
  """The same run, evaluated again with a router of its last version."""
  shutil.copytree(finished / 'before', finished / 'after')
  tiny_run.run(finished / 'config.py', finished / 'after', DATA, REFIT)
  return finished / 'after'


def report(workdir):
  return json.loads((workdir / 'report.json').read_text())


@pytest.mark.slow
def test_a_finished_run_is_evaluated_again_and_nothing_else(finished, refitted):
  before, after = finished / 'before', refitted
  for stage in ('tokenize', 'pretrain', 'route', 'train'):
    assert tiny_run.record(before, stage) == tiny_run.record(after, stage)
  was, now = report(before), report(after)
  assert was['router_refit'] is was['as_trained_perplexity'] is None
  assert now['as_trained_perplexity'] == was['perplexity'] != now['perplexity']
  assert now['ratio_to_as_trained'] == pytest.approx(now['perplexity'] / was['perplexity'])
  assert not now['router_refit']['kept_the_last'] and now['router_refit']['nats'] < now['router_refit']['nats_before']


@pytest.mark.slow
def test_perplexity_and_what_is_served_are_of_that_router(refitted):
  run = trained_run.TrainedRun(str(refitted))
  first, found = run.settings.routing.prefix_tokens, Sequences(refitted / 'sequences', 'validation')
  routes, nats, targets = [], 0.0, 0
  for sequence in found.read(range(len(found))):
    tokens = np.asarray(sequence.tokens)[: run.settings.model.seq_len]
    routes.append(run.router.path(tokens))
    logp = np.asarray(jax.nn.log_softmax(run.path(routes[-1]).logits(tokens)))
    nats -= logp[np.arange(first - 1, len(tokens) - 1), tokens[first:]].sum()
    targets += len(tokens) - first
  assert tensors.read_array(refitted / 'evaluation' / 'routes.npy').tolist() == routes
  assert routes != tensors.read_array(refitted / 'routing' / '0' / 'validation.npy').tolist()
  assert report(refitted)['perplexity'] == pytest.approx(math.exp(nats / targets), rel=1e-4)


def opened(workdir) -> run_lib.Run:
  return run_lib.unattended(workdir, settings.of_run(json.loads((workdir / 'config.json').read_text())), 1)


@pytest.mark.slow
def test_the_last_router_stays_where_no_other_is_better(refitted):
  run = opened(refitted)
  count = int(features.router_data(run).sum())
  fitted, about = router_refit.fit(run, np.full((count, 4), 7.0))
  last = run.router(0)
  assert about['router_refit']['kept_the_last'] and about['router_refit']['nats'] == pytest.approx(7)
  for name, x in own_router.arrays(fitted).items():
    np.testing.assert_array_equal(x, own_router.arrays(last)[name])


@pytest.mark.slow
def test_text_that_one_path_alone_can_read_is_sent_there(refitted):
  run = opened(refitted)
  nll_NP = np.full((int(features.router_data(run).sum()), 4), 90.0)
  nll_NP[:, 2] = 80.0
  fitted, about = router_refit.fit(run, nll_NP)
  assert about['router_refit']['nats'] == pytest.approx(80) and not about['router_refit']['kept_the_last']
  [z_ND] = features.compute(run, 'validation')
  assert own_router.arrays(fitted).keys() == own_router.arrays(run.router(0)).keys()
  assert (np.asarray(router.route(fitted, z_ND)) == 2).all()


@pytest.mark.slow
def test_a_router_for_documents_is_fitted_to_sums_over_their_sequences(refitted):
  run = opened(refitted)
  routing = dataclasses.replace(run.settings.routing, by_document=True)
  run = dataclasses.replace(run, settings=dataclasses.replace(run.settings, routing=routing))
  kept, train = features.router_data(run), run.sequences('train')
  documents = train.columns()[0][kept]
  _, about = router_refit.fit(run, np.full((len(documents), 4), 7.0))
  tested = holdouts.draw_documents(train.contents()[kept], 0, router_refit.TESTED_SHARE, 'tested')
  expected = 7 * tested.sum() / len(np.unique(documents[tested]))
  assert about['router_refit']['nats'] == pytest.approx(expected) and expected > 7
  assert about['router_refit']['router_sequences'] == len(np.unique(documents))


def test_first_sequences_weigh_as_much_as_all_others():
  is_first = np.array([1, 0, 0, 1, 1, 0, 0, 0], bool)
  found = router_refit.weights(is_first)
  assert found[is_first].sum() == pytest.approx(found[~is_first].sum()) == pytest.approx(4)
  assert len(set(found[is_first])) == len(set(found[~is_first])) == 1
  assert (router_refit.weights(np.ones(5, bool)) == 1).all()


@pytest.mark.slow
def test_too_little_router_data_leaves_the_router_as_it_is(finished, tmp_path):
  """One sequence of each of a few documents: fewer than four for each path."""
  few = '--config.routing.router_fraction=0.01'
  out = tiny_run.run(finished / 'config.py', tmp_path / 'few', few, REFIT)
  now = report(tmp_path / 'few')
  assert now['router_refit']['kept_the_last'] and now['router_refit']['router_sequences'] < 16
  assert now['perplexity'] == now['as_trained_perplexity']
  assert 'the router is not fitted again' in out


@pytest.mark.slow
def test_while_a_run_trains_on_it_routes_by_the_router_of_training(refitted, tmp_path):
  """Until it is evaluated again; and a router that is told of and gone is missed."""
  workdir = tmp_path / 'run'
  shutil.copytree(refitted, workdir)
  fitted = trained_run.TrainedRun(str(workdir)).router.fitted
  (workdir / 'stages' / 'evaluate.json').rename(tmp_path / 'aside')
  last = trained_run.TrainedRun(str(workdir)).router.fitted
  assert not np.array_equal(fitted.centroids, last.centroids)
  np.testing.assert_array_equal(last.centroids, opened(refitted).router(0).centroids)
  (tmp_path / 'aside').rename(workdir / 'stages' / 'evaluate.json')
  (workdir / 'evaluation' / 'router.safetensors').unlink()
  with pytest.raises(ValueError, match=r'evaluation/router\.safetensors'):
    _ = trained_run.TrainedRun(str(workdir)).router


@pytest.mark.slow
def test_paths_of_random_shards_have_a_router_afterwards(finished, tmp_path):
  run = tiny_run.run
  random = '--config.routing.method=random'
  out = run(finished / 'config.py', tmp_path / 'run', DATA, REFIT, random)
  now = report(tmp_path / 'run')
  assert now['perplexity'] != now['as_trained_perplexity'] and 'router that' not in out
  assert 0 <= trained_run.TrainedRun(str(tmp_path / 'run')).router.path('aeiou bcd aei') < 4
  few = '--config.routing.router_fraction=0.001'
  process = tiny_run.start(finished / 'config.py', tmp_path / 'few', few, REFIT, random)
  assert 'fewer than the 4 paths' in tiny_run.finish(process, 2)
