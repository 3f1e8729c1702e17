"""What the router in front of engines costs: its own latency, and an engine's throughput behind it and alone.

    pip install -e '.[serve]'
    python benchmarks/route.py [--width=64 --num_layers=2 --asks=300 --clients=16 --requests=64 ...]

On a run of two paths with random parameters; router and engines are processes of their own, clients are here.

    own_ms, own_p99_ms     seconds that an answer takes longer through the router than from an engine that answers at
                           once, for one client: medians, and the 99th percentiles, of each side
    passed_ms              the same where the request names its path, so that nothing is routed; the rest is routing:
                           tokenizer and base model
    first_ms               the same as own_ms until the first piece of a stream
    behind_tokens_per_s    of our own server behind the router; alone_tokens_per_s: asked for the same paths directly;
                           --clients clients, nothing streamed; streamed_...: all streamed. The ratio is the median of
                           those of neighbouring turns
    router_cpu_ms          CPU time that the router took for one of these requests

Prints a table and, as the last line, one JSON object. All sides take turns, after one that is not counted. The server
has half of the cores for itself, as if router and clients were on other machines.
"""

import concurrent.futures
import contextlib
import functools
import http.client
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import common
import serve
from absl import app, flags

ASKS = flags.DEFINE_integer('asks', 300, 'requests of which latencies are measured, on each side')
ROUNDS = 10  # of turns in which they come

INSTANT = """
import asyncio, sys

BODY = b'{"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}'
MODELS = b'{"data": [{"id": "instant"}]}'
EVENTS = b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": null}]}\\n\\n', b'data: [DONE]\\n\\n'

async def answer(reader, writer):
  while head := await reader.readuntil(b'\\r\\n\\r\\n'):
    length = next((int(line[15:]) for line in head.lower().split(b'\\r\\n') if line.startswith(b'content-length')), 0)
    body = await reader.readexactly(length)
    if b'"stream": true' in body:
      writer.write(b'HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n')
      for event in EVENTS:
        writer.write(b'%x\\r\\n%b\\r\\n' % (len(event), event))
      writer.write(b'0\\r\\n\\r\\n')
    else:
      found = BODY if length else MODELS
      writer.write(b'HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\n')
      writer.write(b'content-length: %d\\r\\n\\r\\n%b' % (len(found), found))

async def guarded(reader, writer):
  try:
    await answer(reader, writer)
  except (asyncio.IncompleteReadError, ConnectionError):
    writer.close()

async def main():
  server = await asyncio.start_server(guarded, '127.0.0.1', 0)
  print(server.sockets[0].getsockname()[1], flush=True)
  await server.serve_forever()

asyncio.run(main())
"""


@contextlib.contextmanager
def process(*command: str) -> Iterator[tuple[str, int]]:
  """A process: its first line and its number."""
  root = str(pathlib.Path(__file__).resolve().parent.parent)
  env = os.environ | {'PYTHONPATH': os.pathsep.join([root, os.environ.get('PYTHONPATH', '')])}
  with subprocess.Popen([sys.executable, *command], env=env, stdout=subprocess.PIPE, text=True) as started:
    assert started.stdout
    try:
      yield started.stdout.readline(), started.pid
    finally:
      started.terminate()


@contextlib.contextmanager
def routing(workdir: pathlib.Path, port: int, model: str) -> Iterator[tuple[int, int]]:
  """The port and the process of a router to one engine, which has all paths."""
  url = f'http://127.0.0.1:{port}/v1'
  engines = {str(path): [{'url': url, 'model': model.format(path)}] for path in range(2)}
  file = workdir.parent / f'engines-{port}.json'
  file.write_text(json.dumps({'paths': engines}))
  options = f'--workdir={workdir}', f'--engines={file}', '--port=0'
  with process('-m', 'dipaco_jax.route', *options) as (line, pid):
    yield int(line.partition('/v1')[0].rpartition(':')[2]), pid


def timed(port: int, count: int, stream: bool = False, model: str = 'run') -> list[float]:
  """Milliseconds of each of `count` requests, until the end of the answer or the first line of a stream."""
  connection = http.client.HTTPConnection('127.0.0.1', port)
  found = []
  for seed in range(count):
    began = time.perf_counter()
    response = serve.ask(connection, serve.prompt(seed, serve.PROMPT.value), 1, stream=stream, model=model)
    response.readline() if stream else response.read()
    found.append(1e3 * (time.perf_counter() - began))
    response.read()
  connection.close()
  return found


