"""The parts of a gateway put together: its island, its certificate, its limits and its metrics."""

import dataclasses
import pathlib
import socket
from collections.abc import Callable

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.gateway import certificates
from dipaco_jax.gateway.desks import Desks
from dipaco_jax.gateway.http_app import Server
from dipaco_jax.gateway.limits import Limits, Meter
from dipaco_jax.islands import members, roles, screening_facts
from dipaco_jax.islands.island import Island
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.registry.registry import Fact, Registry
from dipaco_jax.serving import connections
from dipaco_jax.storage import object_store, user_modules
from dipaco_jax.storage.remedies import ISLANDS_MARK

NAME = 'gateway'  # of its island
IDLE_S = 30.0  # for which a connection is kept: a worker's next heartbeat comes sooner, within gateway_link.REUSED_S
PATIENCE_S = 20  # with the storage: a worker tries again itself
Tls = tuple[pathlib.Path, pathlib.Path]


def make_island(workdir: str, registry: Registry, config: Fact) -> Island:
  """Returns the gateway's view of a run. Raises InputError if the workdir is not that of the run."""
  settings = settings_lib.of_run(config.meta['config'])
  user_modules.check_run(settings, workdir)
  storage, local = object_store.open_storage(workdir, PATIENCE_S), roles.make_local_place(workdir)
  if not storage.exists(ISLANDS_MARK) or bytes(storage.fetch(ISLANDS_MARK)).decode() != config.meta['id']:
    raise InputError(f'{storage.url} has no data of the run in this --registry: check --workdir and --registry')
  island = members.make_island(run_lib.unattended(local, settings), registry, storage, NAME)
  island = dataclasses.replace(island, resumed=screening_facts.times_resumed(registry))
  island.all_modules()  # now: JAX takes seconds for the shapes, and the first workers would wait for them
  return island


def find_tls(folder: pathlib.Path, cert: str | None, key: str | None, http: bool) -> Tls | None:
  """Returns the files of the certificate and its key: the given ones, or those in the gateway's folder."""
  if http:
    return None
  files = (pathlib.Path(cert), pathlib.Path(key)) if cert and key else certificates.keep(folder)
  certificates.check(*files)
  return files


def address(listener: socket.socket, tls: Tls | None) -> str:
  """Returns what workers need as DIPACO_GATEWAY."""
  host, port = listener.getsockname()[:2]
  host = socket.gethostname() if host in ('0.0.0.0', '::') else f'[{host}]' if ':' in host else host
  return f'https://{host}:{port}#sha256={certificates.fingerprint(tls[0])}' if tls else f'http://{host}:{port}'


def connection_limits(most: int, body_s: float) -> connections.Limits:
  """Returns limits of connections, with as many open files as they need. Raises InputError if there cannot be."""
  connections.reserve_descriptors(most)
  return connections.Limits(most, head_s=IDLE_S, body_s=body_s + 10)  # the app itself says so before


def make_server(desks: Desks, limits: Limits, started: Callable[[], None], metrics_port: int | None) -> Server:
  """Returns a server, whose counters Prometheus can read at a port of this machine, if that is given."""
  server = Server(desks, Meter(limits), started, grace_s=10.0)
  if metrics_port is not None:
    import prometheus_client

    try:
      prometheus_client.start_http_server(metrics_port, '127.0.0.1', server.metrics)
    except (OSError, OverflowError) as e:
      raise InputError(f'--metrics_port={metrics_port}: {getattr(e, "strerror", None) or e}; choose another') from e
  return server
