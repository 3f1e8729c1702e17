"""Connections between the processes of a job, by which each notices at once that another one has ended.

The first process listens, and each of the others connects to it. The kernel closes the connections of a process that
ends, however it ends, and keep-alive probes end those of a machine that is lost. JAX's own heartbeats notice it after
a minute, and end the process with a C++ stack trace.
"""

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable

BYE = b'bye\n'  # of a process that ends with a status of its own, as others may be about to do
BYE_S = 10.0  # for the others to end so
BYE_OF_FIRST_S = 0.4  # the same where the first process ends: JAX ends the others when it is gone
FIRST_WAITS_S = 0.8  # for the others to end before the first one does
CONNECT_S = 10.0
PROBES = {'TCP_KEEPIDLE': 10, 'TCP_KEEPINTVL': 5, 'TCP_KEEPCNT': 6}  # 40 s without an answer
TOKEN_BYTES, INDEX_DIGITS = 16, 8

Gone = Callable[[int], object]  # is called with the process that is gone


class JobWatch:
  """The connections of one process: to the first one, or the first one's to all others."""

  def __init__(self, gone: Gone, server: socket.socket | None = None):
    self.gone = gone
    self.server = server  # of the first process
    self.is_ending = False  # whether all processes are about to end, and JAX ends nobody
    self.ended = threading.Event()  # this process does not watch any more
    self.first_report = threading.Lock()  # held for good by the thread that reports: later ends are consequences
    self.connections: dict[int, socket.socket] = {}

  def stop(self) -> None:
    """Stops watching: from now on processes end as agreed."""
    self.ended.set()
    if self.server:
      with contextlib.suppress(OSError):
        self.server.shutdown(socket.SHUT_RDWR)  # which ends `_accept`

  def say_bye(self) -> None:
    """Says that this process ends; the first one then waits for the others, for a moment."""
    self.ended.set()
    self._send(BYE)
    until = time.monotonic() + FIRST_WAITS_S
    while self.server and self.connections and time.monotonic() < until:
      time.sleep(0.02)

  def _send(self, message: bytes) -> None:
    for connection in [*self.connections.values()]:
      with contextlib.suppress(OSError):
        connection.send(message, socket.MSG_DONTWAIT)

  def _follow(self, index: int, connection: socket.socket) -> None:
    """Waits for a process to end or to say a line, and reports who is gone: that process, or the one that it names."""
    line = b''
    with connection:  # open until this process ends too: the first one waits for that
      with contextlib.suppress(OSError):
        while not line.endswith(b'\n') and (data := connection.recv(64)):
          line += data
      self.connections.pop(index, None)
      if line == BYE:
        self.ended.wait(BYE_S if index or self.is_ending else BYE_OF_FIRST_S)
    if not self.ended.is_set() and self.first_report.acquire(blocking=False):
      culprit = int(line) if line.strip().isdigit() else index
      self._send(b'%d\n' % culprit)
      self.gone(culprit)


def listen(gone: Gone) -> tuple[JobWatch, int, str]:
  """Listens for the other processes; returns the port and the token that they need."""
  dual = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if dual else socket.AF_INET
  server = socket.create_server(('', 0), family=family, dualstack_ipv6=dual, backlog=1024)
  watch, token = JobWatch(gone, server), secrets.token_hex(TOKEN_BYTES)
  _start(_accept, server, watch, token)
  return watch, server.getsockname()[1], token


def _accept(server: socket.socket, watch: JobWatch, token: str) -> None:
  with server:
    while not watch.ended.is_set():
      try:
        _start(_welcome, server.accept()[0], watch, token)
      except OSError:  # too many open files; or the end
        watch.ended.wait(1)


def _welcome(connection: socket.socket, watch: JobWatch, token: str) -> None:
  """Follows a process that has the token; closes the connection of anybody else."""
  with connection, contextlib.suppress(OSError, ValueError):
    connection.settimeout(CONNECT_S)
    size = 2 * TOKEN_BYTES + INDEX_DIGITS
    hello = b''
    while len(hello) < size and (data := connection.recv(size - len(hello))):
      hello += data
    if not hmac.compare_digest(hello[: 2 * TOKEN_BYTES], token.encode()):
      return
    index = int(hello[2 * TOKEN_BYTES :])
    _probe(connection)
    watch.connections[index] = connection
    watch._follow(index, connection)


def connect(host: str, port: int, token: str, index: int, gone: Gone) -> JobWatch:
  """Connects process `index` to the first one; raises OSError if that cannot be reached."""
  connection = socket.create_connection((host, port), CONNECT_S)
  connection.sendall(f'{token}{index:0{INDEX_DIGITS}}'.encode())
  _probe(connection)
  watch = JobWatch(gone)
  watch.connections[0] = connection
  _start(watch._follow, 0, connection)
  return watch


def _probe(connection: socket.socket) -> None:
  """Enables keep-alive probes of the other machine, and waits for messages without limit."""
  connection.settimeout(None)
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for name, value in PROBES.items():
    if hasattr(socket, name):  # not on macOS
      connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _start(function: Callable, *args: object) -> None:
  threading.Thread(target=function, args=args, daemon=True).start()
