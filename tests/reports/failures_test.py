"""What status and report say of paths that were left out, and of steps that were skipped."""

from dipaco_jax.reports import failures
from dipaco_jax.telemetry import metrics_log


def write(folder, *rows):
  common = {'kind': 'phase', 'stage': 'train', 'updates': 1, 'time': 1.0}
  whole = b''.join(metrics_log.to_line(common | row) for row in rows)
  (folder / 'metrics.jsonl').write_bytes(whole + b'{"kind": "phase", "excluded": {')


def test_failures_are_read_from_the_rows_of_phases(tmp_path):
  assert failures.read_failures(tmp_path) == ([], {})
  write(
    tmp_path,
    {'kind': 'phase', 'phase': 1, 'step': 10, 'loss_by_path': [1, 2]},
    {'kind': 'phase', 'phase': 2, 'step': 20, 'excluded': {'1': 'not finite'}, 'skipped_by_path': [0, 3]},
    {'kind': 'phase', 'phase': 3, 'step': 30, 'excluded': {'0': {'why': 'too long', 'worker': 'w-1'}}},
    {'kind': 'phase', 'phase': 4, 'step': 40, 'skipped_by_path': [0, 2]},
  )
  found = failures.read_failures(tmp_path)
  assert found.skipped == {1: 5}
  assert [(x['phase'], x['step'], x['path']) for x in found.excluded] == [(2, 20, 1), (3, 30, 0)]
  assert failures.in_words(found) == [
    'path 1 was left out of the outer step of phase 2 (step 20): not finite',
    'path 0 was left out of the outer step of phase 3 (step 30, worker w-1): too long',
    'inner steps whose loss or gradient was not finite were skipped: 5 of path 1',
  ]


def test_of_many_failures_the_last_are_reported(tmp_path):
  write(tmp_path, *({'phase': n, 'step': n, 'excluded': {'1': 'why'}} for n in range(1, 9)))
  lines = failures.in_words(failures.read_failures(tmp_path), most=2)
  assert lines[0].startswith('8 times') and [line.split('phase ')[1][0] for line in lines[1:]] == ['7', '8']
