"""Chunks, their paths and their losses, against plain loops and the transformer in numpy."""

import json
import shutil

import made_run
import numpy as np
import plain_transformer
import pytest
import slow
from safetensors.numpy import load_file

from dipaco_jax.inference import excerpts, trained_run
from dipaco_jax.pipeline import excerpt_choice
from dipaco_jax.routing import chunk_losses

PREFIX, WORDS = 8, ''.join(made_run.TEXT * 2)


class ByHand:
  """What a run's models say of WORDS, by the transformer in numpy."""

  def __init__(self, workdir: str, run: trained_run.TrainedRun):
    self.run, self.model = run, run.settings.model
    self.base = load_file(f'{workdir}/base/params.safetensors')
    tokens = run.tokenizer.encode(WORDS, eos=False)
    self.sequences = [tokens[i : i + self.model.seq_len] for i in range(0, len(tokens), self.model.seq_len)]
    of = {path: made_run.parameters(workdir, path) for path in range(4)} | {'base': self.base}
    self.nats = [
      {name: plain_transformer.nll(params, mine, self.model) for name, params in of.items()} for mine in self.sequences
    ]

  def by_router(self, tokens) -> int:
    """k-means: the nearest centroid; the fitted mean is 0, the scale 1."""
    z_D = plain_transformer.hidden(self.base, tokens, self.model).mean(0)
    return int(((z_D - np.asarray(self.run.router.fitted.centroids)) ** 2).sum(1).argmin())

  def by_chooser(self, tokens) -> list[int]:
    """What it prefers after each token."""
    params = {name: np.asarray(x) for name, x in self.run.chooser.items()}
    x_LD = plain_transformer.hidden(params, tokens, self.model)
    x_LD = plain_transformer.norm(x_LD, params['final_norm/scale'], self.model)
    return (x_LD @ params['chooser/kernel']).argmax(1).tolist()

  def paths(self, tokens, W: int) -> list[int]:
    """Of the chunks."""
    starts = range(0, len(tokens), W)
    if self.run.chooser is not None:
      after = self.by_chooser(tokens)
      return [self.by_router(tokens[:PREFIX])] + [after[start - 1] for start in starts[1:]]
    return [self.by_router(tokens[max(0, start - PREFIX) : max(start, PREFIX)]) for start in starts]


@pytest.fixture(scope='module')
def workdirs(tmp_path_factory):
  """Of runs that are the same but for the chooser."""
  folder = tmp_path_factory.mktemp('made')
  made_run.write(folder / 'chooser', made_run.settings(), chooser=True)
  shutil.copytree(folder / 'chooser', folder / 'router', ignore=lambda *_: ['evaluation'])
  return folder


@pytest.fixture(scope='module', params=['router', 'chooser'])
def by_hand(request, workdirs):
  workdir = str(workdirs / request.param)
  return ByHand(workdir, trained_run.TrainedRun(workdir))


@pytest.fixture(scope='module')
def run(workdirs):
  return trained_run.TrainedRun(str(workdirs / 'router'))


def mean(nats_L, start: int, stop: int) -> object:
  """Of the tokens at these places; the first of a text has no nats."""
  values = [nats_L[place - 1] for place in range(start, stop) if place]
  return pytest.approx(sum(values) / len(values), rel=1e-4) if values else None


@pytest.mark.parametrize('W', slow.all_but([1, 5, 16, 200], 16))
def test_chunks_of_a_text_have_the_losses_found_by_hand(by_hand, W):
  run = by_hand.run
  found = excerpts.of_text(run, WORDS, W, None, None)
  assert (found.every, found.prefix_tokens) == (W, PREFIX) and found.by == ('chooser' if run.chooser else 'router')
  assert len(found.documents) == len(by_hand.sequences) > 1
  for document, tokens, nats in zip(found.documents, by_hand.sequences, by_hand.nats, strict=True):
    paths, rerouted = by_hand.paths(tokens, W), []
    assert [(chunk.start, chunk.path) for chunk in document.chunks] == list(zip(range(0, len(tokens), W), paths))  # noqa: B905
    for chunk in document.chunks:
      places = range(chunk.start, min(chunk.start + W, len(tokens)))
      counted = [nats[chunk.path][place - 1] for place in places if place >= PREFIX]
      assert chunk.counted == len(counted)
      assert chunk.nats == mean(nats[chunk.path], places.start, places.stop)
      assert chunk.base == mean(nats['base'], places.start, places.stop)
      rerouted += counted
    assert (document.path, document.counted) == (paths[0], len(rerouted))
    assert document.rerouted == pytest.approx(np.mean(rerouted), rel=1e-4)
    assert document.nats == mean(nats[paths[0]], PREFIX, len(tokens))
    assert document.base == mean(nats['base'], PREFIX, len(tokens))
  assert ''.join(chunk.text for document in found.documents for chunk in document.chunks) == WORDS
  assert W > 16 or len({chunk.path for chunk in found.documents[0].chunks}) > 1


