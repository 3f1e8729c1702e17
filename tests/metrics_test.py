"""Rows, TensorBoard events, the progress line, and figures against direct computations."""

import contextlib
import fcntl
import io
import json
import math
import os
import pty
import struct
import termios
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto import event_pb2

from dipaco_jax import metrics, settings
from dipaco_jax import progress as progress_lib


@pytest.fixture
def opened(tmp_path):
  """Opens the workdir's metrics, and closes them in the end."""
  with contextlib.ExitStack() as stack:
    yield lambda: stack.enter_context(metrics.Metrics(tmp_path))


def rows(workdir):
  return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def test_rows_are_plain_json(tmp_path, opened):
  writer = opened()
  writer.write('step', 'train', 1, loss=np.array([1.5, np.nan], np.float32), worst=float('inf'), best=np.float64(2))
  (row,) = rows(tmp_path)
  assert row.pop('time') > 1e9
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
  assert len(list(metrics.read_rows(tmp_path))) == whole
  opened().write('step', 'train', 9)
  assert [row['updates'] for row in rows(tmp_path)] == [*range(whole), 9]


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


def events(folder):
  """Events of a stage, in the order of the files' names, as TensorBoard reads them."""
  for file in sorted(folder.iterdir()):
    data = file.read_bytes()
    while data:
      (length,) = struct.unpack('<Q', data[:8])
      yield event_pb2.Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]


def test_tensorboard_events(tmp_path, opened):
  writer = opened()
  writer.write('step', 'train', 7, paths=[1, 3], loss=[2.0, 4.0])
  writer.write('evaluation', 'train', 8, perplexity=9.0, perplexity_by_path=[8.0, None], perplexity_by_domain={'x': 3})
  found = {v.tag: (e.step, v.simple_value) for e in events(tmp_path / 'events' / 'train') for v in e.summary.value}
  assert found == {
    'train/loss': (7, 3.0),
    'train/loss/path_1': (7, 2.0),
    'train/loss/path_3': (7, 4.0),
    'evaluation/perplexity': (8, 9.0),
    'evaluation/perplexity/path_0': (8, 8.0),
    'evaluation/perplexity/domain/x': (8, 3.0),
  }


def test_tensorboard_hides_what_a_resumed_run_does_again(tmp_path, opened):
  writer = opened()
  writer.write('step', 'train', 30, loss=[1.0])
  writer.rewind('train', 20)
  purges = [e.step for e in events(tmp_path / 'events' / 'train') if e.HasField('session_log')]
  assert purges == [21]
  assert len(list((tmp_path / 'events' / 'train').iterdir())) == 2  # also within the same second


def test_many_paths_are_not_all_tagged():
  row = {'kind': 'step', 'stage': 'train', 'updates': 1, 'time': 0.0, 'paths': list(range(256)), 'loss': [1.0] * 256}
  tags = dict(metrics.scalars(row))
  assert len(tags) == 1 + metrics.MAX_TAGGED_PATHS


def on_terminal(columns, updates):
  """Everything that a progress line writes to a terminal; updates are (seconds, done, shown)."""
  leader, follower = pty.openpty()
  fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack('HHHH', 24, columns, 0, 0))
  now, written = [0.0], []

  def read():
    with contextlib.suppress(OSError):  # how a terminal tells that nobody will write any more
      while data := os.read(leader, 4096):
        written.append(data)

  reader = threading.Thread(target=read)
  reader.start()
  with open(follower, 'w') as stream:
    progress = progress_lib.Progress('train', 1000, 'steps', stream, clock=lambda: now[0])
    for now[0], done, shown in updates:
      progress.update(done, **shown)
    progress.close()
    progress.close()  # which says nothing twice
  reader.join()
  os.close(leader)
  return b''.join(written).decode()


