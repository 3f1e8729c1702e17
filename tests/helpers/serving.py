"""A server as a process of its own, how to talk to it, and requests drawn at random with what they ask for."""

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import made_run
import numpy as np
from repository import ROOT

from dipaco_jax.inference.request import Request

KEY = 'a key'
HEADERS = {'Content-Type': 'application/json', 'Authorization': f'Bearer {KEY}'}
PATIENCE_S = 120


class Serving:
  """A process, of `serve` or `route`, and how to talk to it."""

  def __init__(self, workdir: pathlib.Path, log: pathlib.Path, *options: str, command: str = 'serve'):
    env = os.environ | {'PYTHONPATH': str(ROOT), 'DIPACO_API_KEY': KEY}
    line = [sys.executable, '-m', f'dipaco_jax.{command}', f'--workdir={workdir}', '--port=0', *options]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup
      line = ['env', '--default-signal=HUP', *line]
    self.log, self.greeting_lines = log, {'serve': 2, 'route': 1}[command]
    with open(log, 'w') as err:
      self.process = subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=err, text=True)

  def wait(self) -> str:
    """Until it serves; what it says then."""
    said = ''.join(self.process.stdout.readline() for _ in range(self.greeting_lines))
    assert said, self.log.read_text()
    self.port = int(said.partition('/v1')[0].rpartition(':')[2])
    return said

  def connect(self) -> http.client.HTTPConnection:
    return http.client.HTTPConnection('127.0.0.1', self.port, timeout=PATIENCE_S)

  def ask(self, body, connection=None, headers=HEADERS):
    """(status, answer) of POST /v1/completions; the answer of a stream is a list."""
    if connection is None:
      with contextlib.closing(self.connect()) as connection:
        return self.ask(body, connection, headers)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request('POST', '/v1/completions', data, headers)
    response = connection.getresponse()
    if response.headers['content-type'].startswith('text/event-stream'):
      return response.status, events(response)
    return response.status, json.loads(response.read())

  def get(self, path: str):
    with contextlib.closing(self.connect()) as connection:
      connection.request('GET', path, headers=HEADERS)
      response = connection.getresponse()
      return response.status, response.read().decode()

  def measured(self, name: str) -> float:
    return float(self.get('/metrics')[1].split(f'\n{name} ')[1].split('\n')[0])

  def open(self, body) -> socket.socket:
    """A connection with a request that is on; nothing of the answer is read."""
    data = json.dumps(body).encode()
    head = ''.join(f'{name}: {value}\r\n' for name, value in (HEADERS | {'Content-Length': len(data)}).items())
    connection = socket.create_connection(('127.0.0.1', self.port), PATIENCE_S)
    connection.sendall(f'POST /v1/completions HTTP/1.1\r\nHost: here\r\n{head}\r\n'.encode() + data)
    return connection


def events(response) -> list:
  """Of a stream, up to [DONE]."""
  found = []
  for line in response:
    if line.strip():
      assert line.startswith(b'data: '), line
      data = line[6:].strip()
      found.append('[DONE]' if data == b'[DONE]' else json.loads(data))
  return found


def wait_for(what, seconds: float = PATIENCE_S):
  until = time.monotonic() + seconds
  while not what():
    assert time.monotonic() < until
    time.sleep(0.01)


def draw(rng: np.random.Generator, tokenizer) -> tuple[dict, list[Request]]:
  """A body, and the requests that it should become."""
  text = made_run.TEXT[rng.integers(3)]
  start = int(rng.integers(len(text) - 4))
  prompts = [text[start : start + int(rng.integers(2, 30))] for _ in range(rng.choice([1, 1, 1, 2]))]
  tokens = [tuple(tokenizer.encode(prompt, eos=False).tolist()) for prompt in prompts]
  kinds = [prompts, [list(ids) for ids in tokens]] if len(prompts) > 1 else [prompts[0], list(tokens[0]), prompts]
  fields = {'seed': int(rng.integers(100)), 'temperature': [0, 0.0, 0.8, 1][rng.integers(4)]}
  fields |= [{}, {'top_k': 5}, {'top_p': 0.7}][rng.integers(3)]
  fields |= [{}, {}, {}, {'path': int(rng.integers(4))}, {'reroute_every': 16}][rng.integers(5)]
  most = [{}, {'max_tokens': int(rng.integers(1, 30))}][rng.integers(2)]
  n = int(rng.choice([1, 1, 1, 2]))
  whole = {'max_tokens': 16} | most | fields
  requests = [Request(**whole | {'tokens': ids, 'seed': whole['seed'] + i}) for ids in tokens for i in range(n)]
  body = {'model': 'run', 'prompt': kinds[rng.integers(len(kinds))], 'n': n, **most, **fields}
  return body, requests


def with_stop(rng, body, requests, texts) -> tuple[dict, list[Request]]:
  """The same, to end in the middle of what would be written."""
  longest = max((text.transcript.text for text in texts), key=len)
  at = len(longest) // 2
  stop = longest[at : at + int(rng.integers(1, 5))]
  if not stop or rng.random() < 0.5:
    return body, requests
  stops = rng.random() < 0.5 and ['nowhere', stop]
  return body | {'stop': stops or stop}, [dataclasses.replace(r, stop=tuple(stops or [stop])) for r in requests]


def gathered(answer) -> list[tuple]:
  """(text, finish_reason, paths) of the choices of an answer or of a stream; what is not right about it fails."""
  if isinstance(answer, dict):
    assert [choice['index'] for choice in answer['choices']] == list(range(len(answer['choices'])))
    return [(choice['text'], choice['finish_reason'], choice['paths']) for choice in answer['choices']]
  assert answer.pop() == '[DONE]'
  found: dict[int, tuple] = {}
  for choice in (choice for event in answer for choice in event['choices']):
    text, finished, _ = found.get(choice['index'], ('', None, []))
    assert finished is None
    found[choice['index']] = (text + choice['text'], choice['finish_reason'], choice['paths'])
  return [found[index] for index in range(len(found))]