def test_one_path_and_another_version(run):
  words = made_run.TEXT[0]
  tokens = run.tokenizer.encode(words, eos=False)
  found = excerpts.of_text(run, words, 4, 3, 2)
  assert not found.by and {chunk.path for chunk in found.documents[0].chunks} == {3}
  params = {name: np.asarray(x) for name, x in run.path(3, 2).params.items()}
  nats = plain_transformer.nll(params, tokens, run.settings.model)
  assert found.documents[0].rerouted == mean(nats, PREFIX, len(tokens))


@pytest.mark.parametrize('words', ['a', 'x y', '漢', 'fox', 'dog.', 'Viktor', '12.3', 'def f'])
def test_texts_too_short_for_a_loss_have_none(run, words):
  (document,) = excerpts.of_text(run, words, 32, None, None).documents
  assert document.counted == 0 and document.nats is document.rerouted is document.base is None
  assert ''.join(chunk.text for chunk in document.chunks) == words
  assert document.path == run.router.path(words)


def test_a_character_in_two_chunks_is_the_second_ones(run):
  assert len(run.tokenizer.encode('漢', eos=False)) == 3  # its bytes
  found = excerpts.of_text(run, 'a' + '漢' * 40, 2, None, None)
  assert len(found.documents) == 2  # and in two sequences
  words = [chunk.text for document in found.documents for chunk in document.chunks]
  assert words[:4] == ['a', '漢', '', '漢'] and ''.join(words) == 'a' + '漢' * 40


def test_a_text_that_ends_within_a_character(run):
  half = excerpt_choice.Text('', run.tokenizer.encode('a漢', eos=False)[:3])
  assert excerpt_choice._chunk_texts(run.tokenizer, [half, half], 2) == [['a', '\ufffd\ufffd']] * 2  # one a byte


@pytest.mark.parametrize(
  'words, path, version, said',
  [
    ('', None, None, 'the text is empty'),
    ('x', 4, None, 'the paths are 0 to 3'),
    ('x', None, 9, 'there is no version 9'),
  ],
)
def test_wrong_input_is_rejected(run, words, path, version, said):
  with pytest.raises(ValueError, match=said):
    excerpts.of_text(run, words, 32, path, version)


def test_each_path_is_asked_once_and_for_its_texts_alone():
  rng, asked = np.random.default_rng(0), []
  table = rng.gamma(2, 1, (5, 3, 12))  # path (4: the base), text, token
  paths = [[0, 2, 0], [1], [2, 2, 1]]

  def nats(path, rows):
    asked.append((path, rows.tolist()))
    return table[4 if path is None else path][rows]

  found = chunk_losses.gather_losses(paths, 4, nats)
  assert sorted(asked[1:]) == [(0, [0]), (1, [1, 2]), (2, [0, 2])] and asked[0] == (None, [0, 1, 2])
  for n, mine in enumerate(paths):
    for place in range(1, 12):
      path = mine[min(place // 4, len(mine) - 1)]
      assert found.rerouted[n, place - 1] == table[path, n, place - 1]
      assert found.routed[n, place - 1] == table[mine[0], n, place - 1]
      assert found.base[n, place - 1] == table[4, n, place - 1]


def test_excerpts_survive_json():
  chunk = chunk_losses.Chunk(0, 'x\n', 1, 2.5, None, 0)
  found = chunk_losses.Excerpts(32, 8, 'router', [chunk_losses.Excerpt('a', 1, 0, None, 0.5, 1.5, [chunk, chunk])])
  assert chunk_losses.Excerpts.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_batches_are_of_one_size():
  sizes = []

  def double(x_NL):
    sizes.append(len(x_NL))
    return 2 * x_NL, None

  found, nothing = chunk_losses.in_batches(double, 3, np.arange(14).reshape(7, 2))
  np.testing.assert_array_equal(found, 2 * np.arange(14).reshape(7, 2))
  assert sizes == [3, 3, 3] and nothing is None
