"""A gateway in this process, in front of a run whose training is about to begin, and workers with tokens."""

import contextlib
import hashlib
import http.client
import json
import pathlib
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import uvicorn

from dipaco_jax.gateway import certificates, http_app, limits
from dipaco_jax.gateway.desks import Desks, make_aside
from dipaco_jax.gateway.tokens import Tokens
from dipaco_jax.islands import island as island_lib, path_messages, pieces, schedule
from dipaco_jax.islands.messages import Sent
from dipaco_jax.registry.gateway_registry import GatewayRegistry
from dipaco_jax.registry.registry import Fact, Registry, Task
from dipaco_jax.serving import connections
from dipaco_jax.storage import gateway_link
from dipaco_jax.storage.gateway_objects import Gateway
from dipaco_jax.storage.object_store import Storage

GENEROUS = limits.Limits(1e6, 1e6, 1e15, 1 << 20, 5.0, 5000)
TRAINED = {
  'rows': [[2, 5.0, 1.0, 0.01, 2, 0]], 'timed_steps': 2, 'timed_s': 0.5, 'started': 1.0, 'ended': 2.0, 'busy_s': 1.0,
  'from_step': 0, 'holdout_loss': 4.5, 'holder': 'disk-1', 'moved': {'ends': 1.0}, 'worker': 'somebody else',
}  # fmt: skip


class Running:
  """A gateway that answers on this machine."""

  def __init__(self, island: island_lib.Island, folder: pathlib.Path, most: limits.Limits, is_secure: bool):
    self.island, self.url = island, island.registry._db._engine.url.render_as_string(hide_password=False)
    self.tokens = Tokens(self.url)
    self.links = list[gateway_link.Link]()
    private = certificates.make_folder(folder)
    self.aside = make_aside(private)
    registry = Registry(self.url, island.registry.lease_s, patience_s=1)
    of_gateway = island_lib.Island(island.run, registry, island.storage, 'gateway')
    self.desks = Desks(of_gateway, self.tokens, self.aside)
    self.server = http_app.Server(self.desks, limits.Meter(most), lambda: None, 1.0)
    self.server.lifecycle.listening = lambda _: watching(self.uvicorn)  # without signals, in a thread
    self.tls = certificates.keep(private) if is_secure else None
    tls: dict[str, Any] = {'ssl_certfile': self.tls[0], 'ssl_keyfile': self.tls[1]} if self.tls else {}
    protocol = connections.protocol_with(connections.Limits(2000, head_s=2, body_s=3, answer_s=5))
    self.uvicorn = uvicorn.Server(
      uvicorn.Config(self.server.app(), '127.0.0.1', 0, http=protocol, ws='none', lifespan='on', log_config=None, **tls)
    )
    self.thread = threading.Thread(target=self.uvicorn.run, daemon=True)

  def start(self) -> 'Running':
    self.thread.start()
    while not self.uvicorn.started:
      assert self.thread.is_alive()
      time.sleep(0.01)
    self.port = self.uvicorn.servers[0].sockets[0].getsockname()[1]
    return self

  def stop(self):
    for link in self.links:
      link.close()
    self.uvicorn.should_exit = True
    self.thread.join(20)
    self.desks.island.registry.close()
    self.tokens.close()

  @property
  def address(self) -> gateway_link.Address:
    fingerprint = certificates.fingerprint(self.tls[0]) if self.tls else ''
    return gateway_link.Address('https' if self.tls else 'http', '127.0.0.1', self.port, fingerprint)

  def link(
    self, name: str = 'alpha', paths: Sequence[int] | None = None, days: float = 1, owner: str = ''
  ) -> gateway_link.Link:
    """Of a worker with a new token."""
    self.links.append(gateway_link.Link(self.address, self.tokens.add(name, paths, days, owner), patience_s=3))
    return self.links[-1]

  def worker(self, name: str = 'alpha', paths: Sequence[int] | None = None) -> island_lib.Island:
    """A worker's island behind this gateway."""
    return island_of(self.island, self.link(name, paths))

  def counts(self) -> dict[str, float]:
    """Requests by cause, of all routes."""
    counts: dict[str, float] = {}
    for metric in self.server.metrics.collect():
      for sample in metric.samples:
        if sample.name == 'dipaco_gateway_requests_total':
          counts[sample.labels['cause']] = counts.get(sample.labels['cause'], 0) + sample.value
    return counts


