"""Packing loses nothing and mixes nothing; hold-outs are whole documents; a stream depends on its step alone."""

import itertools
import json
import os
import threading
import time
import tracemalloc

import numpy as np
import pytest
import whole
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco_jax.data import holdouts, loader, packing, prefetching
from dipaco_jax.data.corpus import Document
from dipaco_jax.data.sequences import Sequences

SEQ_LEN = 48


class Numbered:
  """A vocabulary in which no token occurs twice: a text is the range of its tokens."""

  vocab_size = 1 << 31

  def encode_batch(self, texts):
    return [np.arange(*map(int, t.split())) for t in texts]


def make_sequences(folder, lengths, parts=1):
  """Documents of so many tokens; tokens count from 1."""
  ends = [0, *itertools.accumulate(lengths)]
  documents = [Document(str(i), f'{a + 1} {b + 1}', f'd{i % 3}') for i, (a, b) in enumerate(itertools.pairwise(ends))]
  sizes = {'seq_len': SEQ_LEN, 'eval_len': SEQ_LEN, 'prefix_tokens': 4}
  whole.write_sequences(lambda split: documents, Numbered(), folder, parts, **sizes)
  return Sequences(folder, 'train', open_parts=1)


def read(file):
  return loader.read_rows(str(file), 0, 10**6, SEQ_LEN)


def segments(tokens, ids):
  """The sequences in packed rows, each row checked on the way."""
  found = []
  for row, row_ids in zip(tokens, ids, strict=True):
    used = np.count_nonzero(row_ids)
    assert (row_ids[used:] == 0).all() and (row[used:] == 0).all(), 'padding is at the end'
    steps = np.diff(row_ids[:used])
    assert used == 0 or (row_ids[0] == 1 and np.isin(steps, [0, 1]).all()), 'segments are contiguous: 1, 2...'
    found += [tuple(row[row_ids == s]) for s in range(1, row_ids.max() + 1)]
  return found


