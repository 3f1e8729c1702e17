"""An engine that answers as a test says, on a port of this machine: what engines do when they fail."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

Script = Callable[['Scripted', dict, asyncio.StreamWriter], Awaitable[None]]


class Scripted:
  """`asked` are the bodies that came, `models` what it lists; None: it refuses to."""

  def __init__(self, script: Script):
    self.script = script
    self.asked: list[dict] = []
    self.heads: list[bytes] = []
    self.models: list[str] | None = ['m']
    self.num_gone = 0  # clients that hung up amid an answer
    self.writers: set[asyncio.StreamWriter] = set()

  async def start(self, port: int = 0):
    self.server = await asyncio.start_server(self._serve, '127.0.0.1', port)
    self.port = self.server.sockets[0].getsockname()[1]

  async def stop(self):
    """As if it were killed."""
    self.server.close()
    for writer in self.writers:
      writer.transport.abort()

  @property
  def url(self) -> str:
    return f'http://127.0.0.1:{self.port}/v1'

  async def _serve(self, reader, writer):
    self.writers.add(writer)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
      while True:
        head = await reader.readuntil(b'\r\n\r\n')
        length = next((int(x[15:]) for x in head.lower().split(b'\r\n') if x.startswith(b'content-length')), 0)
        body = await reader.readexactly(length)
        self.heads.append(head)
        if head.startswith(b'GET'):
          listed = {'data': [{'id': name} for name in self.models or ()]}
          whole(writer, listed, 200 if self.models is not None else 503)
        else:
          self.asked.append(json.loads(body))
          await self.script(self, self.asked[-1], writer)
        await writer.drain()
        if writer.is_closing():
          break
    self.writers.discard(writer)
    writer.close()


def whole(writer: asyncio.StreamWriter, body, status: int = 200):
  data = json.dumps(body).encode()
  head = f'HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nx-request-id: 7\r\nset-cookie: a=b\r\n'
  writer.write(head.encode() + b'content-length: %d\r\n\r\n%b' % (len(data), data))


async def stream(writer: asyncio.StreamWriter, pieces: list[bytes], ends: bool = True):
  writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n')
  for piece in pieces:
    writer.write(b'%x\r\n%b\r\n' % (len(piece), piece))
    await writer.drain()
    await asyncio.sleep(0.01)
  if ends:
    writer.write(b'0\r\n\r\n')
  else:
    writer.close()


async def good(engine: Scripted, body: dict, writer: asyncio.StreamWriter):
  whole(writer, {'port': engine.port, 'model': body['model']})


@contextlib.asynccontextmanager
async def running(*scripts: Script) -> AsyncIterator[list[Scripted]]:
  engines = [Scripted(script) for script in scripts]
  for engine in engines:
    await engine.start()
  try:
    yield engines
  finally:
    for engine in engines:
      await engine.stop()
