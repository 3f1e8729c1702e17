"""How an HTTP server starts and ends: uvicorn with our limits; one signal lets answers finish, a second does not."""

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import pathlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import prometheus_client as prometheus
import uvicorn
from starlette.types import ASGIApp

from dipaco_jax.processes import stopping
from dipaco_jax.serving import connections
from dipaco_jax.serving.openai_api import ApiError

CLOSE_S = 2  # for connections to end after the last answer


@dataclasses.dataclass(eq=False)
class Lifecycle:
  num_open: Callable[[], int]  # answers that are not finished
  end_open: Callable[[ApiError], None]  # ends them with an error
  grace_s: float  # that they may still take after a signal

  def __post_init__(self):
    self.signal = 0  # the number of the one that stops the server

  def run(
    self, app: ASGIApp, listener: socket.socket, limits: connections.Limits, access_log: bool,
    tls: tuple[pathlib.Path, pathlib.Path] | None = None,
  ) -> int:  # fmt: skip
    """Serves an app until a signal; returns the exit status. The app's lifespan enters `listening`.

    `tls`: the files of a certificate and its key, with which connections are encrypted.
    """
    connections.limit_log()
    options: Any = {'loop': 'asyncio', 'ws': 'none', 'lifespan': 'on', 'log_config': None, 'server_header': False}
    options |= {'backlog': connections.BACKLOG, 'timeout_graceful_shutdown': CLOSE_S, 'access_log': access_log}
    options |= {'timeout_keep_alive': math.ceil(limits.head_s)}
    options |= {'ssl_certfile': tls[0], 'ssl_keyfile': tls[1]} if tls else {}
    self.uvicorn = uvicorn.Server(uvicorn.Config(app, http=connections.protocol_with(limits), **options))
    self.uvicorn.run([listener])
    return 128 + self.signal

  @contextlib.asynccontextmanager
  async def listening(self, num_connections: prometheus.Gauge) -> AsyncIterator[None]:
    """Handles signals, and watches over connections, while the block runs in the event loop."""
    loop = asyncio.get_running_loop()
    for number in stopping.heard():
      loop.add_signal_handler(number, self._stop, number)  # uvicorn has installed its own by now
    clients = self.uvicorn.server_state.connections
    num_connections.set_function(lambda: len(clients))
    watch = loop.create_task(connections.watch(clients))
    try:
      yield
    finally:
      watch.cancel()

  def end(self, why: ApiError):
    """Ends open requests, and the server."""
    self.end_open(why)
    logging.getLogger('uvicorn.error').setLevel(logging.CRITICAL + 1)  # no line for each client that does not read
    self.uvicorn.should_exit = True

  def _stop(self, number: int):
    if self.signal:
      os._exit(128 + number)
    self.signal = number
    if num_open := self.num_open():
      stopping.say(f'stopping: {num_open} answers may finish, within {self.grace_s:g} s; a second signal ends at once')
    self._drain = asyncio.get_running_loop().create_task(self._finish())  # kept: the loop itself forgets tasks

  async def _finish(self):
    until = time.monotonic() + self.grace_s
    while self.num_open() and time.monotonic() < until:
      await asyncio.sleep(0.02)
    self.end(ApiError(503, 'the server stops'))