@settings(deadline=None)
@given(st.lists(st.integers(1, SEQ_LEN), max_size=300), st.integers(1, 5))
def test_packing(lengths, open_rows):
  ends = np.cumsum([0, *lengths]) + 1
  sequences = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(packing, 'OPEN_ROWS', open_rows)
    rows = list(packing.pack(iter(sequences), SEQ_LEN))
  packed = np.array(rows, np.int64).reshape(-1, 2, SEQ_LEN)
  assert sorted(segments(packed[:, 0], packed[:, 1])) == [tuple(s) for s in sequences], 'each once and whole'
  used = np.count_nonzero(packed[:, 1], axis=1)
  # Of two rows open together, one would have taken the other's first sequence if both were at most half full.
  assert np.count_nonzero(used <= SEQ_LEN // 2) <= 1 or len(rows) > open_rows


def test_sequences_that_fit_exactly_share_a_row():
  assert len(list(packing.pack([np.ones(n, int) for n in (SEQ_LEN - 5, 5, 3, SEQ_LEN - 3)], SEQ_LEN))) == 2


def test_packing_streams():
  """Of sequences no two of which fit in a row, a bounded number waits."""
  read = itertools.count()
  rows = packing.pack((np.ones(SEQ_LEN // 2 + 1, int) for _ in itertools.takewhile(lambda i: i < 5000, read)), SEQ_LEN)
  assert len(list(itertools.islice(rows, 100))) == 100 and next(read) <= 102 + packing.OPEN_ROWS


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_shards_hold_every_sequence(tmp_path_factory, data):
  """Each sequence is in the hold-out of its first path, or trains all its paths; a document is on one side."""
  lengths = data.draw(st.lists(st.integers(5, 150), min_size=1, max_size=80))
  num_paths, top_n = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 2))
  folder = tmp_path_factory.mktemp('shards')
  sequences = make_sequences(folder / 'sequences', lengths, data.draw(st.integers(1, 3)))
  rng = np.random.default_rng(data.draw(st.integers(0, 9)))
  assignment = rng.random((len(sequences), num_paths)).argsort(1)[:, :top_n].astype(np.int32)
  meta = write(sequences, assignment, num_paths, folder / 'shards', holdout_fraction=0.2)
  kinds = [
    {s: read(folder / 'shards' / str(p) / f'{s}.array_record') for s in ('train', 'holdout')} for p in range(num_paths)
  ]
  train = [segments(*kind['train']) for kind in kinds]
  holdout = [segments(*kind['holdout']) for kind in kinds]
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


def write(sequences, assignment, num_paths, out_dir, **kwargs):
  options = {'seq_len': SEQ_LEN, 'seed': 0, 'holdout_fraction': 0.05} | kwargs
  meta = whole.write_shards(sequences, assignment, num_paths, out_dir, **options)
  with open(out_dir / 'meta.json') as f:
    assert json.load(f) == meta
  return meta


def test_hold_outs_follow_the_fraction_and_the_seed():
  documents = np.arange(100_000) // 2
  held = holdouts.held_out(documents, documents % 7, 7, 0, 0.05)
  assert 0.045 < held.mean() < 0.055
  assert (held[::2] == held[1::2]).all()
  assert (held != holdouts.held_out(documents, documents % 7, 7, 1, 0.05)).any()
  assert (held == holdouts.held_out(documents, documents % 7, 7, 0, 0.05)).all()
  assert not holdouts.held_out(documents, documents % 7, 7, 0, 0.0).any()


def test_small_paths_have_a_hold_out_and_tiny_ones_do_not():
  documents = np.concatenate([np.arange(1000), np.arange(1000, 1000 + holdouts.MIN_DOCUMENTS), [5000, 5001]])
  first = np.repeat([0, 1, 2], [1000, holdouts.MIN_DOCUMENTS, 2])
  held = holdouts.held_out(documents, first, 3, 0, 1e-9)
  assert [held[first == p].sum() for p in range(3)] == [1, 1, 0]


def test_what_is_not_used_is_not_held_back():
  """Nor does a draw that hits it count as a path's."""
  everything = np.arange(5000)
  hit = holdouts.held_out(everything, np.zeros(5000, int), 1, 0, 0.01)
  documents = np.concatenate([everything[hit], everything[~hit][: holdouts.MIN_DOCUMENTS]])
  first = np.repeat([-1, 1], [hit.sum(), holdouts.MIN_DOCUMENTS])
  held = holdouts.held_out(documents, first, 2, 0, 0.01)
  assert [held[first == p].sum() for p in (-1, 1)] == [0, 1]


def test_many_paths_need_few_open_files(tmp_path):
  sequences = make_sequences(tmp_path / 'sequences', [40] * 600)
  write(sequences, np.arange(600)[:, None] % 300, 300, tmp_path / 'shards', holdout_fraction=0.0)
  before = len(os.listdir('/proc/self/fd'))
  streams = [loader.Shard([f'{tmp_path}/shards/{p}/train.array_record'], 2, SEQ_LEN, 0, p) for p in range(300)]
  for stream in streams:
    stream.batch(3)
  assert len(os.listdir('/proc/self/fd')) - before <= 257


@settings(deadline=None)
@given(st.integers(1, 70), st.integers(0, 2**31), st.integers(0, 40_000), st.integers(0, 10**12))
def test_an_epoch_is_a_permutation(num_rows, seed, path, epoch):
  positions = np.arange(epoch * num_rows, (epoch + 1) * num_rows)
  order = loader.shuffled(positions, num_rows, seed, path)
  assert sorted(order) == list(range(num_rows))
  alone = [loader.shuffled(positions[i : i + 1], num_rows, seed, path)[0] for i in range(min(num_rows, 5))]
  assert alone == list(order[:5])


def test_orders_are_fair_and_differ():
  orders = {tuple(loader.shuffled(np.arange(4 * e, 4 * e + 4), 4, 0, 0)) for e in range(500)}
  assert len(orders) == 24, 'all permutations occur'
  one = loader.shuffled(np.arange(200_000), 200_000, 0, 0)
  others = [loader.shuffled(np.arange(200_000), 200_000, *key) for key in ((1, 0), (0, 1))]
  others.append(loader.shuffled(np.arange(200_000, 400_000), 200_000, 0, 0))
  for other in [*others, np.arange(200_000)]:
    assert np.corrcoef(one, other)[0, 1] ** 2 < 25 / 200_000  # five standard deviations of independent orders
    assert (one == other).sum() < 10


@pytest.fixture(scope='module')
def stream_file(tmp_path_factory):
  folder = tmp_path_factory.mktemp('stream')
  sequences = make_sequences(folder / 'sequences', [SEQ_LEN] * 37)
  write(sequences, np.zeros((37, 1), int), 1, folder / 'shards', holdout_fraction=0.0)
  return f'{folder}/shards/0/train.array_record'


@pytest.mark.parametrize('batch_size', [1, 8, 37, 100, 9000])
def test_a_stream_depends_on_its_step_alone(stream_file, batch_size):
  stream = loader.Shard([stream_file], batch_size, SEQ_LEN, 3, 5)
  steps = [stream.batch(step) for step in range(4)]
  for step in (3, 0, 2):
    again = loader.Shard([stream_file], batch_size, SEQ_LEN, 3, 5).batch(step)
    assert all((a == b).all() for a, b in zip(again, steps[step], strict=True))
  tokens = np.concatenate([tokens for tokens, _ in steps])
  assert tokens.shape == (4 * batch_size, SEQ_LEN) and tokens.dtype == steps[0][1].dtype == np.int32
  rows = loader.shuffled(np.arange(4 * batch_size), 37, 3, 5)
  assert (tokens == read(stream_file)[0][rows]).all()


def test_several_files_are_one_stream(tmp_path):
  sequences = make_sequences(tmp_path / 'sequences', [SEQ_LEN] * 40)
  where = np.repeat([0, 1, 3], [7, 3, 30])[:, None]  # no sequence goes to 2
  write(sequences, np.zeros_like(where), 1, tmp_path / 'one', holdout_fraction=0.0)
  write(sequences, where, 4, tmp_path / 'four', holdout_fraction=0.0)
  one, four = (
    loader.Shard([f'{tmp_path}/{name}/{p}/train.array_record' for p in range(count)], 16, SEQ_LEN, 3, 5)
    for name, count in (('one', 1), ('four', 4))
  )
  for step in range(5):
    assert all((a == b).all() for a, b in zip(one.batch(step), four.batch(step), strict=True))


def test_dealing_out_takes_few_bytes_a_sequence():
  """One for what is held back; what is computed on the way is of a block."""
  documents = np.arange(1 << 23, dtype=np.uint32)
  first = (documents % 5).astype(np.int32)
  first[-100:] = 5  # a path that no draw hits
  tracemalloc.start()
  held = holdouts.held_out(documents, first, 6, 0, 1e-3)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert held[-100:].sum() == 1
  assert peak < 4 * len(documents)


def test_a_far_step_costs_no_more(stream_file):
  stream = loader.Shard([stream_file], 8, SEQ_LEN, 0, 0)
  start = time.perf_counter()
  stream.batch(10**12)
  assert time.perf_counter() - start < 1


def test_rows_are_read_by_their_numbers_up_to_the_last(stream_file):
  tokens, ids = loader.read_rows(stream_file, 0, 100, SEQ_LEN)
  assert tokens.shape == ids.shape == (37, SEQ_LEN) and (ids == 1).all()
  for start, stop in ((0, 8), (8, 9), (32, 40), (37, 40), (50, 60)):
    some, some_ids = loader.read_rows(stream_file, start, stop, SEQ_LEN)
    assert (some == tokens[start:stop]).all() and (some_ids == ids[start:stop]).all()


def test_padding_single_sequences():
  tokens, ids = packing.pad([np.arange(1, 4, dtype=np.uint16), np.arange(1, 9, dtype=np.uint16)], 5)
  assert tokens.tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]] and ids.tolist() == [[1, 1, 1, 0, 0], [1] * 5]
  assert tokens.dtype == ids.dtype == np.int32


