"""User-defined routers: their inputs, the use of their scores, and errors about faulty ones."""

import dataclasses
import itertools
import shutil

import made_run
import numpy as np
import own_modules
import pytest
import safetensors.numpy

import dipaco_jax
from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.inference.engine import Engine
from dipaco_jax.inference.request import Request
from dipaco_jax.inference.trained_run import TrainedRun
from dipaco_jax.routing import own_router
from dipaco_jax.storage import publishing, tensors

SOURCE = """
import numpy as np

class ByLength:
  def fit(self, texts, num_paths, seed):
    return {'edges': np.quantile(texts.lengths, np.arange(1, num_paths) / num_paths)}

  def scores(self, state, texts):
    path = np.searchsorted(state['edges'], texts.lengths)
    return -np.abs(np.arange(len(state['edges']) + 1) - path[:, None])

class ByFeatures(ByLength):
  uses_features = True

  def fit(self, texts, num_paths, seed):
    assert texts.features.dtype == np.float32 and len(texts.words) == len(texts.features)
    return {'directions': texts.features[:num_paths]}

  def scores(self, state, texts):
    return texts.features @ state['directions'].T

class Forgetful(ByFeatures):
  uses_features = False

class Listed(ByLength):
  def fit(self, texts, num_paths, seed):
    return [1, 2]

class Worded(ByLength):
  def fit(self, texts, num_paths, seed):
    return {'words': np.array(texts.words)}

class Flat(ByLength):
  def scores(self, state, texts):
    return texts.lengths

class Endless(ByLength):
  def scores(self, state, texts):
    found = np.zeros((len(texts), 4))
    found[0, 2] = np.nan
    return found

class Beside(ByLength):
  def scores(self, state, texts):
    return texts.lengths[:, None] / texts.lengths.mean() + np.zeros(4)

class Forgotten(ByLength):
  def fit(self, texts, num_paths, seed):
    self.kept = super().fit(texts, num_paths, seed)
    return {}

  def scores(self, state, texts):
    return super().scores(self.kept, texts)

class Failing(ByLength):
  def scores(self, state, texts):
    return texts.colour

by_length, by_features = lambda config: ByLength(), lambda config: ByFeatures()
forgetful, listed, worded, flat = (lambda config, made=made: made() for made in (Forgetful, Listed, Worded, Flat))
endless, beside, failing = (lambda config, made=made: made() for made in (Endless, Beside, Failing))
nothing, forgotten = lambda config: None, lambda config: Forgotten()
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
  """The user's module, under a name that no other test has."""
  return own_modules.write(tmp_path, monkeypatch, SOURCE)


def routed_by(module: str, name: str, **changes) -> settings.Settings:
  return made_run.settings(routing={'method': f'{module}:{name}', **changes})


def texts_of(lengths: list[int], prefix: int = 4) -> own_router.Texts:
  tokens = [np.arange(1, min(length, prefix) + 1) for length in lengths]
  return own_router.make_texts(tokens, lengths, prefix, lambda ids: ','.join(map(str, ids)))


def test_what_is_seen_of_texts():
  texts = texts_of([2, 900])
  assert texts.tokens.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]] and texts.words == ['1,2', '1,2,3,4']
  assert texts.lengths.tolist() == [2, 900] and len(texts) == 2


def test_the_best_paths_are_those_of_the_highest_scores_ties_to_the_lower(module):
  fitted = own_router.fit(routed_by(module, 'by_length').routing, 4, 0, texts_of([1, 2, 3, 4, 5, 6, 7, 8]))
  assert fitted.route(texts_of([1, 3, 6, 80]), 2).tolist() == [[0, 1], [1, 0], [2, 1], [3, 2]]


@pytest.mark.parametrize('name', ['by_length', 'by_features'])
def test_a_rehearsal_of_what_works_is_silent(module, name):
  own_router.rehearse(routed_by(module, name))


