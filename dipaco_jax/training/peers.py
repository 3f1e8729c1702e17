"""Connections between the processes of a job, by which each learns at once that another one is gone.

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
BYE_OF_FIRST_S = 0.4  # the same where the first process ends: after a second JAX ends the others
CONNECT_S = 10.0
PROBES = {'TCP_KEEPIDLE': 10, 'TCP_KEEPINTVL': 5, 'TCP_KEEPCNT': 6}  # 40 s without an answer
TOKEN_BYTES, INDEX_DIGITS = 16, 8

Gone = Callable[[int], object]  # is called with the process that is gone


class Peers:
  """The connections of one process: to the first one, or the first one's to all others."""

  def __init__(self, gone: Gone, is_first: bool):
    self.gone, self.is_first = gone, is_first
    self.ended = threading.Event()  # this process does not watch any more
    self.connections: dict[int, socket.socket] = {}

  def stop(self) -> None:
    """Stops watching: from now on processes end as agreed."""
    self.ended.set()

  def say_bye(self) -> None:
    """Says that this process ends; the first one then waits for the others, for a moment."""
    self._send(BYE)
    until = time.monotonic() + BYE_OF_FIRST_S
    while self.is_first and self.connections and time.monotonic() < until:
      time.sleep(0.02)

  def _send(self, message: bytes) -> None:
    for connection in [*self.connections.values()]:
      with contextlib.suppress(OSError):
        connection.settimeout(1)
        connection.sendall(message)

  def _follow(self, index: int, connection: socket.socket) -> None:
    """Waits until a process closes its connection, and reports who is gone: that process, or the one that it names."""
    words = b''
    with contextlib.suppress(OSError):
      while data := connection.recv(64):
        words += data
    self.connections.pop(index, None)
    if BYE in words:
      self.ended.wait(BYE_S if index else BYE_OF_FIRST_S)
    if not self.ended.is_set():
      named = words.replace(BYE, b'').split()
      culprit = int(named[0]) if named and named[0].isdigit() else index
      self._send(b'%d\n' % culprit)
      self.gone(culprit)


def listen(gone: Gone) -> tuple[Peers, int, str]:
  """Listens for the other processes; returns the port and the token that they need."""
  dual = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if dual else socket.AF_INET
  server = socket.create_server(('', 0), family=family, dualstack_ipv6=dual, backlog=1024)
  peers, token = Peers(gone, is_first=True), secrets.token_hex(TOKEN_BYTES)
  _start(_accept, server, peers, token)
  return peers, server.getsockname()[1], token


def _accept(server: socket.socket, peers: Peers, token: str) -> None:
  while not peers.ended.is_set():
    try:
      _start(_welcome, server.accept()[0], peers, token)
    except OSError:  # too many open files
      time.sleep(1)


def _welcome(connection: socket.socket, peers: Peers, token: str) -> None:
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
    peers.connections[index] = connection
    peers._follow(index, connection)


def connect(host: str, port: int, token: str, index: int, gone: Gone) -> Peers:
  """Connects process `index` to the first one; raises OSError where that cannot be reached."""
  connection = socket.create_connection((host, port), CONNECT_S)
  connection.sendall(f'{token}{index:0{INDEX_DIGITS}}'.encode())
  _probe(connection)
  peers = Peers(gone, is_first=False)
  peers.connections[0] = connection
  _start(peers._follow, 0, connection)
  return peers


def _probe(connection: socket.socket) -> None:
  """Has the kernel ask from time to time whether the other machine is there, and waits for messages without limit."""
  connection.settimeout(None)
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for name, value in PROBES.items():
    if hasattr(socket, name):  # not on macOS
      connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _start(function: Callable, *args: object) -> None:
  threading.Thread(target=function, args=args, daemon=True).start()
