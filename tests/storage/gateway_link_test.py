"""A worker's link to a gateway: addresses, the fingerprint, tokens, and what an error means."""

import socket
import ssl
import threading

import pytest

from dipaco_jax.core.errors import Away, InputError
from dipaco_jax.gateway import certificates, gateway_server
from dipaco_jax.islands import lease
from dipaco_jax.storage import gateway_link
from dipaco_jax.storage.gateway_link import Address, Link, parse_address

TOKEN = 'x' * 43


def test_the_gateway_keeps_connections_for_as_long_as_workers_use_them_again():
  assert lease.SIGN_OF_LIFE_S < gateway_link.REUSED_S < gateway_server.IDLE_S


def test_addresses():
  assert parse_address('https://host') == Address('https', 'host', 443, '')
  digest = 'A' * 64
  assert parse_address(f' https://host:8443/#sha256={digest}') == Address('https', 'host', 8443, 'a' * 64)
  assert parse_address('http://127.0.0.1:80').url == 'http://127.0.0.1:80'
  assert parse_address('https://[::1]:8443').url == 'https://[::1]:8443'


@pytest.mark.parametrize('text', [
  '', 'host:8443', 'ftp://host', 'https://', 'https://host:x', 'https://user:pw@host', 'https://host/path', 'https://host?x',
  'https://host#sha1=aa', 'https://host#sha256=aa', 'http://example.com',
])  # fmt: skip
def test_other_addresses_are_rejected(text):
  with pytest.raises(InputError, match='DIPACO_GATEWAY') as e:
    parse_address(text)
  assert 'pw' not in str(e.value)


def test_a_token_is_never_shown(tmp_path):
  file = tmp_path / 'token'
  file.write_text(f'{TOKEN}\n')
  link = Link(parse_address('https://127.0.0.1:1'), gateway_link.read_token(f'file:{file}'), patience_s=0)
  with pytest.raises(Away) as e:
    link.call('hello', {})
  for text in (repr(link), str(link), str(e.value), repr(e.value)):
    assert TOKEN not in text
  with pytest.raises(InputError) as wrong:
    gateway_link.read_token(f'{TOKEN} {TOKEN}')
  assert TOKEN not in str(wrong.value)


class Recorder:
  """A server with a certificate, which records what it is sent."""

  def __init__(self, folder):
    self.certificate, key = certificates.keep(folder)
    self.received = b''
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(self.certificate, key)
    self.listener = socket.create_server(('127.0.0.1', 0))
    self.port = self.listener.getsockname()[1]
    self.thread = threading.Thread(target=self.serve, args=(context,), daemon=True)
    self.thread.start()

  def serve(self, context):
    connection, _ = self.listener.accept()
    try:
      with context.wrap_socket(connection, server_side=True) as secure:
        secure.settimeout(5)
        while not self.received.endswith(b'}'):  # header and body may come apart
          if not (part := secure.recv(10_000)):
            raise OSError('the client has closed')
          self.received += part
        secure.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}')
    except OSError:
      pass
    self.listener.close()


@pytest.mark.parametrize('fingerprint', ['its own', 'another', 'none'])
def test_nothing_is_sent_to_a_server_with_another_certificate(fingerprint, tmp_path):
  server = Recorder(tmp_path)
  digest = {'its own': certificates.fingerprint(server.certificate), 'another': 'a' * 64, 'none': ''}[fingerprint]
  link = Link(Address('https', '127.0.0.1', server.port, digest), TOKEN, patience_s=0)
  if fingerprint == 'its own':
    assert link.call('hello', {}) == {} and TOKEN.encode() in server.received
    link.close()
    return
  with pytest.raises(InputError, match='another certificate' if fingerprint == 'another' else 'cannot be verified'):
    link.call('hello', {})
  server.thread.join(10)
  assert server.received == b''
