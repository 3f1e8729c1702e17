"""Re-routing against plain loops over sequences, chunks and tokens."""

import numpy as np
import pytest

from dipaco_jax.routing import chunk_policies

PATHS, LENGTH, PREFIX = 5, 96, 32
LENGTHS = (33, 40, 64, 65, 80, 95, 96)  # of sequences, in tokens
WS = (2, 7, 16, 32, 64, 128)


class Drawn:
  """Token losses as token_losses.py leaves them, and what else re-routing takes."""

  def __init__(self, seed: int = 0):
    rng = np.random.default_rng(seed)
    place = np.arange(LENGTH) + 1  # of each position's target
    inside_NL = place < np.array(LENGTHS)[:, None]
    self.counts = inside_NL & (place >= PREFIX)
    nll_NPL = rng.gamma(2.0, 1.0, (len(LENGTHS), PATHS, LENGTH)) * inside_NL[:, None]
    self.nll = list(nll_NPL.transpose(1, 0, 2).astype('f'))
    self.first = rng.integers(0, PATHS, len(LENGTHS))
    self.chosen = rng.integers(0, PATHS, (len(LENGTHS), LENGTH))

  def of_token(self, n: int, path: int, place: int) -> float:
    """Nats of the token at a place of a sequence; the first has none."""
    return float(self.nll[path][n, place - 1]) if place else 0.0


@pytest.fixture(autouse=True, params=[1, 2, 100], ids='{}-at-a-time'.format)
def few_at_a_time(request, monkeypatch):
  monkeypatch.setattr(chunk_policies, 'BLOCK_BYTES', 4 * PATHS * LENGTH * request.param)


def by_hand(drawn: Drawn, W: int, choose) -> list[float]:
  """`choose(n, tokens of the former chunk, tokens of this chunk)` is the path of every chunk but the first."""
  totals = []
  for n, length in enumerate(LENGTHS):
    total, before = 0.0, None
    for begin in range(0, length, W):
      chunk = range(begin, min(begin + W, length))
      path = drawn.first[n] if before is None else choose(n, before, chunk)
      total += sum(drawn.of_token(n, path, place) for place in chunk if place >= PREFIX)
      before = chunk
    totals.append(total)
  return totals


def nats(drawn: Drawn, n: int, path: int, places) -> float:
  return sum(drawn.of_token(n, path, place) for place in places)


@pytest.mark.parametrize('W', WS)
def test_the_oracle_takes_the_best_path_on_the_chunk_before(W):
  drawn = Drawn()

  def choose(n, before, chunk):
    return min(range(PATHS), key=lambda path: nats(drawn, n, path, before))

  expected = by_hand(drawn, W, choose)
  np.testing.assert_allclose(chunk_policies.oracle(drawn.nll, drawn.counts, W, drawn.first), expected, rtol=1e-12)


@pytest.mark.parametrize('W', WS)
def test_history_takes_the_best_path_on_all_chunks_before(W):
  drawn = Drawn()

  def choose(n, before, chunk):
    return min(range(PATHS), key=lambda path: nats(drawn, n, path, range(chunk.start)))

  expected = by_hand(drawn, W, choose)
  found = chunk_policies.history(drawn.nll, drawn.counts, W, drawn.first)
  np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize('W', WS)
def test_the_chooser_decides_at_the_last_token_before_a_chunk(W):
  drawn = Drawn()
  expected = by_hand(drawn, W, lambda n, before, chunk: drawn.chosen[n, before[-1]])
  found = chunk_policies.by_chooser(drawn.nll, drawn.counts, W, drawn.first, drawn.chosen)
  np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize('W', WS)
def test_hindsight_is_the_best_of_all_choices(W):
  drawn = Drawn()
  expected = []
  for n, length in enumerate(LENGTHS):
    late = [[t for t in range(begin, min(begin + W, length)) if t >= PREFIX] for begin in range(0, length, W)]
    expected.append(sum(min(nats(drawn, n, path, chunk) for path in range(PATHS)) for chunk in late))
  found = chunk_policies.hindsight(drawn.nll, drawn.counts, W)
  np.testing.assert_allclose(found, expected, rtol=1e-12)
  assert (found <= chunk_policies.oracle(drawn.nll, drawn.counts, W, drawn.first)).all()


def test_chunks_as_long_as_the_sequence_are_routed_once():
  drawn = Drawn()
  expected = [nats(drawn, n, drawn.first[n], range(PREFIX, length)) for n, length in enumerate(LENGTHS)]
  np.testing.assert_allclose(chunk_policies.oracle(drawn.nll, drawn.counts, 96, drawn.first), expected, rtol=1e-12)


def test_ties_go_to_the_lower_path():
  counts = np.ones((1, 6), bool)
  nll = [np.array([row], 'f') for row in ([3, 1, 1, 1, 1, 0], [1, 1, 2, 2, 2, 0], [1, 1, 9, 9, 9, 0])]
  # Chunks are the tokens 0 1, 2 3 and 4 5: path 2 has the first, then paths 1 and 2 tie, then path 0 is best.
  assert chunk_policies.oracle(nll, counts, 2, np.array([2])) == [1 + (1 + 2) + (1 + 1)]


def test_blocks_are_files_read_a_part_at_a_time(tmp_path):
  drawn = Drawn()
  for path, nll_NL in enumerate(drawn.nll):
    np.save(tmp_path / f'{path}.npy', nll_NL)
  mapped = [np.load(tmp_path / f'{path}.npy', mmap_mode='r') for path in range(PATHS)]
  found = list(chunk_policies.blocks(mapped))
  assert max(nll_BPL.nbytes for _, nll_BPL in found) <= chunk_policies.BLOCK_BYTES
  np.testing.assert_array_equal(np.concatenate([nll_BPL for _, nll_BPL in found]), np.stack(drawn.nll, 1))
  assert np.concatenate([np.arange(len(LENGTHS))[rows] for rows, _ in found]).tolist() == list(range(len(LENGTHS)))


def test_chunks_of_one_token_are_rejected():
  drawn = Drawn()
  with pytest.raises(ValueError, match='use 2 or more'):
    chunk_policies.oracle(drawn.nll, drawn.counts, 1, drawn.first)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_a_path_that_has_diverged_is_not_chosen(bad):
  """All is as without it."""
  drawn, gone = Drawn(), 2
  others = [path for path in range(PATHS) if path != gone]
  without = [drawn.nll[path] for path in others]
  drawn.nll[gone][:] = np.where(drawn.nll[gone] > 0, bad, 0)
  drawn.first[drawn.first == gone] = 0
  first = np.searchsorted(others, drawn.first)
  for policy in (chunk_policies.oracle, chunk_policies.history):
    found = policy(drawn.nll, drawn.counts, 16, drawn.first)
    np.testing.assert_array_equal(found, policy(without, drawn.counts, 16, first))
  found = chunk_policies.hindsight(drawn.nll, drawn.counts, 16)
  np.testing.assert_array_equal(found, chunk_policies.hindsight(without, drawn.counts, 16))


def test_where_all_have_diverged_nothing_is_flattered():
  drawn = Drawn()
  for nll in drawn.nll:
    nll[-1, 40:] = np.nan
  for found in (
    chunk_policies.oracle(drawn.nll, drawn.counts, 16, drawn.first),
    chunk_policies.hindsight(drawn.nll, drawn.counts, 16),
  ):
    assert np.isfinite(found[:-1]).all() and found[-1] == np.inf