@contextlib.asynccontextmanager
async def watching(server: uvicorn.Server):
  """Cuts clients off that let the server wait, as in a process of its own."""
  import asyncio

  task = asyncio.get_running_loop().create_task(connections.watch(server.server_state.connections))
  yield
  task.cancel()


@contextlib.contextmanager
def running(
  island: island_lib.Island, folder: pathlib.Path, most: limits.Limits = GENEROUS, is_secure: bool = False
) -> Iterator[Running]:
  made = Running(island, folder, most, is_secure).start()
  try:
    yield made
  finally:
    made.stop()


def island_of(island: island_lib.Island, link: gateway_link.Link) -> island_lib.Island:
  """The island of a worker with this link."""
  registry = GatewayRegistry(link)
  storage = Storage(link.address.url, Gateway(link), 3)
  return island_lib.Island(island.run, registry, storage, registry.name)


def begin_training(island: island_lib.Island):
  """Publishes the base as modules of version 0, so that all paths have their first task."""
  objects = {}
  for level in island.layout.levels:
    objects[level.name] = island.write_object(f'modules/0/{level.name}', arrays(island.level_shapes(level), 0.0))
  facts = [Fact('prepared', '', 0, '', '', {'trees': {}})]
  facts += [Fact('module', key, 0, *objects[key.split('/')[0]], {}) for key in island.all_modules()]
  island.registry.put(facts)
  schedule.schedule(island, facts)


def arrays(shapes, x: float) -> dict[str, np.ndarray]:
  return {name: np.full(shape.shape, x, shape.dtype) for name, shape in shapes.items()}


def sent(island: island_lib.Island, x: float = 1.0) -> dict[str, Sent]:
  """What a path sends of all levels: parameters that are all x."""
  return {level.name: Sent(arrays(island.level_shapes(level), x), 1.0, {}) for level in island.layout.levels}


def train(island: island_lib.Island, task: Task, x: float = 1.0, **about) -> list[Fact]:
  """Does a task of training: writes its objects, and returns its facts."""
  part = pieces.part_of(island, task)
  objects = path_messages.write_objects(island, int(task.key), part, sent(island, x))
  return [schedule.checkpoint_fact(int(task.key), task.number, objects, TRAINED | about)]


def state(island: island_lib.Island) -> dict[str, np.ndarray]:
  """What a path carries to its next phase."""
  return {f"['inner']{at}": np.zeros(x.shape, x.dtype) for at, x in island.inner_shapes.items()}


def snapshot(running: Running, folder: pathlib.Path) -> dict[str, Any]:
  """All rows and files of a run, but when roles were seen."""
  import sqlalchemy as sa

  from dipaco_jax.registry.registry_schema import FACTS, TASKS

  def read(connection):
    return [[tuple(row) for row in connection.execute(sa.select(table)).all()] for table in (FACTS, TASKS)]

  files = {
    str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
    for file in folder.rglob('*')
    if file.is_file() and not file.name.startswith('registry.db')
  }
  return {'rows': running.island.registry.read_snapshot(read), 'files': files}


def request(running: Running, method: str, path: str, token: str, body: Any = b'', **headers) -> tuple[int, str]:
  """Sends a request as anybody might; returns status and error."""
  if running.tls:
    context = ssl._create_unverified_context()
    connection = http.client.HTTPSConnection('127.0.0.1', running.port, timeout=30, context=context)
  else:
    connection = http.client.HTTPConnection('127.0.0.1', running.port, timeout=30)
  data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
  given = {'Authorization': f'Bearer {token}'} | {name.replace('_', '-'): value for name, value in headers.items()}
  try:
    connection.request(method, path, data, given)
    answer = connection.getresponse()
    text = answer.read().decode(errors='replace')
  finally:
    connection.close()
  try:
    return answer.status, json.loads(text).get('error', '')
  except ValueError:
    return answer.status, text
