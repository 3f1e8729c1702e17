"""The benchmark behind slow lines: the lines are slow, the figures are those of the facts, and it runs."""

import json
import os
import subprocess
import sys

import postgres
import pytest
from bandwidth_module import FILE, bandwidth

from dipaco_jax.registry import registry as registry_lib

MEGABYTES = 2
ANSWER = f"""
import socket
with socket.create_server(('0.0.0.0', 5001)) as server:
  print('ready', flush=True)
  connection, _ = server.accept()
  got = 0
  while got < {MEGABYTES}_000_000:
    got += len(connection.recv(1 << 16))
  connection.sendall(bytes({MEGABYTES}_000_000))
"""
ASK = f"""
import socket, time
with socket.create_connection(('10.77.0.1', 5001)) as connection:
  times = [time.monotonic()]
  connection.sendall(bytes({MEGABYTES}_000_000))
  got = len(connection.recv(1))
  times.append(time.monotonic())
  while got < {MEGABYTES}_000_000:
    got += len(connection.recv(1 << 16))
  times.append(time.monotonic())
print(times[1] - times[0], times[2] - times[1])
"""


@pytest.fixture(scope='module')
def namespaces():
  if words := bandwidth.missing():
    pytest.skip(words)


def test_lines_are_slow_both_ways(namespaces):
  with bandwidth.Lines(1) as lines:
    for mbit in (1000, 20):  # the second replaces the first
      lines.limit(mbit)
    python = [sys.executable, '-c']
    with subprocess.Popen(['ip', 'netns', 'exec', lines.hub, *python, ANSWER], stdout=subprocess.PIPE) as server:
      assert server.stdout.readline() == b'ready\n'
      done = subprocess.run(['ip', 'netns', 'exec', lines.names[0], *python, ASK], capture_output=True, text=True)
  least_s = (MEGABYTES * 1e6 - 128_000) * 8 / 20e6  # what the bucket holds at first goes at once
  assert done.returncode == 0 and all(float(seconds) > 0.95 * least_s for seconds in done.stdout.split()), done
  left = subprocess.run(['ip', 'netns'], capture_output=True, text=True).stdout
  assert lines.hub not in left


def test_figures_are_those_of_the_facts(tmp_path):
  db = registry_lib.Registry(f'sqlite:///{tmp_path}/registry.db')

  def fact(worker, number, ended, timed_s):
    meta = {'worker': worker, 'started': 0, 'ended': ended, 'timed_steps': 5, 'timed_s': timed_s, 'role': 'worker',
            'bytes_in': 3, 'bytes_out': 1_000_000}  # fmt: skip
    return registry_lib.Fact('checkpoint', worker, number, '', '', meta)

  db.put([fact('a', 0, 100, 50), fact('a', 1, 110, 2), fact('a', 2, 130, 4), fact('b', 0, 90, 9), fact('b', 1, 101, 7)])
  db.put([fact('b', 2, 111, 3), registry_lib.Fact('module', 'm', 1, '', '', {'bytes_in': 9, 'ended': 94})])
  module = {'ended': 102, 'bytes_in': 4_000_000, 'bytes_out': 200_000}
  db.put([registry_lib.Fact('module', 'm', 2, '', '', module)])
  found = bandwidth.tell(db, 10, began=95)  # b's first two tasks began before
  assert found['utilization'] == pytest.approx((4 + 8 + 6) / (10 + 20 + 10)) and found['tasks'] == 3
  assert found['step_s'] == pytest.approx(0.6) and found['task_s'] == pytest.approx(40 / 3)
  line = '| 20 | 10 | 45% | 0.600 s | 13.3 s | 0.0, 1.0 MB | 4.0, 0.2 MB |'
  assert bandwidth.table([{'mbit': 20, 'tau': 10} | found]).splitlines()[-1] == line
  with pytest.raises(ValueError, match='--phases'):
    bandwidth.tell(db, 10, began=120)
  db.close()


@pytest.fixture(params=['direct', 'behind a gateway'])
def access(request):
  """The options of how workers reach the database."""
  if request.param == 'direct':
    yield []
    return
  server = postgres.Server()
  yield ['--gateway', '--round_trip_ms=10', f'--url={server.url("postgres")}']
  server.stop()


@pytest.mark.slow
def test_it_runs(namespaces, access):
  flags = ['--limits=100', '--taus=10', '--width=32', '--batch_size=1', '--phases=4', *access]
  env = os.environ | {'XLA_FLAGS': ''}  # one device: the 8 fake ones of the tests would share its cores
  done = subprocess.run([sys.executable, FILE, *flags], capture_output=True, text=True, timeout=600, env=env)
  assert done.returncode == 0, done.stderr
  (row,) = json.loads(done.stdout.splitlines()[-1])['rows']
  assert 0 < row['utilization'] < 1.2 and 2 <= row['tasks'] <= 4 * 4
  assert '| 100 | 10 |' in done.stdout