@pytest.mark.parametrize('name, words', [
  ('nothing', r'returns a NoneType without fit\(...\): expected an object with fit and scores'),
  ('forgetful', 'raises ValueError: texts.features are made for routers with `uses_features = True` alone'),
  ('listed', 'fit returns list: its state, a dict of arrays of numbers by name, is expected'),
  ('worded', r"fit returns {'words': '<U\d+'}: its state, a dict of arrays of numbers"),
  ('flat', r'scores returns int32 \[256\]: a number for each of 256 texts and 4 paths is asked, \[256, 4\]'),
  ('endless', 'scores are not finite: nan for text 0 and path 2'),
  ('beside', 'the scores of a text differ if it is scored alone'),
  ('forgotten', "raises AttributeError: 'Forgotten' object has no attribute 'kept'"),
  ('failing', r"raises AttributeError: 'Texts' object has no attribute 'colour' \(line \d+ of .*own_.*py\)"),
])  # fmt: skip
def test_what_goes_wrong_is_said_before_any_work(module, name, words):
  with pytest.raises(InputError, match=rf"config.routing.method='{module}:{name}'[: ].*{words}"):
    own_router.rehearse(routed_by(module, name))


@pytest.mark.parametrize('changes, words', [
  ({'capacity': 1.5, 'top_n': 2}, 'capacity requires config.routing.top_n=1'),
])  # fmt: skip
def test_what_does_not_go_together(module, changes, words):
  with pytest.raises(InputError, match=words):
    routed_by(module, 'by_length', **changes)


def test_there_are_no_rounds(module):
  assert routed_by(module, 'by_length').rounds == 0


def loaded(workdir, s: settings.Settings, fitted: own_router.OwnRouter):
  made_run.write(workdir, s)
  shutil.rmtree(workdir / 'routing')
  with publishing.publish_directory(workdir / 'routing' / '0') as aside:
    (aside / 'router.safetensors').write_bytes(tensors.to_bytes(own_router.arrays(fitted)))
  return dipaco_jax.load_router(str(workdir))


def test_a_loaded_router_sees_the_length_of_what_there_is(module, tmp_path):
  s = routed_by(module, 'by_length')
  router = loaded(tmp_path / 'run', s, own_router.fit(s.routing, 4, 0, texts_of([10, 20, 30, 40])))
  assert [router.path([5] * length) for length in (3, 20, 26, 80)] == [0, 1, 2, 3]
  together = router.batch_scores([router.prefix([5] * length) for length in (3, 20, 26, 80)])
  assert together.argmax(1).tolist() == [0, 1, 2, 3]  # as python -m dipaco_jax.route asks
  assert router.path([5] * 3, length=80) == 3 and f'{module}:by_length to 4 paths' in repr(router)


@pytest.mark.slow
def test_a_loaded_router_sees_features_as_ours_does(module, tmp_path):
  s = routed_by(module, 'by_features')
  state = {'directions': np.random.default_rng(0).normal(size=(4, s.model.width)).astype('f')}
  router = loaded(tmp_path / 'run', s, own_router.OwnRouter(s.routing, 4, state))
  made = made_run.settings()
  usual = dipaco_jax.load_router(made_run.write(tmp_path / 'usual', made))
  arrays = safetensors.numpy.load_file(tmp_path / 'usual' / 'routing' / '0' / 'router.safetensors')
  centroids = arrays['centroids']
  mine = dataclasses.replace(router, fitted=own_router.OwnRouter(s.routing, 4, {'directions': centroids}))
  for tokens in ([5, 6, 7], list(range(5, 60))):
    expected = usual.scores(tokens) + (centroids**2).sum(1)
    # Both sum products of D terms in float32, and ours adds |c|^2, which is taken away here.
    np.testing.assert_allclose(2 * mine.scores(tokens), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
def test_generation_goes_by_the_whole_prompt_and_then_by_the_text_so_far(module, tmp_path):
  s = routed_by(module, 'by_length')
  loaded(tmp_path / 'run', s, own_router.fit(s.routing, 4, 0, texts_of([10, 20, 30, 40])))
  engine = Engine(TrainedRun(str(tmp_path / 'run')))
  texts = engine.generate([Request((5,) * length, 1) for length in (3, 20, 26, 80)])
  assert [text.paths for text in texts] == [[0], [1], [2], [3]]
  (text,) = engine.generate([Request((5,) * 3, 36, reroute_every=8, until_eos=False)])
  edges = engine.run.router.fitted.state['edges']
  expected = [int(np.searchsorted(edges, known)) for known in (3, 8, 16, 24, 32)]
  assert [path for path, _ in itertools.groupby(expected)] == text.paths and len(text.paths) > 2