def test_empty_missing_and_damaged_shards(tmp_path):
  sequences = make_sequences(tmp_path / 'sequences', [40] * 5)
  write(sequences, np.zeros((5, 1), int), 2, tmp_path / 'shards', holdout_fraction=0.0)
  with pytest.raises(ValueError, match=r'path 1 has no text .*fewer paths in config\.grid'):
    loader.Shard([f'{tmp_path}/shards/1/train.array_record'], 2, SEQ_LEN, 0, 1)
  assert loader.read_rows(f'{tmp_path}/shards/1/holdout.array_record', 0, 2, SEQ_LEN)[0].shape == (0, SEQ_LEN)
  with pytest.raises(ValueError, match='missing'):
    loader.Shard([f'{tmp_path}/none'], 2, SEQ_LEN, 0, 1)
  (tmp_path / 'bad').write_bytes(b'x' * 100_000)
  with pytest.raises(ValueError, match='not as it was written'):
    loader.Shard([f'{tmp_path}/bad'], 2, SEQ_LEN, 0, 1)


def test_prefetch_runs_ahead_but_not_far():
  loaded = []
  stream = prefetching.prefetch(lambda i: loaded.append(i) or i * i, range(3, 9), depth=2)
  assert next(stream) == 9
  wait_for(lambda: loaded == [3, 4, 5])
  time.sleep(0.05)
  assert loaded == [3, 4, 5], 'at most two ahead'
  assert list(stream) == [16, 25, 36, 49, 64] and loaded == list(range(3, 9))
  assert list(prefetching.prefetch(str, [])) == []


