"""A link to the desks of a gateway in this process, without HTTP: a test may stop a worker and its gateway anywhere."""

import contextlib
import io
import json
import pathlib
import urllib.parse
from typing import Any

from dipaco_jax.core import errors
from dipaco_jax.gateway import http_app
from dipaco_jax.gateway.desks import Desks
from dipaco_jax.gateway.refusals import Refused
from dipaco_jax.gateway.requests import Caller
from dipaco_jax.gateway.tokens import Token
from dipaco_jax.islands.island import Island
from dipaco_jax.registry.gateway_registry import GatewayRegistry
from dipaco_jax.storage import gateway_link
from dipaco_jax.storage.gateway_objects import OBJECTS, Gateway
from dipaco_jax.storage.object_store import Storage


class DeskLink:
  """What `gateway_link.Link` does, by calls of the desks; what is sent is JSON all the same."""

  def __init__(self, desks: Desks, name: str):
    self.desks, self.name = desks, ''
    self.address = gateway_link.Address('https', 'gateway', 443, '')
    self.caller = Caller(Token(name, None, 1e12), desks.scope(None), name)

  def call(self, route: str, body: Any, longest_wait_s: float = 0.0) -> dict[str, Any]:
    with raising_as_http():
      return json.loads(json.dumps(self.desks.routes[route](self.caller, json.loads(json.dumps(body)))))

  post = call

  def open(self, method: str, path: str, body: Any = None, headers: Any = None) -> 'Answer':
    parts, objects = urllib.parse.urlsplit(path), self.desks.objects
    name = urllib.parse.unquote(parts.path).removeprefix(OBJECTS)
    with raising_as_http():
      if method == 'GET':
        _, chunks = objects.open(objects.readable(self.caller, name))
        return Answer(b''.join(map(bytes, chunks)))
      sha256 = urllib.parse.parse_qs(parts.query)['sha256'][0]
      objects.allow(self.caller, name, len(body), sha256)
      file = objects.new_file()
      try:
        file.write_bytes(body)
        objects.accept(name, sha256, file)
      finally:
        file.unlink(missing_ok=True)
      return Answer(b'{}')

  def close(self):
    self.desks.island.registry.close()


class Answer:
  def __init__(self, data: bytes):
    self.headers, self.data = {'Content-Length': str(len(data))}, io.BytesIO(data)

  def read(self, most: int) -> bytes:
    return self.data.read(most)

  read_whole = read

  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass


@contextlib.contextmanager
def raising_as_http():
  """Raises what a link raises, of errors that a server answers."""
  try:
    yield
  except Exception as e:
    if (refused := http_app.to_refused(e)) is http_app.FAILED:
      raise
    raise error_of(refused) from e


def error_of(refused: Refused) -> Exception:
  kinds = {404: FileNotFoundError, 409: errors.Lost, 429: gateway_link.Busy, 503: gateway_link.Busy}
  return kinds.get(refused.status, gateway_link.Rejected)(str(refused))


def behind(island: Island, name: str, aside: pathlib.Path) -> Island:
  """A worker's island behind a gateway, which has this one."""
  aside.mkdir(parents=True, exist_ok=True)
  link = DeskLink(Desks(island, None, aside), name)
  return Island(island.run, GatewayRegistry(link), Storage('https://gateway', Gateway(link), 3), name, island.resumed)
