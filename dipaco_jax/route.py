"""Serves a run by other engines, such as vLLM: takes requests in OpenAI's API, and passes each on to its path's engine.

    python -m dipaco_jax.route --workdir=runs/tiny --engines=engines.json [--port=8080]

engines.json says where the engines of each path are: {"paths": {"0": ["http://HOST:8000/v1"], "1": [...]}}; export
writes paths for them. The router chooses a path for each text, and for each conversation by what the user says first,
unless a request is for model NAME/path-3. The first Ctrl-C or SIGTERM lets answers finish, the second does not. With
DIPACO_API_KEY in the environment, requests must bring that key.
"""

import os
import pathlib
from typing import NoReturn

from absl import flags

from dipaco_jax.command_line import command, listener as listener_lib
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import stopping


def read_engines(file: str | None):
  """Reads engines.json; raises InputError."""
  from dipaco_jax.serving import engines_file

  if not file:
    raise InputError('name the file that says where the engines are with --engines=engines.json')
  command.check_readable('engines', file)
  try:
    data = pathlib.Path(file).read_bytes()
  except OSError as e:
    raise InputError(f'--engines={file}: {e.strerror}; name a file that can be read') from e
  return engines_file.parse(data, f'--engines={file}', os.environ)


def load_router(run):
  """Loads and compiles the router, or None if a run has one path. Raises InputError if there is none."""
  from dipaco_jax.inference.batched_router import BatchedRouter

  if run.layout.grid.num_paths == 1:
    return None
  router = BatchedRouter(run.router)
  router.compile()
  return router


def greeting(name: str, url: str, num_engines: int) -> str:
  return printable.text(f'{name} is at {url}/v1, served by {num_engines} engines; Ctrl-C stops it')


def main() -> NoReturn:
  """Serves until a signal, and ends with its exit status."""
  f = flags.FLAGS
  listener_lib.check({'max_open': 1, 'timeout_s': 1})
  engines = read_engines(f.engines)
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # accelerators of this machine are the engines'
  command.quiet()
  from dipaco_jax.inference.trained_run import TrainedRun
  from dipaco_jax.serving import engines_file

  run = TrainedRun(f.workdir, f.trust_modules)
  num_paths, name = run.settings.num_paths, listener_lib.model_name(f.workdir)
  engines_file.check_paths(engines, num_paths, f'--engines={f.engines}')
  listener = listener_lib.listen(f.host, f.port)
  try:
    from dipaco_jax.serving import connections, route_api, route_server
  except ModuleNotFoundError as e:
    raise InputError(f'{e.name} is missing, which routing needs: pip install "dipaco_jax[serve]"') from e
  limits = connections.Limits(connections.IDLE + f.max_open)
  connections.reserve_descriptors(limits.most + f.max_open)
  listener_lib.log(listener)
  command.keep_programs()
  command.check_devices()
  url = listener_lib.url(listener)
  server = route_server.RouteServer(
    route_api.ApiParser(name, num_paths, f.max_open),
    load_router(run),
    engines,
    lambda: print(greeting(name, url, len(engines.all)), flush=True),
    f.max_open,
    f.timeout_s,
    f.grace_s,
    listener_lib.api_key(),
    listener_lib.allowed_hosts(listener),
  )
  stopping.leave(server.run(listener, limits, f.access_log))


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'Workdir of the run: a folder, s3://BUCKET/... or gs://BUCKET/...')
  flags.DEFINE_string('engines', None, "JSON file with the URLs of each path's engines.")
  command.define_trust()
  listener_lib.define(port=8080)
  flags.DEFINE_integer('max_open', 1024, 'Maximum number of open requests; further requests get status 429.')
  flags.DEFINE_float('timeout_s', 600.0, 'Maximum time in seconds until an engine sends the next part of an answer.')
  command.run(main)
