"""A line with latency: a relay that holds what it passes on back, for machines whose kernel has no tc netem.

    python benchmarks/relay.py FROM TO MS

FROM and TO are PORT, HOST:PORT, or the file of a Unix socket. MS, milliseconds, are those of a round trip: half of them
each way, and all of them to connect.
"""

import asyncio
import contextlib
import functools
import sys
from collections.abc import Awaitable

WAITING = 1024  # reads on their way

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def address(words: str) -> tuple[str, int]:
  host, _, port = words.rpartition(':')
  return host or '127.0.0.1', int(port)


def connect(words: str) -> Awaitable[Streams]:
  return asyncio.open_unix_connection(words) if '/' in words else asyncio.open_connection(*address(words))


async def listen(handle, words: str) -> asyncio.Server:
  if '/' in words:
    return await asyncio.start_unix_server(handle, words)
  return await asyncio.start_server(handle, *address(words))


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float):
  """Writes what is read, after so many seconds."""
  on_their_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(WAITING)
  clock = asyncio.get_running_loop().time

  async def send():
    while True:
      due, data = await on_their_way.get()
      await asyncio.sleep(due - clock())
      if not data:
        writer.write_eof()
        return
      writer.write(data)
      await writer.drain()

  async def read():
    data = b' '
    while data:
      data = await reader.read(1 << 16)
      await on_their_way.put((clock() + seconds, data))

  await asyncio.gather(send(), read())


async def answer(to: str, seconds: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
  """Relays one connection."""
  await asyncio.sleep(seconds)
  with contextlib.suppress(OSError), contextlib.closing(writer):
    there, back = await connect(to)
    with contextlib.closing(back):
      await asyncio.gather(pass_on(reader, back, seconds / 2), pass_on(there, writer, seconds / 2))


async def main(listens: str, to: str, milliseconds: str):
  server = await listen(functools.partial(answer, to, float(milliseconds) / 1000), listens)
  await server.serve_forever()


if __name__ == '__main__':
  if len(sys.argv) != 4:
    sys.exit(__doc__)
  asyncio.run(main(*sys.argv[1:]))
