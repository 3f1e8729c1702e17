"""A shard's stream depends on its step alone, and every epoch is a permutation of its rows."""

import os
import time

import numbered
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numbered import SEQ_LEN

from dipaco_jax.data import loader


def test_many_paths_need_few_open_files(tmp_path):
  sequences = numbered.make_sequences(tmp_path / 'sequences', [40] * 600)
  numbered.write(sequences, np.arange(600)[:, None] % 300, 300, tmp_path / 'shards', holdout_fraction=0.0)
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
  sequences = numbered.make_sequences(folder / 'sequences', [SEQ_LEN] * 37)
  numbered.write(sequences, np.zeros((37, 1), int), 1, folder / 'shards', holdout_fraction=0.0)
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
  assert (tokens == numbered.read(stream_file)[0][rows]).all()


def test_several_files_are_one_stream(tmp_path):
  sequences = numbered.make_sequences(tmp_path / 'sequences', [SEQ_LEN] * 40)
  where = np.repeat([0, 1, 3], [7, 3, 30])[:, None]  # no sequence goes to 2
  numbered.write(sequences, np.zeros_like(where), 1, tmp_path / 'one', holdout_fraction=0.0)
  numbered.write(sequences, where, 4, tmp_path / 'four', holdout_fraction=0.0)
  one, four = (
    loader.Shard([f'{tmp_path}/{name}/{p}/train.array_record' for p in range(count)], 16, SEQ_LEN, 3, 5)
    for name, count in (('one', 1), ('four', 4))
  )
  for step in range(5):
    assert all((a == b).all() for a, b in zip(one.batch(step), four.batch(step), strict=True))


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


def test_empty_missing_and_damaged_shards_are_named(tmp_path):
  sequences = numbered.make_sequences(tmp_path / 'sequences', [40] * 5)
  numbered.write(sequences, np.zeros((5, 1), int), 2, tmp_path / 'shards', holdout_fraction=0.0)
  with pytest.raises(ValueError, match=r'path 1 has no text .*fewer paths in config\.grid'):
    loader.Shard([f'{tmp_path}/shards/1/train.array_record'], 2, SEQ_LEN, 0, 1)
  assert loader.read_rows(f'{tmp_path}/shards/1/holdout.array_record', 0, 2, SEQ_LEN)[0].shape == (
    0,
    SEQ_LEN,
  )
  with pytest.raises(ValueError, match='missing'):
    loader.Shard([f'{tmp_path}/none'], 2, SEQ_LEN, 0, 1)
  (tmp_path / 'bad').write_bytes(b'x' * 100_000)
  with pytest.raises(ValueError, match='is damaged'):
    loader.Shard([f'{tmp_path}/bad'], 2, SEQ_LEN, 0, 1)