def test_prefetch_loads_as_many_at_once_as_it_has_threads():
  both = threading.Barrier(2, timeout=60)
  assert list(prefetching.prefetch(lambda i: (both.wait(), i)[1], range(6), depth=2, threads=2)) == list(range(6))


def test_prefetch_passes_errors_on_and_ends_its_thread():
  def load(i):
    if i == 2:
      raise OSError('disk gone')
    return i

  stream = prefetching.prefetch(load, range(5))
  assert [next(stream), next(stream)] == [0, 1]
  with pytest.raises(OSError, match='disk gone'):
    next(stream)
  closed = prefetching.prefetch(load, range(3, 100))
  next(closed)
  closed.close()
  assert not [t for t in threading.enumerate() if t.name.startswith('prefetch')]


def wait_for(condition):
  deadline = time.monotonic() + 10
  while not condition() and time.monotonic() < deadline:
    time.sleep(0.001)
  assert condition()


# -- hold-outs over documents, and of longer texts


def test_a_hold_out_begins_with_every_document(tmp_path):
  """In the order of the text, its first rows are of few: 20 documents of 30 sequences each."""
  sequences = make_sequences(tmp_path / 'sequences', [30 * SEQ_LEN] * 20)
  documents, _ = sequences.columns()
  order = np.concatenate([*holdouts.spread_out(sequences, iter([np.arange(200), np.arange(200, 600)]), 0)])
  assert sorted(order) == list(range(600))
  for turn in range(30):
    assert sorted(documents[order[20 * turn : 20 * turn + 20]]) == list(range(20))
  firsts = order[:20]
  assert (firsts % 30).std() > 5, 'of a document not its beginning'
  assert (order != np.concatenate([*holdouts.spread_out(sequences, iter([np.arange(600)]), 1)])).any()
  assert (order == np.concatenate([*holdouts.spread_out(sequences, iter([np.arange(600)]), 0)])).all()
  assert list(holdouts.spread_out(sequences, iter([]), 0)) == []


def test_the_first_rows_of_a_written_hold_out_are_of_all_its_documents(tmp_path):
  lengths = np.random.default_rng(0).integers(5, 400, 300).tolist()
  sequences = make_sequences(tmp_path / 'sequences', lengths)
  meta = write(sequences, np.zeros((len(sequences), 1), int), 1, tmp_path / 'shards', holdout_fraction=0.1)
  ends = np.cumsum([0, *lengths])
  tokens, ids = read(tmp_path / 'shards' / '0' / 'holdout.array_record')
  of_row = [set(np.searchsorted(ends, row[row_ids > 0], 'left') - 1) for row, row_ids in zip(tokens, ids, strict=True)]
  everything = set().union(*of_row)
  assert 20 <= len(everything) <= 40 and len(of_row) == meta['holdout_rows'][0] > 60
  assert set().union(*of_row[: len(everything)]) == everything