def test_progress_on_a_terminal(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  written = on_terminal(200, [(t / 10, 500 + t, {'loss': 3.25, 'tokens_per_s': 8012.3}) for t in range(101)])
  *lines, last = written.split('\r')[1:]
  assert 25 < len(lines) < 52, 'at most five a second, for ten seconds'
  assert all(line.endswith('\x1b[K') for line in lines)
  # 100 steps took 10 s; the 500 before the resume took none and don't count.
  assert lines[-1] == 'train 600/1,000 steps 60%  loss 3.250  8,012 tokens/s  ETA 40 s\x1b[K'
  assert last == '\n'


def test_progress_never_wraps(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  written = on_terminal(20, [(1.0, 1, {'loss': 3.25, 'tokens_per_s': 8012.3})])
  assert written.split('\r')[1] == 'train 1/1,000 steps\x1b[K'


def test_eta_is_of_the_recent_rate(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  slow_first = [(0.0, 0, {}), (100.0, 1, {}), *((100.0 + t, 1 + t, {}) for t in range(1, 60))]
  assert 'ETA 15:40' in on_terminal(80, slow_first)  # 940 steps at one a second


def test_progress_off_a_terminal_is_rare():
  now, stream = [0.0], io.StringIO()
  progress = progress_lib.Progress('pretrain', 0, 'documents', stream, clock=lambda: now[0])
  for now[0] in np.arange(0, 600, 0.5):
    progress.update(int(now[0]))
  progress.close()
  lines = stream.getvalue().splitlines()
  seconds = [int(line.split()[1]) for line in lines]
  assert lines[0] == 'pretrain 0 documents' and seconds[-1] == 599
  assert np.diff(seconds[:10]).tolist() == [10] * 9 and np.diff(seconds[20:-1]).tolist() == [30] * len(seconds[21:-1])


def test_the_last_update_is_shown_once():
  stream = io.StringIO()
  progress = progress_lib.Progress('route', 2, 'shards', stream)
  progress.update(2)
  progress.close()
  assert stream.getvalue() == 'route 2/2 shards 100%\n'


@given(st.data())
def test_summarize_is_the_direct_computation(data):
  n, num_paths = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
  sequences = [
    (
      data.draw(st.floats(0, 500)),
      data.draw(st.integers(1, 100)),
      data.draw(st.integers(1, 400)),
      data.draw(st.integers(0, num_paths - 1)),
      data.draw(st.integers(0, 1)),
    )
    for _ in range(n)
  ]
  found = metrics.summarize(*map(np.array, zip(*sequences, strict=True)), num_paths, ['law', 'news'])

  def perplexity(chosen):
    if not chosen:
      return None
    return pytest.approx(math.exp(math.fsum(s[0] for s in chosen) / sum(s[1] for s in chosen)), rel=1e-12)

  assert found['perplexity'] == perplexity(sequences)
  assert found['perplexity_by_path'] == [perplexity([s for s in sequences if s[3] == p]) for p in range(num_paths)]
  by_domain = {name: perplexity([s for s in sequences if s[4] == i]) for i, name in enumerate(['law', 'news'])}
  assert found['perplexity_by_domain'] == by_domain
  assert found['validation_tokens'] == sum(s[1] for s in sequences)
  bits = math.fsum(s[0] for s in sequences) / math.log(2) / sum(s[2] for s in sequences)
  assert found['bits_per_byte'] == pytest.approx(bits, rel=1e-12)


def test_summarize_without_tokens():
  with pytest.raises(ValueError, match='longer than the prefix'):
    metrics.summarize(*(np.zeros(1, int),) * 5, 1, ['all'])


def test_flops_per_token_by_hand():
  # Width 8, 2 heads of 3, MLP 5, 2 blocks, vocabulary 11, 7 tokens. A block: 4 * 8 * 6 + 3 * 8 * 5 = 312 products.
  model = settings.Model(width=8, num_layers=2, num_heads=2, head_dim=3, mlp_dim=5)
  assert metrics.flops_per_token(model, 11, 7) == 6 * (2 * 312 + 8 * 11) + 12 * 2 * 7 * 6


def test_mfu():
  assert metrics.mfu(197e12, 'TPU v5 lite', 'bfloat16', 2) == 0.5
  assert metrics.mfu(459e12, 'TPU v5p', 'bfloat16', 1) == 1
  assert metrics.mfu(275e12, 'TPU v4', 'float32', 1) == 1
  assert metrics.mfu(989e12, 'NVIDIA H200', 'float32', 1) == 2
  assert metrics.mfu(756e12, 'NVIDIA H100 PCIe', 'bfloat16', 1) == 1
  assert metrics.mfu(1e12, 'NVIDIA H100 80GB HBM3 MIG 1g.10gb', 'bfloat16', 1) is None
  assert metrics.mfu(1e12, 'cpu', 'float32', 1) is None


def test_peak_memory():
  import jax

  block = np.ones(200_000_000, np.uint8)
  assert metrics.process_peak_bytes() > len(block)
  assert metrics.device_peak_bytes(jax.devices('cpu')) is None


@pytest.mark.parametrize(
  ('seconds', 'words'), [(0.4, '0 s'), (59.4, '59 s'), (61, '1:01'), (3661, '1:01:01'), (90_061, '1 d 1 h')]
)
def test_duration(seconds, words):
  assert progress_lib.duration(seconds) == words
