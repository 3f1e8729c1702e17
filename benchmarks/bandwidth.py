"""How busy workers are behind slow lines: the share of a worker's time that is spent in inner steps.

    sudo python benchmarks/bandwidth.py [--limits=1000,100,20 --taus=10,50,150 --workers=2 --outer_wire=thin]

Every worker lives in a network namespace of its own; between it and the storage, an S3 server, is a line of so many
Mbit/s each way (tc tbf). Outer executors are beside the storage. One run for each tau: some phases with every limit,
and two that do not count, a first, which compiles, and a last, which publishes all. Prints a table in Markdown and, as
the last line, a JSON object. With --gateway, workers reach the database through a gateway beside it, and the storage by
the URLs that the gateway signs; a process beside the storage prepares the run.
Needs Linux, root, iproute2 and moto[s3] with Flask; where one is missing it says which, and ends with status 3.
"""

import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import sqlalchemy as sa
from absl import app, flags
from role_processes import processes, wait

from dipaco_jax.core.errors import InputError
from dipaco_jax.gateway import tokens
from dipaco_jax.registry import registry

LIMITS = flags.DEFINE_list('limits', ['1000', '100', '20'], 'Mbit/s of each worker, each way; 0: no limit')
TAUS = flags.DEFINE_list('taus', ['10', '50', '150'], 'inner steps in a phase')
WORKERS = flags.DEFINE_integer('workers', 2, 'each behind a line of its own')
PHASES = flags.DEFINE_integer('phases', 2, 'with each limit, of each of the four paths')
HOLDOUT_ROWS = flags.DEFINE_integer(
  'holdout_rows', 512, 'most rows on which a path is evaluated twice in a phase; 0: all that there are'
)
WIRE = flags.DEFINE_enum('outer_wire', 'lan', ['lan', 'wan', 'thin'], 'config.outer.wire')
OWN = flags.DEFINE_bool('own', True, "whether half of the blocks are each path alone's; else all modules are shared")
WIDTH = flags.DEFINE_integer('width', 128, 'D, a multiple of 32; the model has 4 layers')
BATCH_SIZE = flags.DEFINE_integer('batch_size', 4, 'B, rows of 64 tokens in a step')
URL = flags.DEFINE_string(
  'url', '', 'of PostgreSQL, as its superuser, by a Unix socket: every measurement has a database there'
)
GATEWAY = flags.DEFINE_bool('gateway', False, 'whether workers are behind a gateway; needs --round_trip_ms')
ROUND_TRIP_MS = flags.DEFINE_float(
  'round_trip_ms',
  0.0,
  'milliseconds, of each round trip between workers and storage, or the database, which needs --url',
)

ROOT = pathlib.Path(__file__).parent.parent
RELAY = str(ROOT / 'benchmarks' / 'relay.py')
PORT, GATEWAY_PORT = 5000, 8443  # in a namespace of its own
PATIENCE_S = 1800  # for one measurement
PATHS = 4
LEVELS: dict[bool, tuple] = {}
LEVELS[True] = (('low', 'block_[01]/', ('a',)), ('own', 'embed|final_norm|block_[23]/', ('a', 'b')))
LEVELS[False] = (('ends', 'embed|final_norm', ()), ('low', 'block_[01]/', ('a',)), ('high', 'block_[23]/', ('b',)))
ENVIRONMENT = {
  'AWS_ACCESS_KEY_ID': 'test',
  'AWS_SECRET_ACCESS_KEY': 'test',
  'AWS_REGION': 'us-east-1',
  'JAX_PLATFORMS': 'cpu',
  'PYTHONPATH': str(ROOT),
}
CONFIG = """
import runpy

def get_config():
  c = runpy.run_path({tiny!r})['get_config']()
  c.data.update(max_documents=150, max_validation_documents=10)
  c.tokenizer.update(vocab_size=1024, sample_bytes=200_000)
  c.model.update(seq_len=64, width={width}, num_heads={width} // 32, mlp_dim={width} * 8 // 3)
  c.pretrain.update(steps=4, batch_size=4)
  c.train.update(phases={phases}, steps_per_phase={tau}, batch_size={batch_size}, steps_per_dispatch=5)
  c.train.max_holdout_rows = {holdout_rows}
  c.checkpoint.every_steps = 1_000_000
  c.levels = {levels!r}
  c.outer.wire = {wire!r}
  return c
"""  # more paths than workers, in two pairs: a worker has something to do while another path is on its way


def ip(*words: str, program: str = 'ip'):
  subprocess.run([program, *words], check=True, capture_output=True, text=True)


