"""A TCP line to a server on this machine, that breaks when told to."""

import contextlib
import pathlib
import re
import socket
import struct
import threading

STATUSES = {'unavailable': '503 Service Unavailable', 'forbidden': '403 Forbidden', 'absent': '404 Not Found'}
ANSWER = 'HTTP/1.1 {}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'
RESET = struct.pack('ii', 1, 0)  # no lingering: what is not sent yet never is


class Line:
  """The next connections, one by one, get what `faults` says, the others pass; until the line is cut.

  Then nothing comes through any more either way, and nobody is told, until the line heals: as in a network that is
  split. What was on its way is lost, and so are its connections.
  """

  def __init__(self, target: int | pathlib.Path):
    """`target` is a port of this machine, or a socket's file."""
    self.target = target
    self.faults: list[str] = []  # 'reset' or one of STATUSES, used from the front
    self.words, self.lost = b'', ''
    self.cut = threading.Event()
    self.dead: set[socket.socket] = set()  # clients that have lost something
    self.connected: set[socket.socket] = set()
    self.listener = socket.create_server(('127.0.0.1', 0))
    self.port = self.listener.getsockname()[1]
    threading.Thread(target=self.accept, daemon=True).start()

  def trap(self, words: bytes, lost: str):
    """The line is cut where a client says what these words, a pattern, are the end of.

    The end is lost ('request'), or only what answers it ('answer').
    """
    self.words, self.lost = words, lost

  def heal(self):
    self.cut.clear()
    for client in list(self.dead):
      end(client)

  def hang_up(self):
    """All that is connected is no more."""
    for client in list(self.connected):
      end(client)

  def accept(self):
    while True:
      try:
        client, _ = self.listener.accept()
      except OSError:  # closed
        return
      fault = self.faults.pop(0) if self.faults else ''
      if fault in STATUSES:
        client.recv(1 << 16)
        client.sendall(ANSWER.format(STATUSES[fault]).encode())
      if fault:
        if fault == 'reset':
          client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        client.close()
        continue
      threading.Thread(target=self.serve, args=(client,), daemon=True).start()

  def serve(self, client: socket.socket):
    """Passes bytes on both ways until one side ends."""
    with client, connect(self.target) as server:
      back = threading.Thread(target=self.pump, args=(server, client, client), daemon=True)
      self.connected.add(client)
      back.start()
      self.pump(client, server, client)
      back.join()
      self.connected.discard(client)

  def pump(self, source: socket.socket, sink: socket.socket, client: socket.socket):
    """Passes bytes on until one side ends."""
    said = b''
    with contextlib.suppress(OSError):
      while data := source.recv(1 << 16):
        said = said + data if source is client and self.words else b''
        if said and re.search(self.words, said, re.DOTALL):
          self.words = b''
          self.cut.set()
          if self.lost == 'answer':
            sink.sendall(data)
        if self.cut.is_set():
          self.dead.add(client)
        if client not in self.dead:
          sink.sendall(data)
    for side in (source, sink):
      end(side)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    end(self.listener)
    self.listener.close()


def connect(target: int | pathlib.Path) -> socket.socket:
  if isinstance(target, int):
    return socket.create_connection(('127.0.0.1', target))
  server = socket.socket(socket.AF_UNIX)
  server.connect(str(target))
  return server


def end(side: socket.socket):
  with contextlib.suppress(OSError):
    side.shutdown(socket.SHUT_RDWR)
