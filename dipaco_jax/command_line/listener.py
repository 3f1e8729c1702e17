"""Where the HTTP servers among the commands listen, and the options that they share."""

import ipaddress
import logging
import os
import socket
from collections.abc import Mapping

from absl import flags

from dipaco_jax.core.errors import InputError


def define(port: int):
  """Defines the options; `port` is the default."""
  flags.DEFINE_string('host', '127.0.0.1', 'Address to listen at; 0.0.0.0 means all addresses of this machine.')
  flags.DEFINE_integer('port', port, 'Port to listen at; 0 means any free port.')
  about = 'Host names to accept in addition to IP addresses and localhost, such as api.example.com; * accepts all.'
  flags.DEFINE_list('allowed_hosts', None, about)
  flags.DEFINE_float('grace_s', 30.0, 'Time in seconds to finish answers after the server is asked to stop.')
  flags.DEFINE_bool('access_log', False, 'Whether to log each request.')


def check(least: Mapping[str, float]):
  """Raises InputError if an option makes no sense; `least` are the least values of a command's own."""
  f = flags.FLAGS
  if not f.workdir:
    raise InputError('name a run with --workdir=DIR')
  if not 0 <= f.port < 2**16:
    raise InputError(f'--port={f.port} should be from 0 to {2**16 - 1}; 0 means any free port')
  api_key()
  for name, bound in {**least, 'grace_s': 0}.items():
    if not (f[name].value or 0) >= bound:  # neither is nan
      raise InputError(f'--{name}={f[name].value} should be {bound} or more')


def listen(host: str, port: int) -> socket.socket:
  """Returns a socket that listens; raises InputError if there can be none."""
  try:
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    # Connections inherit it. asyncio sets it only where a socket names its protocol, and without it Nagle's algorithm
    # holds every other piece of a stream back for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
  except (OSError, OverflowError) as e:
    reason = str(getattr(e, 'strerror', None) or e).partition(' (')[0]
    raise InputError(f'--host={host} --port={port}: {reason}; choose another, or --port=0 for any free port') from e


def url(listener: socket.socket) -> str:
  host, port = listener.getsockname()[:2]
  return f'http://{f"[{host}]" if ":" in host else host}:{port}'


def log(listener: socket.socket):
  """Warns if a server is open to all hosts, and logs requests if requested."""
  f = flags.FLAGS
  if not _is_local(listener) and not api_key():
    logging.warning('--host=%s: anyone who can reach it can use it; set DIPACO_API_KEY to require a key', f.host)
  if f.access_log:
    logging.getLogger('uvicorn.access').setLevel(logging.INFO)


def api_key() -> str:
  """Returns the key in DIPACO_API_KEY, or '' if there is none; raises InputError if it cannot be a key."""
  from dipaco_jax.serving import engines_file

  return engines_file.read_key(os.environ, 'DIPACO_API_KEY', 'DIPACO_API_KEY')


def allowed_hosts(listener: socket.socket) -> list[str] | None:
  """Returns the names by which a server may be asked, None for all names.

  A server that only this machine reaches answers to names of this machine, as a web page may have a name that leads
  here. It has no reason to mistrust other names where it asks for a key, or is open to a network.
  """
  given = flags.FLAGS.allowed_hosts
  if given is None and (api_key() or not _is_local(listener)):
    return None
  return [name.lower().removesuffix('.') for name in (given or [socket.gethostname()]) if name]


def _is_local(listener: socket.socket) -> bool:
  """Returns whether a server is reached from this machine only."""
  return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def model_name(workdir: str) -> str:
  """Returns the model name of a run: the last part of its workdir."""
  return os.path.basename(os.path.realpath(workdir) if '://' not in workdir else workdir.rstrip('/'))
