"""How many workers one gateway serves on one core: the latency of claims and heartbeats, and its memory over time.

    python benchmarks/gateway.py [--workers=1000 --seconds=120 --lease_s=30 --task_s=60 --url=postgresql://...]

The gateway is a process of its own on one core, with TLS, in front of a run whose paths wait to be trained. Workers are
threads with a token each, in processes on the other cores. Each claims a task, renews its lease as a worker does, gives
the task back after `task_s`, and claims again; nothing is trained and no object is sent. All requests of the `ramp_s`
in which the workers begin count as `beginning`, with their handshakes, and those after it as `claim` and `heartbeat`.
Prints a table and, as the last line, one JSON object.
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from absl import app, flags

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.gateway import tokens as tokens_lib
from dipaco_jax.registry.gateway_registry import GatewayRegistry
from dipaco_jax.registry.registry import Fact, NewTask, Registry
from dipaco_jax.storage import gateway_link, object_store
from dipaco_jax.storage.remedies import ISLANDS_MARK

URL = flags.DEFINE_string('url', '', 'of an empty PostgreSQL database; SQLite in the workdir if it is not given')
WORKERS = flags.DEFINE_integer('workers', 1000, 'at one time')
SECONDS = flags.DEFINE_float('seconds', 120, 'for which all workers hold leases')
LEASE_S = flags.DEFINE_float('lease_s', 30, 'of the gateway')
TASK_S = flags.DEFINE_float('task_s', 60, 'of a task, on average')
RAMP_S = flags.DEFINE_float('ramp_s', 20, 'within which the workers begin')
PROCESSES = 4  # that share the workers
TIMED = 'beginning', 'claim', 'heartbeat'
RENEWED = 0.4  # of a lease, as islands/lease.py
START_S = 300


def begin(folder: str, url: str) -> None:
  """Makes a run of which every path waits to be trained."""
  side = next(n for n in range(1, 1000) if n * n >= WORKERS.value)
  settings = settings_lib.Settings(grid=(('a', side), ('b', side)))
  about = {'config': settings_lib.recorded(settings), 'id': '0' * 16, 'versions': {}}
  with contextlib.closing(Registry(url, LEASE_S.value)) as registry:
    registry.put([Fact('config', '', 0, '', settings_lib.digest(settings), about)])
    registry.put([Fact('prepared', '', 0, '', '', {'trees': {}})])
    registry.add_tasks(NewTask('train', str(path), 0) for path in range(side * side))
  object_store.open_storage(folder).write(ISLANDS_MARK, b'0' * 16)


@contextlib.contextmanager
def gateway(folder: str, url: str) -> Iterator[tuple[int, gateway_link.Address]]:
  """Runs a gateway on the first core; yields its process id and its address."""
  command = [sys.executable, '-m', 'dipaco_jax.gateway', f'--workdir={folder}', f'--registry={url}']
  most = 2 * WORKERS.value + 64
  options = ['--host=127.0.0.1', '--port=0', f'--lease_s={LEASE_S.value}', f'--max_connections={most}']
  process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
  os.sched_setaffinity(process.pid, [min(os.sched_getaffinity(0))])  # before it has threads
  try:
    assert process.stderr
    for line in process.stderr:
      if match := re.search(r'DIPACO_GATEWAY=(\S+)', line):
        yield process.pid, gateway_link.parse_address(match[1])
        return
    raise RuntimeError('the gateway did not start')
  finally:
    process.terminate()
    process.wait(30)


class Worker:
  """One worker, in a thread: claims, renews, gives back; notes the seconds of each."""

  def __init__(self, address: gateway_link.Address, token: str, over: threading.Event):
    self.link, self.over = gateway_link.Link(address, token), over
    self.seconds: dict[str, list[float]] = {name: [] for name in TIMED}
    self.all_begun = time.monotonic() + RAMP_S.value
    self.error = ''
    self.thread = threading.Thread(target=self.work, daemon=True)
    self.thread.start()

  def work(self):
    try:
      if self.over.wait(random.uniform(0, RAMP_S.value)):
        return
      registry = GatewayRegistry(self.link)
      while not self.over.is_set():
        task = self.timed('claim', lambda: registry.claim('', ['train', 'piece']))
        until = time.monotonic() + TASK_S.value * random.uniform(0.5, 1.5)
        while task and time.monotonic() < until and not self.over.is_set():
          if not self.over.wait(RENEWED * LEASE_S.value * random.uniform(0.7, 1)):
            self.timed('heartbeat', lambda task=task: registry.heartbeat(task))
        if task:
          registry.release(task)
        else:
          self.over.wait(1)
      registry.close()
    except Exception as e:
      self.error = f'{type(e).__name__}: {e}'.split('\n')[0]

  def timed(self, name: str, call):
    began = time.monotonic()
    result = call()
    self.seconds[name if began > self.all_begun else 'beginning'].append(time.monotonic() - began)
    return result


def share(address, given: list[str], arguments: list[str], ready, over, results):
  """Runs some of the workers in this process until `over`; sends what they have measured."""
  flags.FLAGS(arguments)
  cores = os.sched_getaffinity(0)
  os.sched_setaffinity(0, cores - {min(cores)} or cores)  # the first core is the gateway's
  ended = threading.Event()
  ready.wait()
  workers = [Worker(address, token, ended) for token in given]
  over.wait()
  ended.set()
  for worker in workers:
    worker.thread.join(30)
  seconds = {name: [s for worker in workers for s in worker.seconds[name]] for name in TIMED}
  results.put((seconds, [worker.error for worker in workers if worker.error]))


def memory_bytes(pid: int) -> int:
  """Returns the memory of a process now."""
  [pages] = re.findall(r'VmRSS:\s+(\d+) kB', pathlib.Path(f'/proc/{pid}/status').read_text())
  return int(pages) * 1024


def cpu_s(pid: int) -> float:
  """Returns the processor time of a process so far."""
  fields = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


def measure(folder: str, url: str) -> dict:
  begin(folder, url)
  with contextlib.closing(tokens_lib.Tokens(url)) as tokens:
    given = [tokens.add(f'worker-{i}', None, 1) for i in range(WORKERS.value)]
  spawn = multiprocessing.get_context('spawn')
  over, results, ready = spawn.Event(), spawn.Queue(), spawn.Barrier(PROCESSES + 1)
  with gateway(folder, url) as (pid, address):
    processes = [
      spawn.Process(target=share, args=(address, given[i::PROCESSES], sys.argv, ready, over, results), daemon=True)
      for i in range(PROCESSES)
    ]
    for process in processes:
      process.start()
    ready.wait(START_S)  # all have imported what they need
    time.sleep(RAMP_S.value)
    before, memory = cpu_s(pid), [memory_bytes(pid)]
    for _ in range(10):
      time.sleep(SECONDS.value / 10)
      memory.append(memory_bytes(pid))
    busy = (cpu_s(pid) - before) / SECONDS.value
    over.set()
    collected = [results.get(timeout=120) for _ in processes]
    for process in processes:
      process.join()
  return summary(collected, memory, busy)


def summary(collected: list, memory: list[int], busy: float) -> dict:
  """Returns the figures of all workers together."""
  figures: dict = {'workers': WORKERS.value, 'cores': len(os.sched_getaffinity(0)), 'load': os.getloadavg()[0]}
  for name in TIMED:
    seconds = [s for measured, _ in collected for s in measured[name]]
    figures |= {f'{name}s': len(seconds)}
    if len(seconds) > 1:
      figures |= {f'{name}_median_s': statistics.median(seconds), f'{name}_max_s': max(seconds)}
      figures |= {f'{name}_p99_s': statistics.quantiles(seconds, n=100)[98]}
  errors = [error for _, found in collected for error in found]
  requests_per_s = (2 * figures['claims'] + figures['heartbeats']) / SECONDS.value  # a claim is followed by a release
  figures |= {'errors': len(errors), 'requests_per_s': requests_per_s, 'gateway_cpu': busy}
  figures |= {'gateway_ms_per_request': 1000 * busy / requests_per_s}
  figures |= {'memory_first_mib': memory[0] / 2**20, 'memory_last_mib': memory[-1] / 2**20}
  print(*sorted({*errors})[:5], sep='\n')
  return figures


def main(_):
  with tempfile.TemporaryDirectory() as folder:
    url = URL.value or f'sqlite:///{folder}/registry.db'
    figures = measure(folder, url)
  print(f'{"PostgreSQL" if URL.value else "SQLite"}: claims and heartbeats through a gateway on one core')
  for name, value in figures.items():
    print(f'{name:24}{value:>14,.4g}')
  print(json.dumps(figures))


if __name__ == '__main__':
  app.run(main)
