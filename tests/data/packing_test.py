"""Packing loses nothing and mixes nothing."""

import itertools

import numbered
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numbered import SEQ_LEN

from dipaco_jax.data import packing


def pack_whole(pack, lengths: list[int], open_rows: int) -> np.ndarray:
  """Rows [N, 2, SEQ_LEN] of numbered sequences of these lengths, each of which is found once and whole."""
  ends = np.cumsum([0, *lengths]) + 1
  sequences = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(packing, 'OPEN_ROWS', open_rows)
    packed = np.array(list(pack(iter(sequences), SEQ_LEN)), np.int64).reshape(-1, 2, SEQ_LEN)
  assert sorted(numbered.segments(packed[:, 0], packed[:, 1])) == [tuple(s) for s in sequences], 'each once and whole'
  return packed


@settings(deadline=None)
@given(st.lists(st.integers(1, SEQ_LEN), max_size=300), st.integers(1, 5))
def test_every_sequence_is_packed_once_and_whole(lengths, open_rows):
  packed = pack_whole(packing.pack, lengths, open_rows)
  used = np.count_nonzero(packed[:, 1], axis=1)
  # Of two rows open together, one would have taken the other's first sequence if both were at most half full.
  assert np.count_nonzero(used <= SEQ_LEN // 2) <= 1 or len(packed) > open_rows


def test_sequences_that_fit_exactly_share_a_row():
  lengths = SEQ_LEN - 5, 5, 3, SEQ_LEN - 3
  assert len(list(packing.pack([np.ones(n, int) for n in lengths], SEQ_LEN))) == 2


def test_a_bounded_number_of_sequences_waits():
  """No two of these fit in a row."""
  read = itertools.count()
  long = (np.ones(SEQ_LEN // 2 + 1, int) for _ in itertools.takewhile(lambda i: i < 5000, read))
  rows = packing.pack(long, SEQ_LEN)
  assert len(list(itertools.islice(rows, 100))) == 100 and next(read) <= 102 + packing.OPEN_ROWS


def test_single_sequences_are_padded_and_cut():
  tokens, ids = packing.pad([np.arange(1, 4, dtype=np.uint16), np.arange(1, 9, dtype=np.uint16)], 5)
  assert tokens.tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]] and ids.tolist() == [[1, 1, 1, 0, 0], [1] * 5]
  assert tokens.dtype == ids.dtype == np.int32


@settings(deadline=None)
@given(st.lists(st.integers(1, SEQ_LEN), max_size=300), st.integers(1, 5))
def test_rows_in_order_come_as_their_first_sequences_do(lengths, open_rows):
  packed = pack_whole(packing.pack_in_order, lengths, open_rows)
  assert (np.diff(packed[:, 0, 0]) > 0).all(), 'rows come as their first sequences do'
