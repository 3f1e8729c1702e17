"""Engines elsewhere, as they are now: which of them answer, how much each has to do, and whose turn it is.

An engine that fails is taken out, is asked for its models at growing intervals, and is taken back when it answers.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import Iterator

import aiohttp

from dipaco_jax.core import json_text, printable
from dipaco_jax.serving.engines_file import Engine, Engines
from dipaco_jax.serving.route_metrics import Metrics

PROBE_S = 5.0  # for a list of models
PROBE_BYTES = 2**20  # that it may have
FIRST_S, LONGEST_S = 0.5, 15.0  # between two probes
ERRORS = 3  # answers of status 500 in a row after which an engine is taken out, if its path has another


class Remote:
  """An engine and its state; `PathEngines` changes it."""

  def __init__(self, engine: Engine):
    self.engine = engine
    self.model = engine.model  # as requests name it
    self.is_in = False
    self.num_open = 0  # requests
    self.last_turn = 0
    self.num_errors = 0  # of status 500, since the last answer that was none
    self.times_out = 0  # since the last good answer
    self.out = asyncio.Event()  # set when it is taken out

  def __str__(self) -> str:
    return f'{self.engine.url} of path {self.engine.path}'

  @property
  def headers(self) -> dict[str, str]:
    return {'Authorization': f'Bearer {self.engine.api_key}'} if self.engine.api_key else {}


class EnginePool:
  def __init__(self, engines: Engines, session: aiohttp.ClientSession, metrics: Metrics):
    self.session = session
    self.remotes = [Remote(engine) for engine in engines.all]
    self._turns = itertools.count(1)
    self._watches: list[asyncio.Task] = []
    for remote in self.remotes:
      labels = str(remote.engine.path), printable.redacted(remote.engine.url)
      metrics.engine_in.labels(*labels).set_function(functools.partial(getattr, remote, 'is_in'))
      metrics.engine_open.labels(*labels).set_function(functools.partial(getattr, remote, 'num_open'))

  async def start(self):
    """Asks all engines once, and watches over them from then on."""
    first = await asyncio.gather(*map(self._probe, self.remotes))
    for remote, why in zip(self.remotes, first, strict=True):
      if why:
        logging.warning('%s is out: %s', remote, why)
      self._watches.append(asyncio.get_running_loop().create_task(self._watch(remote)))

  def close(self):
    for watch in self._watches:
      watch.cancel()

  def ready(self, path: int) -> list[Remote]:
    """Returns the engines of a path that answer, those with the fewest open requests first, then by turns."""
    ready_remotes = [remote for remote in self.remotes if remote.engine.path == path and remote.is_in]
    return sorted(ready_remotes, key=lambda remote: (remote.num_open, remote.last_turn))

  @property
  def ready_paths(self) -> set[int]:
    return {remote.engine.path for remote in self.remotes if remote.is_in}

  @contextlib.contextmanager
  def serving(self, remote: Remote) -> Iterator[None]:
    """Counts a request of an engine's as open within the block."""
    remote.num_open, remote.last_turn = remote.num_open + 1, next(self._turns)
    try:
      yield
    finally:
      remote.num_open -= 1

  def answered(self, remote: Remote, status: int):
    """Notes an answer. An engine that only has errors is taken out, unless it is all that its path has."""
    if status < 500:
      remote.num_errors = remote.times_out = 0
      return
    remote.num_errors += 1
    if remote.num_errors >= ERRORS and len(self.ready(remote.engine.path)) > 1:
      self.take_out(remote, f'{remote.num_errors} answers in a row were errors')

  def take_out(self, remote: Remote, why: str):
    if remote.is_in:
      remote.is_in = False
      remote.num_errors = 0
      remote.times_out = remote.times_out + 1
      remote.out.set()
      logging.warning('%s is out: %s', remote, why)

  async def _watch(self, remote: Remote):
    while True:
      num_probes = 0
      while not remote.is_in:
        await asyncio.sleep(min(LONGEST_S, FIRST_S * 2 ** min(16, remote.times_out + num_probes)))
        num_probes += 1
        if not await self._probe(remote):
          logging.warning('%s answers again', remote)
      await remote.out.wait()

  async def _probe(self, remote: Remote) -> str:
    """Asks an engine for its models, and takes it in; returns why not, or ''."""
    url, model = remote.engine.url, remote.engine.model
    try:
      status, listed = await self._get(remote, f'{url}/models')
      if status != 200 and model:  # transformers serve cannot list models that no hub knows
        status, _ = await self._get(remote, f'{url.rpartition("/")[0]}/health')
      if status != 200:
        return f'it answered GET {url}/models with status {status}'
      remote.model = model or only_model(listed, remote.engine.path)
    except (aiohttp.ClientError, OSError, TimeoutError) as e:
      return explain(e)
    except ValueError as e:
      return str(e)
    remote.out.clear()
    remote.is_in = True
    return ''

  async def _get(self, remote: Remote, url: str) -> tuple[int, bytes]:
    timeout = aiohttp.ClientTimeout(total=PROBE_S)
    async with self.session.get(url, headers=remote.headers, timeout=timeout, allow_redirects=False) as response:
      return response.status, await read_body(response, PROBE_BYTES)


async def read_body(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
  """Reads the body of an answer; raises aiohttp.ClientPayloadError if it is larger than it may be."""
  parts, size = [], 0
  async for part in response.content.iter_any():
    parts.append(part)
    size += len(part)
    if size > most_bytes:
      response.close()
      raise aiohttp.ClientPayloadError(f'its answer is larger than {most_bytes} bytes')
  return b''.join(parts)


def only_model(listed: bytes, path: int) -> str:
  """Returns the model that an engine of a path lists, of several the one called NAME/path-N; raises ValueError."""
  try:
    names = [str(model['id']) for model in json_text.parse(listed)['data']]
  except (ValueError, KeyError, TypeError) as e:
    raise ValueError('it lists no models: set "model" in engines.json') from e
  ours = [name for name in names if name.endswith(f'/path-{path}')]
  if len(names) != 1 and len(ours) != 1:
    raise ValueError(f'it lists {len(names)} models: set "model" in engines.json')
  return (names if len(names) == 1 else ours)[0]


def explain(error: Exception) -> str:
  """Returns a line on what went wrong between us and an engine."""
  if isinstance(error, TimeoutError):
    return 'it did not answer in time'
  if isinstance(error, aiohttp.ServerDisconnectedError):
    return 'it closed the connection'
  return ' '.join(str(error).split()) or type(error).__name__
