"""Records come back as they were written, from several files as from one."""

import pathlib

import bits
import numpy as np
import pytest

from dipaco_jax.storage import records, seals


def test_no_changed_byte_of_a_record_is_read(tmp_path):
  """Which is why no process reads a file of records from end to end before it trains."""
  rng, file = np.random.default_rng(0), str(tmp_path / 'train.array_record')
  expected = [rng.bytes(128) for _ in range(100)]
  with records.record_writer(file) as writer:
    for record in expected:
      writer.write(record)
  data, damaged = pathlib.Path(file).read_bytes(), 0
  everywhere = [*range(0, 100 * 250, 97), *range(0, len(data), 1009)]  # records, and what is behind them
  for at in everywhere:
    pathlib.Path(file).write_bytes(bits.flipped(data, at, at % 8))
    try:
      assert records.read_records(file, records.record_reader(file), list(range(100))) == expected
    except seals.Damaged:
      damaged += 1
  assert damaged > 100


def test_items_of_several_files_are_read_in_the_order_asked_for():
  files, reads = ['abc', '', 'd', 'efgh'], []

  def read(file, numbers):
    reads.append(file)
    return [files[file][n] for n in numbers]

  for wanted in ([], [0], [7, 0, 3, 3, 6, 2], range(8)):
    reads.clear()
    assert records.read_across([3, 0, 1, 4], wanted, read) == ['abcdefgh'[i] for i in wanted]
    assert len(reads) == len(set(reads)) and 1 not in reads, 'each file once, and no empty one'


def test_a_writer_is_closed_where_the_block_fails(tmp_path):
  with pytest.raises(KeyError, match='of the block'), records.record_writer(str(tmp_path / 'x')) as writer:
    writer.write(b'one')
    raise KeyError('of the block')
  assert not writer.is_open()
