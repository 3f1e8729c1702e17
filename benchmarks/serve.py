"""What the server costs: its throughput beside that of its engine alone, and the time to a first token.

    pip install -e '.[serve]'
    python benchmarks/serve.py [--clients=16 --requests=64 --width=512 --num_layers=4 ...]

On a run of two paths with random parameters, a server in a process of its own, asked by clients in threads of this one:

    tokens_per_s        written for clients that each wait for an answer before they ask again, nothing streamed
    offline_tokens_per_s   of the same requests, all there from the beginning, by an engine in this process
    first_token_ratio   from sending a request to the first piece of a stream, over a bare forward pass of the prompt to
                        its last logits; the path is named, or routed (the base reads the first 32 tokens)

Prints a table and, as the last line, one JSON object. Both sides take turns, after one that is not counted; medians.
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
from collections.abc import Iterator
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from dipaco_jax.inference import trained_run
from dipaco_jax.inference.engine import Engine
from dipaco_jax.inference.request import Request
from dipaco_jax.models import transformer

common.define_sizes(width=512, num_layers=4, num_heads=8, mlp_dim=1376, vocab_size=8192, seq_len=1024, batch_size=1)
CLIENTS = flags.DEFINE_integer('clients', 16, 'that ask at one time')
REQUESTS = flags.DEFINE_integer('requests', 64, 'of all clients together')
TOKENS = flags.DEFINE_integer('tokens', 32, 'of an answer')
PROMPT = flags.DEFINE_integer('prompt', 64, 'tokens of a prompt, where throughput is measured')
PROMPTS = flags.DEFINE_multi_integer('first_prompt', [256], 'tokens of one, where first tokens are timed')
MAX_BATCH = flags.DEFINE_integer('max_batch', 8, 'texts that grow together on one path')
REPEATS = flags.DEFINE_integer('repeats', 3, 'of which medians are reported')


def prompt(seed: int, length: int) -> tuple[int, ...]:
  return tuple(np.random.default_rng(seed).integers(3, flags.FLAGS.vocab_size, length).tolist())


@contextlib.contextmanager
def serving(workdir: str) -> Iterator[int]:
  """The port of a server."""
  command = [sys.executable, '-m', 'dipaco_jax.serve', f'--workdir={workdir}', '--port=0']
  root = str(pathlib.Path(__file__).resolve().parent.parent)
  env = os.environ | {'PYTHONPATH': os.pathsep.join([root, os.environ.get('PYTHONPATH', '')])}
  command += [f'--max_batch={MAX_BATCH.value}', f'--max_waiting={CLIENTS.value}']
  with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout
    try:
      yield int(process.stdout.readline().partition('/v1')[0].rpartition(':')[2])
    finally:
      process.terminate()


def ask(connection: http.client.HTTPConnection, tokens: tuple[int, ...], most: int, **fields):
  body = {'model': 'run', 'prompt': tokens, 'max_tokens': most} | fields
  connection.request('POST', '/v1/completions', json.dumps(body), {'Content-Type': 'application/json'})
  response = connection.getresponse()
  assert response.status == 200, response.read()
  return response


def served(port: int) -> float:
  """Tokens a second of all clients."""
  kept = threading.local()

  def one(seed: int) -> int:
    kept.connection = getattr(kept, 'connection', None) or http.client.HTTPConnection('127.0.0.1', port)
    answer = json.loads(ask(kept.connection, prompt(seed, PROMPT.value), TOKENS.value, seed=seed).read())
    return answer['usage']['completion_tokens']

  began = time.perf_counter()
  with concurrent.futures.ThreadPoolExecutor(CLIENTS.value) as pool:
    return sum(pool.map(one, range(REQUESTS.value))) / (time.perf_counter() - began)


def offline(run: trained_run.TrainedRun) -> float:
  """Tokens a second of an engine."""
  engine = Engine(run, max_batch=MAX_BATCH.value)
  requests = [Request(prompt(seed, PROMPT.value), TOKENS.value, seed=seed) for seed in range(REQUESTS.value)]
  began = time.perf_counter()
  texts = engine.generate(requests)
  return sum(len(text.tokens) - PROMPT.value for text in texts) / (time.perf_counter() - began)


@functools.partial(jax.jit, static_argnums=0)
def forward(made: transformer.Transformer, params: transformer.Params, tokens_1L):
  """A bare one: the logits behind the last token."""
  x_1LD, head_DV = transformer.logit_factors(made, params, tokens_1L, jnp.ones_like(tokens_1L))
  return x_1LD[:, -1] @ head_DV


def first_tokens(run: trained_run.TrainedRun, port: int, length: int) -> dict[str, float]:
  path, tokens = run.path(1), prompt(length, length)
  connection = http.client.HTTPConnection('127.0.0.1', port)

  def bare():
    jax.block_until_ready(forward(path.model, path.params, np.array([tokens], np.int32)))

  def first(**fields):
    response = ask(connection, tokens, 1, stream=True, temperature=0, **fields)
    assert response.readline().startswith(b'data: ')
    response.read()

  actions = [bare, lambda: first(path=1), first]
  for action in actions:
    action()
  whole, named, routed = common.in_turns(actions, REPEATS.value)
  connection.close()
  return {
    f'forward_s_{length}': whole,
    f'first_token_ratio_{length}': named / whole,
    f'routed_first_token_ratio_{length}': routed / whole,
  }


def measure(run: trained_run.TrainedRun, port: int) -> dict[str, Any]:
  pairs = [(served(port), offline(run)) for _ in range(1 + REPEATS.value)][1:]
  ours, alone = (statistics.median(column) for column in zip(*pairs, strict=True))
  result: dict[str, Any] = {'tokens_per_s': ours, 'offline_tokens_per_s': alone, 'ratio': ours / alone}
  for length in PROMPTS.value:
    result |= first_tokens(run, port, length)
  return result | {'clients': CLIENTS.value, 'load': os.getloadavg()[0], 'cores': len(os.sched_getaffinity(0))}


def main(argv):
  del argv
  half = flags.FLAGS.num_layers // 2
  upper = '|'.join(f'block_{n}/' for n in range(half, flags.FLAGS.num_layers))
  s = common.make_settings({'a': 2}, (('shared', rf'^(?!{upper})', ()), ('upper', rf'^({upper})', ('a',))))
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder) / 'run'
    common.write_run(workdir, s)
    with serving(str(workdir)) as port:
      common.report('a server of two paths', measure(trained_run.TrainedRun(str(workdir)), port))


if __name__ == '__main__':
  app.run(main)