class Lines:
  """A hub, where the storage is, and a namespace for each worker, with a line between them."""

  def __init__(self, workers: int):
    self.hub = f'dj{os.getpid()}hub'
    self.names = [f'dj{os.getpid()}w{i}' for i in range(workers)]

  def __enter__(self):
    ip('netns', 'add', self.hub)
    ip('-n', self.hub, 'link', 'set', 'lo', 'up')
    for i, name in enumerate(self.names):
      ip('netns', 'add', name)
      ip('-n', name, 'link', 'set', 'lo', 'up')
      ip('-n', self.hub, 'link', 'add', f'to{i}', 'type', 'veth', 'peer', 'name', 'out', 'netns', name)
      for namespace, device, last in ((self.hub, f'to{i}', 1), (name, 'out', 2)):
        ip('-n', namespace, 'address', 'add', f'10.77.{i}.{last}/30', 'dev', device)
        ip('-n', namespace, 'link', 'set', device, 'up')
    return self

  def roles(self) -> list[tuple[str, str, str]]:
    """(namespace, role, address of the storage)."""
    workers = [(name, 'worker', f'10.77.{i}.1') for i, name in enumerate(self.names)]
    return [(self.hub, 'outer', '127.0.0.1'), *workers]

  def limit(self, mbit: float):
    """Of what each end sends."""
    ends = [(self.hub, f'to{i}') for i in range(len(self.names))] + [(name, 'out') for name in self.names]
    for namespace, device in ends:
      with contextlib.suppress(subprocess.CalledProcessError):  # there is none yet
        ip('-n', namespace, 'qdisc', 'del', 'dev', device, 'root', program='tc')
      if mbit:
        burst = max(128_000, round(mbit * 1e6 / 8 / 100))  # bytes: 10 ms, and more than a packet before it is cut
        limit = ('rate', f'{mbit}mbit', 'burst', str(burst), 'latency', '400ms')
        ip('-n', namespace, 'qdisc', 'add', 'dev', device, 'root', 'tbf', *limit, program='tc')

  def __exit__(self, *_):
    for name in (self.hub, *self.names):
      subprocess.run(['ip', 'netns', 'delete', name], capture_output=True)


def missing() -> str:
  """What this machine lacks; '' where all is there."""
  if absent := [name for name in ('ip', 'tc') if not shutil.which(name)]:
    return f'{absent[0]} is not installed: it is part of iproute2'
  try:
    with Lines(1) as lines:
      lines.limit(100)
  except subprocess.CalledProcessError as e:
    return f'no network namespaces with limits here, which root has on Linux: {e.stderr.strip()}'
  return ''


def start(namespace: str, command: list[str], stderr: int | None = None, **env: str) -> subprocess.Popen:
  words = ['ip', 'netns', 'exec', namespace, sys.executable, *command]
  return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=stderr, env=os.environ | ENVIRONMENT | env)


def make_bucket(hub: str):
  """As soon as the server answers."""
  request = f"import urllib.request as u; u.urlopen(u.Request('http://127.0.0.1:{PORT}/bucket', method='PUT'))"
  for _ in range(120):
    if not subprocess.run(['ip', 'netns', 'exec', hub, sys.executable, '-c', request], capture_output=True).returncode:
      return
    time.sleep(0.5)
  raise TimeoutError("moto's server did not start")


@contextlib.contextmanager
def database(folder: pathlib.Path, name: str) -> Iterator[str]:
  """The URL of an empty one."""
  if not URL.value:
    yield f'sqlite:///{folder}/{name}.db'
    return
  engine = sa.create_engine(sa.make_url(URL.value).set(drivername='postgresql+psycopg'), isolation_level='AUTOCOMMIT')
  with engine.connect() as connection:
    connection.execute(sa.text(f'CREATE DATABASE {name}'))
    yield sa.make_url(URL.value).set(database=name).render_as_string(hide_password=False)
    connection.execute(sa.text(f'DROP DATABASE {name} WITH (FORCE)'))


