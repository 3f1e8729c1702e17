"""The table of a trace: shares, idle time, transfers; of the CPU as JAX writes it, and of accelerators made by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from dipaco_jax.telemetry import profile_table
from dipaco_jax.telemetry.profile_table import Operation


def event(name: str, start: float, duration: float, **stats):
  return SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=[*stats.items()])


def trace(**planes):
  """{plane: {line: events}}."""
  made = [
    SimpleNamespace(name=name, lines=[SimpleNamespace(name=line, events=events) for line, events in lines.items()])
    for name, lines in planes.items()
  ]
  return SimpleNamespace(planes=made)


GPU = {
  'Stream #13(Compute)': [event('gemm_fusion_dot_12', 0, 500), event('gemm_fusion_dot_7', 500, 100)],
  'Stream #15(MemcpyH2D)': [event('MemcpyH2D', 550, 150)],
  'Launch Stats': [event('nothing', 0, 9000)],
}
TPU = {
  'XLA Modules': [event('jit_steps(123)', 0, 1000)],
  'XLA Ops': [event('%while.3 = (f32[8]) while(...)', 0, 1000), event('%fusion.12 = f32[8] fusion(...)', 0, 800)],
}


@pytest.mark.parametrize(
  ('found', 'expected'),
  [
    (trace(**{'/device:GPU:0': GPU, '/host:CPU': {'python': [event('PjitFunction', 0, 10)]}}),
     [('gemm_fusion_dot', 600, 2), ('MemcpyH2D', 150, 1)]),
    (trace(**{'/device:TPU:0': TPU}), [('fusion', 800, 1)]),
    (trace(**{'/host:CPU': {'tf_XLA': [event('dot.3', 0, 10, hlo_op='dot.3'), event('end: dot.3', 0, 1, hlo_op='')]}}),
     [('dot', 10, 1)]),
  ],
  ids=['gpu', 'tpu', 'cpu'],
)  # fmt: skip
def test_operations_are_those_of_the_devices(found, expected):
  table = profile_table.summarize(profile_table.operations(found))
  assert [(name, round(1e9 * s), calls) for name, s, calls in table.rows] == expected


def test_shares_are_of_the_time_of_all_devices():
  found = [Operation('a', 'dot', 0, 6e8), Operation('a', 'dot', 5e8, 8e8), Operation('b', 'MemcpyD2H', 0, 1e9)]
  lines = profile_table.to_text(profile_table.summarize(found))
  assert lines[0] == (
    '2 devices, 1.000 s from the first operation to the last: 10.0% idle, 50.0% transfers and copies, '
    '0.0% exchange between devices'
  )
  assert [line.split() for line in lines[2:]] == [
    ['50.0%', '1.0000', '1', 'MemcpyD2H'],
    ['45.0%', '0.9000', '2', 'dot'],
  ]


def test_a_long_table_ends_with_the_rest():
  found = [Operation('a', f'op{i}x', i, i + 1) for i in range(profile_table.ROWS + 3)]
  assert profile_table.to_text(profile_table.summarize(found))[-1].endswith('3 others')
  assert profile_table.to_text(profile_table.summarize([])) == ['the trace has no operation of a device']


def test_a_trace_of_jax_is_read(tmp_path):
  step = jax.jit(lambda x: jnp.sort(jnp.tanh(x @ x), axis=0))
  x = jnp.ones((300, 300))
  step(x).block_until_ready()
  jax.profiler.start_trace(tmp_path)
  step(x).block_until_ready()
  jax.profiler.stop_trace()
  [file] = tmp_path.rglob('*.xplane.pb')
  head, _, *rows = profile_table.lines(file)
  assert head.startswith('1 device, 0.') and any(row.endswith('  sort') for row in rows)
