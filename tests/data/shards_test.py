"""Shards hold every sequence, each on one side, and the first rows of a hold-out are of all its documents."""

import numbered
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_shards_hold_every_sequence(tmp_path_factory, data):
  """Each sequence is in the hold-out of its first path, or trains all its paths; a document is on one side."""
  lengths = data.draw(st.lists(st.integers(5, 150), min_size=1, max_size=80))
  num_paths, top_n = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 2))
  folder = tmp_path_factory.mktemp('shards')
  sequences = numbered.make_sequences(folder / 'sequences', lengths, data.draw(st.integers(1, 3)))
  rng = np.random.default_rng(data.draw(st.integers(0, 9)))
  assignment = rng.random((len(sequences), num_paths)).argsort(1)[:, :top_n].astype(np.int32)
  meta = numbered.write(sequences, assignment, num_paths, folder / 'shards', holdout_fraction=0.2)
  kinds = [
    {s: numbered.read(folder / 'shards' / str(p) / f'{s}.array_record') for s in ('train', 'holdout')}
    for p in range(num_paths)
  ]
  train = [numbered.segments(*kind['train']) for kind in kinds]
  holdout = [numbered.segments(*kind['holdout']) for kind in kinds]
  held = {sequence for path in holdout for sequence in path}
  for i, sequence in enumerate(sequences):
    tokens = tuple(sequence.tokens)
    assert [p for p in range(num_paths) if tokens in holdout[p]] == ([assignment[i, 0]] if tokens in held else [])
    assert {p for p in range(num_paths) if tokens in train[p]} == (set() if tokens in held else set(assignment[i]))
  sides = {(s.document, tuple(s.tokens) in held) for s in sequences}
  assert len(sides) == len({document for document, _ in sides}), 'a document is held back whole'
  assert meta['shard_tokens'] == [sum(map(len, path)) for path in train]
  assert meta['shard_sequences'] == list(map(len, train))
  assert meta['shard_rows'] == [len(kind['train'][0]) for kind in kinds]
  assert meta['holdout_rows'] == [len(kind['holdout'][0]) for kind in kinds]
  assert np.sum(meta['sequences_by_path_and_domain']) == len(sequences)
  rows = np.concatenate([kind['train'][1] for kind in kinds])
  assert meta['padding_fraction'] == pytest.approx((rows == 0).mean() if rows.size else 1)


def test_the_first_rows_of_a_written_hold_out_are_of_all_its_documents(tmp_path):
  lengths = np.random.default_rng(0).integers(5, 400, 300).tolist()
  sequences = numbered.make_sequences(tmp_path / 'sequences', lengths)
  meta = numbered.write(sequences, np.zeros((len(sequences), 1), int), 1, tmp_path / 'shards', holdout_fraction=0.1)
  ends = np.cumsum([0, *lengths])
  tokens, ids = numbered.read(tmp_path / 'shards' / '0' / 'holdout.array_record')
  of_row = [set(np.searchsorted(ends, row[row_ids > 0], 'left') - 1) for row, row_ids in zip(tokens, ids, strict=True)]
  everything = set().union(*of_row)
  assert 20 <= len(everything) <= 40 and len(of_row) == meta['holdout_rows'][0] > 60
  assert set().union(*of_row[: len(everything)]) == everything