def latencies(router: int, engine: int) -> dict[str, float]:
  sides: dict[str, Callable[[int], list[float]]] = {
    'direct': functools.partial(timed, engine),
    'own': functools.partial(timed, router),
    'passed': functools.partial(timed, router, model='run/path-1'),
    'direct_first': functools.partial(timed, engine, stream=True),
    'first': functools.partial(timed, router, stream=True),
  }
  found: dict[str, list[float]] = {name: [] for name in sides}
  for number in range(1 + ROUNDS):
    for name, side in sides.items():
      found[name] += side(ASKS.value // ROUNDS) if number else side(5)[:0]
  median = {name: statistics.median(values) for name, values in found.items()}
  p99 = {name: statistics.quantiles(values, n=100)[98] for name, values in found.items()}
  return {
    'direct_ms': median['direct'],
    'own_ms': median['own'] - median['direct'],
    'own_p99_ms': p99['own'] - p99['direct'],
    'passed_ms': median['passed'] - median['direct'],
    'routing_ms': median['own'] - median['passed'],
    'first_ms': median['first'] - median['direct_first'],
  }


def throughput(port: int, stream: bool, models: dict[int, str], paths: dict[int, str]) -> float:
  """Tokens a second of all clients; `paths` gets what the router answers that it chose."""
  kept = threading.local()

  def one(seed: int) -> int:
    kept.connection = getattr(kept, 'connection', None) or http.client.HTTPConnection('127.0.0.1', port)
    fields = {'stream': True, 'stream_options': {'include_usage': True}} if stream else {}
    prompt = serve.prompt(seed, serve.PROMPT.value)
    fields |= {'model': models.get(seed, 'run'), 'seed': seed}
    response = serve.ask(kept.connection, prompt, serve.TOKENS.value, **fields)
    paths[seed] = response.headers.get('dipaco-path', '')
    body = response.read()
    last = body.split(b'data: ')[-2] if stream else body
    return json.loads(last)['usage']['completion_tokens']

  began = time.perf_counter()
  with concurrent.futures.ThreadPoolExecutor(serve.CLIENTS.value) as pool:
    return sum(pool.map(one, range(serve.REQUESTS.value))) / (time.perf_counter() - began)


def throughputs(router: int, pid: int, engine: int) -> dict[str, float]:
  found: dict[str, float] = {}
  paths: dict[int, str] = {}
  throughput(router, False, {}, paths)
  named = {seed: f'run/path-{path}' for seed, path in paths.items()}
  for name, stream in {'': False, 'streamed_': True}.items():
    pairs, cpu_s = [], []
    for _ in range(1 + serve.REPEATS.value):
      before = cpu_time_s(pid)
      behind = throughput(router, stream, {}, {})
      cpu_s.append(cpu_time_s(pid) - before)
      pairs.append((behind, throughput(engine, stream, named, {})))
    behind, alone = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
    ratio = statistics.median(a / b for a, b in pairs[1:])
    found |= {f'{name}behind_tokens_per_s': behind, f'{name}alone_tokens_per_s': alone, f'{name}ratio': ratio}
    found[f'{name}router_cpu_ms'] = 1e3 * statistics.median(cpu_s[1:]) / serve.REQUESTS.value
  return found


def cpu_time_s(pid: int) -> float:
  """Returns the CPU time of a process's threads so far, to the nanosecond."""
  return 1e-9 * sum(int(file.read_text().split()[0]) for file in pathlib.Path(f'/proc/{pid}/task').glob('*/schedstat'))


def main(argv):
  del argv
  upper = f'block_{flags.FLAGS.num_layers - 1}/'
  s = common.make_settings({'a': 2}, (('shared', rf'^(?!{upper})', ()), ('upper', rf'^{upper}', ('a',))))
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    workdir = pathlib.Path(folder) / 'run'
    common.write_run(workdir, s)
    instant = int(stack.enter_context(process('-c', INSTANT))[0])
    with routing(workdir, instant, 'instant') as (router, _):
      result = latencies(router, instant)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: max(1, len(cores) // 2)])
    engine = stack.enter_context(serve.serving(str(workdir)))
    os.sched_setaffinity(0, cores[len(cores) // 2 :])  # of this process and those that it starts from now on
    result |= throughputs(*stack.enter_context(routing(workdir, engine, 'run/path-{}')), engine)
    result |= {'clients': serve.CLIENTS.value, 'load': os.getloadavg()[0], 'cores': len(cores)}
    common.report('a router in front of engines', result)


if __name__ == '__main__':
  app.run(main)