def measure(lines: Lines, folder: pathlib.Path, limits: list[float], tau: int) -> list[dict]:
  """A row for each limit, from one run."""
  name = f'bandwidth_{os.getpid()}_{tau}'
  config = folder / f'{name}.py'
  tiny, phases = str(ROOT / 'configs' / 'tiny.py'), 2 + len(limits) * PHASES.value
  size = dict(width=WIDTH.value, batch_size=BATCH_SIZE.value, phases=phases, tau=tau)
  text = dict(tiny=tiny, levels=LEVELS[OWN.value], wire=WIRE.value, holdout_rows=HOLDOUT_ROWS.value)
  config.write_text(CONFIG.format(**text, **size))
  lines.limit(0)
  rows = []
  with database(folder, name) as url, processes() as running:
    db = registry.Registry(url)
    far_url = delayed(lines, folder, name, url, running) if ROUND_TRIP_MS.value else url
    place = [f'--workdir=s3://bucket/{name}', f'--registry={url}']
    whole = ['-m', 'dipaco_jax.main', f'--config={config}', *place]
    links: dict[str, dict[str, str]] = {}
    if GATEWAY.value:
      preparer = [*whole, '--role=worker', '--only_prepare']
      running.append(start(lines.hub, preparer, None, **environment(folder, f'{name}-preparer', '127.0.0.1')))
      links = open_gateway(lines, db, url, place, running, environment(folder, f'{name}-gateway', '127.0.0.1'))
    for namespace, role, address in lines.roles():
      is_far = role == 'worker' and ROUND_TRIP_MS.value
      env = environment(folder, f'{name}-{namespace}', '127.0.0.1' if is_far else address)
      given = [f'--registry={far_url}'] if is_far else []  # the last one counts
      behind = links.get(namespace)
      command = ['-m', 'dipaco_jax.main'] if behind else [*whole, *given]
      command += [f'--role={role}', f'--name={namespace}']
      running.append(start(namespace, command, None, **env, **(behind or {})))
    wait_for_phases(db, running, PATHS)
    for i, mbit in enumerate(limits):
      lines.limit(mbit)
      began = time.time()
      wait_for_phases(db, running, PATHS * (1 + (i + 1) * PHASES.value))
      rows.append({'mbit': mbit, 'tau': tau} | tell(db, tau, began))
    db.close()
  return rows


def environment(folder: pathlib.Path, name: str, storage: str) -> dict[str, str]:
  """Returns what a process is told of its machine: its own folder, and the address of the storage."""
  (folder / name).mkdir()
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR', str(folder / 'cache'))
  endpoint = f'http://{storage}:{PORT}'
  return {'AWS_ENDPOINT_URL': endpoint, 'TMPDIR': str(folder / name), 'JAX_COMPILATION_CACHE_DIR': cache}


def open_gateway(
  lines: Lines, db: registry.Registry, url: str, place: list[str], running: list[subprocess.Popen], env: dict[str, str]
) -> dict[str, dict[str, str]]:
  """Starts a gateway as soon as the run is prepared; returns the environment of each worker, by its namespace."""
  wait(running, lambda: bool(db.facts('prepared')), PATIENCE_S)
  command = ['-m', 'dipaco_jax.gateway', *place, f'--port={GATEWAY_PORT}']
  running.append(start(lines.hub, command, subprocess.PIPE, **env))
  assert running[-1].stderr
  ready = (re.search(rb'#sha256=([0-9a-f]+)', line) for line in running[-1].stderr)
  fingerprint = next(match[1].decode() for match in ready if match)
  threading.Thread(target=running[-1].stderr.read, daemon=True).start()
  far = {namespace: address for namespace, role, address in lines.roles() if role == 'worker'}
  for namespace, address in far.items():
    running.append(start(namespace, [RELAY, str(GATEWAY_PORT), f'{address}:{GATEWAY_PORT}', str(ROUND_TRIP_MS.value)]))
  known = {'DIPACO_GATEWAY': f'https://127.0.0.1:{GATEWAY_PORT}#sha256={fingerprint}'}
  with contextlib.closing(tokens.Tokens(url)) as of_run:
    return {namespace: {**known, 'DIPACO_TOKEN': of_run.add(namespace, None, 1)} for namespace in far}


def delayed(lines: Lines, folder: pathlib.Path, name: str, url: str, running: list[subprocess.Popen]) -> str:
  """Starts relays between workers and what is far from them; the URL of the database through one."""
  milliseconds = str(ROUND_TRIP_MS.value)
  for namespace, role, address in lines.roles():
    if role == 'worker':
      running.append(start(namespace, [RELAY, str(PORT), f'{address}:{PORT}', milliseconds]))
  parsed, far = sa.make_url(url), folder / f'{name}-far'
  far.mkdir()
  file = f'.s.PGSQL.{parsed.port or 5432}'
  running.append(start(lines.hub, [RELAY, str(far / file), f'{parsed.query["host"]}/{file}', milliseconds]))
  return parsed.set(query={'host': str(far)}).render_as_string(hide_password=False)


def wait_for_phases(db: registry.Registry, running: list[subprocess.Popen], tasks: int):
  """Until so many phases of paths are trained."""
  wait(running, lambda: db.counts().get('train', {}).get('done', 0) >= tasks, PATIENCE_S)


