"""The disk of a run, as the processes of its job see it: one that all share, or, with a bucket, one for each.

Stages are made together: each process makes parts, the first publishes what is made of them, and all read that. On a
disk that all share a barrier is enough. On disks apart the parts go to the first process at a `gather`, and what it has
published to the others at a `follow`, both through the bucket. Of checkpoints and of modules each disk has a part while
training; the whole is in the bucket.
"""

from collections.abc import Callable

import jax

from dipaco_jax.buckets import disks_apart, mirror as mirror_lib, other_disk
from dipaco_jax.processes import processes


class Disk:
  """The disk of a workdir, and the bucket that the run is in, if any."""

  def __init__(
    self,
    mirror: mirror_lib.Mirror | other_disk.Other | None = None,
    exchange: disks_apart.First | other_disk.Other | None = None,
  ):
    """`mirror` is of a workdir in a bucket; `exchange` keeps disks apart alike, None: all processes share one."""
    self.mirror, self._exchange = mirror, exchange

  @property
  def is_apart(self) -> bool:
    """Whether each process of the job has a disk of its own."""
    return self._exchange is not None

  @property
  def is_ours(self) -> bool:
    """Whether this process does on its disk what is done once: the first process, or, of disks apart, each."""
    return self.is_apart or processes.is_first()

  def publish(self):
    """Publishes what is made, between stages; see `Mirror.publish_all`."""
    if self.mirror:
      self.mirror.publish_all()

  def gather(self, occasion: str, *patterns: str):
    """Waits until all processes are here, and the first has what any has made of the names that match globs."""
    if self._exchange:
      self._exchange.gather(occasion, patterns)
    processes.barrier(occasion)

  def follow(self, occasion: str, with_checkpoints: bool = False):
    """Waits until all processes are here, and have what the first has of what lasts; of checkpoints if asked."""
    if self._exchange:
      self._exchange.follow(occasion, with_checkpoints)
    processes.barrier(occasion)

  def only_first(self, function: Callable[[], None], occasion: str):
    """Calls `function` on the first process while the others wait, and then have what it has published."""
    if processes.is_first():
      function()
    self.follow(occasion)


SHARED = Disk()


def peers() -> disks_apart.Peers:
  """Returns how this process of a job tells the others, by the coordinator."""
  names = jax.process_index(), jax.process_count()
  return disks_apart.Peers(*names, processes.say, processes.hear, processes.unsay)
