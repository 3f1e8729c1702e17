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
from hypothesis import given, strategies as st
from tensorboardX.proto import event_pb2

from dipaco_jax.core import settings
from dipaco_jax.training import display, evaluation, metrics_log, performance, tensorboard as events_lib


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


def shown(folder):
  """{tag: [(step, value)]} in the order written, after what a START purges, as TensorBoard reads it."""
  found = []
  for event in events(folder):
    if event.HasField('session_log'):
      found = [(tag, step, value) for tag, step, value in found if step < event.step]
    found += [(v.tag, event.step, round(v.simple_value, 4)) for v in event.summary.value]
  curves = {}
  for tag, step, value in found:
    curves.setdefault(tag, []).append((step, value))
  return curves


def test_tensorboard_has_the_global_step_and_a_tag_for_each_path_and_level(tmp_path, opened):
  writer = opened()
  writer.write(
    'step', 'train', 28, step=107, phase=2, paths=[1, 3], paths_in_phase=2, loss=[2.0, 4.0], learning_rate=0.5
  )
  norms = {'low': {'0-0': 1.0, '0-1': 3.0}, 'all': {'shared': 5.0}}
  writer.write(
    'phase', 'train', 32, step=108, phase=3, loss_by_path=[1.0, 3.0], best_version_by_path=[2, 3],
    outer_gradient_norm=norms, cosine={'low': 0.25},
  )  # fmt: skip
  writer.write(
    'evaluation', 'train', 32, step=108, phase=3, perplexity=9.0, perplexity_by_path=[8.0, None],
    perplexity_by_domain={'x': 3}, perplexity_interval=[8.5, 9.5],
  )  # fmt: skip
  assert shown(tmp_path / 'events' / 'train') == {
    'train/loss': [(107, 3.0)],
    'train/loss/path_1': [(107, 2.0)],
    'train/loss/path_3': [(107, 4.0)],
    'train/learning_rate': [(107, 0.5)],
    'phase/loss': [(108, 2.0)],
    'phase/loss/path_0': [(108, 1.0)],
    'phase/loss/path_1': [(108, 3.0)],
    'phase/best_version/path_0': [(108, 2.0)],
    'phase/best_version/path_1': [(108, 3.0)],
    'phase/outer_gradient_norm/low': [(108, 2.0)],
    'phase/outer_gradient_norm/low/0-0': [(108, 1.0)],
    'phase/outer_gradient_norm/low/0-1': [(108, 3.0)],
    'phase/outer_gradient_norm/all': [(108, 5.0)],
    'phase/cosine/low': [(108, 0.25)],
    'evaluation/perplexity': [(108, 9.0)],
    'evaluation/perplexity/path_0': [(108, 8.0)],
    'evaluation/perplexity/domain/x': [(108, 3.0)],
  }


def in_turns(paths, phase, steps=(2, 4), in_phase=3):
  """(updates, fields) of the rows of a phase of four steps after a base of 100: a path after another."""
  return [
    (
      12 * phase + 4 * path + k,
      {'step': 100 + 4 * phase + k, 'phase': phase, 'paths': [path], 'paths_in_phase': in_phase}
      | {'loss': [path + phase + k / 10], 'tokens_per_s': None if k == 2 else 10.0 * path},
    )
    for path in paths
    for k in steps
  ]


def write_phase(writer, rows, phase, ended=True):
  for updates, fields in rows:
    writer.write('step', 'train', updates, **fields)
  if ended:
    writer.write('phase', 'train', 12 * (phase + 1), step=104 + 4 * phase, phase=phase + 1, outer_s=1.0)


def test_the_mean_of_paths_that_take_turns_is_no_sawtooth(tmp_path, opened):
  writer = opened()
  write_phase(writer, in_turns([0, 1, 2], 0), 0)
  write_phase(writer, in_turns([0, 2], 1, in_phase=2), 1)  # path 1 rests
  found = shown(tmp_path / 'events' / 'train')
  assert found['train/loss'] == [(102, 1.2), (104, 1.4), (106, 2.2), (108, 2.4)]
  assert found['train/loss/path_1'] == [(102, 1.2), (104, 1.4)]
  assert found['train/tokens_per_s'] == [(104, 10.0), (108, 10.0)]


def test_a_mean_is_written_at_the_phases_end_where_a_path_is_missing(tmp_path, opened):
  writer = opened()
  write_phase(writer, in_turns([0, 2], 0), 0, ended=False)
  assert 'train/loss' not in shown(tmp_path / 'events' / 'train')
  write_phase(writer, [], 0)
  assert shown(tmp_path / 'events' / 'train')['train/loss'] == [(102, 1.2), (104, 1.4)]


