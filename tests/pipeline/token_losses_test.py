"""Every path's token losses: against the model itself, on other placements, and after a run was killed."""

import pathlib
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import repository
import slow
import small
import whole

from dipaco_jax.algorithm import modules
from dipaco_jax.data import packing, sequences
from dipaco_jax.data.corpus import Document
from dipaco_jax.models import loss
from dipaco_jax.pipeline import token_losses
from dipaco_jax.training import evaluation, module_publishing

LENGTH, BATCH, PREFIX = small.LENGTH, small.ROWS, 8
LENGTHS = (9, 40, 17, 40, 30, 25, 40)  # of sequences, in tokens: two batches
SOURCES = [f'parameters of path {path}' for path in range(4)]
# Means of sums over a vocabulary and over width, of values near 4 nats.
CLOSE = 4 * LENGTH * small.EPS


class Numbers:
  """A text is its tokens."""

  vocab_size = small.VOCAB

  def encode_batch(self, texts):
    return [np.array(text.split(), int) for text in texts]

  def byte_ends(self, text):
    return np.arange(len(self.encode_batch([text])[0])) + 1


def make_rows(folder: pathlib.Path) -> token_losses.Rows:
  """All of a file of sequences but its third, last first."""
  rng = np.random.default_rng(0)
  texts = [' '.join(map(str, rng.integers(1, small.VOCAB, length))) for length in LENGTHS]
  documents = [Document(str(i), text, 'd') for i, text in enumerate(texts)]
  sizes = {'seq_len': LENGTH, 'eval_len': LENGTH, 'prefix_tokens': PREFIX}
  whole.write_sequences(lambda split: documents, Numbers(), folder, **sizes)
  found = sequences.Sequences(folder, 'validation')
  return token_losses.Rows(found, np.array([6, 5, 4, 3, 1, 0]), LENGTH, BATCH)


def make_programs(devices: int = 1, **mesh):
  return small.make_programs(small.settings({'a': 2, 'b': 2}, small.MIXED_LEVELS, mesh=mesh), devices)


class Asked(list):
  """`params_of_path` that remembers which paths it was asked for."""

  def __init__(self, made):
    super().__init__()
    self.made = made

  def __call__(self, path: int):
    self.append(path)
    return small.base(self.made.model, path)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
  return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.suffix != '.sha256'}


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
  return make_rows(tmp_path_factory.mktemp('rows') / 'sequences')


@pytest.fixture(scope='module')
def made():
  return make_programs()


@pytest.fixture(scope='module')
def folder(made, rows, tmp_path_factory):
  """Written once, undisturbed."""
  folder = tmp_path_factory.mktemp('whole') / 'evaluation' / 'final'
  token_losses.write(made, Asked(made), SOURCES, rows, folder)
  return folder


def test_files_are_those_that_are_said(folder):
  assert set(contents(folder)) == {'counts.npy', 'meta.json', *(f'nll-{path}.npy' for path in range(4))}


@pytest.mark.slow
def test_token_losses_are_the_models(made, rows, folder):
  found = token_losses.read(folder, 4)
  tokens, segments = packing.pad([x.tokens for x in rows.sequences.read(rows.indices)], LENGTH)
  for path in range(4):
    nll_NL = loss.token_losses(made.model, small.base(made.model, path), tokens, segments)
    assert found.nll[path].dtype == np.float32 and found.nll[path].shape == (6, LENGTH)
    size = token_losses.nll_file(folder, path).stat().st_size
    assert size == found.nll[path].offset + found.nll[path].nbytes  # nothing follows
    np.testing.assert_allclose(found.nll[path], nll_NL, atol=CLOSE)
  assert np.abs(found.nll[0] - found.nll[1]).max() > 100 * CLOSE
  for n, index in enumerate(rows.indices):
    places = np.arange(LENGTH) + 1
    np.testing.assert_array_equal(found.counts[n], (places >= PREFIX) & (places < LENGTHS[index]))
    assert ((found.nll[0][n] > 0) == (places < LENGTHS[index])).all()


def test_sums_are_those_that_perplexity_is_made_of(made, rows, folder):
  found = token_losses.read(folder, 4)
  asked = Asked(made)

  def load(path, start, stop):
    return packing.pad([x.tokens for x in rows.sequences.read(rows.indices[start:stop])], LENGTH)

  losses = evaluation.losses(
    made, lambda turn: evaluation.in_flight(made, turn, asked), evaluation.Rows([6] * 4, load, BATCH, LENGTH)
  )
  for path in range(4):
    np.testing.assert_allclose((found.nll[path] * found.counts).sum(1), losses.nll[path], rtol=LENGTH * small.EPS)
    np.testing.assert_array_equal(found.counts.sum(1), losses.targets[path])


PLACEMENTS = [(2, {}), (8, {}), (8, {'shard_states': True})]


@pytest.mark.parametrize('devices, mesh', slow.all_but(PLACEMENTS, PLACEMENTS[2]), ids=str)
def test_other_placements_agree(rows, folder, devices, mesh, tmp_path):
  made = make_programs(devices, **mesh)
  found = token_losses.write(made, Asked(made), SOURCES, rows, tmp_path)
  for ours, theirs in zip(found.nll, token_losses.read(folder, 4).nll, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=CLOSE)