def tell(db: registry.Registry, tau: int, began: float) -> dict:
  """Of the tasks that workers have begun and trained since `began`, of all workers; bytes are a task's mean."""
  tasks: dict[str, list[dict]] = {}
  for meta in sorted((fact.meta for fact in db.facts('checkpoint')), key=lambda meta: meta['ended']):
    tasks.setdefault(meta['worker'], []).append(meta)
  pairs = [pair for mine in tasks.values() for pair in itertools.pairwise(mine) if pair[0]['ended'] > began]
  counted = [meta | {'wall_s': meta['ended'] - before['ended']} for before, meta in pairs]
  if not counted:
    raise InputError('no worker has done two tasks with the same limit: raise --phases')
  step_s = math.fsum(meta['timed_s'] for meta in counted) / sum(meta['timed_steps'] for meta in counted)
  sent = [fact.meta for kind in ('checkpoint', 'piece') for fact in db.facts(kind) if fact.meta['ended'] > began]
  made = (fact.meta for fact in db.facts('module') if fact.meta.get('ended', 0) > began)
  modules = [meta for meta in made if 'bytes_in' in meta]  # made by executors

  def mean(metas: list[dict], name: str) -> float:
    return math.fsum(meta[name] for meta in metas) / len(metas)

  return {
    'utilization': tau * len(counted) * step_s / math.fsum(meta['wall_s'] for meta in counted),
    'step_s': step_s,
    'task_s': mean(counted, 'wall_s'),
    'tasks': len(counted),
    'worker_in': math.fsum(meta['bytes_in'] for meta in sent) / phases_done(db, began),
    'worker_out': math.fsum(meta['bytes_out'] for meta in sent) / phases_done(db, began),
    'outer_in': mean(modules, 'bytes_in'),
    'outer_out': mean(modules, 'bytes_out'),
  }


def phases_done(db: registry.Registry, began: float) -> int:
  """Phases of paths that have ended since."""
  return sum(1 for fact in db.facts('checkpoint') if fact.meta['ended'] > began)


def table(rows: list[dict]) -> str:
  """Markdown."""
  heads = 'Mbit/s', 'tau', 'in inner steps', 'a step', 'a task', 'a worker reads, writes', 'an executor reads, writes'
  lines = [f'| {" | ".join(heads)} |', '|---' * len(heads) + '|']
  for row in rows:
    moved = [f'{row[f"{role}_in"] / 1e6:.1f}, {row[f"{role}_out"] / 1e6:.1f} MB' for role in ('worker', 'outer')]
    cells = [f'{row["mbit"]:g}' if row['mbit'] else 'no limit', str(row['tau']), f'{row["utilization"]:.0%}',
             f'{row["step_s"]:.3f} s', f'{row["task_s"]:.1f} s', *moved]  # fmt: skip
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join(lines)


def main(_):
  if ROUND_TRIP_MS.value and 'host' not in (sa.make_url(URL.value).query if URL.value else {}):
    app.usage(
      detailed_error='--round_trip_ms needs --url=postgresql://USER@/?host=FOLDER, a database with a Unix socket',
      exitcode=2,
    )
  if GATEWAY.value and not ROUND_TRIP_MS.value:
    app.usage(detailed_error='--gateway needs --round_trip_ms: workers reach it at an address of a relay', exitcode=2)
  if words := missing():
    print(words, file=sys.stderr)
    sys.exit(3)
  rows = []
  with tempfile.TemporaryDirectory() as name, Lines(WORKERS.value) as lines, processes() as server:
    folder = pathlib.Path(name)
    serve = ['-m', 'moto.server', '-H', '0.0.0.0', '-p', str(PORT)]
    server.append(start(lines.hub, serve, subprocess.DEVNULL))
    make_bucket(lines.hub)
    for tau in map(int, TAUS.value):
      rows += measure(lines, folder, [float(mbit) for mbit in LIMITS.value], tau)
      print(table(rows[-len(LIMITS.value) :]), file=sys.stderr, flush=True)
  print(table(rows))
  cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
  print(
    json.dumps(
      {
        'rows': rows,
        'wire': WIRE.value,
        'own': OWN.value,
        'workers': WORKERS.value,
        'phases': PHASES.value,
        'holdout_rows': HOLDOUT_ROWS.value,
        'round_trip_ms': ROUND_TRIP_MS.value,
        'gateway': GATEWAY.value,
        'cores': cores,
        'load': load,
      }
    )
  )


if __name__ == '__main__':
  app.run(main)
