"""TensorBoard shows the global step and smooth means, and the same curves after a resume as without one."""

import contextlib
import struct

import pytest
from tensorboardX.proto import event_pb2

from dipaco_jax.telemetry import curves, metrics_log


@pytest.fixture
def opened(tmp_path):
  """Opens the workdir's metrics, and closes them in the end."""
  with contextlib.ExitStack() as stack:
    yield lambda: stack.enter_context(metrics_log.Metrics(tmp_path))


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
  assert len(list(curves.scalars(row))) == curves.MAX_TAGGED
  row = {'kind': 'phase', 'updates': 1, 'step': 1, 'norm': {'own': {str(i): 1.0 for i in range(256)}}}
  assert len(list(curves.scalars(row))) == 1 + curves.MAX_TAGGED
