"""Rows of metrics.jsonl: whole, on disk, read forwards and backwards, rewound."""

import contextlib
import json

import numpy as np
import pytest

from dipaco_jax.telemetry import metrics_log


@pytest.fixture
def opened(tmp_path):
  """Opens the workdir's metrics, and closes them in the end."""
  with contextlib.ExitStack() as stack:
    yield lambda: stack.enter_context(metrics_log.Metrics(tmp_path))


def rows(workdir):
  return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def test_rows_are_plain_json(tmp_path, opened):
  writer = opened()
  writer.write('step', 'train', 1, loss=np.array([1.5, np.nan], np.float32), worst=float('inf'), best=np.float64(2))
  (row,) = rows(tmp_path)
  assert row.pop('time') > 1e9 and len(row.pop('seal')) == 8
  expected = {'kind': 'step', 'stage': 'train', 'updates': 1, 'loss': [1.5, None], 'worst': None, 'best': 2.0}
  assert row == expected


def test_a_row_is_on_disk_when_write_returns(tmp_path, opened):
  writer = opened()
  for updates in range(3):
    writer.write('step', 'train', updates, loss=[1.0])
    assert rows(tmp_path)[-1]['updates'] == updates


@pytest.mark.parametrize('torn', [b'{"kind": "st', b'{"kind": "step"}', b'x' * 200_000])
@pytest.mark.parametrize('whole', [0, 2])
def test_a_torn_line_is_dropped(tmp_path, opened, torn, whole):
  writer = opened()
  for updates in range(whole):
    writer.write('step', 'train', updates)
  writer.close()
  with open(tmp_path / 'metrics.jsonl', 'ab') as f:
    f.write(torn)
  assert len(list(metrics_log.read_rows(tmp_path))) == whole
  opened().write('step', 'train', 9)
  assert [row['updates'] for row in rows(tmp_path)] == [*range(whole), 9]


def test_damaged_lines_are_reported_once_though_rows_with_marks_are_read_too(tmp_path, caplog):
  row = {'kind': 'phase', 'stage': 'train', 'updates': 1, 'time': 0.0, 'excluded': {'0': 'far'}}
  (tmp_path / 'metrics.jsonl').write_bytes(metrics_log.to_line(row).replace(b'far', b'fat') + metrics_log.to_line(row))
  assert list(metrics_log.read_rows(tmp_path, b'"excluded": {')) == [row] == list(metrics_log.read_rows(tmp_path))
  assert [record.getMessage().endswith('skipped') for record in caplog.records] == [True]


def test_rewind_drops_later_rows_of_the_stage(tmp_path, opened):
  writer = opened()
  for updates in (10, 20, 30):
    writer.write('step', 'pretrain', updates)
  for updates in (10, 20, 30):
    writer.write('step', 'train', updates, loss=[float(updates)])
  writer.close()
  resumed = opened()
  resumed.rewind('train', 20)
  resumed.write('step', 'train', 30, loss=[3.0])
  found = [(row['stage'], row['updates'], row.get('loss')) for row in rows(tmp_path)]
  pretrain = [('pretrain', updates, None) for updates in (10, 20, 30)]
  assert found == [*pretrain, ('train', 10, [10.0]), ('train', 20, [20.0]), ('train', 30, [3.0])]
  assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ['metrics.jsonl']


def test_a_line_that_is_half_written_is_passed_over_backwards_too(tmp_path):
  with metrics_log.Metrics(tmp_path) as writer:
    for updates in range(3):
      writer.write('step', 'train', updates)
  with open(tmp_path / 'metrics.jsonl', 'a') as f:
    f.write('{"kind": "step", "stage": "tr')
  assert [row['updates'] for row in metrics_log.rows_backwards(tmp_path)] == [2, 1, 0]
  with metrics_log.Metrics(tmp_path) as writer:
    writer.write('step', 'train', 3)
  assert [row['updates'] for row in metrics_log.rows_backwards(tmp_path)] == [3, 2, 1, 0]