@settings(deadline=None)
@given(st.lists(st.integers(1, SEQ_LEN), max_size=300), st.integers(1, 5))
def test_packing_in_order(lengths, open_rows):
  ends = np.cumsum([0, *lengths]) + 1
  sequences = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(packing, 'OPEN_ROWS', open_rows)
    packed = np.array(list(packing.pack_in_order(iter(sequences), SEQ_LEN)), np.int64).reshape(-1, 2, SEQ_LEN)
  assert sorted(segments(packed[:, 0], packed[:, 1])) == [tuple(s) for s in sequences], 'each once and whole'
  assert (np.diff(packed[:, 0, 0]) > 0).all(), 'rows come as their first sequences do'


def texts(count, pieces):
  """Documents, and draws of texts of so many pieces: the share of a text behind the middle of each."""
  documents = np.repeat(np.arange(count * pieces), 3)
  return documents, np.tile(np.repeat(1 - (np.arange(pieces) + 0.5) / pieces, 3), count).astype(np.float32)


def test_of_longer_texts_the_ends_are_held_back():
  documents, draws = texts(4, 500)
  held = holdouts.held_out(documents, documents % 5, 5, 0, 0.01, holdouts.draw_pieces(documents, draws, 0.01))
  assert np.flatnonzero(held[::3]).tolist() == [500 * i + n for i in range(4) for n in range(495, 500)]
  router = holdouts.draw_pieces(documents, draws, 0.02)
  after = holdouts.held_out(
    documents, documents % 5, 5, 0, 0.01, holdouts.draw_pieces(documents, draws, 0.01, router.end)
  )
  assert np.flatnonzero(holdouts.draw_documents(documents, 0, 0.02, 'x', router)[:1500:3]).tolist() == [
    *range(490, 500)
  ]
  assert np.flatnonzero(after[:1500:3]).tolist() == [*range(485, 490)], 'next to what is held back already'


def test_of_little_text_more_is_held_back_up_to_a_bound():
  documents, draws = texts(2, 100)
  held = holdouts.draw_pieces(documents, draws, 0.01)
  assert len(np.unique(documents[held.inside(slice(None))])) == holdouts.LEAST_PIECES
  documents, draws = texts(2, 20)
  held = holdouts.draw_pieces(documents, draws, 0.01)
  assert len(np.unique(documents[held.inside(slice(None))])) == 4  # a tenth
  assert not holdouts.draw_pieces(documents, draws, 0.0).inside(slice(None)).any()


def test_of_texts_that_are_drawn_whole_all_pieces_are_held_back():
  documents, draws = np.arange(2000), np.repeat(np.arange(20) / 20, 100).astype(np.float32)
  held = holdouts.held_out(documents, documents % 3, 3, 0, 0.01, holdouts.draw_pieces(documents, draws, 0.01))
  assert np.flatnonzero(held).tolist() == list(range(100))
  first = np.where(documents < 100, 0, 1 + documents % 2)  # no piece of it is another path's
  held = holdouts.held_out(documents, first, 3, 0, 0.01, holdouts.draw_pieces(documents, draws, 0.01))
  assert np.flatnonzero(held).tolist() == list(range(200)), 'those paths get the next text, whole'


def test_documents_and_pieces_are_drawn_side_by_side():
  documents, draws = texts(1, 1000)
  documents = np.concatenate([documents, np.arange(10_000, 60_000)])
  draws = np.concatenate([draws, np.full(50_000, -1, np.float32)])
  first = np.zeros(len(documents), int)
  held = holdouts.held_out(documents, first, 1, 0, 0.05, holdouts.draw_pieces(documents, draws, 0.05))
  assert held[:2850].sum() == 0 and held[2850:3000].all() and 0.045 < held[3000:].mean() < 0.055
