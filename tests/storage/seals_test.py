"""Sealed files are read as they were written, or rejected if any byte has changed."""

import json
import subprocess

import bits
import numpy as np
import pytest

from dipaco_jax.core import errors
from dipaco_jax.storage import module_store, publishing, records, seals
from dipaco_jax.telemetry import metrics_log


def test_no_changed_byte_of_json_is_read():
  value = {'losses': [1.5, None, 2e-7], 'name': 'a "b" \u00e4', 'nested': {'1': True}}
  data = seals.dumps(value).encode()
  assert seals.loads(data) == value and list(json.loads(data)) == [*value, 'seal']
  for at in range(len(data)):
    for bit in range(8):
      found = seals.loads(bits.flipped(data, at, bit), 'losses')
      assert found is None or {name: found[name] for name in value} == value  # else of the seal's own name


OTHERS = b'', b'[]', b'null', b'{}', b'{"a": ', b'\xff\xfe', b'[' * 100_000, b'{"seal": "x", "a": 1}'


@pytest.mark.parametrize('data', OTHERS, ids=range(len(OTHERS)))
def test_json_that_is_no_sealed_object_is_rejected(data, tmp_path):
  (tmp_path / 'stages').mkdir()
  (tmp_path / 'stages' / 'train.json').write_bytes(data)
  with pytest.raises(seals.Damaged, match=r'made by the stage train, is damaged: remove .*train\.json,'):
    seals.read_json(tmp_path / 'stages' / 'train.json', 'a')


def test_a_directory_s_seal_is_as_coreutils_have_it(tmp_path):
  with publishing.publish_directory(tmp_path / 'base') as aside:
    (aside / 'params.safetensors').write_bytes(b'abc')
    (aside / 'inner').write_bytes(b'')
  said = subprocess.run(['sha256sum', '--check', seals.SUMS], cwd=tmp_path / 'base', capture_output=True, text=True)
  assert said.stdout.splitlines() == ['inner: OK', 'params.safetensors: OK']
  assert seals.read(tmp_path / 'base' / 'params.safetensors') == b'abc'
  (tmp_path / 'base' / 'params.safetensors').write_bytes(b'abd')
  with pytest.raises(seals.Damaged, match=r'base/params\.safetensors is damaged'):
    seals.read(tmp_path / 'base' / 'params.safetensors')


@pytest.mark.parametrize('text', ['', '\n', 'x', '0' * 64 + '  params', '0' * 64 + '  other\n', '\x00\xff'])
def test_a_damaged_seal_is_noticed(text, tmp_path):
  with publishing.publish_directory(tmp_path / 'base') as aside:
    (aside / 'params').write_bytes(b'abc')
  (tmp_path / 'base' / seals.SUMS).write_text(text)
  with pytest.raises(seals.Damaged):
    seals.read(tmp_path / 'base' / 'params')
  (tmp_path / 'base' / seals.SUMS).unlink()
  assert seals.read(tmp_path / 'base' / 'params') == b'abc'  # of a run from before there were any


def test_what_is_made_again_at_once_goes(tmp_path, caplog):
  file = tmp_path / 'features' / 'train.npy'
  assert not seals.keep_if_whole(file) and not caplog.text
  publishing.write_array(file, np.arange(100))
  assert seals.keep_if_whole(file)
  bits.flip_in_middle(file)
  assert not seals.keep_if_whole(file) and not file.exists()
  assert 'train.npy is damaged: it is made again' in caplog.text


def test_no_changed_byte_of_metrics_is_read(tmp_path, caplog):
  rows = [{'kind': 'step', 'stage': 'train', 'updates': n, 'time': 1.5, 'loss': [2.0 + n]} for n in range(3)]
  lines = [metrics_log.to_line(row) for row in rows]
  assert metrics_log.from_line(json.dumps(rows[0]).encode() + b'\n') is None, 'it has no seal'
  for at in range(len(lines[1]) - 1):
    found = metrics_log.from_line(bits.flipped(lines[1], at, at % 8))
    assert found is None or rows[1].items() <= found.items()
  (tmp_path / 'metrics.jsonl').write_bytes(lines[0] + bits.flipped(lines[1], 20) + lines[2] + b'{"kind": "st')
  assert list(metrics_log.read_rows(tmp_path)) == [rows[0], rows[2]]
  assert 'metrics.jsonl: 1 lines are damaged' in caplog.text
  caplog.clear()
  assert list(metrics_log.read_rows(tmp_path, b'"loss": ')) == [rows[0], rows[2]] and not caplog.text  # once is enough


def test_a_missing_file_is_an_input_error(tmp_path):
  for action in (
    lambda: seals.check(tmp_path / 'base' / 'none'),
    lambda: seals.read_json(tmp_path / 'stages' / 'train.json'),
    lambda: records.record_reader(str(tmp_path / 'none')),
    lambda: module_store.best_versions(tmp_path),
  ):
    with pytest.raises(seals.Damaged) as info:
      action()
    assert isinstance(info.value, errors.InputError) and 'is missing' in str(info.value) and info.value.errno is None
