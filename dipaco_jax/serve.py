"""Serves a run over HTTP, as OpenAI's API of completions and chat completions, with a page to try it.

    python -m dipaco_jax.serve --workdir=runs/tiny [--port=8000 --max_batch=8 --max_paths=4]

The router chooses a path for each text, unless a request is for model NAME/path-3. The first Ctrl-C or SIGTERM lets
answers finish, the second does not. With DIPACO_API_KEY in the environment, requests must bring that key.
"""

import json
import shlex
from typing import NoReturn

from absl import flags

from dipaco_jax.command_line import command, listener as listener_lib
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.inference.request import Request
from dipaco_jax.processes import stopping
from dipaco_jax.storage import seals


def warm(engine):
  """Compiles an engine's first programs and loads its first paths; returns the engine."""
  paths, start = engine.run.paths_here[: engine.max_paths], (engine.run.tokenizer.eos_id,)
  engine.generate([Request(start, 2, path, until_eos=False) for path in paths])
  try:
    engine.run.router.path(start)
  except seals.Damaged:
    raise
  except InputError:  # there is no router: requests that need one get an error
    pass
  return engine


def greeting(name: str, paths: list[int], url: str, is_store: bool = False) -> str:
  """Returns the lines that say where the server is, which models it has, and how to ask.

  `is_store`: whether these are the paths of an owner's store, of which each request has to name one.
  """
  first = f'{name}/path-{paths[0]}'
  body = json.dumps({'model': first if is_store else name, 'prompt': 'The', 'max_tokens': 32})
  about = f', its paths are {first} to path-{paths[-1]}' if len(paths) > 1 else f', its path is {first}' * is_store
  return printable.text(
    f'{name} is at {url}/v1{about}; a page to try it is at {url}/; Ctrl-C stops it\n'
    f"curl {url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
  )


def main() -> NoReturn:
  """Serves until a signal, and ends with its exit status."""
  f = flags.FLAGS
  listener_lib.check({'max_batch': 1, 'max_paths': 1, 'max_waiting': 1, 'reroute_every': 0})
  listener = listener_lib.listen(f.host, f.port)
  command.quiet()
  try:
    from dipaco_jax.data import chat_template
    from dipaco_jax.inference.engine import Engine
    from dipaco_jax.inference.trained_run import TrainedRun
    from dipaco_jax.serving import connections, http_server
  except ModuleNotFoundError as e:
    raise InputError(f'{e.name} is missing, which serving needs: pip install "dipaco_jax[serve]"') from e
  limits = connections.Limits(connections.IDLE + f.max_waiting + f.max_batch * f.max_paths)
  connections.reserve_descriptors(limits.most)
  listener_lib.log(listener)
  command.keep_programs()
  run = TrainedRun(f.workdir, f.trust_modules)
  command.check_devices()
  name, url = listener_lib.model_name(f.workdir), listener_lib.url(listener)
  server = http_server.Server(
    name,
    lambda: warm(Engine(run, f.max_paths, f.max_batch, f.version)),
    lambda: print(greeting(name, run.paths_here, url, run.settings.data.own_text), flush=True),
    f.reroute_every,
    f.max_waiting,
    f.grace_s,
    listener_lib.api_key(),
    chat_template.load(run.tokenizer),
    listener_lib.allowed_hosts(listener),
  )
  status = server.run(listener, limits, f.access_log)
  stopping.leave(status)  # at once: the engine's thread may be at a long compilation


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'Workdir of the run: a folder, s3://BUCKET/... or gs://BUCKET/...')
  command.define_trust()
  listener_lib.define(port=8000)
  flags.DEFINE_integer('max_batch', 8, 'Maximum number of texts that one path continues at the same time.')
  flags.DEFINE_integer('max_paths', 4, 'Maximum number of paths in memory at the same time.')
  flags.DEFINE_integer('max_waiting', 64, 'Maximum number of texts in the queue; further requests get status 429.')
  flags.DEFINE_integer(
    'version', None, 'Version of the modules. By default, the version that early stopping chose for each path.'
  )
  flags.DEFINE_integer(
    'reroute_every', Request.reroute_every, 'Number of tokens after which the path is chosen again. 0 means never.'
  )
  command.run(main)
