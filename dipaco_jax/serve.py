"""Serves a run over HTTP, as OpenAI's completions API.

    python -m dipaco_jax.serve --workdir=runs/tiny [--port=8000 --max_batch=8 --max_paths=4]

The router chooses a path for each text, unless a request is for model NAME/path-3. The first Ctrl-C or SIGTERM lets
answers finish, the second does not. With DIPACO_API_KEY in the environment, requests must bring that key.
"""

import ipaddress
import json
import logging
import os
import shlex
import socket
from typing import NoReturn

from absl import flags

from dipaco_jax.command_line import command
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.inference.request import Request
from dipaco_jax.storage import seals
from dipaco_jax.training import stopping


def check_options(f):
  if not f.workdir:
    raise InputError('name a run with --workdir=DIR')
  if not 0 <= f.port < 2**16:
    raise InputError(f'--port={f.port} should be from 0 to {2**16 - 1}; 0: any that is free')
  for name, least in {'max_batch': 1, 'max_paths': 1, 'max_waiting': 1, 'grace_s': 0, 'reroute_every': 0}.items():
    if f[name].value < least:
      raise InputError(f'--{name}={f[name].value} should be {least} or more')


def listen(host: str, port: int) -> socket.socket:
  """Returns a socket that listens; raises InputError where there can be none."""
  try:
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    # Connections inherit it. asyncio sets it only where a socket names its protocol, and without it Nagle's algorithm
    # holds every other piece of a stream back for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
  except (OSError, OverflowError) as e:
    words = str(getattr(e, 'strerror', None) or e).partition(' (')[0]
    raise InputError(f'--host={host} --port={port}: {words}; choose another, or --port=0 for any free port') from e


def warm(engine):
  """Compiles an engine's first programs and loads its first paths; returns the engine."""
  num_paths, start = engine.run.layout.grid.num_paths, (engine.run.tokenizer.eos_id,)
  engine.generate([Request(start, 2, path, until_eos=False) for path in range(min(num_paths, engine.max_paths))])
  try:
    engine.run.router.path(start)
  except seals.Damaged:
    raise
  except InputError:  # there is no router: requests that need one are told
    pass
  return engine


def greeting(name: str, num_paths: int, url: str) -> str:
  """Returns the lines that say where the server is, which models it has, and how to ask."""
  body = json.dumps({'model': name, 'prompt': 'The', 'max_tokens': 32})
  paths = f', its paths are {name}/path-0 to path-{num_paths - 1}' if num_paths > 1 else ''
  return printable.text(
    f'{name} is at {url}/v1{paths}; Ctrl-C stops it\n'
    f"curl {url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
  )


def main() -> NoReturn:
  """Serves until a signal, and ends with its exit status."""
  f = flags.FLAGS
  check_options(f)
  listener = listen(f.host, f.port)
  command.quiet()
  try:
    from dipaco_jax.inference import connections, http_server
    from dipaco_jax.inference.engine import Engine
    from dipaco_jax.inference.trained_run import TrainedRun
  except ModuleNotFoundError as e:
    raise InputError(f'{e.name} is missing, which serving needs: pip install "dipaco_jax[serve]"') from e
  limits = connections.Limits(connections.IDLE + f.max_waiting + f.max_batch * f.max_paths)
  connections.reserve_descriptors(limits.most)
  host, port = listener.getsockname()[:2]
  url = f'http://{f"[{host}]" if ":" in host else host}:{port}'
  if not ipaddress.ip_address(host).is_loopback and not os.environ.get('DIPACO_API_KEY'):
    logging.warning('--host=%s: whoever reaches it may use it; set DIPACO_API_KEY to ask for a key', f.host)
  if f.access_log:
    logging.getLogger('uvicorn.access').setLevel(logging.INFO)
  command.keep_programs()
  run = TrainedRun(f.workdir)
  command.check_devices()
  name = os.path.basename(os.path.realpath(f.workdir) if '://' not in f.workdir else f.workdir.rstrip('/'))
  num_paths = run.layout.grid.num_paths
  server = http_server.Server(
    name,
    lambda: warm(Engine(run, f.max_paths, f.max_batch, f.version)),
    lambda: print(greeting(name, num_paths, url), flush=True),
    f.reroute_every,
    f.max_waiting,
    f.grace_s,
    os.environ.get('DIPACO_API_KEY', ''),
  )
  status = server.run(listener, limits, f.access_log)
  stopping.leave(status)  # at once: the engine's thread may be at a long compilation


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'The run: a folder, s3://BUCKET/... or gs://BUCKET/...')
  flags.DEFINE_string('host', '127.0.0.1', 'The address to listen at; 0.0.0.0: all addresses of this machine.')
  flags.DEFINE_integer('port', 8000, 'The port; 0: any that is free.')
  flags.DEFINE_integer('max_batch', 8, 'Texts that grow together on one path.')
  flags.DEFINE_integer('max_paths', 4, 'Paths in memory at one time.')
  flags.DEFINE_integer('max_waiting', 64, 'Texts that may wait for a place; more are refused, with status 429.')
  flags.DEFINE_integer('version', None, 'The version of the modules; by default as early stopping chose for each path.')
  flags.DEFINE_integer('reroute_every', Request.reroute_every, 'Tokens after which a path is chosen again; 0: never.')
  flags.DEFINE_float('grace_s', 30.0, 'Seconds that answers may still take when the server is stopped.')
  flags.DEFINE_bool('access_log', False, 'Log a line for each request.')
  command.run(main)