@pytest.mark.parametrize('kept', range(7))
def test_tensorboard_after_a_resume_is_as_if_nothing_had_happened(tmp_path, kept):
  """The second phase's first rows are kept, of paths 0, 0, 1, 1, 2, 2; all had been written."""
  rows = in_turns([0, 1, 2], 1)
  for folder in ('disturbed', 'undisturbed'):
    with metrics_log.Metrics(tmp_path / folder) as writer:
      write_phase(writer, in_turns([0, 1, 2], 0), 0)
      write_phase(writer, rows, 1)
  with metrics_log.Metrics(tmp_path / 'disturbed') as writer:
    writer.rewind('train', rows[kept - 1][0] if kept else 12)
    write_phase(writer, rows[kept:], 1, ended=kept < 6)  # a phase's last updates are those at its end
  found = shown(tmp_path / 'disturbed' / 'events' / 'train')
  assert found == shown(tmp_path / 'undisturbed' / 'events' / 'train')
  assert len(list((tmp_path / 'disturbed' / 'events' / 'train').iterdir())) == 2  # also within the same second


def test_many_paths_and_modules_are_not_all_tagged():
  row = {'kind': 'step', 'stage': 'train', 'updates': 1, 'step': 1, 'paths': list(range(256)), 'loss': [1.0] * 256}
  assert len(list(events_lib.scalars(row))) == events_lib.MAX_TAGGED
  row = {'kind': 'phase', 'updates': 1, 'step': 1, 'norm': {'own': {str(i): 1.0 for i in range(256)}}}
  assert len(list(events_lib.scalars(row))) == 1 + events_lib.MAX_TAGGED


@pytest.mark.parametrize(
  ('paths', 'num_paths', 'words'),
  [([0], 1, 'loss 2.500'), ([3], 4, 'path 3 loss 2.500'), ([0, 1], 4, 'mean loss of 2 paths 2.500')],
)
def test_the_progress_line_says_whose_loss_it_is(paths, num_paths, words):
  progress = display.Progress('train', 0, 'updates', stream := io.StringIO())
  progress.update(8, **{display.whose_loss(paths, num_paths): 2.5})
  assert stream.getvalue() == f'train 8 updates  {words}\n'


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
    progress = display.Progress('train', 1000, 'steps', stream, clock=lambda: now[0])
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
  progress = display.Progress('pretrain', 0, 'documents', stream, clock=lambda: now[0])
  for now[0] in np.arange(0, 1800, 0.5):
    progress.update(int(now[0]))
  progress.close()
  lines = stream.getvalue().splitlines()
  seconds = [int(line.split()[1].replace(',', '')) for line in lines]
  assert lines[0] == 'pretrain 0 documents' and seconds[-1] == 1799
  assert seconds[:24] == [int(2.5 * i) for i in range(24)]  # the first minute
  assert seconds[24:79] == [*range(60, 610, 10)] and seconds[79:-1] == [*range(630, 1800, 30)]


@pytest.mark.parametrize('step_s', [0.1, 0.9, 1.2, 1.6, 2.4])
def test_progress_off_a_terminal_is_not_silent_for_long(step_s):
  now, stream = [0.0], io.StringIO()
  progress = display.Progress('train', 0, 'ms', stream, clock=lambda: now[0])
  for now[0] in np.arange(0, 58, step_s):
    progress.update(round(1000 * now[0]))
  seconds = [int(line.split()[1].replace(',', '')) / 1000 for line in stream.getvalue().splitlines()]
  assert min(np.diff(seconds)) >= 1.5 and max(np.diff(seconds)) <= 3


def test_the_last_update_is_shown_once():
  stream = io.StringIO()
  progress = display.Progress('route', 2, 'shards', stream)
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
  found = evaluation.summarize(*map(np.array, zip(*sequences, strict=True)), num_paths, ['law', 'news'])

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
    evaluation.summarize(*(np.zeros(1, int),) * 5, 1, ['all'])


def test_flops_per_token_by_hand():
  # Width 8, 2 heads of 3, MLP 5, 2 blocks, vocabulary 11, 7 tokens. A block: 4 * 8 * 6 + 3 * 8 * 5 = 312 products.
  model = settings.Model(width=8, num_layers=2, num_heads=2, head_dim=3, mlp_dim=5)
  assert performance.flops_per_token(model, 11, 7) == 6 * (2 * 312 + 8 * 11) + 12 * 2 * 7 * 6


def test_mfu():
  assert performance.mfu(197e12, 'TPU v5 lite', 'bfloat16', 2) == 0.5
  assert performance.mfu(459e12, 'TPU v5p', 'bfloat16', 1) == 1
  assert performance.mfu(275e12, 'TPU v4', 'float32', 1) == 1
  assert performance.mfu(989e12, 'NVIDIA H200', 'float32', 1) == 2
  assert performance.mfu(756e12, 'NVIDIA H100 PCIe', 'bfloat16', 1) == 1
  assert performance.mfu(1e12, 'NVIDIA H100 80GB HBM3 MIG 1g.10gb', 'bfloat16', 1) is None
  assert performance.mfu(1e12, 'cpu', 'float32', 1) is None


def test_peak_memory():
  import jax

  block = np.ones(200_000_000, np.uint8)
  assert performance.process_peak_bytes() > len(block)
  assert performance.device_peak_bytes(jax.devices('cpu')) is None


@pytest.mark.parametrize(
  ('seconds', 'words'), [(0.4, '0 s'), (59.4, '59 s'), (61, '1:01'), (3661, '1:01:01'), (90_061, '1 d 1 h')]
)
def test_duration(seconds, words):
  assert display.duration(seconds) == words


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