@pytest.mark.slow
def test_the_empty_grid(rows, tmp_path):
  made = small.make_programs(small.settings(), 2)
  found = token_losses.write(made, Asked(made), ['base'], rows, tmp_path)
  tokens, segments = packing.pad([x.tokens for x in rows.sequences.read(rows.indices)], LENGTH)
  nll_NL = loss.token_losses(made.model, small.base(made.model, 0), tokens, segments)
  np.testing.assert_allclose(found.nll[0], nll_NL, atol=CLOSE)


def write_again(made, rows, folder, tmp_path, sources=SOURCES, change=lambda folder: None) -> list[int]:
  """Paths scored anew in a copy of the folder."""
  for name, data in contents(folder).items():
    (tmp_path / name).write_bytes(data)
  change(tmp_path)
  asked = Asked(made)
  token_losses.write(made, asked, sources, rows, tmp_path)
  return asked


def test_what_is_there_is_not_made_again(made, rows, folder, tmp_path):
  before = token_losses.program(made)._cache_size()
  assert write_again(made, rows, folder, tmp_path) == []
  missing = write_again(made, rows, folder, tmp_path, change=lambda copy: (copy / 'nll-2.npy').unlink())
  assert missing == [2] and contents(tmp_path) == contents(folder)
  assert token_losses.program(made)._cache_size() == before == 1


def test_a_path_whose_parameters_changed_is_scored_again(made, rows, folder, tmp_path):
  sources = [*SOURCES[:3], 'others']
  assert write_again(made, rows, folder, tmp_path, sources) == [3]
  again = Asked(made)
  token_losses.write(made, again, sources, rows, tmp_path)
  assert again == []


@pytest.mark.parametrize('change', [{'indices': np.array([6, 5])}, {'length': 30}], ids=str)
def test_other_rows_are_scored_again(made, rows, folder, tmp_path, change):
  rows = rows._replace(**change)
  assert write_again(made, rows, folder, tmp_path) == [0, 1, 2, 3]
  found = token_losses.read(tmp_path, 4)
  assert {x.shape for x in (*found.nll, found.counts)} == {(len(rows.indices), rows.length)}


KILLED = """
import os, pathlib, signal, sys
import conftest, small
import token_losses_test as test
from dipaco_jax.pipeline import token_losses

made, rows = test.make_programs(), test.make_rows(pathlib.Path(sys.argv[1]) / 'sequences')
score, calls = token_losses.program(made), []

def killed(*args):
  calls.append(args)
  if len(calls) == 6:  # in the second batch of the third path
    os.kill(os.getpid(), signal.SIGKILL)
  return score(*args)

token_losses.program = lambda programs: killed
token_losses.write(made, test.Asked(made), test.SOURCES, rows, pathlib.Path(sys.argv[1]) / 'scores')
"""


@pytest.mark.slow
def test_killed_and_started_again(made, rows, folder, tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', KILLED, str(tmp_path)], env=repository.environment(__file__), timeout=120
  )
  assert done.returncode == -signal.SIGKILL
  scores = tmp_path / 'scores'
  there = {file.name for file in scores.iterdir() if not file.name.startswith('.')}
  assert {'nll-0.npy', 'counts.npy', 'meta.json'} <= there and 'nll-2.npy' not in there
  (scores / '.nll-1.npy.1').write_bytes(b'of a run that was killed')
  asked = Asked(made)
  token_losses.write(made, asked, SOURCES, rows, scores)
  assert asked == [path for path in range(4) if f'nll-{path}.npy' not in there]
  assert contents(scores) == contents(folder)


class Failing(sequences.Sequences):
  """Can be read so many times."""

  def __init__(self, folder, reads: int):
    super().__init__(folder, 'validation')
    self.reads = reads

  def read(self, indices):
    self.reads -= 1
    if self.reads < 0:
      raise OSError('cannot be read')
    return super().read(indices)


def test_a_failure_leaves_no_part_of_a_file(made, rows, tmp_path):
  make_rows(tmp_path / 'sequences')
  failing = Failing(tmp_path / 'sequences', 2 + 2 + 1)  # in the second path
  with pytest.raises(OSError, match='cannot be read'):
    token_losses.write(made, Asked(made), SOURCES, rows._replace(sequences=failing), tmp_path / 'scores')
  assert set(contents(tmp_path / 'scores')) == {'counts.npy', 'meta.json', 'nll-0.npy'}


def test_sources_are_the_modules_that_a_path_picks(tmp_path):
  made = make_programs()
  stacked = modules.stack(made.layout, {name: jnp.asarray(x) for name, x in small.base(made.model).items()})
  module_publishing.publish_modules(tmp_path, 1, made.layout, stacked)
  stacked['low'] = {name: x.at[1].add(1) for name, x in stacked['low'].items()}
  module_publishing.publish_modules(tmp_path, 2, made.layout, stacked)
  one, two = (token_losses.published(tmp_path, made.layout, [version] * 4) for version in (1, 2))
  # Level `low` varies over axis a: its module 1 is that of paths 2 and 3.
  assert [a == b for a, b in zip(one, two, strict=True)] == [True, True, False, False]
  assert token_losses.published(tmp_path, made.layout, [1, 1, 2, 1]) == [*one[:2], two[2], one[3]]
